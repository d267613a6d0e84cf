"""Attention from a cache of keys (or inputs) alone in jax.numpy, a few pages at a time.

With `one_turn` the turns are larger and their number is known to the compiler: on a GPU each turn of a loop
of unknown length costs a round trip to the host.

Where a sequence has more queries than a head is wide, values are made first from its stored rows, once for
all its blocks, and the rest is ordinary attention: in the weighted sum of whole rows, each head would do the
work of all.
"""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import dispatch, mask, online
from swiftkv_jax.kernels.k_cache_attention import reference
from swiftkv_jax.kernels.k_cache_attention.reference import Options

ONE_TURN_KEYS = 1 << 16  # of all blocks together


def k_cache_attention(
    q, k, w_kv, *where, one_turn: bool | None = None, values_first: bool | None = None, **options
):
    """As `api.k_cache_attention`; `threshold` skips nothing. values_first: None decides by the queries."""
    how, heads = Options(**options), q.shape[2]
    values_first = _values_pay(q, where[0]) if values_first is None else values_first

    def read(stored, place):
        """(keys for the scores, rows to sum), from stored rows [b, s, E] at positions [s]."""
        keys, rows = turned(stored, place)
        return keys, _of_heads(rows, w_kv, rows.dtype) if values_first else rows

    def turned(stored, place):
        split = stored.reshape(*stored.shape[:-1], heads, -1)
        if how.frequencies is None:
            return split.astype(q.dtype), stored
        angle = place[:, None] * how.frequencies
        if how.rotated:
            raw = reference.rotate(split.astype(jnp.float32), -angle).astype(stored.dtype)
            return split.astype(q.dtype), raw.reshape(stored.shape)
        return reference.rotate(split.astype(jnp.float32), angle).astype(q.dtype), stored

    return _attend(q, k, how, read, w_kv, values_first, one_turn, *where)


def x_cache_attention(
    q, x, w_k, w_v, *where, row, scale, window, x_scale=None, bias=None, one_turn=None, values_first=None
):
    """As `api.x_cache_attention`. W_K is absorbed into the query and W_V applied to the sum, unless keys and
    values are made first."""
    values_first = _values_pay(q, where[0]) if values_first is None else values_first
    if not values_first:
        q = jnp.einsum("bcnh,neh->bcne", q, w_k, preferred_element_type=jnp.float32).astype(q.dtype)

    def read(stored, _):
        if values_first:
            return _of_heads(stored, w_k, stored.dtype), _of_heads(stored, w_v, stored.dtype)
        return jnp.broadcast_to(stored[:, :, None], (*stored.shape[:2], q.shape[2], stored.shape[-1])), stored

    how = Options(row, None, scale, window, False, 0.0, x_scale, bias)
    return _attend(q, x, how, read, w_v, values_first, one_turn, *where)


def _values_pay(q, table) -> bool:
    """Whether to make values first, for blocks of queries [b, C, N, H] of the sequences in `table`."""
    blocks, queries, _, width = q.shape
    return max(1, blocks // table.shape[0]) * queries > width


def _of_heads(rows, w, dtype):
    """[b, s, E] times the matrices of heads [N, E, U]: [b, s, N, U]."""
    return jnp.einsum("bse,neu->bsnu", rows, w, preferred_element_type=jnp.float32).astype(dtype)


def _attend(
    q, pool, how: Options, read, w, values_first: bool, one_turn, table, sequence, position
) -> jax.Array:
    """Attention [b, C, N, U] over a pool of rows read whole. `read` returns keys, and rows to sum: rows of
    all heads [b, s, E], whose sums are multiplied by `w` [N, E, U]; or with `values_first` values by head
    [b, s, N, U], made once for all blocks of a sequence.
    """
    (blocks, queries, heads, _), page = q.shape, pool.shape[2]
    (sequences, slots), together = table.shape, values_first and len(table) < len(sequence)
    table = table if together else table[sequence]
    window, one_turn = mask.window_of(how.window), dispatch.static_loops(one_turn)
    keys = ONE_TURN_KEYS if one_turn else online.TURN_KEYS
    pages = max(1, min(slots, keys // (blocks * page)))
    table, turns = jnp.pad(table, ((0, 0), (0, -slots % pages))), -(-slots // pages)

    def of_blocks(made):
        return made[sequence] if together else made

    def turn(i):
        names = jax.lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        place = i * pages * page + jnp.arange(pages * page)
        back = position[..., None] - place
        seen = (back >= 0) & (back < window)
        held = pool[how.row, names].reshape(*names.shape[:1], -1, pool.shape[-1]).astype(q.dtype)
        live = seen.any(1)
        if together:
            live = jnp.zeros((sequences, len(place)), bool).at[sequence].max(live)
        held = jnp.where(live[..., None], held, 0)  # 0 x NaN of a stale page is NaN
        keys, rows = (of_blocks(made) for made in read(held, place))
        scores = jnp.einsum("bcnh,bsnh->bncs", q, keys, preferred_element_type=jnp.float32)
        scales = jnp.ones((), jnp.float32)
        if how.k_scale is not None:
            scales = of_blocks(jnp.where(live, how.k_scale[how.row, names].reshape(live.shape), 0))
            scales = scales[:, None, None]

        def weigh(weights):
            return jnp.einsum(
                "bncs,bse->bnce" if rows.ndim == 3 else "bncs,bsne->bnce",
                (weights * scales).astype(rows.dtype),
                rows,
                preferred_element_type=jnp.float32,
            )

        added = 0.0 if how.bias is None else jnp.moveaxis(mask.bias_of(how.bias, back), 0, 1)
        return scores * how.scale * scales + added, seen[:, None], weigh

    span = (0, turns) if one_turn else online.span(position, window, pages * page)
    mixed = online.softmax_sum(turn, *span, (blocks, heads, queries), w.shape[2 if values_first else 1])
    if values_first:
        return jnp.swapaxes(mixed, 1, 2).astype(q.dtype)
    return jnp.einsum("bnce,neu->bcnu", mixed, w, preferred_element_type=jnp.float32).astype(q.dtype)
