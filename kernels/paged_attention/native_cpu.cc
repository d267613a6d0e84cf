// Attention over paged keys and values on CPUs, as a handler of XLA's foreign function interface; see
// `native_cpu.py`.
//
// A piece of work is one block of queries with the query heads of some kv heads. It processes the keys that any of
// its queries sees with an online softmax. Unseen keys are not used, so stale pages may hold anything. The result of
// a query does not depend on its neighbours.

#include "native_tile.h"

namespace {

struct Call {
  int64_t blocks, queries, heads, width, value, kv_heads, pages, page, slots, sequences, row;
  float scale;
  int64_t window;
  const float *q, *k_scale, *v_scale;
  const void *k, *v;
  const int32_t *table, *sequence, *position;
  float* out;
};

constexpr int AT_ONCE = 3;  // tiles: one in use, one that is read, one that is asked for

// The buffers of one thread: the queries that see any key, the destination of each row's result, zeros in place of
// unseen keys, and the factors of 8-bit rows of AT_ONCE tiles.
struct Work : Scratch {
  explicit Work(const Call& c)
      : Scratch(std::max(c.queries * (c.heads / c.kv_heads), FEW * c.kv_heads), c.width, c.value), out(rows),
        nothing(c.kv_heads * std::max(c.width, c.value)), factors(2 * AT_ONCE * c.kv_heads * TILE) {}
  Sight sight;
  std::vector<float*> out;
  std::vector<float> nothing, factors;
};

// Points the scratch at keys and values [start, start + TILE) of a sequence, or at zeros for unseen ones.
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

// Keys and values [start, start + TILE) of a sequence in place: rows of all heads from the `head`-th on, and the
// factors of 8-bit rows of `heads` heads.
template <class T>
struct Tile {
  const T *key[TILE], *value[TILE];
  float *k_scale, *v_scale;  // [heads, TILE]

  void locate(const Call& c, const int32_t* table, int64_t head, int64_t heads, int64_t start) {
    in_pages(table, c.slots, c.pages, c.page, start, [&](int t, int run, int64_t name, int64_t offset) {
      const int64_t page = c.row * c.pages + name;
      const int64_t at = (page * c.page + offset) * c.kv_heads + head;
      const T* k = static_cast<const T*>(c.k) + at * c.width;
      const T* v = static_cast<const T*>(c.v) + at * c.value;
      for (int i = 0; i < run; ++i) {
        key[t + i] = k + i * c.kv_heads * c.width;
        value[t + i] = v + i * c.kv_heads * c.value;
      }
      if (!c.k_scale) return;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t factor = (page * c.kv_heads + head + h) * c.page + offset;
        std::copy_n(c.k_scale + factor, run, k_scale + h * TILE + t);
        std::copy_n(c.v_scale + factor, run, v_scale + h * TILE + t);
      }
    });
  }

  // Unseen keys are zeros, at `nothing`.
  void forget(const bool* seen, const void* nothing, int64_t scaled_heads) {
    for (int t = 0; t < TILE; ++t) {
      if (seen[t]) continue;
      key[t] = value[t] = static_cast<const T*>(nothing);
      for (int64_t h = 0; h < scaled_heads; ++h) k_scale[h * TILE + t] = v_scale[h * TILE + t] = 0;
    }
  }
};

// What is brought in while key t of head h is used: the rows of the next tile are read, and those of the one after it
// asked for into a farther cache, all in turn in the order in which they lie. Prefetches alone are dropped where too
// many are under way, and do not make the processor read ahead by itself, as reading does.
template <class T>
struct Ahead {
  const Tile<T>*next, *after;  // next nullptr: nothing
  int64_t head, heads, key_size, value_size;

  template <int N>
  void bring(const T* const* rows, const T* const* far, int64_t size, int t) const {
    for (int64_t i = (head * TILE + t) / heads, end = (head * TILE + t + N) / heads; i < end; ++i) {
      const auto *row = reinterpret_cast<const char*>(rows[i]), *asked = reinterpret_cast<const char*>(far[i]);
      for (int64_t at = 0; at < int64_t(size * sizeof(T)); at += 64) {
        static_cast<void>(*static_cast<const volatile char*>(row + at));
        __builtin_prefetch(asked + at, 0, 2);
      }
    }
  }
  template <int N>
  void keys(int t) const { if (next) bring<N>(next->key, after->key, key_size, t); }
  void value(int t) const { if (next) bring<1>(next->value, after->value, value_size, t); }
};

// Scores of R query rows with LANES / R keys in place, from number `at` on, row after row.
template <int R, class T>
inline Vec score_some(const float* q, int64_t width, const T* const* keys, int64_t at) {
  constexpr int KEYS = LANES / R;
  Vec s[R * KEYS];
  for (Vec& x : s) x = Vec{};
  for (int64_t d = 0; d < width; d += LANES) {
    Vec rows[R];
    for (int r = 0; r < R; ++r) rows[r] = load(q + r * width + d);
#pragma GCC unroll 16
    for (int t = 0; t < KEYS; ++t) {
      const Vec x = wide(keys[t] + at + d);
      for (int r = 0; r < R; ++r) s[r * KEYS + t] += rows[r] * x;
    }
  }
  return sums<LANES>(s);
}

// Adds weighted values of keys [begin, end) to R rows: N vectors of each, from number `at` of a value on.
template <int R, int N, class T>
inline void mix_some(const float* weights, int begin, int end, const T* const* values, const Ahead<T>& ahead, int64_t at,
                     int64_t width, float* out) {
  Vec s[R][N];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) s[r][i] = load(out + r * width + i * LANES);
  for (int t = begin; t < end; ++t) {
    ahead.value(t);
    for (int i = 0; i < N; ++i) {
      const Vec v = wide(values[t] + at + i * LANES);
      for (int r = 0; r < R; ++r) s[r][i] += weights[r * TILE + t] * v;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < N; ++i) store(out + r * width + i * LANES, s[r][i]);
}

// The rows [r, r + R) of a scratch, for the tile's head h, with the tile at `start`; prefetches the next tile.
template <int R, class T>
inline void few_rows(Scratch& s, int64_t r, int64_t start, const Tile<T>& tile, int64_t h, Ahead<T> ahead, bool scaled) {
  constexpr int KEYS = LANES / R;
  int from[R], to[R], a = TILE, b = 0;
  for (int i = 0; i < R; ++i) {
    from[i] = std::clamp<int64_t>(s.first[r + i] - start, 0, TILE);
    to[i] = std::clamp<int64_t>(s.last[r + i] - start, 0, TILE);
    if (from[i] < to[i]) a = std::min(a, from[i]), b = std::max(b, to[i]);
  }
  if (a >= b) return;
  for (int t = a / KEYS * KEYS; t < b; t += KEYS) {
    ahead.template keys<KEYS>(t);
    float some[LANES];
    store(some, score_some<R>(s.q + r * s.width, s.width, tile.key + t, h * s.width));
    for (int i = 0; i < R; ++i) std::copy_n(some + i * KEYS, KEYS, s.scores + i * TILE + t);
  }
  const auto scale = [&](float* scores, const float* factors) {
    for (int t = 0; t < TILE; t += LANES) store(scores + t, load(scores + t) * load(factors + h * TILE + t));
  };
  for (int i = 0; i < R; ++i) {
    float* scores = s.scores + i * TILE;
    if (from[i] >= to[i]) {
      std::fill_n(scores, TILE, 0.0f);
      continue;
    }
    if (scaled) scale(scores, tile.k_scale);
    weigh(scores, from[i], to[i], s.top[r + i], s.total[r + i], s.mixed + (r + i) * s.value, s.value);
    if (scaled) scale(scores, tile.v_scale);
  }
  const auto mix = [&](auto n, int64_t at) {
    mix_some<R, n>(s.scores, a, b, tile.value, ahead, h * s.value + at, s.value, s.mixed + r * s.value + at);
    ahead.next = nullptr;
  };
  int64_t at = 0;
  for (; at + 4 * LANES <= s.value; at += 4 * LANES) mix(std::integral_constant<int, 4>{}, at);
  switch ((s.value - at) / LANES) {
    case 3: return mix(std::integral_constant<int, 3>{}, at);
    case 2: return mix(std::integral_constant<int, 2>{}, at);
    case 1: return mix(std::integral_constant<int, 1>{}, at);
  }
}

// As `attend_rows`, for few rows of each of `heads` heads from the `head`-th on, head after head. Numbers are
// widened as they are used while memory is read, once for all heads.
template <class T>
void attend_few(const Call& c, Work& s, const int32_t* table, int64_t head, int64_t heads) {
  Tile<T> tiles[AT_ONCE];
  for (int i = 0; i < AT_ONCE; ++i)
    tiles[i].k_scale = s.factors.data() + 2 * i * heads * TILE, tiles[i].v_scale = tiles[i].k_scale + heads * TILE;
  const int64_t rows = s.rows / heads, scaled = c.k_scale ? heads : 0, end = s.sight.end;
  // The tile at `start`, or the last one.
  const auto tile_at = [&](int64_t start) { return &tiles[std::min(start, (end - 1) / TILE * TILE) / TILE % AT_ONCE]; };
  const auto locate = [&](int64_t start) {
    if (start >= end) return;
    tile_at(start)->locate(c, table, head, heads, start);
    bool some[TILE];
    if (!s.sight.seen(start, some)) tile_at(start)->forget(some, s.nothing.data(), scaled);
  };
  const int64_t begin = s.sight.begin / TILE * TILE;
  locate(begin);
  locate(begin + TILE);
  for (int64_t start = begin; start < end; start += TILE) {
    locate(start + 2 * TILE);
    const Tile<T>& tile = *tile_at(start);
    const Tile<T>* next = start + TILE < end ? tile_at(start + TILE) : nullptr;
    for (int64_t h = 0; h < heads; ++h) {
      Ahead<T> ahead{next, tile_at(start + 2 * TILE), h, heads, heads * s.width, heads * s.value};
      int64_t r = h * rows;
      const auto take = [&](auto n) {
        for (; r + n <= (h + 1) * rows; r += n, ahead.next = nullptr)
          few_rows<n>(s, r, start, tile, h, ahead, scaled > 0);
      };
      take(std::integral_constant<int, 4>{});
      take(std::integral_constant<int, 2>{});
      take(std::integral_constant<int, 1>{});
    }
  }
}

// Block `block` of queries with `heads` kv heads from the `head`-th on.
template <class T>
void attend(const Call& c, Work& s, int64_t block, int64_t head, int64_t heads) {
  const int64_t group = c.heads / c.kv_heads;
  Sight& sight = s.sight;
  sight.look(c.position, block * c.queries, (block + 1) * c.queries, c.window, c.slots * c.page, [&](int64_t number) {
    std::fill_n(c.out + (number * c.heads + head * group) * c.value, heads * group * c.value, 0.0f);
  });
  const int32_t* table = c.table + std::clamp<int64_t>(c.sequence[block], 0, c.sequences - 1) * c.slots;
  const bool few = int64_t(sight.queries.size()) * group <= FEW && s.width == c.width && s.value == c.value;
  const int64_t together = few ? heads : 1;
  for (const int64_t stop = head + heads; head < stop; head += together) {
    s.rows = 0;
    for (int64_t h = head; h < head + together; ++h)
      for (const Query& query : sight.queries)
        for (int64_t g = h * group; g < (h + 1) * group; ++g, ++s.rows) {
          const int64_t row = query.number * c.heads + g;
          begin_row(s, s.rows, c.q + row * c.width, c.width, c.scale, query.first, query.last);
          s.out[s.rows] = c.out + row * c.value;
        }
    if (few)
      attend_few<T>(c, s, table, head, together);
    else
      attend_rows(s, s.rows, sight.begin, sight.end, [&](int64_t start) {
        bool some[TILE];
        if (sight.seen(start, some)) std::fill_n(some, TILE, true);
        read<T>(c, s, table, head, start, some);
      });
    for (int64_t r = 0; r < s.rows; ++r) {
      const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];
      for (int64_t i = 0; i < c.value; ++i) s.out[r][i] = s.mixed[r * s.value + i] * share;
    }
  }
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  const auto make = [c] { return Work(c); };
  // If there are many blocks, one thread takes all heads of a block, whose keys lie side by side.
  const int64_t together = c.blocks >= 4 * pool.num_threads() ? c.kv_heads : 1, parts = c.kv_heads / together;
  in_parallel(pool, c.blocks * parts, make, [=](int64_t i, Work& s) {
    i = c.blocks * parts - 1 - i;  // the last blocks of a prompt see the most: they go first
    attend<T>(c, s, i / parts, i % parts * together, together);
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
  return by_type(k.element_type(), [&](auto number) { run<decltype(number)>(pool, c); });
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
