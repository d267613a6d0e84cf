"""Upper rows made and written whole pages at a time, by an implementation of kernels/fused_kv_fill.

Of a ragged batch, the pages that begin in it are made from the stream in one call. A token that goes on a
page begun before, as nearly every decoded one does, is appended: a whole page for it would be mostly waste.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax import params as weights
from swiftkv_jax.cache import Batch, Cache, make_batch
from swiftkv_jax.kernels.fused_kv_fill.api import Makers, fold_gain, fused_kv_fill, rows_of
from swiftkv_jax.layers import Rotary
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import Array, Bool, Float, Int, PyTree

_FEWEST = 8  # tokens appended at a time


def fold(plan: KVPlan, params: PyTree, dtype) -> PyTree:
    """`params` with `fill` as the kernels take it: `Makers` of `dtype`, the norm's gain folded in.

    It replaces the makers it is made from, so that both are in memory only while this runs; `model.fill`
    takes either. What is folded already stays as it is.
    """
    p = params["fill"]
    if isinstance(p, Makers):
        return params
    gain = p["norm_swiftkv"] if plan.is_swiftkv else weights.layer(params["upper"], 0)["input_norm"]
    (w_k, b_k), (w_v, b_v) = (
        (fold_gain(gain, p[name]["kernel"]).astype(dtype), p[name].get("bias"))
        for name in ("k_proj", "v_proj")
    )
    return params | {"fill": Makers(w_k, w_v, b_k, b_v, p.get("k_norm"))}


def rows_of_stream(
    makers: Makers, kv_heads: int, eps: float, x: Float[Array, "*batch D"], at: Rotary
) -> tuple[Array, Array]:
    """Keys and values [*batch, rows, K, H] of the stream `x`, in float32 as pages are rounded from."""
    cos, sin = (angle.reshape(-1, angle.shape[-1]) for angle in (at.cos, at.sin))
    made = rows_of(x.reshape(-1, x.shape[-1]), makers, cos, sin, kv_heads, eps)
    k, v = (y.reshape(*x.shape[:-1], y.shape[1], kv_heads, -1) for y in made)
    return k, v


def write(
    makers: Makers,
    rows: tuple[int, ...],
    eps: float,
    x: Float[Array, "T D"],
    at: Rotary,
    batch: Batch,
    cache: Cache,
) -> Cache:
    """The cache with `rows` of a flat batch's tokens in it, made from the stream `x` by `cache.fill`.

    A sequence's tokens in `batch` are at consecutive positions. In a page that begins here, tokens after the
    batch's last are zeros.
    """
    if not batch.chunks:
        return _append(makers, rows, eps, x, at, batch, cache)
    begun = begun_here(batch, cache.page)
    cache = _append_some(makers, rows, eps, x, at, batch, batch.valid & ~begun, cache)
    pages = pages_of(batch, begun, cache)
    picked = jnp.clip(pages.first[:, None] + jnp.arange(cache.page), 0, x.shape[0] - 1).reshape(-1)
    made = fused_kv_fill(
        x[picked],
        makers,
        at.cos[picked],
        at.sin[picked],
        cache.pools,
        pages.name,
        pages.live,
        rows=rows,
        eps=eps,
        implementation=cache.fill,
    )
    return cache.holding(made)


class Pages(NamedTuple):
    """The pages that begin in a batch, packed; in all fields [n], of which the last ones may be empty.

    Attributes:
      first: token that each begins with. live: its tokens in the batch; 0: an empty place.
      name: of the pool; P, one past the last, of an empty place.
    """

    first: Int[Array, " n"]
    live: Int[Array, " n"]
    name: Int[Array, " n"]


def begun_here(batch: Batch, page: int) -> Bool[Array, " T"]:
    """Whether the first token of each token's page is in the batch too."""
    first = jnp.arange(batch.position.shape[0]) - batch.position % page
    there = jnp.clip(first, 0)
    same = (batch.sequence[there] == batch.sequence) & (batch.position[there] % page == 0)
    return batch.valid & same & (first >= 0)


def pages_of(batch: Batch, begun: Bool[Array, " T"], cache: Cache) -> Pages:
    """The pages that `begun` tokens lie in, as many as any such batch may begin."""
    tokens, sequences = batch.position.shape[0], cache.table.shape[0]
    most = min(tokens, (tokens + sequences * (cache.page - 1)) // cache.page)
    opens = begun & (batch.position % cache.page == 0)
    place = jnp.where(begun, jnp.cumsum(opens) - 1, most)
    where = jnp.where(opens, place, most)

    def placed(values, empty: int):
        return jnp.full(most, empty, jnp.int32).at[where].set(values.astype(jnp.int32), mode="drop")

    live = jnp.zeros(most, jnp.int32).at[place].add(1, mode="drop")
    return Pages(placed(jnp.arange(tokens), 0), live, placed(cache.names(batch), cache.k.shape[1]))


def _append(makers: Makers, rows, eps: float, x, at: Rotary, batch: Batch, cache: Cache) -> Cache:
    """All tokens of a batch, one by one into their pages."""
    return cache.write(rows, *rows_of_stream(makers, cache.kv_heads, eps, x, at), batch)


def _append_some(makers: Makers, rows, eps: float, x, at: Rotary, batch: Batch, which, cache: Cache) -> Cache:
    """The tokens of a batch that `which` [T] says, a few at a time: usually one of each sequence."""
    tokens = x.shape[0]
    few = min(tokens, max(_FEWEST, cache.table.shape[0]))
    order = jnp.argsort(~which, stable=True)
    count = jnp.sum(which)

    def turn(i, cache):
        number = i * few + jnp.arange(few)
        some = order[jnp.clip(number, 0, tokens - 1)]
        alone = make_batch(None, batch.position[some])
        alone = dataclasses.replace(alone, sequence=batch.sequence[some], valid=number < count)
        return _append(makers, rows, eps, x[some], Rotary(at.cos[some], at.sin[some]), alone, cache)

    return jax.lax.fori_loop(0, -(-count // few), turn, cache)
