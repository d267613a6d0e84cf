"""The kernel of attention without values on Hopper: softmax and weighted sums of whole rows, by a cluster.

The sum of whole rows for all heads, O^T [E, N], is larger than the registers of a multiprocessor. So a
cluster shares a block of queries: each CTA owns a slice of the columns. One warpgroup brings in pages of its
slice, makes keys of them in registers, and sends the scores of its columns to all CTAs. Two others wait for
the scores of all heads and add up the raw rows, half of the slice each.

Keys that are stored after rotary embedding are rotated back in shared memory by the first warpgroup, once it
has their scores. 8-bit rows are widened in registers for the scores. The warpgroups that add them up widen
them into shared memory and rotate them back if necessary: each has registers for its own part.

A buffer of scores may be overwritten once every CTA has read it. With three buffers this holds for the
oldest: when a CTA sends the scores of page i, its own sums are done with page i - 2, so every CTA has sent
the scores of that page, and no CTA does so before its sums are done with page i - 3.
"""

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftkv_jax.kernels.common import gpu_pages
from swiftkv_jax.kernels.common.gpu_tile import Tiles, across, down, plgpu
from swiftkv_jax.kernels.common.online import MASKED

KEYS = 64  # of a page
SUMMERS = 2  # warpgroups that add up rows
COLUMNS = 64  # of the smallest weighted sum
_STAGES = 2
_BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Form:
    """Static parameters of the kernel.

    parts: CTAs of a cluster, `columns` of a row each. rows: of queries, of all heads; wide: of those, what a
    CTA scores. layers: CTAs whose scores add up. piece: columns that are in registers at a time. half:
    columns of half a head, 0 without rotary embedding; rotated: rows are stored after it. splits: shares of
    a sequence's pages.
    """

    parts: int
    columns: int
    rows: int
    wide: int
    layers: int
    piece: int
    half: int
    rotated: bool
    splits: int
    scale: float
    tiles: Tiles


# In global memory: q [b, parts, wide, columns]; pool [R, P, Z, E]; position [b, rows]; pages; cos, sin
# [slots, Z, H / 2] of every position, or None without rotary embedding; k_scale [R, P, 1, Z], None of wide
# rows.
Inputs = namedtuple("Inputs", "q pool position pages cos sin k_scale")


# Shared memory: q [wide, columns]; tile [stages * 2, Z, columns / 2] as stored, of 8 bits also widened
# [2, Z, columns / 2]; scores [buffers * layers, Z, rows]; weights [2, rows, Z]; out [2, 64, rows]; and stats
# [2, rows]. Barriers: asked, came and free [stages], sent [buffers].
Scratch = namedtuple("Scratch", "q tile widened scores weights out stats asked came free sent")


def scratch(form: Form, stored) -> Scratch:
    """The scratch memory for rows of dtype `stored`."""
    half, dtype = form.columns // 2, jnp.bfloat16
    return Scratch(
        q=plgpu.SMEM((form.wide, form.columns), dtype),
        tile=plgpu.SMEM((_STAGES * 2, KEYS, half), stored),
        widened=None if stored == dtype else plgpu.SMEM((SUMMERS, KEYS, half), dtype),
        scores=plgpu.SMEM((_BUFFERS * form.layers, KEYS, form.rows), jnp.float32),
        weights=plgpu.SMEM((SUMMERS, form.rows, KEYS), dtype),
        out=plgpu.SMEM((SUMMERS, COLUMNS, form.rows), jnp.float32),
        stats=plgpu.SMEM((2, form.rows), jnp.float32),
        asked=plgpu.Barrier(),
        came=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        free=plgpu.Barrier(num_arrivals=SUMMERS, num_barriers=_STAGES),
        sent=plgpu.Barrier(num_arrivals=form.parts, num_barriers=_BUFFERS),
    )


def kernel(form: Form, x: Inputs, outs, s: Scratch):
    """Maxima and totals [b, splits, rows] and sums [b, splits, E, rows] of every share, into `outs`."""
    block, split, part, group = (lax.axis_index(name) for name in ("block", "split", "part", "group"))
    start, count = x.pages.share(block, split, form.splits)
    tiles, half, dtype = form.tiles, form.columns // 2, s.q.dtype

    def stored(slot, column: int):
        """A piece of a stage's rows, converted in type only; float8 converts to bfloat16 only through
        float32."""
        side, inside = divmod(column, half)
        return tiles.load(s.tile.at[slot * 2 + side, :, pl.ds(inside, form.piece)]).astype(jnp.float32)

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

    @pl.when(group == SUMMERS)
    def _():
        """Bring the pages in, and send the scores of this CTA's columns to all."""
        plgpu.copy_gmem_to_smem(x.q.at[block, part], s.q, s.asked)

        def ask(i):
            slot, name = lax.rem(i, _STAGES), x.pages.name(block, start + i)
            for side in range(2):
                columns = pl.ds(part * form.columns + side * half, half)
                source = x.pool.at[x.pages.row[0], name, :, columns]
                plgpu.copy_gmem_to_smem(source, s.tile.at[slot * 2 + side], s.came.at[slot])

        def terms(i, slot) -> Iterator:
            """Pieces of the keys, rotated to their positions, each with the queries' columns. Wide rows that
            must be rotated back for the sum are left so in the tile."""

            def queries(column: int):
                return s.q.at[:, pl.ds(column, form.piece)]

            if not form.half or (form.rotated and s.widened is not None):
                for column in range(0, form.columns, form.piece):
                    yield stored(slot, column).astype(dtype), queries(column)
                return
            for column, other, cos, sin in turns(i):
                a, b = stored(slot, column), stored(slot, other)
                if form.rotated:
                    yield a.astype(dtype), queries(column)
                    yield b.astype(dtype), queries(other)
                    for place, back in ((column, a * cos + b * sin), (other, b * cos - a * sin)):
                        side, inside = divmod(place, half)
                        s.tile.at[slot * 2 + side, :, pl.ds(inside, form.piece)][...] = back.astype(dtype)
                    continue
                yield (a * cos - b * sin).astype(dtype), queries(column)
                a, b = stored(slot, column), stored(slot, other)  # loaded again to save registers
                yield (b * cos + a * sin).astype(dtype), queries(other)

        for i in range(_STAGES):
            pl.when(i < count)(functools.partial(ask, i))
        plgpu.barrier_wait(s.asked)

        def turn(i, carry):
            slot, buffer = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS)
            plgpu.barrier_wait(s.came.at[slot])

            @pl.when((i > 0) & (i + 1 < count))
            def _():
                plgpu.barrier_wait(s.free.at[1 - slot])
                ask(i + 1)

            shape = KEYS, form.wide
            scores = tiles.products(shape, terms(i, slot)) * form.scale
            if x.k_scale is not None:
                scores = scores * factors(i, shape)
            if form.rotated:
                plgpu.commit_smem()
            column = pl.multiple_of(part // form.layers * form.wide, 8)
            layer = buffer * form.layers + lax.rem(part, form.layers)
            target = s.scores.at[layer, :, pl.ds(column, form.wide)]
            tiles.send(scores, target, s.sent.at[buffer], form.parts, "part")
            return carry

        lax.fori_loop(0, count, turn, 0)
        for last in (2, 1):  # wait for released tiles that were not refilled too: every barrier must complete
            slot = lax.rem(jnp.maximum(count - last, 0), _STAGES)
            pl.when(count >= last)(functools.partial(plgpu.barrier_wait, s.free.at[slot]))

    def widen(i, slot) -> None:
        """Widen this warpgroup's half of a stage's rows, by their scales, to bfloat16 before rotary
        embedding."""
        scales = factors(i, (KEYS, form.piece))

        def turn_back(side: int) -> None:
            for column, other, cos, sin in turns(i):
                for one, two, sign in ((column, other, 1), (other, column, -1)):
                    if one // half == side:
                        rows = stored(slot, one) * cos + stored(slot, two) * (sin * sign)
                        target = s.widened.at[side, :, pl.ds(one % half, form.piece)]
                        target[...] = (rows * scales).astype(dtype)

        if form.rotated:
            for side in range(SUMMERS):
                pl.when(group == side)(functools.partial(turn_back, side))
            return
        for column in range(0, half, form.piece):
            some = pl.ds(column, form.piece)
            rows = tiles.load(s.tile.at[slot * 2 + group, :, some]).astype(jnp.float32)
            s.widened.at[group, :, some][...] = (rows * scales).astype(dtype)

    @pl.when(group < SUMMERS)
    def _():
        """Softmax over the scores of all heads, and the weighted sums of half of this CTA's columns."""
        # Slices of `COLUMNS` columns. The last may overlap the one before it; both have the same sums there.
        whole = half // COLUMNS * COLUMNS
        spans: list[Any] = [pl.ds(0, whole)] + ([pl.ds(half - COLUMNS, COLUMNS)] if whole < half else [])

        def turn(i, carry):
            top, total, mixed = carry
            slot, buffer, key = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS), (start + i) * KEYS
            plgpu.barrier_wait(s.came.at[slot])
            rows = s.tile.at[slot * 2 + group]
            if s.widened is not None:
                widen(i, slot)
                rows = s.widened.at[group]
            plgpu.barrier_wait(s.sent.at[buffer])  # by then a tile of wide rows has been rotated back
            scores = sum(tiles.load(s.scores.at[buffer * form.layers + n]) for n in range(form.layers))
            position = tiles.load(x.position.at[block])  # loaded in each turn, to save registers
            top, weights, decay = x.pages.weigh(tiles, scores, position, key, top)
            total = total * decay + jnp.sum(weights, axis=0)
            tiles.store_transposed(s.weights.at[group], weights)
            x.pages.clear_unseen(tiles, rows, block, key, form.piece)
            plgpu.commit_smem()
            mixed = tuple(
                tiles.add_matmul(sums * down(decay, sums.shape), rows.at[:, some], s.weights.at[group])
                for sums, some in zip(mixed, spans, strict=True)
            )
            if s.widened is not None:
                plgpu.commit_smem()  # no warp may widen the next rows while another still multiplies these
            plgpu.barrier_arrive(s.free.at[slot])
            return top, total, mixed

        top, total = (tiles.constant(value, (form.rows,)) for value in (MASKED, 0.0))
        sums = tuple(tiles.constant(0.0, (some.size, form.rows)) for some in spans)
        top, total, mixed = lax.fori_loop(0, count, turn, (top, total, sums))
        for sums, some in zip(mixed, spans, strict=True):
            for column in range(0, some.size, COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                s.out.at[group][...] = sums[column : column + COLUMNS]
                plgpu.commit_smem()
                target = pl.ds(part * form.columns + group * half + some.start + column, COLUMNS)
                plgpu.copy_smem_to_gmem(s.out.at[group], outs[2].at[block, split, target])

        @pl.when((part == 0) & (group == 0))
        def _():
            for i, value in enumerate((top, total)):
                s.stats.at[i][...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(s.stats.at[i], outs[i].at[block, split])

        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnums=(0, 2))  # lowered once for all layers
def launch(form: Form, inputs: Inputs, interpret: Any):
    """The softmax-weighted sums [b, E, rows] of whole rows."""
    parts, body = (inputs.q.shape[0], form.splits), functools.partial(kernel, form)
    how = {
        "grid": parts,
        "grid_names": ("block", "split"),
        "cluster": (form.parts,),
        "cluster_names": ("part",),
    }
    how |= {"num_threads": SUMMERS + 1, "thread_name": "group", "kernel_name": "k_cache_attention"}
    sizes, memory = (parts, form.rows, inputs.pool.shape[-1]), scratch(form, inputs.pool.dtype)
    return gpu_pages.launch(body, inputs, memory, *sizes, interpret=interpret, **how)
