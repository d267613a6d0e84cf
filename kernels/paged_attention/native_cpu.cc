// Attention over paged keys and values on CPUs, a handler of XLA's foreign function interface: `native_cpu.py`.
//
// A piece of work is one block of queries with the query heads of one kv head. It goes through the keys that
// any of its queries sees with a running softmax. Nothing of a key that no query sees is used, so stale pages
// may hold anything. What a query gets does not depend on its neighbours.

#include "native_tile.h"

namespace {

template <class T>
inline Ints one_by_one(const T* p) {
  Ints x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}

// LANES stored integers, widened. Compilers make of a conversion of vectors what they like: GCC 12, one by one.
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
  Vec x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}
inline Vec wide(const Bf16* p) { return bits<Vec>(integers(&p->raw) << 16); }
inline Vec wide(const int8_t* p) { return __builtin_convertvector(integers(p), Vec); }
inline Vec wide(const Fp8* p) {
  const Ints x = integers(&p->raw), size = x & 0x7f;
  // Numbers below 2^-6 are multiples of 2^-9. XLA's threads flush denormals, so that exponents are added.
  const Vec small = __builtin_convertvector(size, Vec) * 0.001953125f, normal = bits<Vec>((size << 20) + (120 << 23));
  const Vec y = size == 0x7f ? fill(__builtin_nanf("")) : size < 8 ? small : normal;
  return bits<Vec>(bits<Ints>(y) | (x & 0x80) << 24);
}

// n stored numbers times a factor, filled up with zeros to `whole`, a multiple of LANES.
template <class T>
inline void widen(const T* from, int64_t n, int64_t whole, float factor, float* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, wide(from + i) * factor);
  if (i == whole) return;
  T last[LANES] = {};
  std::copy_n(from + i, n - i, last);
  store(to + i, wide(last) * factor);
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

// What one thread works in: where each row's result goes, and what an unseen key is.
struct Work : Scratch {
  explicit Work(const Call& c)
      : Scratch(c.queries * (c.heads / c.kv_heads), c.width, c.value), out(rows), nothing(std::max(c.width, c.value)) {}
  std::vector<float*> out;
  std::vector<float> nothing;
};

// Points the scratch at keys and values [start, start + TILE) of a sequence; zeros for what is not seen.
template <class T>
void read(const Call& c, Scratch& s, const int32_t* table, int64_t head, int64_t start, const bool* seen) {
  int64_t slot = start / c.page, offset = start % c.page;
  const bool in_place = std::is_same_v<T, float>;
  for (int t = 0; t < TILE; ++t) {
    float *key = s.keys + t * s.width, *value = s.values + t * s.value;
    s.key[t] = key, s.of_value[t] = value;
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
        s.key[t] = reinterpret_cast<const float*>(k);
      else
        widen(k, c.width, s.width, c.k_scale ? c.k_scale[factor] : 1.0f, key);
      if (in_place && s.value == c.value)
        s.of_value[t] = reinterpret_cast<const float*>(v);
      else
        widen(v, c.value, s.value, c.v_scale ? c.v_scale[factor] : 1.0f, value);
    }
    if (++offset == c.page) ++slot, offset = 0;
  }
}

// Keys and values [start, start + TILE) of a sequence where they lie, and what gives 8-bit ones back.
template <class T>
struct Tile {
  const T *key[TILE], *value[TILE];
  float k_scale[TILE], v_scale[TILE];

  void locate(const Call& c, const int32_t* table, int64_t head, int64_t start) {
    int64_t slot = start / c.page, offset = start % c.page;
    for (int t = 0, run; t < TILE; t += run, ++slot, offset = 0) {
      run = std::min<int64_t>(TILE - t, c.page - offset);
      const int64_t name = table[std::min(slot, c.slots - 1)];
      const int64_t page = c.row * c.pages + std::clamp<int64_t>(name, 0, c.pages - 1);
      const int64_t at = (page * c.page + offset) * c.kv_heads + head;
      const T* k = static_cast<const T*>(c.k) + at * c.width;
      const T* v = static_cast<const T*>(c.v) + at * c.value;
      for (int i = 0; i < run; ++i) {
        key[t + i] = k + i * c.kv_heads * c.width;
        value[t + i] = v + i * c.kv_heads * c.value;
      }
      if (!c.k_scale) continue;
      const int64_t factor = (page * c.kv_heads + head) * c.page + offset;
      std::copy_n(c.k_scale + factor, run, k_scale + t);
      std::copy_n(c.v_scale + factor, run, v_scale + t);
    }
  }

  // What is not seen is zeros, which `nothing` points at.
  void forget(const bool* seen, const void* nothing) {
    for (int t = 0; t < TILE; ++t)
      if (!seen[t]) key[t] = value[t] = static_cast<const T*>(nothing), k_scale[t] = v_scale[t] = 0;
  }
};

template <class T>
inline void prefetch(const T* p, int64_t n) {
  const char* from = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < int64_t(n * sizeof(T)); i += 64) __builtin_prefetch(from + i);
}

// Scores of R query rows with LANES / R keys as they lie, row after row.
template <int R, class T>
inline Vec score_some(const float* q, int64_t width, const T* const* keys) {
  constexpr int KEYS = LANES / R;
  Vec s[R * KEYS];
  for (Vec& x : s) x = Vec{};
  for (int64_t d = 0; d < width; d += LANES) {
    Vec rows[R];
    for (int r = 0; r < R; ++r) rows[r] = load(q + r * width + d);
#pragma GCC unroll 16
    for (int t = 0; t < KEYS; ++t) {
      const Vec x = wide(keys[t] + d);
      for (int r = 0; r < R; ++r) s[r * KEYS + t] += rows[r] * x;
    }
  }
  return sums<LANES>(s);
}

// Adds weighted values of keys [begin, end) to R rows: N vectors of each, from the `at`-th number on.
template <int R, int N, class T>
inline void mix_some(const float* weights, int begin, int end, const T* const* values, const T* const* next, int64_t at,
                     int64_t width, float* out) {
  Vec s[R][N];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) s[r][i] = load(out + r * width + at + i * LANES);
  for (int t = begin; t < end; ++t) {
    if (next) prefetch(next[t] + at, N * LANES);
    for (int i = 0; i < N; ++i) {
      const Vec v = wide(values[t] + at + i * LANES);
      for (int r = 0; r < R; ++r) s[r][i] += weights[r * TILE + t] * v;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) store(out + r * width + at + i * LANES, s[r][i]);
}

// The rows [r, r + R) of a scratch with the tile at `start`; asks for the next tile meanwhile.
template <int R, class T>
inline void few_rows(Scratch& s, int64_t r, int64_t start, const Tile<T>& tile, const Tile<T>* next, bool scaled) {
  constexpr int KEYS = LANES / R;
  int from[R], to[R], a = TILE, b = 0;
  for (int i = 0; i < R; ++i) {
    from[i] = std::clamp<int64_t>(s.first[r + i] - start, 0, TILE);
    to[i] = std::clamp<int64_t>(s.last[r + i] - start, 0, TILE);
    if (from[i] < to[i]) a = std::min(a, from[i]), b = std::max(b, to[i]);
  }
  if (a >= b) return;
  for (int t = a / KEYS * KEYS; t < b; t += KEYS) {
    if (next)
      for (int i = 0; i < KEYS; ++i) prefetch(next->key[t + i], s.width);
    float some[LANES];
    store(some, score_some<R>(s.q + r * s.width, s.width, tile.key + t));
    for (int i = 0; i < R; ++i) std::copy_n(some + i * KEYS, KEYS, s.scores + i * TILE + t);
  }
  for (int i = 0; i < R; ++i) {
    float* scores = s.scores + i * TILE;
    if (from[i] >= to[i]) {
      std::fill_n(scores, TILE, 0.0f);
      continue;
    }
    if (scaled)
      for (int t = 0; t < TILE; t += LANES) store(scores + t, load(scores + t) * load(tile.k_scale + t));
    weigh(scores, from[i], to[i], s.top[r + i], s.total[r + i], s.mixed + (r + i) * s.value, s.value);
    if (scaled)
      for (int t = 0; t < TILE; t += LANES) store(scores + t, load(scores + t) * load(tile.v_scale + t));
  }
  const auto mix = [&](auto n, int64_t at) {
    mix_some<R, n>(s.scores, a, b, tile.value, next ? next->value : nullptr, at, s.value, s.mixed + r * s.value);
  };
  int64_t at = 0;
  for (; at + 4 * LANES <= s.value; at += 4 * LANES) mix(std::integral_constant<int, 4>{}, at);
  switch ((s.value - at) / LANES) {
    case 3: return mix(std::integral_constant<int, 3>{}, at);
    case 2: return mix(std::integral_constant<int, 2>{}, at);
    case 1: return mix(std::integral_constant<int, 1>{}, at);
  }
}

// As `attend_rows`, for few rows: numbers are widened as they are used, and memory is read while they are.
template <class T, class Seen>
void attend_few(const Call& c, Work& s, const int32_t* table, int64_t head, int64_t begin, int64_t end, Seen seen) {
  Tile<T> tiles[2];
  const auto locate = [&](int64_t start) {
    Tile<T>& tile = tiles[start / TILE % 2];
    tile.locate(c, table, head, start);
    bool some[TILE];
    if (!seen(start, some)) tile.forget(some, s.nothing.data());
  };
  begin = begin / TILE * TILE;
  if (begin < end) locate(begin);
  for (int64_t start = begin; start < end; start += TILE) {
    const Tile<T>* next = nullptr;
    if (start + TILE < end) locate(start + TILE), next = &tiles[(start / TILE + 1) % 2];
    int64_t r = 0;
    const auto rows = [&](auto n) {
      for (; r + n <= s.rows; r += n, next = nullptr)
        few_rows<n>(s, r, start, tiles[start / TILE % 2], next, c.k_scale != nullptr);
    };
    rows(std::integral_constant<int, 4>{});
    rows(std::integral_constant<int, 2>{});
    rows(std::integral_constant<int, 1>{});
  }
}

template <class T>
void attend(const Call& c, Work& s, int64_t block, int64_t head) {
  const int64_t group = c.heads / c.kv_heads, most = c.slots * c.page;
  int64_t begin = most, end = 0, sure_begin = 0, sure_end = most;  // what any query sees, and what every one does
  s.rows = 0;  // a block of one sequence that decodes beside prompts has one query, whatever its size
  for (int64_t i = 0; i < c.queries; ++i) {
    const int64_t query = (block * c.queries + i) * c.heads + head * group;
    const int64_t after = c.position[block * c.queries + i] + int64_t{1};
    const int64_t first = std::max<int64_t>(0, after - c.window), last = std::min(after, most);
    if (first >= last) {
      std::fill_n(c.out + query * c.value, group * c.value, 0.0f);
      continue;
    }
    begin = std::min(begin, first), end = std::max(end, last);
    sure_begin = std::max(sure_begin, first), sure_end = std::min(sure_end, last);
    for (int64_t g = 0; g < group; ++g, ++s.rows) {
      begin_row(s, s.rows, c.q + (query + g) * c.width, c.width, c.scale, first, last);
      s.out[s.rows] = c.out + (query + g) * c.value;
    }
  }
  const int32_t* table = c.table + std::clamp<int64_t>(c.sequence[block], 0, c.sequences - 1) * c.slots;
  // Which keys of a tile any query sees; or true: all of them.
  const auto seen = [&](int64_t start, bool* some) {
    if (sure_begin <= start && start + TILE <= sure_end) return true;
    int change[TILE + 1] = {};  // positions may leave gaps
    for (int64_t r = 0; r < s.rows; r += group) {
      const int64_t a = std::clamp<int64_t>(s.first[r] - start, 0, TILE);
      const int64_t b = std::clamp<int64_t>(s.last[r] - start, 0, TILE);
      if (a < b) ++change[a], --change[b];
    }
    for (int t = 0, depth = 0; t < TILE; ++t) some[t] = (depth += change[t]) > 0;
    return false;
  };
  if (s.rows <= FEW && s.width == c.width && s.value == c.value)
    attend_few<T>(c, s, table, head, begin, end, seen);
  else
    attend_rows(s, s.rows, begin, end, [&](int64_t start) {
      bool some[TILE];
      if (seen(start, some)) std::fill_n(some, TILE, true);
      read<T>(c, s, table, head, start, some);
    });
  for (int64_t r = 0; r < s.rows; ++r) {
    const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];
    for (int64_t i = 0; i < c.value; ++i) s.out[r][i] = s.mixed[r * s.value + i] * share;
  }
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  const auto make = [c] { return Work(c); };
  // Where there are many blocks one thread takes all heads of a block: their keys lie side by side.
  const int64_t together = c.blocks >= 4 * pool.num_threads() ? c.kv_heads : 1, parts = c.kv_heads / together;
  in_parallel(pool, c.blocks * parts, make, [=](int64_t i, Work& s) {
    i = c.blocks * parts - 1 - i;  // the last blocks of a prompt see the most: they go first
    for (int64_t h = 0; h < together; ++h) attend<T>(c, s, i / parts, i % parts * together + h);
  });
}

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
