"""Attention over paged keys and values in jax.numpy, a few pages a turn, in forms that suit XLA on CPUs."""

import jax.numpy as jnp
from jax import lax

from swiftkv_jax.kernels import online
from swiftkv_jax.kernels.paged_attention import reference

# What one turn takes on, measured on a CPU: small enough to stay in its caches.
_TURN_KEYS = 2048  # of all blocks together
_TURN_QUERIES = 128  # of all blocks together, unless each has one
_TURN_SCORES = 16384  # queries times keys
_FEW_HEADS = 4
_FEW_ROWS = 8


def paged_attention(q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale):
    """As `api.paged_attention`."""
    window = reference.NO_WINDOW if window is None else window
    blocks, queries = position.shape
    at_once = blocks if queries == 1 else max(1, _TURN_QUERIES // queries)  # decoding: every sequence at once

    def some(q, sequence, position):
        return _blocks(q, k, v, table[sequence], position, row, scale, window, k_scale, v_scale)

    return _in_groups(some, (q, sequence, position), at_once)


def _in_groups(run, arrays, size: int):
    """`run` over `size` leading entries of the arrays at a time; the last group repeats an entry."""
    count = arrays[0].shape[0]
    if size >= count:
        return run(*arrays)
    groups = -(-count // size)
    index = jnp.minimum(jnp.arange(groups * size), count - 1).reshape(groups, size)
    out = lax.map(lambda at: run(*(x[at] for x in arrays)), index)
    return out.reshape(-1, *out.shape[2:])[:count]


def _blocks(q, k, v, table, position, row, scale, window, k_scale, v_scale):
    """Blocks of C queries against the pages `table` [b, slots], as far as any of them sees."""
    (blocks, queries, _, width), page, slots = q.shape, k.shape[2], table.shape[1]
    heads = k.shape[-1] // width
    most = min(_TURN_KEYS // blocks, _TURN_SCORES // (blocks * queries))
    pages = min(slots, max(1, most // page))
    keys, shape = pages * page, q.shape
    table, dtype = jnp.pad(table, ((0, 0), (0, -slots % pages))), q.dtype
    q = _spread(q, heads)
    groups, rows = q.shape[1:3]
    q = q.reshape(-1, rows, q.shape[-1])

    def cut(x):
        """Stored numbers by group: [b * J, keys, w]; with one group nothing moves."""
        return jnp.moveaxis(x.reshape(blocks, keys, groups, -1), 2, 1).reshape(blocks * groups, keys, -1)

    def turn(i):
        names = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        back = position[..., None] - (i * keys + jnp.arange(keys))
        seen = (back >= 0) & (back < window)
        stored, values = (
            _read(k, k_scale, row, names, heads, dtype),
            _read(v, v_scale, row, names, heads, dtype),
        )
        values = jnp.where(seen.any(1)[..., None, None], values, 0)  # 0 x NaN of a stale page is NaN
        scores = _scores(q, cut(stored)) * scale
        seen = jnp.repeat(jnp.repeat(seen, rows // queries, axis=1), groups, axis=0)

        def weigh(weights):
            weights = weights.astype(dtype)
            return jnp.einsum("brs,bse->bre", weights, cut(values), preferred_element_type=jnp.float32)

        return scores, seen, weigh

    width = v.shape[-1] // groups
    if pages == slots:
        mixed = online.softmax_sum(turn, 0, 1, q.shape[:2], width)
    else:
        mixed = online.softmax_sum(turn, *online.span(position, window, keys), q.shape[:2], width)
    mixed = _gather(mixed.reshape(blocks, groups, rows, width), queries, heads)
    return mixed.reshape(*shape[:3], -1).astype(dtype)


def _read(pool, scale, row: int, names, heads: int, dtype):
    """Pages `names` [b, n] of a row, [b, n * Z, K, width]."""
    rows = pool[row, names].reshape(names.shape[0], -1, heads, pool.shape[-1] // heads)
    if scale is None:
        return rows.astype(dtype)
    factor = jnp.swapaxes(scale[row, names], 2, 3).reshape(*rows.shape[:3], 1)
    return (rows.astype(jnp.float32) * factor).astype(dtype)


def _scores(q, k):
    """q k^T; few queries are multiplied from the right, so that the keys are read in the order they lie."""
    if q.shape[1] <= _FEW_ROWS:
        return jnp.moveaxis(jnp.einsum("bse,bre->bsr", k, q, preferred_element_type=jnp.float32), 1, 2)
    return jnp.einsum("bre,bse->brs", q, k, preferred_element_type=jnp.float32)


def _spread(q, kv_heads: int):
    """Queries [b, C, N, H] as rows [b, J, r, w] that match J groups of w numbers of a stored key.

    With few kv heads and one query a block there is one group, the whole key: each query stands at its own
    head's place among zeros. That multiplies by K, but the keys are used as they lie; cutting them up by
    heads would move every byte of them twice, and bytes are what decoding waits for.
    """
    blocks, queries, heads, width = q.shape
    q = q.reshape(blocks, queries, kv_heads, heads // kv_heads, width)
    if queries > 1 or kv_heads > _FEW_HEADS:
        return jnp.moveaxis(q, 2, 1).reshape(blocks, kv_heads, -1, width)
    at = jnp.eye(kv_heads, dtype=q.dtype)[:, None, :, None]
    return (q[..., None, :] * at).reshape(blocks, 1, heads, kv_heads * width)


def _gather(mixed, queries: int, kv_heads: int):
    """[b, J, r, w] -> [b, C, N, w of a head]: the inverse of `_spread`, each query's own head of the sum."""
    blocks, groups, rows, width = mixed.shape
    if groups == kv_heads:
        mixed = mixed.reshape(blocks, kv_heads, queries, -1, width)
        return jnp.moveaxis(mixed, 1, 2).reshape(blocks, queries, -1, width)
    mixed = mixed.reshape(blocks, kv_heads, rows // kv_heads, kv_heads, -1)
    own = jnp.diagonal(mixed, axis1=1, axis2=3)  # [b, G, H, K]
    return jnp.moveaxis(own, 3, 1).reshape(blocks, 1, rows, -1)
