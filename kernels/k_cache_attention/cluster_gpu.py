"""The kernel of attention without values on Hopper: softmax and weighted sums of whole rows, by a cluster.

The sum of whole rows for all heads, O^T [E, N], is larger than the registers of a multiprocessor, so a
cluster of CTAs shares a block of queries: each owns a slice of the columns. One warpgroup brings pages of its
slice in, makes keys of them in registers, and sends the scores of its columns to all CTAs. Two others wait
for the scores of all heads and add up the raw rows, half of the slice each.

Keys that are stored after rotary embedding are turned back in shared memory by the first warpgroup, once it
has their scores.

A buffer of scores may be written again once every CTA has read it, and of three the oldest has been: when a
CTA sends the scores of page i, its own sums are done with page i - 2, so every CTA had sent the scores of
that page, and none does so before its sums are done with page i - 3.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftkv_jax.kernels import gpu_pages
from swiftkv_jax.kernels.gpu_pages import COLUMNS
from swiftkv_jax.kernels.gpu_tile import Tiles, down, plgpu
from swiftkv_jax.kernels.online import MASKED

KEYS = 64  # of a page
SUMMERS = 2  # warpgroups that add up rows
_STAGES = 2
_BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Form:
    """What is static in the kernel.

    parts: CTAs of a cluster, `columns` of a row each. rows: of queries, of all heads; wide: of those, what a
    CTA scores. layers: CTAs whose scores add up. half: columns of half a group of heads, 0 without rotary
    embedding; rotated: rows are stored after it. splits: shares of a sequence's pages.
    """

    row: int
    parts: int
    columns: int
    rows: int
    wide: int
    layers: int
    half: int
    rotated: bool
    splits: int
    scale: float
    tiles: Tiles


class Inputs(NamedTuple):
    """In global memory: q [b, parts, wide, columns]; pool [R, P, Z, E]; position [b, rows]; pages; cos, sin
    [slots, Z, period] of every position, or None without rotary embedding."""

    q: Any
    pool: Any
    position: Any
    pages: Any
    cos: Any
    sin: Any


class Scratch(NamedTuple):
    """q [wide, columns]; tile [stages * 2, Z, columns / 2]; scores [buffers * layers, Z, rows]; weights
    [2, rows, Z]; out [2, 64, rows]; stats [2, rows]; barriers asked, came and free [stages], sent
    [buffers]."""

    q: Any
    tile: Any
    scores: Any
    weights: Any
    out: Any
    stats: Any
    asked: Any
    came: Any
    free: Any
    sent: Any


class _Share(NamedTuple):
    """The pages of a cluster: `count` of block `block` from `start` on; this CTA's part of the columns."""

    block: Any
    split: Any
    part: Any
    start: Any
    count: Any


def scratch(form: Form, dtype) -> Scratch:
    """For queries and rows of `dtype`."""
    half = form.columns // 2
    return Scratch(
        q=plgpu.SMEM((form.wide, form.columns), dtype),
        tile=plgpu.SMEM((_STAGES * 2, KEYS, half), dtype),
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
    at = _Share(block, split, part, *x.pages.share(block, split, form.splits))

    @pl.when(group == SUMMERS)
    def _():
        _score(form, x, s, at)

    @pl.when(group < SUMMERS)
    def _():
        _sum(form, x, outs, s, at, group)


def _score(form: Form, x: Inputs, s: Scratch, at: _Share) -> None:
    """Bring the pages in, and send the scores of this CTA's columns to all."""
    tiles, half = form.tiles, form.columns // 2
    plgpu.copy_gmem_to_smem(x.q.at[at.block, at.part], s.q, s.asked)

    def ask(i):
        slot, name = lax.rem(i, _STAGES), x.pages.name(at.block, at.start + i)
        for side in range(2):
            columns = pl.ds(at.part * form.columns + side * half, half)
            source = x.pool.at[form.row, name, :, columns]
            plgpu.copy_gmem_to_smem(source, s.tile.at[slot * 2 + side], s.came.at[slot])

    for i in range(_STAGES):
        pl.when(i < at.count)(functools.partial(ask, i))
    plgpu.barrier_wait(s.asked)

    def turn(i, carry):
        slot, buffer = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS)
        plgpu.barrier_wait(s.came.at[slot])

        @pl.when((i > 0) & (i + 1 < at.count))
        def _():
            plgpu.barrier_wait(s.free.at[1 - slot])
            ask(i + 1)

        scores = tiles.products((KEYS, form.wide), _terms(form, x, s, at, i, slot)) * form.scale
        if form.rotated:
            plgpu.commit_smem()
        column = pl.multiple_of(at.part // form.layers * form.wide, 8)
        layer = buffer * form.layers + lax.rem(at.part, form.layers)
        target = s.scores.at[layer, :, pl.ds(column, form.wide)]
        tiles.send(scores, target, s.sent.at[buffer], form.parts, "part")
        return carry

    lax.fori_loop(0, at.count, turn, 0)
    for last in (
        2,
        1,
    ):  # tiles given back that nothing was brought into: a barrier is seen through to its end
        slot = lax.rem(jnp.maximum(at.count - last, 0), _STAGES)
        pl.when(at.count >= last)(functools.partial(plgpu.barrier_wait, s.free.at[slot]))


def _terms(form: Form, x: Inputs, s: Scratch, at: _Share, i, slot):
    """Pieces of the keys, turned to their positions, each with the queries' columns; the rows that the sum
    takes are left in the tile where they are others."""
    tiles, half, dtype = form.tiles, form.columns // 2, s.q.dtype

    def piece(column: int):
        side, inside = divmod(column, half)
        return tiles.load(s.tile.at[slot * 2 + side, :, pl.ds(inside, COLUMNS)]).astype(jnp.float32)

    def keep(column: int, rows) -> None:
        side, inside = divmod(column, half)
        s.tile.at[slot * 2 + side, :, pl.ds(inside, COLUMNS)][...] = rows.astype(dtype)

    def queries(column: int):
        return s.q.at[:, pl.ds(column, COLUMNS)]

    if not form.half:
        for column in range(0, form.columns, COLUMNS):
            yield piece(column).astype(dtype), queries(column)
        return
    angles = _angles(form, x, at, i)
    for first in range(0, form.columns, 2 * form.half):
        for column in range(first, first + form.half, COLUMNS):
            other, (cos, sin) = column + form.half, angles(column - first)
            a, b = piece(column), piece(other)
            if form.rotated:
                yield a.astype(dtype), queries(column)
                yield b.astype(dtype), queries(other)
                keep(column, a * cos + b * sin)
                keep(other, b * cos - a * sin)
                continue
            yield (a * cos - b * sin).astype(dtype), queries(column)
            a, b = piece(column), piece(other)  # again: they need not stay in registers
            yield (b * cos + a * sin).astype(dtype), queries(other)


def _angles(form: Form, x: Inputs, at: _Share, i):
    """From a column of half a group to cos and sin of the 64 from it on, for the i-th page of a share."""
    period = x.cos.shape[-1]

    def load(start: int):
        some = pl.ds(start, COLUMNS)
        return tuple(form.tiles.load(angle.at[at.start + i, :, some]) for angle in (x.cos, x.sin))

    if period > COLUMNS:
        return lambda column: load(column % period)
    once = load(0)
    return lambda column: once


def _sum(form: Form, x: Inputs, outs, s: Scratch, at: _Share, group) -> None:
    """Softmax over the scores of all heads, and the weighted sums of half of this CTA's columns."""
    tiles, half = form.tiles, form.columns // 2

    def turn(i, carry):
        top, total, mixed = carry
        slot, buffer, key = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS), (at.start + i) * KEYS
        plgpu.barrier_wait(s.sent.at[buffer])  # after which the tile is turned back
        scores = sum(tiles.load(s.scores.at[buffer * form.layers + n]) for n in range(form.layers))
        position = tiles.load(x.position.at[at.block])  # every turn: registers are what there is least of
        top, weights, decay = x.pages.weigh(tiles, scores, position, key, top)
        total = total * decay + jnp.sum(weights, axis=0)
        tiles.store_transposed(s.weights.at[group], weights)
        plgpu.barrier_wait(s.came.at[slot])
        rows = s.tile.at[slot * 2 + group]
        x.pages.clear_unseen(tiles, rows, at.block, key)
        plgpu.commit_smem()
        mixed = tiles.add_matmul(mixed * down(decay, mixed.shape), rows, s.weights.at[group])
        plgpu.barrier_arrive(s.free.at[slot])
        return top, total, mixed

    carry = (
        tiles.constant(MASKED, (form.rows,)),
        tiles.constant(0.0, (form.rows,)),
        tiles.constant(0.0, (half, form.rows)),
    )
    top, total, mixed = lax.fori_loop(0, at.count, turn, carry)
    for column in range(0, half, COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        s.out.at[group][...] = mixed[column : column + COLUMNS]
        plgpu.commit_smem()
        target = pl.ds(at.part * form.columns + group * half + column, COLUMNS)
        plgpu.copy_smem_to_gmem(s.out.at[group], outs[2].at[at.block, at.split, target])

    @pl.when((at.part == 0) & (group == 0))
    def _():
        for i, value in enumerate((top, total)):
            s.stats.at[i][...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s.stats.at[i], outs[i].at[at.block, at.split])

    plgpu.wait_smem_to_gmem(0)


def launch(form: Form, inputs: Inputs, interpret: Any):
    """The softmax-weighted sums [b, E, rows] of whole rows."""
    blocks, width = inputs.q.shape[0], inputs.pool.shape[-1]
    shapes = *((blocks, form.splits, form.rows),) * 2, (blocks, form.splits, width, form.rows)
    found = gpu_pages.launch(
        functools.partial(kernel, form),
        inputs,
        scratch(form, inputs.q.dtype),
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=(blocks, form.splits),
        grid_names=("block", "split"),
        cluster=(form.parts,),
        cluster_names=("part",),
        num_threads=SUMMERS + 1,
        thread_name="group",
        kernel_name="k_cache_attention",
        interpret=interpret,
    )
    return gpu_pages.merge(*found)
