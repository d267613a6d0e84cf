"""Attention over paged keys and values in jax.numpy, a few pages a turn, in forms that suit XLA:CPU.

Blocks of many queries process their pages together, with an online softmax. Single queries go page by page:
each page in use is one piece of work, so that the cost of a short sequence is proportional to its length.

On a GPU each turn of a loop of unknown length costs a round trip to the host. `one_turn` avoids this: it
takes all pages of the table at once, for as many blocks as a bounded memory holds, in a loop of known length.
Blocks of many queries take a softmax of whole rows, which XLA:GPU computes in one kernel: it reads float32
scores once and writes weights in the queries' dtype. Single queries are then computed as sums, since matmuls
would first copy the pages out of the pool.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from swiftkv_jax.kernels.common import dispatch, mask, online

# The work of one turn, measured on a CPU: small enough to stay in its caches.
TURN_KEYS = 2048  # of all blocks together
_TURN_QUERIES = 128  # of all blocks together
_TURN_SCORES = 16384  # queries times keys
ONE_TURN_BYTES = 1 << 28  # scores and copies of the blocks that are processed together
_FEW_HEADS = 4
_FEW_ROWS = 8


def paged_attention(
    q, k, v, *where, row, scale, window, k_scale, v_scale, bias=None, softcap=None, one_turn=None
):
    """As `api.paged_attention`. `one_turn` avoids loops whose length is known only at run time; None: as
    `dispatch.static_loops` says."""
    (table, sequence, position), pools = where, (k, v, k_scale, v_scale)
    window, one_turn = mask.window_of(window), dispatch.static_loops(one_turn)
    if position.shape[1] == 1 and not one_turn:
        return _singles(q, pools, table[sequence], position[:, 0], row, (scale, softcap), window, bias)

    read, together = functools.partial(_blocks, one_turn=one_turn), _TURN_QUERIES // position.shape[1]
    if one_turn:
        keys, queries = table.shape[1] * k.shape[2], position.shape[1] * q.shape[2]
        size, copies = (4 + q.dtype.itemsize) * queries, (k.shape[-1] + v.shape[-1]) * q.dtype.itemsize
        if position.shape[1] > 1:
            read, copies = _whole_rows, copies if len(table) > 1 else 0
        elif q.shape[2] * q.shape[3] // k.shape[-1] <= _FEW_ROWS and dispatch.device()[0] != "tpu":
            # Each query head of a kv head reads the rows again, on a GPU from its L2 cache. A TPU cannot fuse
            # such reads with a sum.
            read, copies = _in_place, 0
        together = ONE_TURN_BYTES // (keys * (size + copies))
        if read is _whole_rows and len(table) == 1:  # its pages are copied once for all turns
            heads = k.shape[-1] // q.shape[-1]
            held = _stored(pools, table, position.reshape(1, -1), row, window, heads, q.dtype)
            read = functools.partial(read, held=held)

    def some(q, sequence, position):
        return read(q, pools, table[sequence], position, row, (scale, softcap), window, bias)

    width = v.shape[-1] * q.shape[-1] // k.shape[-1]
    return _in_turns(some, (q, sequence, position), max(1, together), width)


def _in_turns(run, arrays, size: int, width: int):
    """`run` over `size` leading entries of the arrays at a time, the last turn over some of them again; its
    results are `width` wide."""
    (first, *_), count = arrays, arrays[0].shape[0]
    if size >= count:
        return run(*arrays)

    def turn(i, out):
        at = jnp.minimum(i * size, count - size)
        some = run(*(lax.dynamic_slice_in_dim(x, at, size) for x in arrays))
        return lax.dynamic_update_slice_in_dim(out, some, at, 0)

    # What is overwritten depends on the queries. XLA would make the zeros that `lax.map` begins with for all
    # layers at once, before the first.
    out = jnp.broadcast_to(first[..., :1], (*first.shape[:-1], width))
    return lax.fori_loop(0, -(-count // size), turn, out)


def _singles(q, pools, table, position, row, scale, window, bias):
    """One query in each block, [b, 1, N, H], against the pages that it sees of `table` [b, slots]."""
    k, v, k_scale, v_scale = pools
    (blocks, _, _, width), page, slots = q.shape, k.shape[2], table.shape[1]
    heads, dtype = k.shape[-1] // width, q.dtype
    first = jnp.maximum(position - window + 1, 0) // page
    count = jnp.where(position < 0, 0, position // page + 1 - first)
    end = jnp.cumsum(count)
    begin = end - count
    # All blocks' pages in one list: the block, the page's number in it, the query's distance from its start.
    turns = -(-blocks * slots // max(1, TURN_KEYS // page))
    pages = -(-blocks * slots // turns)
    most = turns * pages
    at = jnp.arange(most)
    owner = jnp.minimum(jnp.searchsorted(end, at, side="right", method="compare_all"), blocks - 1)
    number = jnp.minimum(at - begin[owner] + first[owner], slots - 1)
    names, back = _after(q, table[owner, number]), position[owner] - number * page
    q = _spread(q, heads)
    groups, rows = q.shape[1:3]

    def turn(i, parts):
        of, name, distance = (lax.dynamic_slice_in_dim(x, i * pages, pages) for x in (owner, names, back))
        distance = distance[:, None] - jnp.arange(page)
        seen = (distance >= 0) & (distance < window)
        keys = _read(k, k_scale, row, name[:, None], heads, dtype)
        values = _read(v, v_scale, row, name[:, None], heads, dtype)
        values = jnp.where(seen[..., None, None], values, 0)  # 0 x NaN of a stale page is NaN
        scores = _scaled(_scores(q[of].reshape(pages * groups, rows, -1), _cut(keys, groups)), scale)
        scores += _bias(bias, distance[:, None], groups)
        seen = jnp.repeat(seen, groups, axis=0)[:, None]
        scores = jnp.where(seen, scores, online.MASKED)
        top = scores.max(-1)
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        new = (top, weights.sum(-1), _mix(weights.astype(dtype), _cut(values, groups)))
        new = (x.reshape(pages, groups, *x.shape[1:]) for x in new)
        return tuple(
            lax.dynamic_update_slice_in_dim(o, x, i * pages, 0) for o, x in zip(parts, new, strict=True)
        )

    shape = (most, groups, rows)
    parts = (jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((*shape, v.shape[-1] // groups)))
    top, total, mixed = turn(0, parts) if turns == 1 else lax.fori_loop(0, -(-end[-1] // pages), turn, parts)
    # Merge the sums of each block's pages.
    own = jnp.minimum(begin[:, None] + jnp.arange(slots), most - 1)
    some = jnp.arange(slots) < count[:, None]
    top, total, mixed = (
        # Mask the places of other blocks: 0 x NaN is NaN.
        jnp.where(some.reshape(*some.shape, *(1,) * (x.ndim - 1)), x[own], rest)
        for x, rest in ((top, online.MASKED), (total, 0), (mixed, 0))
    )
    share = jnp.exp(top - top.max(1, keepdims=True))
    total = jnp.maximum((share * total).sum(1), 1e-30)
    mixed = jnp.einsum("bpgr,bpgre->bgre", share, mixed) / total[..., None]
    return _gather(mixed, 1, heads).reshape(blocks, 1, -1, v.shape[-1] // heads).astype(dtype)


def _in_place(q, pools, table, position, row, scale, window, bias):
    """One query in each block, [b, 1, N, H], against all pages of `table` [b, slots], by sums that read rows
    in place. Matmuls would need a copy of the rows."""
    k, v, k_scale, v_scale = pools
    (blocks, _, _, width), dtype = q.shape, q.dtype
    heads = k.shape[-1] // width
    # Otherwise layers that share an 8-bit row would share a widened copy of it, and the inputs of a step's
    # values would be kept until after the scores, to be written then.
    # Scales need no such names. With four readers XLA would make the names in an operation of each layer.
    pages, table = table, _after(q, table, v[row, 0, 0, 0])
    back = position - jnp.arange(table.shape[1] * k.shape[2])
    seen = (back >= 0) & (back < window)
    keys = _read(k, k_scale, row, table, heads, dtype, pages)
    values = _read(v, v_scale, row, table, heads, dtype, pages)
    values = jnp.where(seen[..., None, None], values, 0)  # 0 x NaN of a stale page is NaN
    q, keys, values = (x.astype(jnp.float32) for x in (q, keys, values))
    keys, values = (jnp.moveaxis(x, 1, 2)[:, :, None] for x in (keys, values))  # [b, K, 1, keys, width]
    scores = _scaled((q.reshape(blocks, heads, -1, 1, width) * keys).sum(-1), scale)
    if bias is not None:
        scores += jnp.moveaxis(mask.bias_of(bias, back), 0, 1).reshape(scores.shape)
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, online.MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    # The barrier forces rounding: XLA would otherwise keep the weights in float32.
    weights = lax.optimization_barrier(weights.astype(dtype)).astype(jnp.float32)
    # Keep the numbers of a row innermost. XLA would make keys innermost for the sum, and transpose all
    # values.
    mixed = with_layout_constraint(weights[..., None] * values, Layout((0, 1, 2, 3, 4))).sum(3)
    return mixed.reshape(blocks, 1, -1, mixed.shape[-1]).astype(dtype)


def _after(q, names, stored=0):
    """Make `names` depend on `q`, so that XLA cannot hoist the gathers of rows that exist early (SwiftKV's
    upper ones) to before their first layer, where they would evict each other from a core's cache. `stored`:
    a number of a pool that must be written first."""
    size = jnp.abs(q[0, 0, 0, 0]) + jnp.abs(jnp.asarray(stored, q.dtype))
    return jnp.where(size < -1, 0, names)  # never true, but the compiler cannot know


def _blocks(q, pools, table, position, row, scale, window, bias, one_turn=False):
    """Blocks of C queries against the pages `table` [b, slots], up to the last page that any of them sees."""
    k, v, *_ = pools
    (blocks, queries, _, width), page, slots = q.shape, k.shape[2], table.shape[1]
    heads = k.shape[-1] // width
    most = min(TURN_KEYS // blocks, _TURN_SCORES // (blocks * queries))
    pages = slots if one_turn else min(slots, max(1, most // page))
    keys, shape = pages * page, q.shape
    table, dtype = jnp.pad(table, ((0, 0), (0, -slots % pages))), q.dtype
    q = _spread(q, heads)
    groups, rows = q.shape[1:3]
    q = q.reshape(-1, rows, q.shape[-1])

    def turn(i):
        names, here = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1), position - i * keys
        stored, values = _stored(pools, names, here, row, window, heads, dtype)
        back, seen = _seen(here, keys, window)
        scores = _scaled(_scores(q, _cut(stored, groups), one_by_one=not one_turn), scale)
        scores += _bias(bias, back, groups)
        seen = jnp.repeat(jnp.repeat(seen, rows // queries, axis=1), groups, axis=0)
        return scores, seen, lambda weights: _mix(weights.astype(dtype), _cut(values, groups))

    width = v.shape[-1] // groups
    span = (0, 1) if pages == slots else online.span(position, window, keys)
    mixed = online.softmax_sum(turn, *span, q.shape[:2], width)
    mixed = _gather(mixed.reshape(blocks, groups, rows, width), queries, heads)
    return mixed.reshape(*shape[:3], -1).astype(dtype)


def _whole_rows(q, pools, table, position, row, scale, window, bias, held=None):
    """Blocks of C queries against all pages of `table` [b, slots], or `held`: what `_stored` returns for one
    sequence, whose blocks all are."""
    k, shape = pools[0], q.shape
    heads = k.shape[-1] // shape[-1]
    keys, values = held or _stored(pools, table, position, row, window, heads, q.dtype)
    position = position.reshape(len(keys), -1)
    back, seen = _seen(position, keys.shape[1], window)
    q = _spread(q.reshape(*position.shape, *shape[2:]), heads)
    rows = q.shape[2]
    scores = _scaled(_scores(q.reshape(-1, rows, shape[-1]), _cut(keys, heads), one_by_one=False), scale)
    scores += _bias(bias, back, heads)
    seen = jnp.repeat(jnp.repeat(seen, rows // position.shape[1], axis=1), heads, axis=0)
    weights = jax.nn.softmax(jnp.where(seen, scores, online.MASKED)).astype(q.dtype)
    mixed = _mix(weights, _cut(values, heads)).reshape(-1, heads, rows, values.shape[-1])
    mixed = _gather(mixed, position.shape[1], heads)
    mixed = jnp.where(position[..., None, None] < 0, 0, mixed)  # the mean of all values
    return mixed.reshape(*shape[:3], -1).astype(q.dtype)


def _stored(pools, table, position, row, window, heads: int, dtype):
    """Keys and values [b, keys, K, width] of the pages `table`."""
    k, v, k_scale, v_scale = pools
    stored, values = (_read(*x, row, table, heads, dtype) for x in ((k, k_scale), (v, v_scale)))
    seen = _seen(position, stored.shape[1], window)[1].any(1)
    return stored, jnp.where(seen[..., None, None], values, 0)  # 0 x NaN of a stale page is NaN


def _seen(position, keys: int, window):
    """(distance of each key from queries at `position` [b, C], whether they see it), [b, C, keys]."""
    back = position[..., None] - jnp.arange(keys)
    return back, (back >= 0) & (back < window)


def _bias(bias, back, groups: int):
    """The bias of scores [b * J, r, keys] with keys at distances `back` [b, C, keys], in the order of
    `_spread`."""
    if bias is None:
        return 0.0
    by_group = mask.bias_of(bias, back).reshape(groups, -1, *back.shape)  # [J, heads, b, C, keys]
    return jnp.transpose(by_group, (2, 0, 3, 1, 4)).reshape(back.shape[0] * groups, -1, back.shape[-1])


def _read(pool, scale, row: int, names, heads: int, dtype, scales=None):
    """Pages `names` [b, n] of a row, [b, n * Z, K, width]; `scales`: the same names, for their scales."""
    rows = pool[row, names].reshape(names.shape[0], -1, heads, pool.shape[-1] // heads)
    if scale is None:
        return rows.astype(dtype)
    factor = jnp.swapaxes(scale[row, names if scales is None else scales], 2, 3).reshape(*rows.shape[:3], 1)
    return (rows.astype(jnp.float32) * factor).astype(dtype)


def _cut(stored, groups: int):
    """Stored numbers [b, keys, K, w] by group, [b * J, keys, w']; with one group nothing moves."""
    blocks, keys = stored.shape[:2]
    return jnp.moveaxis(stored.reshape(blocks, keys, groups, -1), 2, 1).reshape(blocks * groups, keys, -1)


def _mix(weights, values) -> jax.Array:
    """Sums of values [b, s, w] by weights [b, r, s], in float32."""
    return jnp.einsum("brs,bse->bre", weights, values, preferred_element_type=jnp.float32)


def _scores(q, k, one_by_one: bool = True):
    """q k^T in float32, [b, r, s]; a few queries are multiplied one by one, which avoids packing the
    matrix."""
    if one_by_one and q.shape[1] <= _FEW_ROWS:
        product = functools.partial(jnp.einsum, "bse,be->bs", k, preferred_element_type=jnp.float32)
        return jnp.stack([product(q[:, r]) for r in range(q.shape[1])], axis=1)
    return jnp.einsum("bre,bse->brs", q, k, preferred_element_type=jnp.float32)


def _scaled(scores, scale):
    """Scores times their scale, below their cap; `scale` is (scale, soft cap or None)."""
    return mask.capped(scores * scale[0], scale[1])


def _spread(q, kv_heads: int):
    """Queries [b, C, N, H] as rows [b, J, r, w] that match J groups of w numbers of a stored key.

    With few kv heads and one query a block there is one group, the whole key, and each query is padded with
    zeros at the other heads' places. This multiplies the work by K, but uses the keys in place. Cutting them
    up by heads would move every byte twice, and decoding is bound by memory bandwidth.
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
