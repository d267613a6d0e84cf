// Tokens written into pages on CPUs, a handler of XLA's foreign function interface: `native_cpu.py`.

#include "native_tile.h"

namespace {

constexpr int64_t TOKENS = 16;  // that a thread takes at a time

// Floats as they are stored: to the nearest, ties to even.
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, _Float16& to) { to = static_cast<_Float16>(x); }
inline void narrow(float x, Bf16& to) {
  const uint32_t u = bits<uint32_t>(x);
  to.raw = x == x ? (u + 0x7fff + (u >> 16 & 1)) >> 16 : 0x7fc0;
}
inline void narrow(float x, int8_t& to) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  to = x == x ? static_cast<int8_t>(x + magic - magic) : 0;
}
inline void narrow(float x, Fp8& to) {
  const uint32_t u = bits<uint32_t>(x), size = u & 0x7fffffff;
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 numbers are multiples of 2^-9: adding 2^14 leaves as many bits.
  const uint32_t small = bits<uint32_t>(bits<float>(size) + 16384.0f) & 15;
  const uint32_t e4m3 = size < 0x3c800000 ? small : std::min<uint32_t>(normal, 0x7f);
  to.raw = uint8_t(e4m3 | (u >> 24 & 0x80));
}

struct Side {  // keys, or values
  const float* from;
  void* pool;
  float* scales;
  int64_t width;
};

struct Call {
  int64_t tokens, filled, heads, pages, page;
  const int32_t *name, *slot, *rows;
  Side sides[2];
};

template <class T>
void write(const Call& c, const Side& side, int64_t token, int64_t i) {
  const int64_t at = c.rows[i] * c.pages + c.name[token], slot = c.slot[token];
  const float* from = side.from + (token * c.filled + i) * c.heads * side.width;
  T* to = static_cast<T*>(side.pool) + (at * c.page + slot) * c.heads * side.width;
  if (!side.scales) {
    for (int64_t d = 0; d < c.heads * side.width; ++d) narrow(from[d], to[d]);
    return;
  }
  for (int64_t h = 0; h < c.heads; ++h, from += side.width, to += side.width) {
    uint32_t most = 0;  // sizes are in the order of their bits, NaN last
    for (int64_t d = 0; d < side.width; ++d) most = std::max(most, bits<uint32_t>(from[d]) & 0x7fffffff);
    const float scale = bits<float>(most) * (1 / (std::is_same_v<T, int8_t> ? 127.0f : 448.0f));  // as XLA divides
    const float factor = scale > 0 ? 1 / scale : 0;
    for (int64_t d = 0; d < side.width; ++d) narrow(from[d] * factor, to[d]);
    side.scales[(at * c.heads + h) * c.page + slot] = scale;
  }
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  in_parallel(pool, (c.tokens + TOKENS - 1) / TOKENS, [c](int64_t piece) {
    for (int64_t t = piece * TOKENS; t < std::min(c.tokens, (piece + 1) * TOKENS); ++t)
      if (c.name[t] > 0 && c.name[t] < c.pages)  // page 0 is scratch
        for (int64_t i = 0; i < c.filled; ++i)
          for (const Side& side : c.sides) write<T>(c, side, t, i);
  });
}

// Pools k [R, P, Z, K * H], v [R, P, Z, K * U], scales [R, P, K, Z] or empty, each the result of its name; new
// k [T, F, K, H], v [T, F, K, U]; page [T], slot [T], rows [F].
ffi::Error page_write(ffi::ThreadPool pool, ffi::AnyBuffer, ffi::AnyBuffer, F32, F32, F32 new_k, F32 new_v,
                      S32 page, S32 slot, S32 rows, ffi::Result<ffi::AnyBuffer> k,
                      ffi::Result<ffi::AnyBuffer> v, ffi::Result<F32> k_scale, ffi::Result<F32> v_scale) {
  const auto shape = new_k.dimensions(), pages = k->dimensions();
  Call c{};
  c.tokens = shape[0], c.filled = shape[1], c.heads = shape[2], c.pages = pages[1], c.page = pages[2];
  c.name = page.typed_data(), c.slot = slot.typed_data(), c.rows = rows.typed_data();
  const auto scales = [](auto& x) { return x->element_count() ? x->typed_data() : nullptr; };
  c.sides[0] = {new_k.typed_data(), k->untyped_data(), scales(k_scale), shape[3]};
  c.sides[1] = {new_v.typed_data(), v->untyped_data(), scales(v_scale), new_v.dimensions()[3]};
  return by_type(k->element_type(), [&](auto number) { run<decltype(number)>(pool, c); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PageWrite, page_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // k
                                  .Arg<ffi::AnyBuffer>()  // v
                                  .Arg<F32>()             // k_scale
                                  .Arg<F32>()             // v_scale
                                  .Arg<F32>()             // new k
                                  .Arg<F32>()             // new v
                                  .Arg<S32>()             // page
                                  .Arg<S32>()             // slot
                                  .Arg<S32>()             // rows
                                  .Ret<ffi::AnyBuffer>()  // k
                                  .Ret<ffi::AnyBuffer>()  // v
                                  .Ret<F32>()             // k_scale
                                  .Ret<F32>());           // v_scale
