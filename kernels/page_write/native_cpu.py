"""Tokens written into pages in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI.

XLA's own scatter goes number by number, and converts a whole pool of 8-bit floats to write one token.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels import native
from swiftkv_jax.kernels.pools import Pools

_SOURCE = Path(__file__).with_name("native_cpu.cc")
_TARGET = "swiftkv_page_write"


def refuses(pools: Pools, *_, **__) -> str:
    """What of a call is not supported, or ""."""
    if pools.k.dtype != pools.v.dtype or pools.k.dtype.name not in native.STORED:
        return f"{pools.k.dtype} keys and {pools.v.dtype} values: both {' or '.join(native.STORED)}"
    return native.refuses(_SOURCE, PageWrite=_TARGET)


def page_write(pools: Pools, k, v, page, slot, *, rows: tuple[int, ...]) -> Pools:
    """As `api.page_write`, in place."""
    arrays = [jnp.zeros((0, 0, 0, 0)) if x is None else x for x in pools]
    call = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
        input_output_aliases={i: i for i in range(len(arrays))},
    )
    where = (x.astype(jnp.int32) for x in (page, slot, jnp.array(rows)))
    written = call(*arrays, k.astype(jnp.float32), v.astype(jnp.float32), *where)
    return Pools(*written) if pools.k_scale is not None else Pools(*written[:2])
