"""The definition of the fused fill.

Letters: T tokens, D width of the stream, F filled rows, K kv heads, H width of a key, U of a value, R rows,
P pages, Z tokens of a page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.pools import encode


class Pools(NamedTuple):
    """The pools of keys and of values: data [R, P, Z, E], and scales [R, P, K, Z] of 8-bit rows."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None


class Makers(NamedTuple):
    """The projections that make rows from the normalised stream.

    Attributes:
      w_k: [F, D, K * H] and w_v: [F, D, K * U], as `fold_gain` makes them. b_k: [F, K * H], b_v: [F, K * U]
      biases, and k_norm: [F, H] gain of a norm of each key, or None.
    """

    w_k: jax.Array
    w_v: jax.Array
    b_k: jax.Array | None = None
    b_v: jax.Array | None = None
    k_norm: jax.Array | None = None


def fold_gain(gain: jax.Array, w: jax.Array) -> jax.Array:
    """Projections w [F, D, E] with the gain [D] of the norm before them folded in."""
    return (w.astype(jnp.float32) * gain.astype(jnp.float32)[:, None]).astype(w.dtype)


def store(pool, scales, filled, heads: int, rows: tuple[int, ...], names, live):
    """A pool and its scales with the pages `filled` [T, F, E] written; tokens of a page from `live` on are
    0."""
    page, dtype = pool.shape[2], pool.dtype
    dead = (jnp.arange(page) >= live[:, None])[..., None, None]
    filled = jnp.where(dead, 0, filled.reshape(-1, page, *filled.shape[1:]))
    filled = jnp.moveaxis(filled, 2, 0)  # F, pages, Z, E
    split, factor = encode(filled.reshape(*filled.shape[:3], heads, -1), dtype)
    for i, row in enumerate(rows):
        pool = pool.at[row, names].set(split[i].reshape(filled.shape[1:]), mode="drop")
        if factor is not None:
            scales = scales.at[row, names].set(jnp.swapaxes(factor[i], 1, 2), mode="drop")
    return pool, scales


def rows_of(x, makers: Makers, cos, sin, heads: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """Keys [T, F, K * H] and values [T, F, K * U] of the stream [T, D], computed in at least float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(wide)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)

    def project(w, bias):
        y = jnp.einsum("td,fde->tfe", x, w.astype(wide), precision="highest")
        return y if bias is None else y + bias.astype(wide)

    k, v = project(makers.w_k, makers.b_k), project(makers.w_v, makers.b_v)
    return finish_keys(k.reshape(*k.shape[:2], heads, -1), makers.k_norm, cos, sin, eps), v


def finish_keys(k, gain, cos, sin, eps: float) -> jax.Array:
    """Norm and rotary embedding of keys [T, F, K, H]: [T, F, K * H]."""
    if gain is not None:
        k = k * jax.lax.rsqrt(jnp.mean(k * k, axis=-1, keepdims=True) + eps)
        k = k * gain.astype(k.dtype)[:, None]
    a, b = jnp.split(k, 2, axis=-1)
    cos, sin = (angle.astype(k.dtype)[:, None, None] for angle in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(*k.shape[:2], -1)


def fused_kv_fill(
    x, makers: Makers, cos, sin, pools: Pools, names, live, *, rows, eps, make=rows_of
) -> Pools:
    """As `api.fused_kv_fill`, of what `make` makes: by default in at least float32."""
    heads = pools.k.shape[-1] // (2 * cos.shape[-1])
    k, v = make(x, makers, cos, sin, heads, eps)
    k, k_scale = store(pools.k, pools.k_scale, k, heads, rows, names, live)
    v, v_scale = store(pools.v, pools.v_scale, v, heads, rows, names, live)
    return Pools(k, v, k_scale, v_scale)
