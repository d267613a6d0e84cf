"""The kernel of attention without values on Hopper: softmax and weighted sums of whole rows, by a cluster.

The sum of whole rows for all heads, O^T [E, N], is larger than the registers of a multiprocessor. So a
cluster shares a block of queries: each CTA owns a slice of the columns. One warpgroup, the scorer, makes keys
of the slice's pages in registers, and sends the scores of its columns to all CTAs. Two others, the summers,
add up the raw rows, half of the slice each. The first summer waits for the scores of all heads and makes
weights of them for both: all reductions across warps of a kernel use the same shared memory, so only one
warpgroup may have any.

Keys that are stored after rotary embedding are rotated back in shared memory by the scorer, once it has their
scores. 8-bit rows are widened in registers for the scores. The summers widen them into shared memory and
rotate them back if necessary: each has registers for its own part.

Both summers wait for each other at the end of a page. They may then overwrite its weights and rows, and ask
for the rows that come next in their place: the scorer sent the scores after it had read these rows. It sends
the scores of page i when the summers of its CTA are done with page i - 1. Then every CTA has sent the scores
of page i - 1, and so every first summer has read those of page i - 2, whose buffer is the same.
"""

import functools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftkv_jax.kernels.common import gpu_pages
from swiftkv_jax.kernels.common.gpu_tile import SMEM_BYTES, Tiles, across, down, plgpu, smem_bytes
from swiftkv_jax.kernels.common.online import MASKED

KEYS = 64  # of a page
SUMMERS = 2  # warpgroups that add up rows
COLUMNS = 64  # of the smallest weighted sum
_HALVES = range(4, 9)  # halves of pages in shared memory
_BUFFERS = 2


class Form(NamedTuple):
    """Static parameters of the kernel.

    parts: CTAs of a cluster, `columns` of a row each. own: query rows that are a CTA's own; wide: that it
    scores; rows: of all heads. piece: columns that are in registers at a time. half: columns of half a head,
    0 without rotary embedding; rotated: rows are stored after it. splits: shares of a sequence's pages.
    """

    parts: int
    columns: int
    own: int
    wide: int
    rows: int
    piece: int
    half: int = 0
    rotated: bool = False
    splits: int = 1
    scale: float = 1.0
    tiles: Tiles = Tiles()

    @property
    def layers(self) -> int:
        """CTAs whose scores add up."""
        return self.parts * self.wide // self.rows


# In global memory: q [b, parts, wide, columns]; pool [R, P, Z, E]; position [b, rows]; pages; cos, sin
# [slots, Z, H / 2] of every position, or None without rotary embedding; k_scale [R, P, 1, Z], None of wide
# rows.
Inputs = namedtuple("Inputs", "q pool position pages cos sin k_scale")


# Shared memory: q [wide, columns]; tile [halves, Z, columns / 2] as stored, of 8 bits also widened [2, Z,
# columns / 2]; scores [buffers * layers, Z, rows]; weights [rows, Z]; out [2, 64, rows]; decay, top and total
# [rows]. Barriers: asked, came [halves], sent [buffers], weighed, free.
Scratch = namedtuple(
    "Scratch", "q tile widened scores weights out decay top total asked came sent weighed free"
)


def scratch(form: Form, stored) -> Scratch:
    """The scratch memory for rows of dtype `stored`: as many tiles as there is room for."""
    half, dtype = form.columns // 2, jnp.bfloat16

    def of(halves: int) -> Scratch:
        return Scratch(
            q=plgpu.SMEM((form.wide, form.columns), dtype),
            tile=plgpu.SMEM((halves, KEYS, half), stored),
            widened=None if stored == dtype else plgpu.SMEM((SUMMERS, KEYS, half), dtype),
            scores=plgpu.SMEM((_BUFFERS * form.layers, KEYS, form.rows), jnp.float32),
            weights=plgpu.SMEM((form.rows, KEYS), dtype),
            out=plgpu.SMEM((SUMMERS, COLUMNS, form.rows), jnp.float32),
            decay=plgpu.SMEM((form.rows,), jnp.float32),
            top=plgpu.SMEM((form.rows,), jnp.float32),
            total=plgpu.SMEM((form.rows,), jnp.float32),
            asked=plgpu.Barrier(),
            came=plgpu.Barrier(num_barriers=halves),
            sent=plgpu.Barrier(num_arrivals=form.parts, num_barriers=_BUFFERS),
            weighed=plgpu.Barrier(),
            free=plgpu.Barrier(num_arrivals=SUMMERS),
        )

    fits = (found for found in map(of, reversed(_HALVES)) if smem_bytes(found) <= SMEM_BYTES)
    return next(fits, of(_HALVES[0]))


def kernel(form: Form, x: Inputs, outs, s: Scratch):
    """Maxima and totals [b, splits, rows] and sums [b, splits, E, rows] of every share, into `outs`."""
    block, split, part, group = (lax.axis_index(name) for name in ("block", "split", "part", "group"))
    start, count = x.pages.share(block, split, form.splits)
    tiles, half, dtype, halves = form.tiles, form.columns // 2, s.q.dtype, s.tile.shape[0]

    def ask(n) -> None:
        """Start the copy of the share's n-th half of a page."""
        slot, name = lax.rem(n, halves), x.pages.name(block, start + lax.div(n, 2))
        columns = pl.ds(part * form.columns + lax.rem(n, 2) * half, half)
        source = x.pool.at[x.pages.row[0], name, :, columns]
        plgpu.copy_gmem_to_smem(source, s.tile.at[slot], s.came.at[slot])

    def wait(i) -> None:
        """Wait for the share's i-th page."""
        for side in range(2):
            plgpu.barrier_wait(s.came.at[lax.rem(2 * i + side, halves)])

    def rows_of(i, side: int):
        return s.tile.at[lax.rem(2 * i + side, halves)]

    def stored(i, column: int):
        """A piece of a page's rows, converted in type only; float8 converts to bfloat16 only through
        float32."""
        side, inside = divmod(column, half)
        return tiles.load(rows_of(i, side).at[:, pl.ds(inside, form.piece)]).astype(jnp.float32)

    def turns(i) -> Iterator:
        """(column in a head's first half, column in its second half, cos, sin) for the share's i-th page;
        every angle occurs once."""
        for first in range(0, form.half, form.piece):
            some = pl.ds(first, form.piece)
            cos, sin = (tiles.load(angle.at[start + i, :, some]) for angle in (x.cos, x.sin))
            for column in range(first, form.columns, 2 * form.half):
                yield column, column + form.half, cos, sin

    def factors(i, shape: tuple[int, int]):
        """The scales of the i-th page of the share, along the rows of a tile."""
        scales = x.k_scale.at[x.pages.row[0], x.pages.name(block, start + i), 0]
        return across(tiles.load(scales, rows=True), shape)

    def terms(i) -> Iterator:
        """Pieces of the keys, rotated to their positions, each with the queries' columns. Wide rows that must
        be rotated back for the sum are left so in the tile."""

        def queries(column: int):
            return s.q.at[:, pl.ds(column, form.piece)]

        if form.rotated or not form.half:
            for column in range(0, form.columns, form.piece):
                yield stored(i, column).astype(dtype), queries(column)
            for column, other, cos, sin in turns(i) if s.widened is None else ():
                a, b = stored(i, column), stored(i, other)
                for place, back in ((column, a * cos + b * sin), (other, b * cos - a * sin)):
                    side, inside = divmod(place, half)
                    rows_of(i, side).at[:, pl.ds(inside, form.piece)][...] = back.astype(dtype)
            return
        for column, other, cos, sin in turns(i):
            a, b = stored(i, column), stored(i, other)
            yield (a * cos - b * sin).astype(dtype), queries(column)
            a, b = stored(i, column), stored(i, other)  # loaded again to save registers
            yield (b * cos + a * sin).astype(dtype), queries(other)

    @pl.when(group == SUMMERS)
    def _():
        """Ask for the first pages, and send the scores of this CTA's columns to all."""
        plgpu.copy_gmem_to_smem(x.q.at[block, part], s.q, s.asked)
        for n in range(halves):
            pl.when(n < 2 * count)(functools.partial(ask, n))
        plgpu.barrier_wait(s.asked)

        def turn(i, carry):
            wait(i)
            shape = KEYS, form.wide
            scores = tiles.products(shape, terms(i)) * form.scale
            if x.k_scale is not None:
                scores = scores * factors(i, shape)
            if form.rotated:
                plgpu.commit_smem()
            column = pl.multiple_of(part // form.layers * form.wide, 8)
            buffer = lax.rem(i, _BUFFERS)
            layer = buffer * form.layers + lax.rem(part, form.layers)
            target = s.scores.at[layer, :, pl.ds(column, form.wide)]
            pl.when(i > 0)(lambda: plgpu.barrier_wait(s.free))
            tiles.send(scores, target, s.sent.at[buffer], form.parts, "part")
            return carry

        lax.fori_loop(0, count, turn, 0)
        pl.when(count > 0)(lambda: plgpu.barrier_wait(s.free))

    def widen(i, side: int) -> None:
        """Widen half of a page's rows, by their scales, to bfloat16 before rotary embedding."""
        scales = factors(i, (KEYS, form.piece))
        if form.rotated:
            for column, other, cos, sin in turns(i):
                for one, two, sign in ((column, other, 1), (other, column, -1)):
                    if one // half == side:
                        rows = stored(i, one) * cos + stored(i, two) * (sin * sign)
                        target = s.widened.at[side, :, pl.ds(one % half, form.piece)]
                        target[...] = (rows * scales).astype(dtype)
            return
        for column in range(0, half, form.piece):
            rows = stored(i, side * half + column)
            s.widened.at[side, :, pl.ds(column, form.piece)][...] = (rows * scales).astype(dtype)

    def add_up(side: int) -> None:
        """The weighted sums of half of this CTA's columns; on side 0 also the softmax over the scores of all
        heads."""
        # Slices of `COLUMNS` columns. The last may overlap the one before it; both have the same sums there.
        whole = half // COLUMNS * COLUMNS
        spans: list[Any] = [pl.ds(0, whole)] + ([pl.ds(half - COLUMNS, COLUMNS)] if whole < half else [])

        def weigh(i, top, total):
            buffer = lax.rem(i, _BUFFERS)
            plgpu.barrier_wait(s.sent.at[buffer])
            scores = sum(tiles.load(s.scores.at[buffer * form.layers + n]) for n in range(form.layers))
            position = tiles.load(x.position.at[block])  # loaded in each turn, to save registers
            top, weights, decay = x.pages.weigh(tiles, scores, position, (start + i) * KEYS, top)
            tiles.store_transposed(s.weights, weights)
            s.decay[...] = decay
            return top, total * decay + jnp.sum(weights, axis=0)

        def turn(i, carry):
            seen, mixed = carry
            wait(i)
            rows = rows_of(i, side)
            if s.widened is not None:
                widen(i, side)
                rows = s.widened.at[group]  # `side`, but a matmul takes no constant here
            # After either wait, the scorer has read a tile of wide rows, and rotated it back.
            if side == 0:
                seen = weigh(i, *seen)
            else:
                plgpu.barrier_wait(s.weighed)
            x.pages.clear_unseen(tiles, rows, block, (start + i) * KEYS, form.piece)
            plgpu.commit_smem()
            if side == 0:
                plgpu.barrier_arrive(s.weighed)
            decay = tiles.load(s.decay)
            mixed = tuple(
                tiles.add_matmul(sums * down(decay, sums.shape), rows.at[:, some], s.weights)
                for sums, some in zip(mixed, spans, strict=True)
            )
            plgpu.barrier_arrive(s.free)
            plgpu.barrier_wait(s.free)
            ahead = 2 * i + side + halves
            pl.when(ahead < 2 * count)(functools.partial(ask, ahead))
            return seen, mixed

        seen = tuple(tiles.constant(value, (form.rows,)) for value in (MASKED, 0.0)) if side == 0 else ()
        sums = tuple(tiles.constant(0.0, (some.size, form.rows)) for some in spans)
        seen, mixed = lax.fori_loop(0, count, turn, (seen, sums))
        for sums, some in zip(mixed, spans, strict=True):
            for column in range(0, some.size, COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                s.out.at[side][...] = sums[column : column + COLUMNS]
                plgpu.commit_smem()
                target = pl.ds(part * form.columns + side * half + some.start + column, COLUMNS)
                plgpu.copy_smem_to_gmem(s.out.at[side], outs[2].at[block, split, target])

        if side == 0:

            @pl.when(part == 0)
            def _():
                for stage, value, out in zip((s.top, s.total), seen, outs[:2], strict=True):
                    stage[...] = value
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, out.at[block, split])

        plgpu.wait_smem_to_gmem(0)

    for side in range(SUMMERS):
        pl.when(group == side)(functools.partial(add_up, side))


@functools.partial(jax.jit, static_argnums=(0, 2))  # lowered once for all layers
def launch(form: Form, inputs: Inputs, interpret: Any):
    """The softmax-weighted sums [b, E, rows] of whole rows."""
    parts, body = (inputs.q.shape[0], form.splits), functools.partial(kernel, form)
    how = {"grid": parts, "grid_names": ("block", "split"), "kernel_name": "k_cache_attention"}
    how |= {"cluster": (form.parts,), "cluster_names": ("part",)}
    how |= {"num_threads": SUMMERS + 1, "thread_name": "group"}
    sizes, memory = (parts, form.rows, inputs.pool.shape[-1]), scratch(form, inputs.pool.dtype)
    return gpu_pages.launch(body, inputs, memory, *sizes, interpret=interpret, **how)
