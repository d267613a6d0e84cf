"""Attention from a cache of keys (or inputs) alone in jax.numpy, a few pages a turn."""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels import online
from swiftkv_jax.kernels.k_cache_attention import reference


def k_cache_attention(
    q,
    k,
    w_kv,
    table,
    sequence,
    position,
    *,
    row,
    frequencies,
    scale,
    window,
    group,
    rotated,
    threshold,
    k_scale,
):
    """As `api.k_cache_attention`; `threshold` skips nothing."""
    del threshold
    heads = q.shape[2]

    def turned(stored, at):
        """Keys for the scores, and rows for the sum, of stored rows [b, s, E] at positions [s]."""
        if frequencies is None:
            return reference.to_heads(stored, heads, group), stored
        angle = at[:, None] * frequencies
        split = reference.to_heads(stored, heads, group)
        if rotated:
            raw = reference.rotate(split.astype(jnp.float32), -angle).astype(stored.dtype)
            return split, reference.to_rows(raw, group)
        return reference.rotate(split.astype(jnp.float32), angle).astype(stored.dtype), stored

    mixed = _attend(q, k, table[sequence], position, row, scale, window, k_scale, turned)
    out = jnp.einsum("bnce,neu->bcnu", mixed, w_kv, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def x_cache_attention(q, x, w_k, w_v, table, sequence, position, *, row, scale, window):
    """As `api.x_cache_attention`, W_K absorbed into the query and W_V applied to the sum."""
    absorbed = jnp.einsum("bcnh,neh->bcne", q, w_k, preferred_element_type=jnp.float32).astype(q.dtype)

    def turned(stored, _):
        return jnp.broadcast_to(stored[:, :, None], (*stored.shape[:2], q.shape[2], stored.shape[-1])), stored

    mixed = _attend(absorbed, x, table[sequence], position, row, scale, window, None, turned)
    out = jnp.einsum("bnce,neu->bcnu", mixed, w_v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def _attend(q, pool, table, position, row, scale, window, k_scale, turned) -> jax.Array:
    """Softmax-weighted sums of rows [b, N, C, E] in float32; `turned` as in `k_cache_attention`."""
    (blocks, queries, heads, _), (page, width) = q.shape, pool.shape[2:]
    slots = table.shape[1]
    window = reference.NO_WINDOW if window is None else window
    pages = online.pages_per_turn(blocks, page, slots)
    table = jnp.pad(table, ((0, 0), (0, -slots % pages)))

    def turn(i):
        names = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        at = i * pages * page + jnp.arange(pages * page)
        back = position[..., None] - at
        seen = (back >= 0) & (back < window)
        stored = pool[row, names].reshape(blocks, -1, width).astype(q.dtype)
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

    first, last = online.span(position, window, pages * page)
    return online.softmax_sum(turn, first, last, (blocks, heads, queries), width)
