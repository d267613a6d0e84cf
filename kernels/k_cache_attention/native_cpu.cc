// Attention over pages of rows that hold keys alone, or a layer's inputs alone, as a handler of XLA's foreign
// function interface; see `native_cpu.py`.
//
// A run is the queries of one sequence in neighbouring blocks. There are two orders. Sums first: whole rows are
// summed for each query and head, and the sum is multiplied by the head's matrix; a row is read once for all heads.
// Values first: the values of a tile are made from its rows once for all queries of a run, and attention is then
// computed as usual. Unseen keys are not used, so stale pages may hold anything. The result of a query does not
// depend on other sequences.

#include "native_tile.h"

namespace {

constexpr int64_t LONGEST = 1024;  // queries of a run
constexpr double BESIDE_SCORES = 0.4;  // of what is prefetched; the rest comes beside the sums of whole rows
constexpr int EITHER = 0, SUMS = 1, VALUES = 2;

struct Call {
  int64_t blocks, queries, heads, width, whole, value, pages, page, slots, sequences, row, order;
  float scale;
  int64_t window;
  const float *q, *factors, *w_k, *w_v, *near, *far;  // w_k: rows are inputs; near, far: keys turn when they are read
  const void* rows;
  const int32_t *table, *sequence, *position;
  float* out;

  int64_t span() const { return w_k ? whole : width; }  // of a row, that a query meets
  const int32_t* pages_of(int64_t block) const {
    return table + std::clamp<int64_t>(sequence[block], 0, sequences - 1) * slots;
  }
};

// Blocks [first, last) with `live` queries; for a run of few queries, its place among all such runs.
struct Run {
  int64_t first, last, live, place;
  bool values;
};

// A matrix [size, columns], with rows padded to whole vectors.
struct Matrix {
  Matrix(const float* from, int64_t size, int64_t columns)
      : size(size), width(in_lanes(columns)), zeros(width), rows(in_lanes(size), zeros.data()) {
    const bool as_it_lies = width == columns;
    if (!as_it_lies) copy.resize(size * width);
    for (int64_t i = 0; i < size; ++i) {
      if (!as_it_lies) std::copy_n(from + i * columns, columns, copy.data() + i * width);
      rows[i] = as_it_lies ? from + i * columns : copy.data() + i * width;
    }
  }
  int64_t size, width;
  std::vector<float> zeros, copy;
  std::vector<const float*> rows;
};

// `count` rows, `apart` from each other, times a matrix: [count, w.width].
void product(const float* rows, int64_t apart, int64_t count, const Matrix& w, float* out) {
  std::fill_n(out, count * w.width, 0.0f);
  for (int64_t d = 0; d < w.size; d += TILE)  // a part of the matrix that stays in the nearest cache
    for (int64_t r = 0; r < count; r += ROWS)
      with_rows(std::min<int64_t>(ROWS, count - r), [&](auto n) {
        mix<n>(rows + r * apart, apart, 1, d, std::min(d + TILE, w.size), w.rows.data(), w.width, out + r * w.width);
      });
}

// A head's matrices: for the values, and for the keys if rows are inputs.
Matrix of_values(const Call& c, int64_t head) {
  return Matrix(c.w_v + head * c.whole * c.value, c.whole, c.value);
}
Matrix of_keys(const Call& c, int64_t head) { return Matrix(c.w_k + head * c.whole * c.width, c.whole, c.width); }

// Rows of TILE keys, in place, and the factors of 8-bit rows.
template <class T>
struct Tile {
  const T* row[TILE];
  float factor[TILE];

  void locate(const Call& c, const int32_t* table, const Sight& sight, const T* nothing, int64_t start) {
    std::fill_n(factor, TILE, 1.0f);
    in_pages(table, c.slots, c.pages, c.page, start, [&](int t, int run, int64_t name, int64_t offset) {
      const int64_t at = (c.row * c.pages + name) * c.page + offset;
      for (int i = 0; i < run; ++i) row[t + i] = static_cast<const T*>(c.rows) + (at + i) * c.whole;
      if (c.factors) std::copy_n(c.factors + at, run, factor + t);
    });
    bool some[TILE];
    if (sight.seen(start, some)) return;
    for (int t = 0; t < TILE; ++t)
      if (!some[t]) row[t] = nothing, factor[t] = 0;
  }

  // The rows as floats: in place, or widened into `room`.
  void open(int64_t whole, int64_t filled, float* room, const float** rows) const {
    for (int t = 0; t < TILE; ++t) {
      if (std::is_same_v<T, float> && whole == filled) {
        rows[t] = reinterpret_cast<const float*>(row[t]);
      } else {
        widen(row[t], whole, filled, factor[t], room + t * filled);
        rows[t] = room + t * filled;
      }
    }
  }
};

// The buffers of one thread. `moved`: for each query and head, first the query for whole rows, then their sum.
struct Work {
  Work(const Call& c, int64_t few, int64_t many)
      : filled(in_lanes(c.whole)), sums(few * c.heads, c.span(), c.whole), values(many, c.width, c.value),
        scores(few * c.heads * TILE), turned(few * c.heads * c.width), moved(few * c.heads * filled),
        room(TILE * filled), nothing(filled) {}
  int64_t filled;
  Scratch sums, values;
  Sight sight;
  std::vector<float> scores, turned, moved, room, nothing;
};

// Loads the first n numbers at p, then zeros.
inline Vec some(const float* p, int64_t n) {
  float x[LANES] = {};
  std::copy_n(p, n, x);
  return load(x);
}

// Scores of one query with LANES keys, `width` numbers from number `at` of their rows on.
inline Vec score_plain(const float* q, int64_t width, const float* const* rows, int64_t at) {
  Vec s[LANES] = {};
  const auto add = [&](int64_t d, auto get) {
    const Vec x = get(q + d);
    for (int t = 0; t < LANES; ++t) s[t] += x * get(rows[t] + at + d);
  };
  int64_t d = 0;
  for (; d + LANES <= width; d += LANES) add(d, [](const float* p) { return load(p); });
  if (d < width) add(d, [=](const float* p) { return some(p, width - d); });
  return sums<LANES>(s);
}

// The same with keys that are rotated by angles [LANES, (cosine, sine), width / 2].
inline Vec score_turned(const float* q, int64_t width, const float* const* rows, int64_t at, const float* angles) {
  constexpr int SOME = std::min(LANES, 8);  // at a time: more do not fit the registers
  const int64_t half = width / 2;
  Vec every[LANES];
#pragma GCC unroll 1
  for (int from = 0; from < LANES; from += SOME) {
    Vec s[SOME] = {};
    const auto add = [&](int64_t d, auto get) {
      const Vec a = get(q + d), b = get(q + half + d);
#pragma GCC unroll 16
      for (int i = 0; i < SOME; ++i) {
        const int t = from + i;
        const Vec x = get(rows[t] + at + d), y = get(rows[t] + at + half + d);
        s[i] += (a * x + b * y) * get(angles + t * width + d);
        s[i] += (b * x - a * y) * get(angles + t * width + half + d);
      }
    };
    int64_t d = 0;
    for (; d + LANES <= half; d += LANES) add(d, [](const float* p) { return load(p); });
    if (d < half) add(d, [=](const float* p) { return some(p, half - d); });
    std::copy_n(s, SOME, every + from);
  }
  return sums<LANES>(every);
}

// Rotates [width] by angles [(cosine, sine), width / 2]; with `sign` -1, back.
inline void turn(const float* from, int64_t width, const float* angles, float sign, float* to) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = from[i], b = from[half + i], cosine = angles[i], sine = sign * angles[half + i];
    to[i] = a * cosine - b * sine;
    to[half + i] = b * cosine + a * sine;
  }
}

// Prefetches the next tile beside the work on this one, in memory order: some bytes of a row at each call.
template <class T>
struct Ahead {
  const Tile<T>* next;  // nullptr: nothing
  int64_t size, some;   // bytes of a row, and of a call
  int row = 0;
  int64_t at = 0;

  // `part` of the tile in the next `calls`, in whole cache lines.
  void spread(double part, int64_t calls) { some = (int64_t(part * size * TILE) / calls + 63) / 64 * 64; }

  void operator()(int64_t) {
    if (!next || row == TILE) return;
    for (const int64_t stop = std::min(at + some, size); at < stop; at += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(next->row[row]) + at, 0, 2);
    if (at >= size) ++row, at = 0;
  }
};

// Scores [rows, TILE] of a scratch's rows, each of one head of `heads` from the `head`-th on, with a tile.
template <class Each>
void score_tile(const Call& c, Work& w, const float* const* tile, int64_t start, int64_t head, int64_t heads,
                Each& each) {
  const Scratch& s = w.sums;
  const int64_t queries = s.rows / heads;
  if (c.near)  // the way from the tile's first key to each is the same in every tile
    for (int64_t r = 0; r < s.rows; ++r)
      turn(s.q + r * s.width, c.width, c.far + start / TILE * c.width, -1, w.turned.data() + r * c.width);
  for (int t = 0; t < TILE; t += LANES)
    for (int64_t r = 0; r < s.rows; ++r) {
      const int64_t at = c.w_k ? 0 : (head + r / queries) * c.width;
      each(r);
      store(w.scores.data() + r * TILE + t,
            c.near ? score_turned(w.turned.data() + r * c.width, c.width, tile + t, at, c.near + t * c.width)
                   : score_plain(s.q + r * s.width, c.span(), tile + t, at));
    }
}

// Adds weighted whole rows [begin, end) of a tile to every row of a scratch, some columns for all of them at a time.
template <class Each>
void mix_tile(Work& w, const float* const* tile, int begin, int end, Each& each) {
  Scratch& s = w.sums;
  const auto mix_some = [&](auto vectors, int64_t at) {
    for (int64_t r = 0; r < s.rows; r += ROWS)
      with_rows(std::min<int64_t>(ROWS, s.rows - r), [&](auto n) {
        const float* weights = w.scores.data() + r * TILE;
        mix<n, vectors>(weights, TILE, 1, begin, end, tile, at, s.value, s.mixed + r * s.value, std::ref(each));
      });
  };
  int64_t at = 0;
  for (; at + 4 * LANES <= s.value; at += 4 * LANES) mix_some(std::integral_constant<int, 4>{}, at);
  for (; at < s.value; at += LANES) mix_some(std::integral_constant<int, 1>{}, at);
}

// Sums first: sums of a run's queries for heads [head, head + heads), in their places of `moved`.
template <class T>
void sum(const Call& c, Work& w, const Run& run, int64_t head, int64_t heads, float* moved) {
  Scratch& s = w.sums;
  const std::vector<Query>& queries = w.sight.queries;
  const int32_t* table = c.pages_of(run.first);
  const auto* nothing = reinterpret_cast<const T*>(w.nothing.data());
  const auto place = [&](int64_t i, int64_t h) { return moved + (i * c.heads + h) * w.filled; };
  s.rows = 0;
  for (int64_t h = head; h < head + heads; ++h)
    for (size_t i = 0; i < queries.size(); ++i, ++s.rows) {
      const float* q = c.w_k ? place(i, h) : c.q + (queries[i].number * c.heads + h) * c.width;
      begin_row(s, s.rows, q, c.span(), c.scale, queries[i].first, queries[i].last);
    }
  Tile<T> tiles[2];
  const int64_t begin = w.sight.begin / TILE * TILE, last = (w.sight.end - 1) / TILE * TILE;
  const auto tile_at = [&](int64_t start) { return &tiles[start / TILE % 2]; };
  tile_at(begin)->locate(c, table, w.sight, nothing, begin);
  for (int64_t start = begin; start <= last; start += TILE) {
    if (start < last) tile_at(start + TILE)->locate(c, table, w.sight, nothing, start + TILE);
    const float* rows[TILE];
    tile_at(start)->open(c.whole, w.filled, w.room.data(), rows);
    Ahead<T> ahead{start < last ? tile_at(start + TILE) : nullptr, int64_t(c.whole * sizeof(T))};
    ahead.spread(BESIDE_SCORES, s.rows * TILE / LANES);
    score_tile(c, w, rows, start, head, heads, ahead);
    int a = TILE, b = 0;
    for (int64_t r = 0; r < s.rows; ++r) {
      const int from = std::clamp<int64_t>(s.first[r] - start, 0, TILE);
      const int to = std::clamp<int64_t>(s.last[r] - start, 0, TILE);
      float* scores = w.scores.data() + r * TILE;
      if (from >= to) {
        std::fill_n(scores, TILE, 0.0f);
        continue;
      }
      a = std::min(a, from), b = std::max(b, to);
      weigh(scores, from, to, s.top[r], s.total[r], s.mixed + r * s.value, s.value);
    }
    ahead.spread(1, TILE * ((s.rows + ROWS - 1) / ROWS) * (s.value / (4 * LANES) + 1));
    mix_tile(w, rows, a, b, ahead);
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];
    float* to = place(r % queries.size(), head + r / queries.size());
    for (int64_t i = 0; i < s.value; ++i) to[i] = s.mixed[r * s.value + i] * share;
  }
}

// Values first: attention of a run's queries for one head.
template <class T>
void attend(const Call& c, Work& w, const Run& run, int64_t head) {
  Scratch& s = w.values;
  const std::vector<Query>& queries = w.sight.queries;
  const Matrix values = of_values(c, head);
  const Matrix keys = c.w_k ? of_keys(c, head) : Matrix(nullptr, 0, 0);
  for (size_t r = 0; r < queries.size(); ++r) {
    const float* q = c.q + (queries[r].number * c.heads + head) * c.width;
    begin_row(s, r, q, c.width, c.scale, queries[r].first, queries[r].last);
  }
  for (int t = 0; t < TILE; ++t) s.key[t] = s.keys + t * s.width, s.of_value[t] = s.values + t * s.value;
  attend_rows(s, queries.size(), w.sight.begin, w.sight.end, [&](int64_t start) {
    Tile<T> tile;
    tile.locate(c, c.pages_of(run.first), w.sight, reinterpret_cast<const T*>(w.nothing.data()), start);
    for (int t = 0; t < TILE; ++t) widen(tile.row[t], c.whole, w.filled, tile.factor[t], w.room.data() + t * w.filled);
    product(w.room.data(), w.filled, TILE, values, s.values);
    if (c.w_k) return product(w.room.data(), w.filled, TILE, keys, s.keys);
    for (int t = 0; t < TILE; ++t) {
      float* key = s.keys + t * s.width;
      const float* stored = w.room.data() + t * w.filled + head * c.width;
      std::fill_n(std::copy_n(stored, c.width, key), s.width - c.width, 0.0f);
      if (!c.near) continue;
      turn(key, c.width, c.far + start / TILE * c.width, 1, key);
      turn(key, c.width, c.near + t * c.width, 1, key);
    }
  });
  for (size_t r = 0; r < queries.size(); ++r) {
    const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];
    float* out = c.out + (queries[r].number * c.heads + head) * c.value;
    for (int64_t i = 0; i < c.value; ++i) out[i] = s.mixed[r * s.value + i] * share;
  }
}

// Makes the queries for whole rows, from `count` queries of one head, in `moved`.
void meet(const Call& c, const Query* queries, int64_t count, int64_t head, float* moved) {
  const Matrix w = of_keys(c, head);
  std::vector<float> q(w.width);
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(c.q + (queries[i].number * c.heads + head) * c.width, c.width, q.data());
    float* to = moved + (i * c.heads + head) * in_lanes(c.whole);
    for (int64_t e = 0; e < c.whole; e += LANES) score_rows(q.data(), w.width, w.rows.data() + e, to + e);
  }
}

// Makes their results: the sums of whole rows times the head's matrix.
void finish(const Call& c, const Query* queries, int64_t count, int64_t head, const float* moved) {
  const Matrix w = of_values(c, head);
  const int64_t filled = in_lanes(c.whole);
  std::vector<float> made(count * w.width);
  product(moved + head * filled, c.heads * filled, count, w, made.data());
  for (int64_t i = 0; i < count; ++i)
    std::copy_n(made.data() + i * w.width, c.value, c.out + (queries[i].number * c.heads + head) * c.value);
}

// The runs of a call, and the queries of those that have few: their matrices are read once for all of them. Zeros for
// queries that see nothing.
struct Plan {
  explicit Plan(const Call& c) {
    Sight sight;
    for (int64_t block = 0; block < c.blocks; ++block) {
      sight.look(c.position, block * c.queries, (block + 1) * c.queries, c.window, c.slots * c.page,
                 [&](int64_t number) { std::fill_n(c.out + number * c.heads * c.value, c.heads * c.value, 0.0f); });
      const int64_t live = sight.queries.size();
      if (!live) continue;
      const bool more = !runs.empty() && runs.back().last == block && runs.back().live + live <= LONGEST &&
                        c.sequence[runs.back().first] == c.sequence[block];
      if (!more) runs.push_back({block, block, 0, 0, false});
      runs.back().last = block + 1, runs.back().live += live;
    }
    for (Run& run : runs) {
      run.values = c.order == VALUES || (c.order == EITHER && run.live > c.width);
      (run.values ? many : some) = std::max(run.values ? many : some, run.live);
      if (run.values || run.live > FEW) continue;
      run.place = few.size();
      sight.look(c.position, run.first * c.queries, run.last * c.queries, c.window, c.slots * c.page, Nothing{});
      few.insert(few.end(), sight.queries.begin(), sight.queries.end());
    }
  }
  std::vector<Run> runs;
  std::vector<Query> few;
  int64_t some = 0, many = 0;  // queries of the longest runs of both orders
};

// A piece of work: a run with some heads.
struct Piece { const Run* run; int64_t head, heads; };

template <class T>
void work_on(const Call& c, Work& w, const Piece& piece, float* moved) {
  const Run& run = *piece.run;
  w.sight.look(c.position, run.first * c.queries, run.last * c.queries, c.window, c.slots * c.page, Nothing{});
  if (run.values) return attend<T>(c, w, run, piece.head);
  const bool few = run.live <= FEW;
  float* place = few ? moved + run.place * c.heads * w.filled : w.moved.data();
  const Query* queries = w.sight.queries.data();
  for (int64_t h = piece.head; !few && c.w_k && h < piece.head + piece.heads; ++h) meet(c, queries, run.live, h, place);
  sum<T>(c, w, run, piece.head, piece.heads, place);
  for (int64_t h = piece.head; !few && h < piece.head + piece.heads; ++h) finish(c, queries, run.live, h, place);
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  const Plan plan(c);
  // Where there are many runs one thread takes all heads of a row, which is read once.
  const int64_t runs = plan.runs.size(), threads = pool.num_threads();
  const int64_t together = runs >= 4 * threads ? c.heads : (c.heads + threads - 1) / threads;
  std::vector<Piece> pieces;
  for (int64_t i = runs - 1; i >= 0; --i)  // the last runs of a prompt see the most: they go first
    for (int64_t head = 0, some; head < c.heads; head += some) {
      some = plan.runs[i].values ? 1 : std::min(together, c.heads - head);
      pieces.push_back({&plan.runs[i], head, some});
    }
  const int64_t few = plan.few.size();
  std::vector<float> moved(few * c.heads * in_lanes(c.whole));
  float* of_few = moved.data();
  const Query* queries = plan.few.data();
  const Piece* piece = pieces.data();
  if (few && c.w_k) in_parallel(pool, c.heads, [=](int64_t head) { meet(c, queries, few, head, of_few); });
  const auto make = [c, some = plan.some, many = plan.many] { return Work(c, some, many); };
  in_parallel(pool, pieces.size(), make, [=](int64_t i, Work& w) { work_on<T>(c, w, piece[i], of_few); });
  if (few) in_parallel(pool, c.heads, [=](int64_t head) { finish(c, queries, few, head, of_few); });
}

// q [b, C, N, H], rows [R, P, Z, E], factors [R, P, 1, Z] or empty, w_k [N, E, H] or empty, w_v [N, E, U], near
// [TILE, 2, H / 2] and far [tiles, 2, H / 2] or both empty, table [Q, slots], sequence [b], position [b, C], window []
// -> [b, C, N, U].
ffi::Error row_attention(ffi::ThreadPool pool, F32 q, ffi::AnyBuffer rows, F32 factors, F32 w_k, F32 w_v, F32 near,
                         F32 far, S32 table, S32 sequence, S32 position, S32 window, int64_t row, double scale,
                         int64_t order, ffi::Result<F32> out) {
  const auto shape = q.dimensions(), pages = rows.dimensions(), names = table.dimensions();
  const auto given = [](F32 x) { return x.element_count() ? x.typed_data() : nullptr; };
  if (given(near) && near.dimensions()[0] != TILE) return ffi::Error::InvalidArgument("angles of another tile");
  Call c{};
  c.blocks = shape[0], c.queries = shape[1], c.heads = shape[2], c.width = shape[3];
  c.pages = pages[1], c.page = pages[2], c.whole = pages[3], c.value = w_v.dimensions()[2];
  c.sequences = names[0], c.slots = names[1];
  c.row = row, c.order = order, c.scale = float(scale), c.window = *window.typed_data();
  c.q = q.typed_data(), c.rows = rows.untyped_data(), c.factors = given(factors);
  c.w_k = given(w_k), c.w_v = w_v.typed_data(), c.near = given(near), c.far = given(far);
  c.table = table.typed_data(), c.sequence = sequence.typed_data(), c.position = position.typed_data();
  c.out = out->typed_data();
  return by_type(rows.element_type(), [&](auto number) { run<decltype(number)>(pool, c); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RowAttention, row_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()             // q
                                  .Arg<ffi::AnyBuffer>()  // rows
                                  .Arg<F32>()             // factors
                                  .Arg<F32>()             // w_k
                                  .Arg<F32>()             // w_v
                                  .Arg<F32>()             // near
                                  .Arg<F32>()             // far
                                  .Arg<S32>()             // table
                                  .Arg<S32>()             // sequence
                                  .Arg<S32>()             // position
                                  .Arg<S32>()             // window
                                  .Attr<int64_t>("row")
                                  .Attr<double>("scale")
                                  .Attr<int64_t>("order")
                                  .Ret<F32>());
