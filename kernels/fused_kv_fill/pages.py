"""Make and write the rows of a ragged batch, whole pages at a time.

The pages that begin in the batch are made from the hidden states in one call of the fused fill. A token that
continues a partially filled page (nearly every decoded one does) is written by itself: rewriting the page
would waste most of the work. How many do is known only at run time, and a loop of such a length waits for the
host: so they are packed, and made by a second call, which leaves out what stays empty.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill.api import Makers, fused_kv_fill, rows_of
from swiftkv_jax.kernels.page_write.api import page_write, places

_PACKED = 64  # tokens of a page of those that are written by themselves; each kernel takes it


class Tokens(NamedTuple):
    """A flat ragged batch; a sequence's tokens are neighbours, at consecutive positions.

    Attributes:
      x: [T, D] hidden states, unnormalised. cos, sin: [T, H / 2] of the rotary angles.
      sequence: [T] of each token. position: [T]. valid: [T], False for padding.
    """

    x: jax.Array
    cos: jax.Array
    sin: jax.Array
    sequence: jax.Array
    position: jax.Array
    valid: jax.Array


class Pages(NamedTuple):
    """The pages that begin in a batch, packed; in all fields [n], of which the last ones may be empty.

    Attributes:
      first: token that each begins with. live: its tokens in the batch; 0: an empty entry.
      page: its id in the pool; P, one past the last, for an empty entry.
    """

    first: jax.Array
    live: jax.Array
    page: jax.Array


def fill_pages(
    tokens: Tokens,
    makers: Makers,
    pools: tuple[Pool, Pool],
    table: jax.Array,
    *,
    rows: tuple[int, ...],
    eps: float,
    chunks: bool,
    implementation: str | None,
    writer: str | None = None,
) -> tuple[Pool, Pool]:
    """The pools with `rows` of a batch's tokens in them.

    Args:
      makers, pools, rows, eps, implementation: as `api.fused_kv_fill` takes them.
      table: [Q, slots] page ids of each sequence in order.
      writer: implementation of `page_write`, for tokens that are written by themselves.
      chunks: whether the batch may hold chunks of prompts; without them every token is written by itself.

    In a page that begins in the batch, the places after the batch's last token are zeros.
    """
    size = pools[0].data.shape[2]
    if not chunks:  # made by XLA
        heads = pools[0].data.shape[-1] // (2 * tokens.cos.shape[-1])
        made = rows_of(tokens.x, makers, tokens.cos, tokens.sin, heads, eps)
        return _put(tokens, made, pools, table, rows, writer)
    begun = begun_here(tokens, size)
    pools = _append_some(
        tokens, tokens.valid & ~begun, makers, pools, table, rows, eps, implementation, writer
    )
    pages = pages_of(tokens, begun, pools[0].data.shape[1], size, table)
    picked = jnp.clip(pages.first[:, None] + jnp.arange(size), 0, len(tokens.x) - 1).reshape(-1)
    x, cos, sin = (field[picked] for field in tokens[:3])
    how = {"rows": rows, "eps": eps, "implementation": implementation}
    return fused_kv_fill(x, makers, cos, sin, pools, pages.page, pages.live, **how)


def begun_here(tokens: Tokens, size: int) -> jax.Array:
    """[T]: whether the first token of each token's page, of `size` tokens, is in the batch too."""
    first = jnp.arange(len(tokens.position)) - tokens.position % size
    there = jnp.clip(first, 0)
    same = (tokens.sequence[there] == tokens.sequence) & (tokens.position[there] % size == 0)
    return tokens.valid & same & (first >= 0)


def pages_of(tokens: Tokens, begun: jax.Array, count: int, size: int, table: jax.Array) -> Pages:
    """The pages of `begun` tokens, in a pool of `count` pages; there is room for as many as a batch may
    begin."""
    total, sequences = len(tokens.position), table.shape[0]
    most = min(total, (total + sequences * (size - 1)) // size)
    opens = begun & (tokens.position % size == 0)
    place = jnp.where(begun, jnp.cumsum(opens) - 1, most)
    where = jnp.where(opens, place, most)

    def placed(values, empty: int):
        return jnp.full(most, empty, jnp.int32).at[where].set(values.astype(jnp.int32), mode="drop")

    live = jnp.zeros(most, jnp.int32).at[place].add(1, mode="drop")
    page, _ = places(table, tokens.sequence, tokens.position, tokens.valid, size)
    return Pages(placed(jnp.arange(total), 0), live, placed(page, count))


def _append_some(
    tokens: Tokens, which: jax.Array, makers: Makers, pools, table, rows, eps: float, implementation, writer
) -> tuple[Pool, Pool]:
    """Make and write one by one the tokens of a batch that `which` [T] says. In a sequence they all lie in
    one page, which another batch has begun, so that they are at most as many as such pages have places left.

    They are packed, and made by the fused fill as pages of their own: it leaves out those that stay empty,
    where XLA would make as many tokens as there might be.
    """
    most = min(len(tokens.x), table.shape[0] * (pools[0].data.shape[2] - 1))
    first, count = jnp.arange(0, most, _PACKED), jnp.sum(which)
    (picked,) = jnp.nonzero(which, size=len(first) * _PACKED, fill_value=0)
    tokens = Tokens(*(field[picked] for field in tokens))
    tokens = tokens._replace(valid=jnp.arange(len(picked)) < count)
    shapes = [(len(rows), len(first), _PACKED, pool.data.shape[-1]) for pool in pools]
    own = Pool(jnp.zeros(shapes[0], tokens.x.dtype)), Pool(jnp.zeros(shapes[1], tokens.x.dtype))
    names = jnp.where(first < count, jnp.arange(len(first)), len(first))
    live = jnp.clip(count - first, 0, _PACKED)
    how = {"rows": tuple(range(len(rows))), "eps": eps, "implementation": implementation}
    made = fused_kv_fill(tokens.x, makers, tokens.cos, tokens.sin, own, names, live, **how)
    flat = (jnp.moveaxis(pool.data.reshape(len(rows), len(picked), -1), 0, 1) for pool in made)
    return _put(tokens, flat, pools, table, rows, writer)


def _put(tokens: Tokens, made, pools, table, rows, writer) -> tuple[Pool, Pool]:
    """The pools with keys and values `made`, each [T, F, E], of a batch's tokens."""
    size = pools[0].data.shape[2]
    page, slot = places(table, tokens.sequence, tokens.position, tokens.valid, size)
    heads = pools[0].data.shape[-1] // (2 * tokens.cos.shape[-1])
    write = functools.partial(page_write, page=page, slot=slot, rows=rows, implementation=writer)
    k, v = (write(p, y.reshape(*y.shape[:2], heads, -1)) for p, y in zip(pools, made, strict=True))
    return k, v
