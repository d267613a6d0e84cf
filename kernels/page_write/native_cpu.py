"""Tokens written into pages in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI.

XLA:CPU's scatter writes number by number, and converts a whole pool of 8-bit floats to write one token.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import native
from swiftkv_jax.kernels.common.pools import Pool

_SOURCE = Path(__file__).with_name("native_cpu.cc")
TARGET = "swiftkv_page_write"


def refuses(pool: Pool, *_, **__) -> str:
    """Name the unsupported part of a call, or return ""."""
    if pool.data.dtype.name not in native.STORED:
        return f"{pool.data.dtype} rows: {' or '.join(native.STORED)}"
    return native.refuses(_SOURCE, PageWrite=TARGET)


def page_write(pool: Pool, new, page, slot, *, rows: tuple[int, ...]) -> Pool:
    """As `api.page_write`, in place."""
    arrays = pool.data, jnp.zeros((0, 0, 0, 0)) if pool.scale is None else pool.scale
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    call = jax.ffi.ffi_call(TARGET, shapes, input_output_aliases={0: 0, 1: 1})
    where = (x.astype(jnp.int32) for x in (page, slot, jnp.array(rows)))
    data, scale = call(*arrays, new.astype(jnp.float32), *where)
    return Pool(data, None if pool.scale is None else scale)
