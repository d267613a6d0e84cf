// Writing of tokens into pages on CPUs, as a handler of XLA's foreign function interface; see `native_cpu.py`.

#include "native_tile.h"

namespace {

constexpr int64_t TOKENS = 16;  // that a thread takes at a time

// Conversion of floats to the stored type: to the nearest, ties to even.
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
  // Numbers below 2^-6 are multiples of 2^-9: adding 2^14 rounds to exactly these bits.
  const uint32_t small = bits<uint32_t>(bits<float>(size) + 16384.0f) & 15;
  const uint32_t e4m3 = size < 0x3c800000 ? small : std::min<uint32_t>(normal, 0x7f);
  to.raw = uint8_t(e4m3 | (u >> 24 & 0x80));
}

struct Call {
  int64_t tokens, filled, heads, width, pages, page;
  const int32_t *name, *slot, *rows;
  const float* from;
  void* data;
  float* scales;
};

template <class T>
void write(const Call& c, int64_t token, int64_t i) {
  const int64_t at = c.rows[i] * c.pages + c.name[token], slot = c.slot[token];
  const float* from = c.from + (token * c.filled + i) * c.heads * c.width;
  T* to = static_cast<T*>(c.data) + (at * c.page + slot) * c.heads * c.width;
  if (!c.scales) {
    for (int64_t d = 0; d < c.heads * c.width; ++d) narrow(from[d], to[d]);
    return;
  }
  for (int64_t h = 0; h < c.heads; ++h, from += c.width, to += c.width) {
    uint32_t most = 0;  // sizes are in the order of their bits, NaN last
    for (int64_t d = 0; d < c.width; ++d) most = std::max(most, bits<uint32_t>(from[d]) & 0x7fffffff);
    const float scale = bits<float>(most) * (1 / (std::is_same_v<T, int8_t> ? 127.0f : 448.0f));  // as XLA divides
    const float factor = scale > 0 ? 1 / scale : 0;
    for (int64_t d = 0; d < c.width; ++d) narrow(from[d] * factor, to[d]);
    c.scales[(at * c.heads + h) * c.page + slot] = scale;
  }
}

template <class T>
void run(ffi::ThreadPool& pool, const Call& c) {
  in_parallel(pool, (c.tokens + TOKENS - 1) / TOKENS, [c](int64_t piece) {
    for (int64_t t = piece * TOKENS; t < std::min(c.tokens, (piece + 1) * TOKENS); ++t)
      if (c.name[t] > 0 && c.name[t] < c.pages)  // page 0 is scratch
        for (int64_t i = 0; i < c.filled; ++i) write<T>(c, t, i);
  });
}

// A pool [R, P, Z, K * H] and its scales [R, P, K, Z] or empty, each aliased with its result; new entries
// [T, F, K, H]; page [T], slot [T], rows [F].
ffi::Error page_write(ffi::ThreadPool pool, ffi::AnyBuffer, F32, F32 entries, S32 page, S32 slot, S32 rows,
                      ffi::Result<ffi::AnyBuffer> data, ffi::Result<F32> scale) {
  const auto shape = entries.dimensions(), pages = data->dimensions();
  const Call c{shape[0], shape[1], shape[2], shape[3], pages[1], pages[2],
               page.typed_data(), slot.typed_data(), rows.typed_data(), entries.typed_data(),
               data->untyped_data(), scale->element_count() ? scale->typed_data() : nullptr};
  return by_type(data->element_type(), [&](auto number) { run<decltype(number)>(pool, c); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PageWrite, page_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // data
                                  .Arg<F32>()             // scale
                                  .Arg<F32>()             // new entries
                                  .Arg<S32>()             // page
                                  .Arg<S32>()             // slot
                                  .Arg<S32>()             // rows
                                  .Ret<ffi::AnyBuffer>()  // data
                                  .Ret<F32>());           // scale
