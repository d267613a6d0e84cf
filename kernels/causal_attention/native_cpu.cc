// Causal attention of whole sequences on CPUs, with gradients, as handlers of XLA's foreign function interface;
// see `native_cpu.py`.
//
// Query t of a sequence sees the keys [first[t], t]. Forward, a piece of work is BLOCK tokens with the query
// heads of one kv head. Backward, it is a sequence with those heads: its keys come a tile at a time, and the
// weights of a tile are recomputed from the logarithm of each query's sum (arXiv 2205.14135, appendix B.2).

#include "native_tile.h"

namespace {

constexpr int64_t BLOCK = 128;  // tokens of a piece of work, forward
constexpr int SOME = 64;        // rows that are taken through a tile at once, backward
constexpr float LN2 = 0.6931471805599453f;

struct Call {
  int64_t sequences, tokens, heads, width, value, kv_heads;
  float scale;
  const float *q, *k, *v, *out, *sums, *given;  // sums: log2 of what each query's weights are divided by
  const int32_t* first;
  int64_t group() const { return heads / kv_heads; }
  int64_t row(int64_t sequence, int64_t token, int64_t head) const {
    return (sequence * tokens + token) * heads + head;
  }
  int64_t key(int64_t sequence, int64_t token, int64_t head) const {
    return (sequence * tokens + token) * kv_heads + head;
  }
};

Call of(const F32& q, const F32& k, const F32& v, const S32& first, double scale) {
  const auto shape = q.dimensions(), pairs = v.dimensions();
  return {shape[0], shape[1], shape[2], shape[3], pairs[3], pairs[2], float(scale), q.typed_data(), k.typed_data(),
          v.typed_data(), nullptr, nullptr, nullptr, first.typed_data()};
}

// Points the scratch at keys and values [start, start + TILE), with zeros after the last.
void read(const Call& c, Scratch& s, int64_t sequence, int64_t head, int64_t start) {
  for (int t = 0; t < TILE; ++t) {
    const bool real = start + t < c.tokens;
    const int64_t at = real ? c.key(sequence, start + t, head) : 0;
    s.key[t] = c.k + at * c.width;
    s.of_value[t] = c.v + at * c.value;
    if (!real || s.width != c.width) {
      float* copy = s.keys + t * s.width;
      for (int64_t d = 0; d < s.width; ++d) copy[d] = real && d < c.width ? s.key[t][d] : 0;
      s.key[t] = copy;
    }
    if (!real || s.value != c.value) {
      float* copy = s.values + t * s.value;
      for (int64_t d = 0; d < s.value; ++d) copy[d] = real && d < c.value ? s.of_value[t][d] : 0;
      s.of_value[t] = copy;
    }
  }
}

void forward(const Call& c, Scratch& s, int64_t sequence, int64_t head, int64_t begin, float* out, float* sums) {
  const int64_t group = c.group(), tokens = std::min(BLOCK, c.tokens - begin), rows = tokens * group;
  int64_t first = begin;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = begin + r / group, sees = std::max(c.first[sequence * c.tokens + t], 0);
    first = std::min(first, sees);
    begin_row(s, r, c.q + c.row(sequence, t, head * group + r % group) * c.width, c.width, c.scale, sees, t + 1);
  }
  attend_rows(s, rows, first, begin + tokens, [&](int64_t start) { read(c, s, sequence, head, start); });
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t to = c.row(sequence, begin + r / group, head * group + r % group);
    for (int64_t i = 0; i < c.value; ++i) out[to * c.value + i] = s.mixed[r * s.value + i] / s.total[r];
    sums[to] = s.top[r] + std::log2(s.total[r]);
  }
}

// A scratch, and for the rows of a whole sequence: the gradients of the outputs (input) and of the queries
// (result), and each row's sum of output times gradient.
struct Back : Scratch {
  Back(int64_t rows, int64_t width, int64_t value)
      : Scratch(rows, width, value),
        more(rows * (this->width + this->value + 2) + TILE * (this->width * 2 + this->value * 2) + 2 * SOME * TILE) {
    given = more.data();
    dq = given + rows * this->value;
    delta = dq + rows * this->width;
    sums = delta + rows;
    of_values = sums + rows;
    dk = of_values + TILE * this->value;
    dv = dk + TILE * this->width;
    weights = dv + TILE * this->value;
    slopes = weights + SOME * TILE;
  }
  std::vector<float> more;
  float *given, *dq, *delta, *sums, *of_values, *dk, *dv, *weights, *slopes;
};

// Turns one row's scores, and its values' products with the gradients, into weights and gradients of the scores.
inline void slope(float* weights, float* slopes, int from, int to, float sum, float delta) {
  const Ints lane = bits<Ints>(IOTA);
  for (int t = 0; t < TILE; t += LANES) {
    const auto seen = (lane + t >= from) & (lane + t < to);
    const Vec x = load(weights + t) - fill(sum);
    const Vec w = seen ? exp2(x > fill(0) ? fill(0) : x) : Vec{};
    store(weights + t, w);
    store(slopes + t, seen ? w * (load(slopes + t) - fill(delta)) : Vec{});
  }
}

void backward(const Call& c, Back& s, int64_t sequence, int64_t head, float* dq, float* dk, float* dv) {
  const int64_t group = c.group(), rows = c.tokens * group;
  const auto at = [&](int64_t r) { return c.row(sequence, r / group, head * group + r % group); };
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t t = r / group, sees = std::max(c.first[sequence * c.tokens + t], 0);
    begin_row(s, r, c.q + at(r) * c.width, c.width, c.scale, sees, t + 1);
    const float *given = c.given + at(r) * c.value, *out = c.out + at(r) * c.value;
    s.sums[r] = c.sums[at(r)];
    s.delta[r] = 0;
    for (int64_t i = 0; i < s.value; ++i) s.given[r * s.value + i] = i < c.value ? given[i] : 0;
    for (int64_t i = 0; i < c.value; ++i) s.delta[r] += given[i] * out[i];
  }
  std::fill_n(s.dq, rows * s.width, 0.0f);
  for (int64_t start = 0; start < c.tokens; start += TILE) {
    read(c, s, sequence, head, start);
    for (int64_t d = 0; d < s.width; ++d)
      for (int t = 0; t < TILE; ++t) s.columns[d * TILE + t] = s.key[t][d];
    for (int64_t d = 0; d < s.value; ++d)
      for (int t = 0; t < TILE; ++t) s.of_values[d * TILE + t] = s.of_value[t][d];
    std::fill_n(s.dk, TILE * s.width, 0.0f);
    std::fill_n(s.dv, TILE * s.value, 0.0f);
    for (int64_t begin = start * group; begin < rows; begin += SOME) {
      const int some = std::min<int64_t>(SOME, rows - begin);
      int from[SOME], to[SOME], a = TILE, b = 0;  // what each of these rows sees of the tile, and any of them
      const float *queries[SOME], *given[SOME];
      for (int i = 0; i < some; ++i) {
        from[i] = std::clamp<int64_t>(s.first[begin + i] - start, 0, TILE);
        to[i] = std::clamp<int64_t>(s.last[begin + i] - start, 0, TILE);
        if (from[i] < to[i]) a = std::min(a, from[i]), b = std::max(b, to[i]);
        queries[i] = s.q + (begin + i) * s.width;
        given[i] = s.given + (begin + i) * s.value;
      }
      if (a >= b) continue;
      for (int r = 0; r < some; r += ROWS)
        with_rows(std::min(ROWS, some - r), [&](auto n) {
          for (int t = 0; t < TILE; t += 4 * LANES) {
            score<n>(queries[r], s.width, s.columns + t, s.weights + r * TILE + t);
            score<n>(given[r], s.value, s.of_values + t, s.slopes + r * TILE + t);
          }
        });
      for (int i = 0; i < some; ++i)
        slope(s.weights + i * TILE, s.slopes + i * TILE, from[i], to[i], s.sums[begin + i], s.delta[begin + i]);
      for (int r = 0; r < some; r += ROWS)
        with_rows(std::min(ROWS, some - r), [&](auto n) {
          mix<n>(s.slopes + r * TILE, TILE, 1, a, b, s.key, s.width, s.dq + (begin + r) * s.width);
        });
      for (int t = a; t < b; t += ROWS)
        with_rows(std::min(ROWS, b - t), [&](auto n) {
          mix<n>(s.slopes + t, 1, TILE, 0, some, queries, s.width, s.dk + t * s.width);
          mix<n>(s.weights + t, 1, TILE, 0, some, given, s.value, s.dv + t * s.value);
        });
    }
    for (int64_t t = 0; t < std::min<int64_t>(TILE, c.tokens - start); ++t) {
      const int64_t key = c.key(sequence, start + t, head);
      for (int64_t i = 0; i < c.width; ++i) dk[key * c.width + i] = s.dk[t * s.width + i] * LN2;
      for (int64_t i = 0; i < c.value; ++i) dv[key * c.value + i] = s.dv[t * s.value + i];
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < c.width; ++i) dq[at(r) * c.width + i] = s.dq[r * s.width + i] * c.scale;
}

// q [B, T, N, H], k [B, T, K, H], v [B, T, K, U], first [B, T] -> [B, T, N, U] and log2 of the sums [B, T, N].
ffi::Error causal_attention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 first, double scale, ffi::Result<F32> out,
                            ffi::Result<F32> sums) {
  const Call c = of(q, k, v, first, scale);
  const int64_t blocks = (c.tokens + BLOCK - 1) / BLOCK;
  const auto make = [c] { return Scratch(std::min(BLOCK, c.tokens) * c.group(), c.width, c.value); };
  float *to = out->typed_data(), *log_sums = sums->typed_data();
  in_parallel(pool, c.sequences * c.kv_heads * blocks, make, [=](int64_t i, Scratch& s) {
    const int64_t block = blocks - 1 - i / (c.sequences * c.kv_heads);  // those that see the most go first
    i %= c.sequences * c.kv_heads;
    forward(c, s, i / c.kv_heads, i % c.kv_heads, block * BLOCK, to, log_sums);
  });
  return ffi::Error::Success();
}

// The same, with the forward results and the gradient of the outputs -> the gradients of q, k and v.
ffi::Error causal_attention_backward(ffi::ThreadPool pool, F32 q, F32 k, F32 v, S32 first, F32 out, F32 sums,
                                     F32 given, double scale, ffi::Result<F32> dq, ffi::Result<F32> dk,
                                     ffi::Result<F32> dv) {
  Call c = of(q, k, v, first, scale);
  c.out = out.typed_data(), c.sums = sums.typed_data(), c.given = given.typed_data();
  const auto make = [c] { return Back(c.tokens * c.group(), c.width, c.value); };
  float *to_q = dq->typed_data(), *to_k = dk->typed_data(), *to_v = dv->typed_data();
  in_parallel(pool, c.sequences * c.kv_heads, make, [=](int64_t i, Back& s) {
    backward(c, s, i / c.kv_heads, i % c.kv_heads, to_q, to_k, to_v);
  });
  return ffi::Error::Success();
}

}  // namespace

static auto inputs() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<F32>()   // q
      .Arg<F32>()   // k
      .Arg<F32>()   // v
      .Arg<S32>();  // first
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(CausalAttention, causal_attention,
                              inputs()
                                  .Attr<double>("scale")
                                  .Ret<F32>()
                                  .Ret<F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CausalAttentionBackward, causal_attention_backward,
                              inputs()
                                  .Arg<F32>()  // out
                                  .Arg<F32>()  // sums
                                  .Arg<F32>()  // given
                                  .Attr<double>("scale")
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>());
