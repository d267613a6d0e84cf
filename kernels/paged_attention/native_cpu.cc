// Attention over paged keys and values on CPUs, a handler of XLA's foreign function interface: `native_cpu.py`.
//
// A piece of work is one block of queries with the query heads of one kv head. It goes through the keys that
// any of its queries sees with a running softmax. Nothing of a key that no query sees is used, so stale pages
// may hold anything. What a query gets does not depend on its neighbours.

#include "native_tile.h"

namespace {

// Stored numbers as floats.
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
    const float* q = c.q + ((block * c.queries + i) * c.heads + head * group) * c.width;
    for (int64_t g = 0; g < group; ++g)
      begin_row(s, i * group + g, q + g * c.width, c.width, c.scale, first, last);
  }
  const int32_t* table = c.table + std::clamp<int64_t>(c.sequence[block], 0, c.sequences - 1) * c.slots;
  attend_rows(s, s.rows, begin, end, [&](int64_t start) {
    int change[TILE + 1] = {};  // positions may leave gaps
    for (int64_t r = 0; r < s.rows; r += group) {
      const int64_t a = std::clamp<int64_t>(s.first[r] - start, 0, TILE);
      const int64_t b = std::clamp<int64_t>(s.last[r] - start, 0, TILE);
      if (a < b) ++change[a], --change[b];
    }
    bool seen[TILE];
    for (int t = 0, depth = 0; t < TILE; ++t) seen[t] = (depth += change[t]) > 0;
    read<T>(c, s, table, head, start, seen);
    prefetch<T>(c, table, head, start + TILE, std::min(start + 2 * TILE, end));
  });
  for (int64_t r = 0; r < s.rows; ++r) {
    float* to = c.out + ((block * c.queries + r / group) * c.heads + head * group + r % group) * c.value;
    const float share = s.total[r] == 0 ? 0 : 1 / s.total[r];
    for (int64_t i = 0; i < c.value; ++i) to[i] = s.mixed[r * s.value + i] * share;
  }
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  const auto make = [c] { return Scratch(c.queries * (c.heads / c.kv_heads), c.width, c.value); };
  // Where there are many blocks one thread takes all heads of a block: their keys lie side by side.
  const int64_t together = c.blocks >= 4 * pool.num_threads() ? c.kv_heads : 1, parts = c.kv_heads / together;
  in_parallel(pool, c.blocks * parts, make, [=](int64_t i, Scratch& s) {
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
