"""Attention over rows of keys alone, or of inputs alone, in C++, for CPUs: `native_cpu.cc`, called through
XLA's FFI.

There are two orders, and the C++ picks one for each run of queries of a sequence. With at most as many
queries as a head is wide, whole rows are summed first, and each head's matrix then multiplies the sum.
Otherwise values are first made from the rows, once for the whole run, and attention is then computed as
usual.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import mask, native

_SOURCE = Path(__file__).with_name("native_cpu.cc")
TARGET = "swiftkv_row_attention"
_ORDERS = (None, False, True)  # `values_first`, by its number in C++
_TILE = 64  # keys, as in native_tile.h


def refuses(q, k, *_, frequencies=None, rotated=False, **__) -> str:
    """Name the unsupported part of a call of `k_cache_attention`, or return ""."""
    if rotated and frequencies is not None:
        return "keys stored after rotary embedding: before it"
    return refuses_inputs(q, k)


def refuses_inputs(q, x, *_, **__) -> str:
    """Name the unsupported part of a call of `x_cache_attention`, or return ""."""
    if x.dtype.name not in native.STORED:
        return f"{x.dtype} rows: {' or '.join(native.STORED)}"
    return native.refuses(_SOURCE, RowAttention=TARGET)


def k_cache_attention(
    q, k, w_kv, *where, row, frequencies, scale, window, k_scale, values_first=None, **_
) -> jax.Array:
    """As `api.k_cache_attention`, in float32; `threshold` skips nothing.

    values_first: None decides by the number of queries.
    """
    near = far = none = jnp.zeros((0, 0, 0))
    if frequencies is not None:
        tiles = -(-where[0].shape[1] * k.shape[2] // _TILE)
        near, far = _angles(jnp.arange(_TILE), frequencies), _angles(_TILE * jnp.arange(tiles), frequencies)
    return _call(q, k, k_scale, none, w_kv, near, far, where, row, scale, window, values_first)


def x_cache_attention(
    q, x, w_k, w_v, *where, row, scale, window, x_scale=None, values_first=None
) -> jax.Array:
    """As `api.x_cache_attention`, in float32; `values_first` as above."""
    none = jnp.zeros((0, 0, 0))
    return _call(q, x, x_scale, w_k, w_v, none, none, where, row, scale, window, values_first)


def _angles(position: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Cosines and sines [positions, 2, H / 2]."""
    angle = position[:, None] * frequencies.astype(jnp.float32)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def _call(q, rows, scales, w_k, w_v, near, far, where, row, scale, window, values_first) -> jax.Array:
    scales = jnp.zeros((0, 0, 0, 0)) if scales is None else scales
    floats = (x.astype(jnp.float32) for x in (scales, w_k, w_v, near, far))
    integers = (x.astype(jnp.int32) for x in (*where, jnp.asarray(mask.window_of(window))))
    out = jax.ShapeDtypeStruct((*q.shape[:3], w_v.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(TARGET, out, vmap_method="sequential")
    options = {"row": int(row), "scale": float(scale), "order": _ORDERS.index(values_first)}
    return call(q.astype(jnp.float32), rows, *floats, *integers, **options).astype(q.dtype)
