"""Attention over paged keys and values in jax.numpy, a few pages a turn."""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels import online
from swiftkv_jax.kernels.paged_attention import reference


def paged_attention(q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale):
    """As `api.paged_attention`."""
    (blocks, queries, _, width), page = q.shape, k.shape[2]
    heads, slots = k.shape[-1] // width, table.shape[1]
    window = reference.NO_WINDOW if window is None else window
    pages = online.pages_per_turn(blocks, page, slots)
    table = jnp.pad(table[sequence], ((0, 0), (0, -slots % pages)))
    grouped = q.reshape(blocks, queries, heads, -1, width)

    def turn(i):
        names = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        back = position[..., None] - (i * pages * page + jnp.arange(pages * page))
        seen = (back >= 0) & (back < window)
        keys = reference.gather(k, k_scale, row, names, heads, seen, q.dtype)
        values = reference.gather(v, v_scale, row, names, heads, seen, q.dtype)
        scores = jnp.einsum("bckgh,bskh->bkgcs", grouped, keys, preferred_element_type=jnp.float32)

        def weigh(weights):
            weights = weights.astype(values.dtype)
            return jnp.einsum("bkgcs,bsku->bkgcu", weights, values, preferred_element_type=jnp.float32)

        return scores * scale, seen[:, None, None], weigh

    first, last = online.span(position, window, pages * page)
    shape = (blocks, heads, q.shape[2] // heads, queries)
    mixed = online.softmax_sum(turn, first, last, shape, v.shape[-1] // heads)
    return jnp.moveaxis(mixed, 3, 1).reshape(*q.shape[:3], -1).astype(q.dtype)
