"""Rotary angles in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI.

XLA computes an angle's cosine again for every head of every layer that uses it, inside the loop that rotates:
an eighth of a prompt's time. What another function gives it computes once.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels import native

_SOURCE = Path(__file__).with_name("native_cpu.cc")
_TARGET = "swiftkv_rotary_angles"


def refuses(*_, **__) -> str:
    """What of a call is not supported, or ""."""
    return native.refuses(_SOURCE, RotaryAngles=_TARGET)


def rotary_angles(position, frequency, *, factor: float):
    """As `api.rotary_angles`."""
    out = jax.ShapeDtypeStruct((*position.shape, frequency.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call(_TARGET, (out, out), vmap_method="sequential")
    return call(position.astype(jnp.int32), frequency.astype(jnp.float32), factor=factor)
