"""Attention over pages on Hopper: the assignment of pages to CTAs, the online softmax, and the merge of
shares.

A block's pages are cut into shares, one for each CTA or cluster. Each computes the maximum, the total and the
weighted sum of its keys, and XLA merges these.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from swiftkv_jax.kernels.common import mask, worklist
from swiftkv_jax.kernels.common.gpu_tile import Tiles, down, plgpu
from swiftkv_jax.kernels.common.online import MASKED

COLUMNS = 64  # columns of a tile in registers at a time
_SHORTEST = 4  # least pages of a share


class Pages(NamedTuple):
    """The pages of every block of queries; int32, in global memory inside a kernel.

    Attributes:
      table: [Q, slots] of each sequence. sequence: [b] of each block. window: [1]. row: [1] of the pool; no
        constant, so that the layers of a model share one kernel.
      low, high: [b] its pages [low, high). first, last: [b] no query sees a key outside [first, last).
    """

    table: Any
    sequence: Any
    window: Any
    row: Any
    low: Any
    high: Any
    first: Any
    last: Any

    def share(self, block, split, splits: int) -> tuple[Any, Any]:
        """(first page, pages) of one of the `splits` shares of a block."""
        each = pl.cdiv(self.high[block] - self.low[block], splits)
        start = self.low[block] + split * each
        return start, jnp.maximum(jnp.minimum(self.high[block] - start, each), 0)

    def name(self, block, page):
        """The pool's page id of page number `page` of a block's sequence."""
        return self.table[self.sequence[block], page]

    def weigh(self, tiles: Tiles, scores, position, key, top):
        """One turn of the online softmax, over keys from `key` on, of queries at `position` [rows].

        Scores are [keys, rows], `top` [rows] their maximum so far. Returns the new maximum, the weights, and
        the factor for earlier sums.
        """
        shape = scores.shape
        back = down(position, shape) - (key + tiles.row_number(shape))
        seen = (back >= 0) & (back < self.window[0])
        scores = jnp.where(seen, scores, MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp(scores - down(higher, shape)), 0.0)
        return higher, weights, jnp.exp(top - higher)

    def clear_unseen(self, tiles: Tiles, rows, block, key, piece: int = COLUMNS) -> None:
        """Zero the rows of a tile [keys, E] from `key` on that no query sees: 0 x NaN is NaN.

        It takes `piece` columns at a time.
        """
        keys, width = rows.shape

        @pl.when((key < self.first[block]) | (key + keys > self.last[block]))
        def _():
            token = key + tiles.row_number((keys, piece))
            kept = (token >= self.first[block]) & (token < self.last[block])
            for column in range(0, width, piece):
                some = rows.at[:, pl.ds(column, piece)]
                stored = tiles.load(some)
                some[...] = jnp.where(kept, stored, jnp.zeros_like(stored))


def pages_of(position, table, sequence, row, window, page: int) -> Pages:
    """The pages of blocks of queries at `position` [b, C] (-1: no query), with `page` tokens per page."""
    row, window = (jnp.asarray(x, jnp.int32).reshape(1) for x in (row, mask.window_of(window)))
    work = worklist.make(position, window[0], page, 1, table.shape[1], 1)
    edge = work.edge.reshape(-1, 4)
    table, sequence = table.astype(jnp.int32), sequence.astype(jnp.int32)
    return Pages(table, sequence, window, row, work.low, work.high, edge[:, 0], edge[:, 3])


def pieces(q, sequence, position, most: int):
    """Split blocks [b, C] into blocks of equal size and at most `most` queries, padded with empty queries.
    Each reads its keys again, mostly from the L2 cache."""
    queries = position.shape[1]
    count = -(-queries // most)
    each = -(-queries // count)
    over = ((0, 0), (0, count * each - queries))
    position = jnp.pad(position, over, constant_values=-1).reshape(-1, each)
    q = jnp.pad(q, (*over, (0, 0), (0, 0))).reshape(-1, each, *q.shape[2:])
    return q, jnp.repeat(sequence, count), position


def splits_of(ctas: int, work: int, slots: int) -> int:
    """Shares of each of `work` pieces of work, for about `ctas` CTAs in all, without very short shares."""
    return max(1, min(-(-ctas // work), slots // _SHORTEST))


def launch(kernel, inputs, scratch, parts, rows: int, width: int, *, interpret: Any, **options) -> jax.Array:
    """Softmax-weighted sums [..., width, rows]: of `parts` [..., splits], for each of which
    `kernel(inputs, outs, scratch)`, on trees of references, makes the maxima and totals [rows] and the sums
    [width, rows]. `options` of `plgpu.kernel`."""
    shapes = (*parts, rows), (*parts, rows), (*parts, width, rows)
    out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    leaves, tree = jax.tree.flatten(inputs)
    kinds, shape = jax.tree.flatten(scratch)

    def body(*refs):
        ends = len(leaves), len(leaves) + len(out_type)
        read, outs, own = refs[: ends[0]], refs[ends[0] : ends[1]], refs[ends[1] :]
        kernel(jax.tree.unflatten(tree, read), outs, jax.tree.unflatten(shape, own))

    tops, totals, sums = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=kinds,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        **options,
    )(*leaves)
    share = jnp.exp(tops - jnp.max(tops, axis=-2, keepdims=True))
    total = jnp.maximum(jnp.sum(totals * share, axis=-2), 1e-30)
    return jnp.sum(sums * share[..., None, :], axis=-3) / total[..., None, :]
