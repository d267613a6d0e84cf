// Attention over paged keys and values on CPUs, a handler of XLA's foreign function interface: `native_cpu.py`.
//
// A piece of work is one block of queries with the query heads of one kv head. It goes through the keys that
// any of its queries sees, TILE at a time, with a running softmax. Nothing of a key that no query sees is
// used, so stale pages may hold anything. What a query gets does not depend on its neighbours.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 6;  // ROWS * 4 vectors of sums fit the registers
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 3;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int TILE = 64;  // keys, a multiple of 4 * LANES
constexpr int FEW = 4;    // query rows that use keys as they lie; more make a transposed copy worth while
constexpr float LOG2E = 1.4426950408889634f, INF = __builtin_inff();

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline Vec fill(float x) { return x - Vec{}; }

template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// Sums of neighbours: those of a, then those of b.
inline Vec pairs(Vec a, Vec b) {
#if defined(__clang__)
#define PICK(first) __builtin_shufflevector(a, b, INDICES(first))
#else
#define PICK(first) __builtin_shuffle(a, b, Ints{INDICES(first)})
#endif
#if defined(__AVX512F__)
#define INDICES(i) i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14, i + 16, i + 18, i + 20, i + 22, i + 24, i + 26, i + 28, i + 30
#elif defined(__AVX__)
#define INDICES(i) i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14
#else
#define INDICES(i) i, i + 2, i + 4, i + 6
#endif
  return PICK(0) + PICK(1);
}

// The sum of each of N vectors, N a power of two, in as many lanes of the result again and again.
template <int N>
inline Vec sums(const Vec* x) {
  if constexpr (N == 1)
    return x[0];
  else {
    Vec half[N / 2];
    for (int i = 0; i < N / 2; ++i) half[i] = pairs(x[2 * i], x[2 * i + 1]);
    return sums<N / 2>(half);
  }
}

template <class Of>
inline float reduce(Vec x, Of of) {
  float lanes[LANES], y;
  store(lanes, x);
  y = lanes[0];
  for (int i = 1; i < LANES; ++i) y = of(y, lanes[i]);
  return y;
}

struct Iota {
  int32_t at[LANES];
  constexpr Iota() : at() {
    for (int i = 0; i < LANES; ++i) at[i] = i;
  }
};
constexpr Iota IOTA;

// 2^x for x <= 0, to 1e-7 of it; NaN stays NaN.
inline Vec exp2(Vec x) {
  const Vec low = fill(-126.0f), magic = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = x < low ? low : x;
  const Vec whole = x + magic, f = x - (whole - magic);
  Vec y = fill(1.52527338e-5f);
  for (float c : {1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f})
    y = y * f + c;
  return y * bits<Vec>((bits<Ints>(whole) - bits<Ints>(magic) + 127) << 23);
}
inline float exp2(float x) { return exp2(fill(x))[0]; }

// Stored numbers as floats.
struct Bf16 { uint16_t raw; };
struct Fp8 { uint8_t raw; };  // e4m3fn
inline float wide(float x) { return x; }
inline float wide(_Float16 x) { return x; }
inline float wide(int8_t x) { return x; }
inline float wide(Bf16 x) { return bits<float>(uint32_t(x.raw) << 16); }
// All of them: XLA's threads flush denormals, which the usual trick with an exponent's bias passes through.
struct Fp8Table {
  float at[256];
  Fp8Table() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
      at[i] = (i & 0x7f) == 0x7f ? __builtin_nanf("") : i & 0x80 ? -size : size;
    }
  }
};
const Fp8Table FP8;
inline float wide(Fp8 x) { return FP8.at[x.raw]; }

// n stored numbers times a factor, filled up with zeros.
template <class T>
inline void widen(const T* from, int64_t n, int64_t whole, float factor, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = wide(from[i]) * factor;
  for (int64_t i = n; i < whole; ++i) to[i] = 0;
}

struct Call {
  int64_t blocks, queries, heads, width, value, kv_heads, pages, page, slots, sequences, row;
  float scale;
  int64_t window;
  const float *q, *k_scale, *v_scale;
  const void *k, *v;
  const int32_t *table, *sequence, *position;
  float* out;
};

inline int64_t in_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// What one thread works in.
struct Scratch {
  explicit Scratch(const Call& c)
      : rows(c.queries * (c.heads / c.kv_heads)), width(in_lanes(c.width)), value(in_lanes(c.value)),
        floats(rows * (width + value + 2) + TILE * (2 * width + value) + ROWS * TILE), spans(2 * rows) {
    q = floats.data();
    mixed = q + rows * width;
    top = mixed + rows * value;
    total = top + rows;
    columns = total + rows;
    keys = columns + TILE * width;
    values = keys + TILE * width;
    scores = values + TILE * value;
    first = spans.data();
    last = first + rows;
  }
  int64_t rows, width, value;  // of keys and values, filled up to whole vectors
  std::vector<float> floats;
  std::vector<int64_t> spans;
  float *q, *mixed, *top, *total, *columns, *keys, *values, *scores;
  int64_t *first, *last;  // row r sees keys [first[r], last[r])
};

// Scores of R query rows with 4 * LANES keys that stand in columns.
template <int R>
inline void score(const float* q, int64_t width, const float* columns, float* out) {
  Vec s[R][4] = {};
  for (int64_t d = 0; d < width; ++d, columns += TILE) {
    const Vec k[4] = {load(columns), load(columns + LANES), load(columns + 2 * LANES), load(columns + 3 * LANES)};
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 4; ++i) s[r][i] += q[r * width + d] * k[i];
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 4; ++i) store(out + r * TILE + i * LANES, s[r][i]);
}

// Scores of one query row with LANES keys as they lie.
inline void score_rows(const float* q, int64_t width, const float* const* keys, float* out) {
  Vec s[LANES] = {};
  for (int64_t d = 0; d < width; d += LANES) {
    const Vec x = load(q + d);
    for (int t = 0; t < LANES; ++t) s[t] += x * load(keys[t] + d);
  }
  store(out, sums<LANES>(s));
}

// Adds the values of keys [begin, end), weighted, to R rows: N vectors of each, from the `at`-th number on.
template <int R, int N>
inline void mix(const float* weights, int begin, int end, const float* const* values, int64_t at, int64_t width,
                float* out) {
  Vec s[R][N];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) s[r][i] = load(out + r * width + at + i * LANES);
  for (int t = begin; t < end; ++t)
    for (int i = 0; i < N; ++i) {
      const Vec v = load(values[t] + at + i * LANES);
      for (int r = 0; r < R; ++r) s[r][i] += weights[r * TILE + t] * v;
    }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) store(out + r * width + at + i * LANES, s[r][i]);
}

template <int R>
inline void mix(const float* weights, int begin, int end, const float* const* values, int64_t width, float* out) {
  int64_t at = 0;
  for (; at + 4 * LANES <= width; at += 4 * LANES) mix<R, 4>(weights, begin, end, values, at, width, out);
  switch ((width - at) / LANES) {
    case 3: return mix<R, 3>(weights, begin, end, values, at, width, out);
    case 2: return mix<R, 2>(weights, begin, end, values, at, width, out);
    case 1: return mix<R, 1>(weights, begin, end, values, at, width, out);
  }
}

// Scores of one row become weights of the keys [begin, end) that it sees, zeros elsewhere; what was summed
// so far is scaled to the new largest score.
inline void weigh(float* scores, int begin, int end, float& top, float& total, float* mixed, int64_t width) {
  const Ints lane = bits<Ints>(IOTA);
  Vec most = fill(-INF), sums = {};
  for (int t = 0; t < TILE; t += LANES) {
    Vec x = load(scores + t);
    if (t < begin || t + LANES > end) {
      x = (lane + t >= begin) & (lane + t < end) ? x : fill(-INF);
      store(scores + t, x);
    }
    most = x > most ? x : most;
  }
  const auto larger = [](float a, float b) { return b > a ? b : a; };
  const float seen = larger(top, reduce(most, larger));
  const float now = seen == -INF ? 0 : seen;  // every score is -inf or NaN
  for (int t = 0; t < TILE; t += LANES) {
    const Vec x = load(scores + t);
    Vec w = exp2(x - fill(now));
    if (t < begin || t + LANES > end) w = (lane + t >= begin) & (lane + t < end) ? w : Vec{};
    store(scores + t, w);
    sums += w;
  }
  const float kept = total == 0 ? 0 : exp2(top - now);
  if (kept != 1)
    for (int64_t i = 0; i < width; i += LANES) store(mixed + i, load(mixed + i) * kept);
  total = total * kept + reduce(sums, [](float a, float b) { return a + b; });
  top = now;
}

// `run(std::integral_constant<int, n>)` for an n that is known when it runs, 1 to ROWS.
template <int N = ROWS, class Run>
inline void with_rows(int n, Run run) {
  if constexpr (N > 1)
    if (n < N) return with_rows<N - 1>(n, run);
  run(std::integral_constant<int, N>{});
}

// The keys and values [start, start + TILE) of a sequence, of which any query sees [begin, end).
template <class T>
struct Tile {
  const float *keys[TILE], *values[TILE];

  void read(const Call& c, Scratch& s, const int32_t* table, int64_t head, int64_t start, const bool* seen) {
    int64_t slot = start / c.page, offset = start % c.page;
    const bool in_place = std::is_same_v<T, float>;
    for (int t = 0; t < TILE; ++t) {
      float *key = s.keys + t * s.width, *value = s.values + t * s.value;
      keys[t] = key, values[t] = value;
      if (!seen[t]) {
        std::fill_n(key, s.width, 0.0f);
        std::fill_n(value, s.value, 0.0f);
      } else {
        const int64_t page = c.row * c.pages + std::clamp<int64_t>(table[slot], 0, c.pages - 1);
        const int64_t at = (page * c.page + offset) * c.kv_heads + head;
        const int64_t factor = (page * c.kv_heads + head) * c.page + offset;
        const T* k = static_cast<const T*>(c.k) + at * c.width;
        const T* v = static_cast<const T*>(c.v) + at * c.value;
        if (in_place && s.width == c.width)
          keys[t] = reinterpret_cast<const float*>(k);
        else
          widen(k, c.width, s.width, c.k_scale ? c.k_scale[factor] : 1.0f, key);
        if (in_place && s.value == c.value)
          values[t] = reinterpret_cast<const float*>(v);
        else
          widen(v, c.value, s.value, c.v_scale ? c.v_scale[factor] : 1.0f, value);
      }
      if (++offset == c.page) ++slot, offset = 0;
    }
  }
};

// Asks for keys and values [from, to) of a sequence before they are needed: no processor foresees a page.
template <class T>
inline void prefetch(const Call& c, const int32_t* table, int64_t head, int64_t from, int64_t to) {
  if (from >= to) return;
  int64_t slot = from / c.page, offset = from % c.page;
  for (; from < to; ++slot, offset = 0) {
    const int64_t page = c.row * c.pages + std::clamp<int64_t>(table[slot], 0, c.pages - 1);
    for (; offset < c.page && from < to; ++offset, ++from) {
      const int64_t at = (page * c.page + offset) * c.kv_heads + head;
      const char* k = reinterpret_cast<const char*>(static_cast<const T*>(c.k) + at * c.width);
      const char* v = reinterpret_cast<const char*>(static_cast<const T*>(c.v) + at * c.value);
      for (size_t i = 0; i < c.width * sizeof(T); i += 64) __builtin_prefetch(k + i);
      for (size_t i = 0; i < c.value * sizeof(T); i += 64) __builtin_prefetch(v + i);
    }
  }
}

template <class T>
void attend(const Call& c, Scratch& s, int64_t block, int64_t head) {
  const int64_t group = c.heads / c.kv_heads, most = c.slots * c.page;
  int64_t begin = most, end = 0;
  for (int64_t i = 0; i < c.queries; ++i) {
    const int64_t after = c.position[block * c.queries + i] + int64_t{1};
    const int64_t first = std::max<int64_t>(0, after - c.window), last = std::min(after, most);
    if (first < last) begin = std::min(begin, first), end = std::max(end, last);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t r = i * group + g;
      s.first[r] = first, s.last[r] = last;
      const float* q = c.q + ((block * c.queries + i) * c.heads + head * group + g) * c.width;
      float* to = s.q + r * s.width;
      for (int64_t d = 0; d < s.width; ++d) to[d] = d < c.width ? q[d] * (c.scale * LOG2E) : 0;
      s.top[r] = -INF;
      s.total[r] = 0;
    }
  }
  std::fill_n(s.mixed, s.rows * s.value, 0.0f);

  const int32_t* table = c.table + std::clamp<int64_t>(c.sequence[block], 0, c.sequences - 1) * c.slots;
  const bool few = s.rows <= FEW;
  Tile<T> tile;
  for (int64_t start = begin / TILE * TILE; start < end; start += TILE) {
    // Which keys of the tile any query sees: positions may leave gaps.
    int change[TILE + 1] = {};
    for (int64_t r = 0; r < s.rows; r += group) {
      const int64_t a = std::clamp<int64_t>(s.first[r] - start, 0, TILE);
      const int64_t b = std::clamp<int64_t>(s.last[r] - start, 0, TILE);
      if (a < b) ++change[a], --change[b];
    }
    bool seen[TILE];
    for (int t = 0, depth = 0; t < TILE; ++t) seen[t] = (depth += change[t]) > 0;
    tile.read(c, s, table, head, start, seen);
    prefetch<T>(c, table, head, start + TILE, std::min(start + 2 * TILE, end));
    if (!few)
      for (int64_t d = 0; d < s.width; ++d)
        for (int t = 0; t < TILE; ++t) s.columns[d * TILE + t] = tile.keys[t][d];

    for (int64_t r = 0; r < s.rows; r += ROWS) {
      const int rows = std::min<int64_t>(ROWS, s.rows - r);
      int from[ROWS], to[ROWS], a = TILE, b = 0;  // what each of these rows sees of the tile, and any of them
      for (int i = 0; i < rows; ++i) {
        from[i] = std::clamp<int64_t>(s.first[r + i] - start, 0, TILE);
        to[i] = std::clamp<int64_t>(s.last[r + i] - start, 0, TILE);
        if (from[i] < to[i]) a = std::min(a, from[i]), b = std::max(b, to[i]);
      }
      if (a >= b) continue;
      const float* q = s.q + r * s.width;
      if (few)
        for (int i = 0; i < rows; ++i)
          for (int t = a / LANES * LANES; t < b; t += LANES)
            score_rows(q + i * s.width, s.width, tile.keys + t, s.scores + i * TILE + t);
      else
        with_rows(rows, [&](auto n) {
          for (int t = a / (4 * LANES) * (4 * LANES); t < b; t += 4 * LANES)
            score<n>(q, s.width, s.columns + t, s.scores + t);
        });
      for (int i = 0; i < rows; ++i)
        if (from[i] < to[i])
          weigh(s.scores + i * TILE, from[i], to[i], s.top[r + i], s.total[r + i], s.mixed + (r + i) * s.value,
                s.value);
        else
          std::fill_n(s.scores + i * TILE, TILE, 0.0f);
      with_rows(rows, [&](auto n) { mix<n>(s.scores, a, b, tile.values, s.value, s.mixed + r * s.value); });
    }
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    float* to = c.out + ((block * c.queries + r / group) * c.heads + head * group + r % group) * c.value;
    const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];
    for (int64_t i = 0; i < c.value; ++i) to[i] = s.mixed[r * s.value + i] * share;
  }
}

// Runs `work(i, scratch)` for every i < count on the caller and the pool's threads. The caller waits only for
// pieces that have begun: it never depends on a thread that is busy elsewhere.
template <class Work>
void in_parallel(ffi::ThreadPool& pool, const Call& c, int64_t count, Work work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto run = [shared, count, work, c] {
    if (shared->next.load() >= count) return;
    Scratch scratch(c);
    for (int64_t i; (i = shared->next.fetch_add(1)) < count; shared->done.fetch_add(1)) work(i, scratch);
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([run] { run(); });
  run();
  while (shared->done.load() < count) std::this_thread::yield();
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  in_parallel(pool, c, c.blocks * c.kv_heads, [c](int64_t i, Scratch& s) {
    i = c.blocks * c.kv_heads - 1 - i;  // the last blocks of a prompt see the most: they go first
    attend<T>(c, s, i / c.kv_heads, i % c.kv_heads);
  });
}

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

// q [b, C, N, H], k [R, P, Z, K * H], v [R, P, Z, K * U], scales [R, P, K, Z] or empty, table [Q, slots],
// sequence [b], position [b, C], window [] -> [b, C, N, U].
ffi::Error paged_attention(ffi::ThreadPool pool, F32 q, ffi::AnyBuffer k, ffi::AnyBuffer v, F32 k_scale,
                           F32 v_scale, S32 table, S32 sequence, S32 position, S32 window, int64_t row,
                           double scale, ffi::Result<F32> out) {
  const auto shape = q.dimensions(), pages = k.dimensions(), names = table.dimensions();
  Call c{};
  c.blocks = shape[0], c.queries = shape[1], c.heads = shape[2], c.width = shape[3];
  c.pages = pages[1], c.page = pages[2], c.kv_heads = pages[3] / c.width;
  c.value = v.dimensions()[3] / c.kv_heads;
  c.sequences = names[0], c.slots = names[1];
  c.row = row, c.scale = float(scale), c.window = *window.typed_data();
  c.q = q.typed_data(), c.k = k.untyped_data(), c.v = v.untyped_data();
  c.k_scale = k_scale.element_count() ? k_scale.typed_data() : nullptr;
  c.v_scale = v_scale.element_count() ? v_scale.typed_data() : nullptr;
  c.table = table.typed_data(), c.sequence = sequence.typed_data(), c.position = position.typed_data();
  c.out = out->typed_data();
  switch (k.element_type()) {
    case ffi::F32: run<float>(pool, c); break;
    case ffi::BF16: run<Bf16>(pool, c); break;
    case ffi::F16: run<_Float16>(pool, c); break;
    case ffi::S8: run<int8_t>(pool, c); break;
    case ffi::F8E4M3FN: run<Fp8>(pool, c); break;
    default: return ffi::Error::InvalidArgument("rows of a type that native_cpu.refuses lets pass");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()             // q
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<F32>()             // k_scale
                                  .Arg<F32>()             // v_scale
                                  .Arg<S32>()             // table
                                  .Arg<S32>()             // sequence
                                  .Arg<S32>()             // position
                                  .Arg<S32>()             // window
                                  .Attr<int64_t>("row")
                                  .Attr<double>("scale")
                                  .Ret<F32>());
