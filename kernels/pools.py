"""Rows of keys and values in pages, and how they are rounded to 8 bits.

Letters: K kv heads, H width of a key, U of a value, R rows, P pages, Z tokens of a page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pools(NamedTuple):
    """Where rows go.

    Attributes:
      k: [R, P, Z, K * H]. v: [R, P, Z, K * U]. k_scale, v_scale: [R, P, K, Z] float32, with 8-bit rows only.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


def largest(dtype) -> float:
    """The value that a row's largest becomes in an 8-bit dtype."""
    return 127.0 if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def quantise(heads: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """[..., width] in 8 bits, and the factor [...] that gives it back: its largest value fills the range."""
    scale = jnp.max(jnp.abs(heads), axis=-1) / largest(dtype)
    small = heads * jnp.where(scale > 0, 1 / scale, 0)[..., None]
    return (jnp.round(small) if jnp.dtype(dtype) == jnp.int8 else small).astype(dtype), scale


def encode(heads: jax.Array, dtype) -> tuple[jax.Array, jax.Array | None]:
    """[..., width] as a pool of `dtype` stores it, and in 8 bits the factor [...] beside it, else None."""
    if jnp.dtype(dtype).itemsize > 1:
        return heads.astype(dtype), None
    return quantise(heads.astype(jnp.float32), dtype)
