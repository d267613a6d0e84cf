"""The definition of attention over paged keys and values.

Letters: b blocks of queries, C queries of a block (of one sequence), N query heads, K kv heads, H the width
of a key, U of a value, R rows, P pages, Z tokens of a page.
"""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.mask import bias_of, capped, visible, weights_of


def gather(pool, scale, row, names, heads: int, seen, dtype) -> jax.Array:
    """Pages `names` [b, slots] of a row as heads in order, [b, slots * Z, K, width]; zeros where not seen."""
    rows = pool[row, names].reshape(names.shape[0], -1, heads, pool.shape[-1] // heads).astype(dtype)
    if scale is not None:
        rows = rows * jnp.swapaxes(scale[row, names], 2, 3).reshape(*rows.shape[:3], 1).astype(dtype)
    return jnp.where(seen.any(1)[..., None, None], rows, 0)


def paged_attention(
    q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale, bias=None, softcap=None
):
    """As `api.paged_attention`, in at least float32."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    heads, names = k.shape[-1] // q.shape[-1], table[sequence]
    seen = visible(position, table.shape[1] * k.shape[2], window)
    keys = gather(k, k_scale, row, names, heads, seen, wide)
    values = gather(v, v_scale, row, names, heads, seen, wide)
    grouped = q.astype(wide).reshape(*q.shape[:2], heads, -1, q.shape[-1])
    scores = jnp.einsum("bckgh,bskh->bkgcs", grouped, keys, precision="highest") * scale
    scores = capped(scores, softcap)
    if bias is not None:
        found = bias_of(bias, position[..., None] - jnp.arange(seen.shape[-1]))  # [N, b, C, S]
        scores += jnp.moveaxis(found.reshape(*scores.shape[1:3], *seen.shape), 2, 0)
    weights = weights_of(scores, seen[:, None, None])
    mixed = jnp.einsum("bkgcs,bsku->bckgu", weights, values, precision="highest")
    return mixed.reshape(*q.shape[:3], -1).astype(q.dtype)
