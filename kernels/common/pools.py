"""Arrays of cache rows in pages, and how rows are rounded to 8 bits.

Letters: R rows, P pages, Z tokens of a page, K heads with one scale each, H width of a head.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pool(NamedTuple):
    """One array of all the rows of a form: the keys, say.

    Attributes:
      data: [R, P, Z, K * H]. scale: [R, P, K, Z] float32 beside 8-bit data: a factor of each token and head.
    """

    data: jax.Array
    scale: jax.Array | None = None


def largest(dtype) -> float:
    """Largest representable magnitude of an 8-bit dtype: a row is scaled so that its maximum maps to it."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def quantise(heads: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """([..., width] in 8 bits, the scale [...]); the largest value of each head fills the range."""
    scale = jnp.max(jnp.abs(heads), axis=-1) / largest(dtype)
    small = heads * jnp.where(scale > 0, 1 / scale, 0)[..., None]
    return (jnp.round(small) if jnp.dtype(dtype) == jnp.int8 else small).astype(dtype), scale


def encode(heads: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """[..., width] as a pool of `dtype` stores it, and in 8 bits its scale [...], else None."""
    if jnp.dtype(dtype).itemsize > 1:
        return heads.astype(dtype), None
    return quantise(heads.astype(jnp.float32), dtype)
