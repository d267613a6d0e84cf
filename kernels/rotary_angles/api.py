"""Rotary angles. A named implementation runs or raises; None picks by platform."""

import jax

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.dispatch import Implementation
from swiftkv_jax.kernels.rotary_angles import native_cpu, reference

ROTARY_ANGLES = {
    "xla": Implementation(reference.rotary_angles),
    "native_cpu": Implementation(native_cpu.rotary_angles, native_cpu.refuses),
}


def rotary_angles(
    position: jax.Array, frequency: jax.Array, *, factor: float = 1.0, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of `position * frequency`, times `factor`; without a gradient in C++.

    Args:
      position: [...] integers. frequency: [H / 2] float32.
      implementation: "xla", which is the definition, "native_cpu" (needs a C++ compiler), or None.

    Returns:
      Two of [..., H / 2] float32.

    Raises:
      dispatch.UnsupportedError: a call that the named implementation cannot run.
    """
    args, options = (position, frequency), {"factor": float(factor)}
    return dispatch.call("rotary_angles", ROTARY_ANGLES, implementation, args, options)
