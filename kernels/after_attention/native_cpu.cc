// What a layer does after its attention, on CPUs, a handler of XLA's foreign function interface: `native_cpu.py`.
//
// Letters: T tokens, N numbers that the heads of a token give, D of the stream, F of the MLP.

#include "native_tile.h"

namespace {

constexpr int64_t LEAST = 24, MOST = 64;  // tokens that a thread takes at a time: each reads all weights for them
constexpr int64_t STRIP = 4 * LANES;      // columns of a weight that are taken at a time
constexpr int DEPTH = 256;                // rows of a weight over which sums stay in registers
constexpr int64_t LINE = 64 / sizeof(float);

struct Call {
  int64_t tokens, heads, width, inner;
  const float *x, *mixed, *gain, *o, *o_bias, *gate_up, *gate_up_bias, *down, *down_bias;  // biases may be null
  float eps;
  float* out;
  int64_t each;  // tokens of a piece
};

// What one thread works in: normalised streams [each, D], gates beside what they let through [each, 2 F].
struct Work {
  explicit Work(const Call& c) : normed(new float[c.each * c.width]), pair(new float[c.each * 2 * c.inner]) {}
  std::unique_ptr<float[]> normed, pair;
  const float* weight[DEPTH];
};

// Adds x [rows, depth], whose rows are `by_x` apart, times weight [depth, width] to out [rows, width].
void add_product(Work& w, int64_t rows, int64_t depth, int64_t width, const float* x, int64_t by_x, const float* weight,
                 float* out) {
  for (int64_t from = 0; from < depth; from += DEPTH) {
    const int some = std::min<int64_t>(DEPTH, depth - from);
    for (int d = 0; d < some; ++d) w.weight[d] = weight + (from + d) * width;
    for (int64_t at = 0; at < width; at += STRIP) {
      int ahead = 0;
      for (int64_t r = 0; r < rows; r += ROWS) {
        // The next strip meanwhile: its rows lie too far apart for a processor to guess.
        if (at + STRIP < width)
          for (const int until = some * std::min(rows, r + ROWS) / rows; ahead < until; ++ahead)
            for (int64_t i = 0; i < STRIP; i += LINE) __builtin_prefetch(w.weight[ahead] + at + STRIP + i, 0, 2);
        with_rows(std::min<int64_t>(ROWS, rows - r), [&](auto n) {
          const float* numbers = x + r * by_x + from;
          if (at + STRIP <= width)
            mix<n, 4>(numbers, by_x, 1, 0, some, w.weight, at, width, out + r * width);
          else
            for (int64_t i = at; i < width; i += LANES)
              mix<n, 1>(numbers, by_x, 1, 0, some, w.weight, i, width, out + r * width);
        });
      }
    }
  }
}

// x / (1 + e^-x).
inline Vec silu(Vec x) {
  const Vec e = exp2((x < 0 ? x : -x) * LOG2E);
  return x * (x < 0 ? e : fill(1.0f)) / (e + 1.0f);
}

void piece(const Call& c, Work& w, int64_t first) {
  const int64_t rows = std::min(c.each, c.tokens - first), width = c.width, inner = c.inner;
  float *out = c.out + first * width, *normed = w.normed.get(), *pair = w.pair.get();
  std::copy_n(c.x + first * width, rows * width, out);
  const auto add = [&](const float* bias) {
    for (int64_t r = 0; bias && r < rows; ++r)
      for (int64_t d = 0; d < width; ++d) out[r * width + d] += bias[d];
  };
  add(c.o_bias);
  add_product(w, rows, c.heads, width, c.mixed + first * c.heads, c.heads, c.o, out);
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = out + r * width;
    Vec squares = {};
    for (int64_t d = 0; d < width; d += LANES) squares += load(x + d) * load(x + d);
    const float sum = reduce(squares, [](float a, float b) { return a + b; });
    const float by = 1 / std::sqrt(sum / width + c.eps);
    for (int64_t d = 0; d < width; ++d) normed[r * width + d] = x[d] * by * c.gain[d];
    if (c.gate_up_bias)
      std::copy_n(c.gate_up_bias, 2 * inner, pair + r * 2 * inner);
    else
      std::fill_n(pair + r * 2 * inner, 2 * inner, 0.0f);
  }
  add_product(w, rows, width, 2 * inner, normed, width, c.gate_up, pair);
  for (int64_t r = 0; r < rows; ++r) {
    float *gate = pair + r * 2 * inner, *up = gate + inner;
    for (int64_t f = 0; f < inner; f += LANES) store(gate + f, silu(load(gate + f)) * load(up + f));
  }
  add(c.down_bias);
  add_product(w, rows, inner, width, pair, 2 * inner, c.down, out);
}

// x [T, D], mixed [T, N], gain [D], o [N, D], o_bias [D], gate_up [D, 2, F], gate_up_bias [2, F], down [F, D],
// down_bias [D]; a bias may be empty. out [T, D]. D and F are multiples of LANES.
ffi::Error after_attention(ffi::ThreadPool pool, F32 x, F32 mixed, F32 gain, F32 o, F32 o_bias, F32 gate_up,
                           F32 gate_up_bias, F32 down, F32 down_bias, double eps, ffi::Result<F32> out) {
  const auto given = [](F32& x) { return x.element_count() ? x.typed_data() : nullptr; };
  const int64_t tokens = x.dimensions()[0], threads = std::max<int64_t>(1, pool.num_threads());
  const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  Call c{};
  c.tokens = tokens, c.heads = mixed.dimensions()[1], c.width = x.dimensions()[1], c.inner = down.dimensions()[0];
  c.x = x.typed_data(), c.mixed = mixed.typed_data(), c.gain = gain.typed_data();
  c.o = o.typed_data(), c.gate_up = gate_up.typed_data(), c.down = down.typed_data();
  c.o_bias = given(o_bias), c.gate_up_bias = given(gate_up_bias), c.down_bias = given(down_bias);
  c.eps = static_cast<float>(eps), c.out = out->typed_data();
  c.each = std::max(LEAST, parts(tokens, threads * parts(tokens, threads * MOST)));
  in_parallel(pool, parts(tokens, c.each), [c] { return Work(c); },
              [c](int64_t i, Work& w) { piece(c, w, i * c.each); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AfterAttention, after_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()  // x
                                  .Arg<F32>()  // mixed
                                  .Arg<F32>()  // gain
                                  .Arg<F32>()  // o
                                  .Arg<F32>()  // o_bias
                                  .Arg<F32>()  // gate_up
                                  .Arg<F32>()  // gate_up_bias
                                  .Arg<F32>()  // down
                                  .Arg<F32>()  // down_bias
                                  .Attr<double>("eps")
                                  .Ret<F32>());  // out
