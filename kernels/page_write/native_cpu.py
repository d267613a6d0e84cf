"""Tokens written into pages in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI.

XLA's own scatter goes number by number, and converts a whole pool of 8-bit floats to write one token.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

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
    new = (k.astype(jnp.float32), v.astype(jnp.float32), page.astype(jnp.int32), slot.astype(jnp.int32))
    written = call(*arrays, *new, rows=np.array(rows, np.int64))
    return Pools(*(None if old is None else x for x, old in zip(written, pools, strict=True)))
