// Building blocks of attention on CPUs: vectors of floats, products of tiles, an online softmax, threads;
// and the reading of rows in pages.
//
// Letters: a row is one query of one head. Keys and values come TILE at a time; rows are taken ROWS at a time.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

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

// Stored types that C++ lacks.
struct Bf16 { uint16_t raw; };
struct Fp8 { uint8_t raw; };  // e4m3fn

// Calls `f` with a number of the type that rows are stored in.
template <class F>
ffi::Error by_type(ffi::DataType type, F f) {
  switch (type) {
    case ffi::F32: f(float{}); break;
    case ffi::BF16: f(Bf16{}); break;
    case ffi::F16: f(_Float16{}); break;
    case ffi::S8: f(int8_t{}); break;
    case ffi::F8E4M3FN: f(Fp8{}); break;
    default: return ffi::Error::InvalidArgument("rows of a type that native_cpu.refuses lets pass");
  }
  return ffi::Error::Success();
}

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

// Sums of neighbouring numbers of a, then of b.
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

// The sums of N vectors, N a power of two, repeated over the lanes of the result.
template <int N>
[[gnu::always_inline]] inline Vec sums(const Vec* x) {
  if constexpr (N == 1)
    return x[0];
  else
    return pairs(sums<N / 2>(x), sums<N / 2>(x + N / 2));
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

// 2^x for x <= 0, with a relative error of 1e-7; NaN stays NaN.
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

inline int64_t in_lanes(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The buffers of one thread: `rows` rows of keys of `width` and values of `value` numbers.
struct Scratch {
  Scratch(int64_t rows, int64_t width, int64_t value)
      : rows(rows), width(in_lanes(width)), value(in_lanes(value)),
        floats(LANES + rows * (this->width + this->value + 2) + TILE * (2 * this->width + this->value) +
               std::max(ROWS, FEW) * TILE),
        spans(2 * rows) {
    // Whole vectors first, so that none straddles two cache lines.
    q = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(floats.data()) + sizeof(Vec) - 1) & -sizeof(Vec));
    mixed = q + rows * this->width;
    columns = mixed + rows * this->value;
    keys = columns + TILE * this->width;
    values = keys + TILE * this->width;
    scores = values + TILE * this->value;
    top = scores + std::max(ROWS, FEW) * TILE;
    total = top + rows;
    first = spans.data();
    last = first + rows;
  }
  int64_t rows, width, value;  // widths filled up to whole vectors
  std::vector<float> floats;
  std::vector<int64_t> spans;
  float *q, *mixed, *top, *total, *columns, *keys, *values, *scores;
  int64_t *first, *last;                    // row r sees keys [first[r], last[r])
  const float *key[TILE], *of_value[TILE];  // the tile's, in place or in `keys` and `values`
};

// Scores of R query rows with 4 * LANES keys in columns.
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

// Scores of one query row with LANES keys in place.
inline void score_rows(const float* q, int64_t width, const float* const* keys, float* out) {
  Vec s[LANES] = {};
  for (int64_t d = 0; d < width; d += LANES) {
    const Vec x = load(q + d);
    for (int t = 0; t < LANES; ++t) s[t] += x * load(keys[t] + d);
  }
  store(out, sums<LANES>(s));
}

struct Nothing {
  void operator()(int64_t) const {}
};

// Adds the values of keys [begin, end), weighted, to R rows: N vectors of each, from the `at`-th number on. The
// weight of key t for row r stands at weights[r * by_row + t * by_key]. `each(t)` is called beside key t.
template <int R, int N, class Each = Nothing>
inline void mix(const float* weights, int64_t by_row, int64_t by_key, int begin, int end, const float* const* values,
                int64_t at, int64_t width, float* out, Each each = {}) {
  Vec s[R][N];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) s[r][i] = load(out + r * width + at + i * LANES);
  for (int t = begin; t < end; ++t) {
    each(t);
    for (int i = 0; i < N; ++i) {
      const Vec v = load(values[t] + at + i * LANES);
      for (int r = 0; r < R; ++r) s[r][i] += weights[r * by_row + t * by_key] * v;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) store(out + r * width + at + i * LANES, s[r][i]);
}

template <int R>
inline void mix(const float* weights, int64_t by_row, int64_t by_key, int begin, int end, const float* const* values,
                int64_t width, float* out) {
  const auto some = [&](auto n, int64_t at) {
    mix<R, n>(weights, by_row, by_key, begin, end, values, at, width, out);
  };
  int64_t at = 0;
  for (; at + 4 * LANES <= width; at += 4 * LANES) some(std::integral_constant<int, 4>{}, at);
  switch ((width - at) / LANES) {
    case 3: return some(std::integral_constant<int, 3>{}, at);
    case 2: return some(std::integral_constant<int, 2>{}, at);
    case 1: return some(std::integral_constant<int, 1>{}, at);
  }
}

// Turns the scores of one row into weights of the keys [begin, end) that it sees, zeros elsewhere. Earlier sums are
// scaled to the new largest score.
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

// Row r of a scratch: its query, times the scale, in units of log 2; and the keys that it sees.
inline void begin_row(Scratch& s, int64_t r, const float* q, int64_t width, float scale, int64_t first, int64_t last) {
  for (int64_t d = 0; d < s.width; ++d) s.q[r * s.width + d] = d < width ? q[d] * (scale * LOG2E) : 0;
  std::fill_n(s.mixed + r * s.value, s.value, 0.0f);
  s.top[r] = -INF;
  s.total[r] = 0;
  s.first[r] = first;
  s.last[r] = last;
}

// Weighted sums of values for rows [0, rows), by an online softmax over the keys [begin, end), in `mixed`, still to
// be divided by `total`. `read(start)` points `key` and `of_value` at TILE keys from `start` on; unseen ones must
// be finite.
template <class Read>
inline void attend_rows(Scratch& s, int64_t rows, int64_t begin, int64_t end, Read read) {
  const bool few = rows <= FEW;
  for (int64_t start = begin / TILE * TILE; start < end; start += TILE) {
    read(start);
    if (!few)
      for (int64_t d = 0; d < s.width; ++d)
        for (int t = 0; t < TILE; ++t) s.columns[d * TILE + t] = s.key[t][d];
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int some = std::min<int64_t>(ROWS, rows - r);
      int from[ROWS], to[ROWS], a = TILE, b = 0;  // what each of these rows sees of the tile, and any of them
      for (int i = 0; i < some; ++i) {
        from[i] = std::clamp<int64_t>(s.first[r + i] - start, 0, TILE);
        to[i] = std::clamp<int64_t>(s.last[r + i] - start, 0, TILE);
        if (from[i] < to[i]) a = std::min(a, from[i]), b = std::max(b, to[i]);
      }
      if (a >= b) continue;
      const float* q = s.q + r * s.width;
      if (few)
        for (int i = 0; i < some; ++i)
          for (int t = a / LANES * LANES; t < b; t += LANES)
            score_rows(q + i * s.width, s.width, s.key + t, s.scores + i * TILE + t);
      else
        with_rows(some, [&](auto n) {
          for (int t = a / (4 * LANES) * (4 * LANES); t < b; t += 4 * LANES)
            score<n>(q, s.width, s.columns + t, s.scores + t);
        });
      for (int i = 0; i < some; ++i)
        if (from[i] < to[i])
          weigh(s.scores + i * TILE, from[i], to[i], s.top[r + i], s.total[r + i], s.mixed + (r + i) * s.value,
                s.value);
        else
          std::fill_n(s.scores + i * TILE, TILE, 0.0f);
      with_rows(some, [&](auto n) {
        mix<n>(s.scores, TILE, 1, a, b, s.of_value, s.value, s.mixed + r * s.value);
      });
    }
  }
}

// Runs `work(i, scratch)` for every i < count on the caller and the pool's threads, each with its own `make()`.
// The caller waits only for pieces that have begun, so it never depends on a thread that is busy elsewhere.
template <class Make, class Work>
void in_parallel(ffi::ThreadPool& pool, int64_t count, Make make, Work work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto run = [shared, count, make, work] {
    if (shared->next.load() >= count) return;
    auto scratch = make();
    for (int64_t i; (i = shared->next.fetch_add(1)) < count; shared->done.fetch_add(1)) work(i, scratch);
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([run] { run(); });
  run();
  while (shared->done.load() < count) std::this_thread::yield();
}

// As above, for work without scratch buffers.
template <class Work>
void in_parallel(ffi::ThreadPool& pool, int64_t count, Work work) {
  in_parallel(pool, count, [] { return nullptr; }, [work](int64_t i, std::nullptr_t) { work(i); });
}

// Reading of rows in pages: stored numbers as floats, the places of keys, the keys that queries see.

template <class T>
inline Ints one_by_one(const T* p) {
  Ints x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}

// LANES stored integers, widened. Written out because compilers may not vectorise a conversion (GCC 12 does not).
inline Ints integers(const int8_t* p) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return one_by_one(p);
#endif
}
inline Ints integers(const uint8_t* p) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return one_by_one(p);
#endif
}
inline Ints integers(const uint16_t* p) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return one_by_one(p);
#endif
}

// LANES stored numbers as floats.
inline Vec wide(const float* p) { return load(p); }
inline Vec wide(const _Float16* p) {
#if defined(__AVX512F__)
  return bits<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__) && defined(__F16C__)
  return bits<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
#endif
}
inline Vec wide(const Bf16* p) { return bits<Vec>(integers(&p->raw) << 16); }
inline Vec wide(const int8_t* p) { return __builtin_convertvector(integers(p), Vec); }
inline Vec wide(const Fp8* p) {
  const Ints x = integers(&p->raw), size = x & 0x7f;
  // Numbers below 2^-6 are multiples of 2^-9. XLA's threads flush denormals, so exponents are added instead.
  const Vec small = __builtin_convertvector(size, Vec) * 0.001953125f, normal = bits<Vec>((size << 20) + (120 << 23));
  const Vec y = size == 0x7f ? fill(__builtin_nanf("")) : size < 8 ? small : normal;
  return bits<Vec>(bits<Ints>(y) | (x & 0x80) << 24);
}

// n stored numbers times a factor, padded with zeros to `whole`, a multiple of LANES.
template <class T>
inline void widen(const T* from, int64_t n, int64_t whole, float factor, float* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, wide(from + i) * factor);
  if (i == whole) return;
  T last[LANES] = {};
  std::copy_n(from + i, n - i, last);
  store(to + i, wide(last) * factor);
}

// A query of a batch, and the keys [first, last) that it sees.
struct Query { int64_t number, first, last; };

// The queries of a batch that see any key, and the keys [begin, end) that any of them sees. A block of a sequence
// that decodes beside prompts has one query, whatever the block's size.
struct Sight {
  std::vector<Query> queries;
  int64_t begin, end, sure_begin, sure_end;  // every one of them sees [sure_begin, sure_end)

  // Takes queries [from, to) of a batch with their positions; keys are [0, most). Calls `blind` for queries that
  // see nothing.
  template <class Blind>
  void look(const int32_t* position, int64_t from, int64_t to, int64_t window, int64_t most, Blind blind) {
    begin = most, end = 0, sure_begin = 0, sure_end = most;
    queries.clear();
    for (int64_t number = from; number < to; ++number) {
      const int64_t after = position[number] + int64_t{1};
      const int64_t first = std::max<int64_t>(0, after - window), last = std::min(after, most);
      if (first >= last) {
        blind(number);
        continue;
      }
      begin = std::min(begin, first), end = std::max(end, last);
      sure_begin = std::max(sure_begin, first), sure_end = std::min(sure_end, last);
      queries.push_back({number, first, last});
    }
  }

  // Which of the keys [start, start + TILE) are seen by any query; returns true if all of them are.
  bool seen(int64_t start, bool* some) const {
    if (sure_begin <= start && start + TILE <= sure_end) return true;
    int change[TILE + 1] = {};  // positions may leave gaps
    for (const Query& query : queries) {
      const int64_t a = std::clamp<int64_t>(query.first - start, 0, TILE);
      const int64_t b = std::clamp<int64_t>(query.last - start, 0, TILE);
      if (a < b) ++change[a], --change[b];
    }
    for (int t = 0, depth = 0; t < TILE; ++t) some[t] = (depth += change[t]) > 0;
    return false;
  }
};

// `f(t, run, page, offset)` for the keys [start + t, start + t + run) of a sequence, which lie in `page` from
// `offset` on; together they are TILE keys.
template <class F>
inline void in_pages(const int32_t* table, int64_t slots, int64_t pages, int64_t page, int64_t start, F f) {
  int64_t slot = start / page, offset = start % page;
  for (int t = 0, run; t < TILE; t += run, ++slot, offset = 0) {
    run = std::min<int64_t>(TILE - t, page - offset);
    f(t, run, std::clamp<int64_t>(table[std::min(slot, slots - 1)], 0, pages - 1), offset);
  }
}

}  // namespace
