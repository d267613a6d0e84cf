// Rotary angles on CPUs, a handler of XLA's foreign function interface: `native_cpu.py`.

#include "native_tile.h"

namespace {

constexpr int64_t TOKENS = 32;  // that a thread takes at a time

// position [...], frequency [h] -> cos, sin [..., h].
ffi::Error rotary_angles(ffi::ThreadPool pool, S32 position, F32 frequency, double factor, ffi::Result<F32> cos,
                         ffi::Result<F32> sin) {
  const int64_t tokens = position.element_count(), half = frequency.element_count();
  const int32_t* at = position.typed_data();
  const float *of = frequency.typed_data(), times = float(factor);
  float *c = cos->typed_data(), *s = sin->typed_data();
  in_parallel(pool, (tokens + TOKENS - 1) / TOKENS, [=](int64_t piece) {
    for (int64_t t = piece * TOKENS; t < std::min(tokens, (piece + 1) * TOKENS); ++t)
      for (int64_t i = 0; i < half; ++i) {
        const float angle = float(at[t]) * of[i];
        c[t * half + i] = std::cos(angle) * times;
        s[t * half + i] = std::sin(angle) * times;
      }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RotaryAngles, rotary_angles,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<S32>()  // position
                                  .Arg<F32>()  // frequency
                                  .Attr<double>("factor")
                                  .Ret<F32>()    // cos
                                  .Ret<F32>());  // sin
