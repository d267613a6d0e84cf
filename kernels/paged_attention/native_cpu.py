"""Attention over paged keys and values in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI."""

from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import mask, native

_SOURCE = Path(__file__).with_name("native_cpu.cc")
TARGET = "swiftkv_paged_attention"


def refuses(q, k, v, *_, **__) -> str:
    """Name the unsupported part of a call, or return ""."""
    if k.dtype != v.dtype or k.dtype.name not in native.STORED:
        return f"{k.dtype} keys and {v.dtype} values: both {' or '.join(native.STORED)}"
    return native.refuses(_SOURCE, PagedAttention=TARGET)


def paged_attention(q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale):
    """As `api.paged_attention`; everything is computed in float32."""
    none = jnp.zeros((0, 0, 0, 0))
    heads = k.shape[-1] // q.shape[-1]
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1] // heads), jnp.float32)
    scales = (none if x is None else x for x in (k_scale, v_scale))
    integers = (x.astype(jnp.int32) for x in (table, sequence, position, jnp.asarray(mask.window_of(window))))
    call = jax.ffi.ffi_call(TARGET, out, vmap_method="sequential")
    mixed = call(q.astype(jnp.float32), k, v, *scales, *integers, row=int(row), scale=float(scale))
    return mixed.astype(q.dtype)
