"""Attention from a cache of keys (or inputs) alone in jax.numpy, a few pages a turn.

With `one_turn` the turns are larger and their number is known to the compiler: on a GPU a loop of unknown
length costs a round trip to the host in each turn.
"""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import mask, online
from swiftkv_jax.kernels.k_cache_attention import reference
from swiftkv_jax.kernels.k_cache_attention.reference import Options

ONE_TURN_KEYS = 1 << 16  # of all blocks together


def k_cache_attention(q, k, w_kv, table, sequence, position, one_turn: bool = False, **options):
    """As `api.k_cache_attention`; `threshold` skips nothing."""
    how, heads = Options(**options), q.shape[2]

    def turned(stored, at):
        """Keys for the scores, and rows for the sum, of stored rows [b, s, E] at positions [s]."""
        split = reference.to_heads(stored, heads, how.group)
        if how.frequencies is None:
            return scored(split), stored
        angle = at[:, None] * how.frequencies
        if how.rotated:
            raw = reference.rotate(split.astype(jnp.float32), -angle).astype(stored.dtype)
            return scored(split), reference.to_rows(raw, how.group)
        return scored(reference.rotate(split.astype(jnp.float32), angle)), stored

    def scored(keys):
        return reference.float8_keys(keys, how) if how.float8_scores else keys.astype(q.dtype)

    queries, scale = q, how.scale
    if how.float8_scores:
        queries, factor = reference.float8_queries(q, how)
        scale = scale * jnp.swapaxes(factor, 1, 2)[..., None]
    stored = table[sequence], position, how.row, scale, how.window, how.k_scale
    mixed = _attend(queries, k, *stored, q.dtype, turned, one_turn)
    out = jnp.einsum("bnce,neu->bcnu", mixed, w_kv, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def x_cache_attention(
    q, x, w_k, w_v, table, sequence, position, *, row, scale, window, x_scale=None, one_turn: bool = False
):
    """As `api.x_cache_attention`, W_K absorbed into the query and W_V applied to the sum."""
    absorbed = jnp.einsum("bcnh,neh->bcne", q, w_k, preferred_element_type=jnp.float32).astype(q.dtype)

    def turned(stored, _):
        return jnp.broadcast_to(stored[:, :, None], (*stored.shape[:2], q.shape[2], stored.shape[-1])), stored

    where = table[sequence], position, row, scale, window, x_scale
    mixed = _attend(absorbed, x, *where, q.dtype, turned, one_turn)
    out = jnp.einsum("bnce,neu->bcnu", mixed, w_v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def _attend(q, pool, table, position, row, scale, window, k_scale, dtype, turned, one_turn) -> jax.Array:
    """Softmax-weighted sums [b, N, C, E] of rows in `dtype`, in float32; `turned` as in k_cache_attention."""
    (blocks, queries, heads, _), (page, width) = q.shape, pool.shape[2:]
    slots = table.shape[1]
    window = mask.window_of(window)
    pages = online.pages_per_turn(blocks, page, slots, ONE_TURN_KEYS if one_turn else online.TURN_KEYS)
    table = jnp.pad(table, ((0, 0), (0, -slots % pages)))

    def turn(i):
        names = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        at = i * pages * page + jnp.arange(pages * page)
        back = position[..., None] - at
        seen = (back >= 0) & (back < window)
        stored = pool[row, names].reshape(blocks, -1, width).astype(dtype)
        stored = jnp.where(seen.any(1)[..., None], stored, 0)  # 0 x NaN of a stale page is NaN
        keys, rows = turned(stored, at)
        scores = jnp.einsum("bcnh,bsnh->bncs", q, keys, preferred_element_type=jnp.float32) * scale
        scales = jnp.ones((), jnp.float32)
        if k_scale is not None:
            scales = jnp.where(seen.any(1), k_scale[row, names].reshape(blocks, -1), 0)[:, None, None]

        def weigh(weights):
            return jnp.einsum(
                "bncs,bse->bnce",
                (weights * scales).astype(rows.dtype),
                rows,
                preferred_element_type=jnp.float32,
            )

        return scores * scales, seen[:, None], weigh

    span = (0, -(-slots // pages)) if one_turn else online.span(position, window, pages * page)
    return online.softmax_sum(turn, *span, (blocks, heads, queries), width)
