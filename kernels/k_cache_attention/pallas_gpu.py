"""Decoding from a cache of keys alone on Hopper (Mosaic GPU, Warpgroup semantics): one pass for all heads.

Compiled for H100, never run on hardware: it is chosen by name only. What a CPU can interpret is everything
but the exchange of scores in a cluster, the matmuls on transposed tiles and the layouts in registers.

The sum of whole rows for all heads, O^T [E, N], is larger than the registers of a multiprocessor, so a
cluster of CTAs shares a block of queries: each owns a slice of the columns, which are some of the heads. One
warpgroup brings pages of its slice in, rotates them in registers, and sends the scores of its own heads to
all CTAs. Two others wait for the scores of all heads and add up the raw rows, half of the slice each.

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
from swiftkv_jax.kernels.gpu_tile import SMEM_BYTES, Tiles, down, plgpu, smem_bytes
from swiftkv_jax.kernels.k_cache_attention import reference
from swiftkv_jax.kernels.k_cache_attention.reference import Options
from swiftkv_jax.kernels.online import MASKED

_KEYS = 64  # of a page
_STAGES = 2
_BUFFERS = 3
_SUMMERS = 2  # warpgroups that add up rows
_LEAST = 8  # columns of the smallest matmul
_ROWS = 64  # of queries, of all heads together
_SLICE = 512  # columns of a CTA at most
_CTAS = 132


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is static in the kernel.

    parts: CTAs of a cluster, `columns` of a row each. own: query rows of a CTA; rows: of all. half: columns
    of half a group of heads, 0 without rotary embedding. splits: shares of a sequence's pages.
    """

    row: int
    parts: int
    columns: int
    own: int
    half: int
    splits: int
    scale: float
    tiles: Tiles

    @property
    def rows(self) -> int:
        return self.parts * self.own

    @property
    def wide(self) -> int:
        """Query rows of a CTA as its matmul has them."""
        return max(_LEAST, self.own)

    @property
    def layers(self) -> int:
        """CTAs whose scores share a tile of columns."""
        return self.wide // self.own


class _Inputs(NamedTuple):
    """In global memory: q [b, parts, wide, columns]; pool [R, P, Z, E]; position [b, rows]; pages; cos, sin
    [slots, Z, 64] of every position, or None without rotary embedding."""

    q: Any
    pool: Any
    position: Any
    pages: Any
    cos: Any
    sin: Any


class _Scratch(NamedTuple):
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


def _kernel(form: _Form, x: _Inputs, outs, s: _Scratch):
    block, split, part, group = (lax.axis_index(name) for name in ("block", "split", "part", "group"))
    at = _Share(block, split, part, *x.pages.share(block, split, form.splits))

    @pl.when(group == _SUMMERS)
    def _():
        _score(form, x, s, at)

    @pl.when(group < _SUMMERS)
    def _():
        _sum(form, x, outs, s, at, group)


def _score(form: _Form, x: _Inputs, s: _Scratch, at: _Share) -> None:
    """Bring the pages in, and send the scores of this CTA's heads to all."""
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

    def piece(slot, column: int):
        side, inside = divmod(column, half)
        return tiles.load(s.tile.at[slot * 2 + side, :, pl.ds(inside, COLUMNS)]).astype(jnp.float32)

    def terms(i, slot):
        """Pieces of the keys, turned to their positions, each with the queries' columns."""
        if not form.half:
            for column in range(0, form.columns, COLUMNS):
                yield piece(slot, column).astype(s.q.dtype), s.q.at[:, pl.ds(column, COLUMNS)]
            return
        cos, sin = (tiles.load(angle.at[at.start + i]) for angle in (x.cos, x.sin))
        for first in range(0, form.columns, 2 * form.half):
            for column in range(first, first + form.half, COLUMNS):
                other = column + form.half
                a, b = piece(slot, column), piece(slot, other)
                yield (a * cos - b * sin).astype(s.q.dtype), s.q.at[:, pl.ds(column, COLUMNS)]
                a, b = piece(slot, column), piece(slot, other)  # again: they need not stay in registers
                yield (b * cos + a * sin).astype(s.q.dtype), s.q.at[:, pl.ds(other, COLUMNS)]

    def turn(i, carry):
        slot, buffer = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS)
        plgpu.barrier_wait(s.came.at[slot])

        @pl.when((i > 0) & (i + 1 < at.count))
        def _():
            plgpu.barrier_wait(s.free.at[1 - slot])
            ask(i + 1)

        scores = tiles.products((_KEYS, form.wide), terms(i, slot)) * form.scale
        column = pl.multiple_of(at.part // form.layers * form.wide, _LEAST)
        layer = buffer * form.layers + lax.rem(at.part, form.layers)
        target = s.scores.at[layer, :, pl.ds(column, form.wide)]
        tiles.send(scores, target, s.sent.at[buffer], form.parts, "part")
        return carry

    lax.fori_loop(0, at.count, turn, 0)


def _sum(form: _Form, x: _Inputs, outs, s: _Scratch, at: _Share, group) -> None:
    """Softmax over the scores of all heads, and the weighted sums of half of this CTA's columns."""
    tiles, half = form.tiles, form.columns // 2

    def turn(i, carry):
        top, total, mixed = carry
        slot, buffer, key = lax.rem(i, _STAGES), lax.rem(i, _BUFFERS), (at.start + i) * _KEYS
        plgpu.barrier_wait(s.sent.at[buffer])
        scores = sum(tiles.load(s.scores.at[buffer * form.layers + n]) for n in range(form.layers))
        position = tiles.load(x.position.at[at.block])  # every turn: registers are what there is least of
        top, weights, decay = x.pages.weigh(tiles, scores, position, key, top)
        tiles.store_transposed(s.weights.at[group], weights)
        plgpu.barrier_wait(s.came.at[slot])
        rows = s.tile.at[slot * 2 + group]
        x.pages.clear_unseen(tiles, rows, at.block, key)
        plgpu.commit_smem()
        mixed = tiles.add_matmul(mixed * down(decay, mixed.shape), rows, s.weights.at[group])
        plgpu.barrier_arrive(s.free.at[slot])
        return top, total * decay + jnp.sum(weights, axis=0), mixed

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


def _cut(heads: int, queries: int, width: int, group: int, half: int) -> tuple[int, int, int] | None:
    """(CTAs of a cluster, columns of each, query rows of each), or None: whole groups, whole pieces."""
    for parts in (n for n in range(1, 9) if heads % n == 0):
        columns, real = heads // parts * width, heads // parts * queries
        whole = columns % (2 * COLUMNS) == 0 and heads // parts % group == 0 and half % COLUMNS == 0
        sizes = (
            n for n in (1, 2, 4, *range(_LEAST, _ROWS + 1, _LEAST)) if n >= real and n * parts % _LEAST == 0
        )
        own = next(sizes, None)
        if whole and columns <= _SLICE and own and own * parts <= _ROWS:
            return parts, columns, own
    return None


def _scratch(form: _Form, dtype) -> _Scratch:
    half, rows = form.columns // 2, form.rows
    return _Scratch(
        q=plgpu.SMEM((form.wide, form.columns), dtype),
        tile=plgpu.SMEM((_STAGES * 2, _KEYS, half), dtype),
        scores=plgpu.SMEM((_BUFFERS * form.layers, _KEYS, rows), jnp.float32),
        weights=plgpu.SMEM((_SUMMERS, rows, _KEYS), dtype),
        out=plgpu.SMEM((_SUMMERS, COLUMNS, rows), jnp.float32),
        stats=plgpu.SMEM((2, rows), jnp.float32),
        asked=plgpu.Barrier(),
        came=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        free=plgpu.Barrier(num_arrivals=_SUMMERS, num_barriers=_STAGES),
        sent=plgpu.Barrier(num_arrivals=form.parts, num_barriers=_BUFFERS),
    )


def _queries(q, position, form: _Form, group: int):
    """q [b, parts, wide, columns]: each query row of a CTA in its own head's columns, zero elsewhere; and the
    position [b, rows] of every query row."""
    blocks, queries, heads, width = q.shape
    local = heads // form.parts
    q = q.reshape(blocks, queries, form.parts, local, width)
    spread = jnp.einsum("bcpnh,nm->bpncmh", q, jnp.eye(local, dtype=q.dtype))
    spread = reference.to_rows(spread, group).reshape(blocks, form.parts, local * queries, -1)
    spare = form.own - local * queries
    spread = jnp.pad(spread, ((0, 0), (0, 0), (0, spare), (0, 0)))
    layer = jnp.arange(form.parts) % form.layers
    spread = jnp.einsum("bpne,pl->bplne", spread, jax.nn.one_hot(layer, form.layers, dtype=q.dtype))
    every = jnp.tile(position[:, None], (1, form.parts, local))
    every = jnp.pad(every, ((0, 0), (0, 0), (0, spare)), constant_values=-1)
    return spread.reshape(blocks, form.parts, form.wide, -1), every.reshape(blocks, -1).astype(jnp.int32)


def _angles(frequencies, slots: int) -> tuple[jax.Array, jax.Array]:
    """cos, sin [slots, Z, 64] of every position, as often as 64 columns of half a group of heads repeat."""
    wide = jnp.tile(frequencies.astype(jnp.float32), COLUMNS // frequencies.shape[0])
    angle = (jnp.arange(slots * _KEYS)[:, None] * wide).reshape(slots, _KEYS, COLUMNS)
    return jnp.cos(angle), jnp.sin(angle)


def k_cache_attention(
    q, k, w_kv, table, sequence, position, *, interpret: Any = False, **options
) -> jax.Array:
    """As `api.k_cache_attention`."""
    how = Options(**options)
    (blocks, queries, heads, width), slots = q.shape, table.shape[1]
    half = 0 if how.frequencies is None else how.group * width // 2
    cut = _cut(heads, queries, width, how.group, half)
    assert cut is not None  # `refuses` has looked
    parts, columns, own = cut
    splits = gpu_pages.splits_of(_CTAS, blocks * parts, slots)
    form = _Form(how.row, parts, columns, own, half, splits, how.scale, Tiles(bool(interpret)))
    spread, every = _queries(q, position, form, how.group)
    pages = gpu_pages.pages_of(position, table, sequence, how.window, _KEYS)
    angles = (None,) * 2 if how.frequencies is None else _angles(how.frequencies, slots)
    shapes = *((blocks, splits, form.rows),) * 2, (blocks, splits, k.shape[-1], form.rows)
    found = gpu_pages.launch(
        functools.partial(_kernel, form),
        _Inputs(spread, k, every, pages, *angles),
        _scratch(form, q.dtype),
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
        grid=(blocks, splits),
        grid_names=("block", "split"),
        cluster=(parts,),
        cluster_names=("part",),
        num_threads=_SUMMERS + 1,
        thread_name="group",
        kernel_name="k_cache_attention",
        interpret=interpret,
    )
    mixed = gpu_pages.merge(*found).reshape(blocks, -1, parts, own)[..., : heads // parts * queries]
    mixed = mixed.reshape(blocks, -1, heads, queries)
    out = jnp.einsum("benc,neu->bcnu", mixed, w_kv.astype(jnp.float32))
    return jnp.where(position[..., None, None] >= 0, out, 0).astype(q.dtype)


def refuses(q, k, w_kv, table, *_, frequencies=None, group=1, rotated=False, k_scale=None, **__) -> str:
    """What of a call is not supported here, and what is, or ""."""
    del w_kv, table
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16 or k_scale is not None:
        return f"{q.dtype} queries of {k.dtype} rows: both bfloat16"
    if rotated:
        return "rotated rows: keys stored before rotary embedding"
    if k.shape[2] != _KEYS:
        return f"a page of {k.shape[2]} tokens: {_KEYS}"
    _, queries, heads, width = q.shape
    if frequencies is not None and width not in (64, 128):
        return f"heads {width} wide with rotary embedding: 64 (in groups of 2), 128"
    cut = _cut(heads, queries, width, group, 0 if frequencies is None else group * width // 2)
    if cut is None:
        return (
            f"{queries} queries of {heads} heads {width} wide in groups of {group}: at most {_ROWS} query"
            f" rows; slices for 8 CTAs of at most {_SLICE} columns, multiples of {2 * COLUMNS} in whole"
            " groups"
        )
    form = _Form(0, *cut, half=0, splits=1, scale=1.0, tiles=Tiles())
    if (need := smem_bytes(_scratch(form, q.dtype))) > SMEM_BYTES:
        return f"{queries} queries a block, for {need} bytes of shared memory: at most {SMEM_BYTES}"
    return ""
