"""Decoding over paged keys and values on Hopper (Mosaic GPU, Warpgroup semantics): split-K, read in place.

On an H200 it reads bfloat16 rows at 81 to 102 % of the copy rate (docs/results.md); float8 rows, when their
scales did not come with the pages yet, at 30 %. It runs where the check on a machine chose it, or by name.

Keys lie along the tensor core's long side: S^T = K q^T and O^T = V^T P^T, so a few queries take 8 columns
instead of 64 rows. One CTA handles one kv head of one block of queries over a share of its pages, which TMA
brings into a ring of stages. XLA merges the shares' partial sums. 8-bit rows are widened on the chip, keys in
registers and values into shared memory. The scales of keys multiply scores. Weights are of scores plus the
logarithm of the values' scale, hence at most 1 whatever the scales, and their total is of weights / scale.

A tile is 64, 128 or 256 columns wide. A head of another width is read with some columns of its neighbours:
queries are zero there, and those rows of the sum are dropped.

Blocks with more queries than a CTA has room for are split; each piece reads its keys again, mostly from L2.
"""

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftkv_jax.kernels.common import gpu_pages
from swiftkv_jax.kernels.common.gpu_tile import SMEM_BYTES, Tiles, across, down, plgpu, smem_bytes
from swiftkv_jax.kernels.common.online import MASKED

_CTAS = 2 * 132  # two on each multiprocessor of a Hopper
_MOST_SCORES = {2: 4096, 1: 3072}  # bytes of a number: most keys x queries whose scores stay in registers
_MOST_WIDENED = 8192  # numbers of 8-bit rows that are widened in registers at a time
_MOST_WEIGHT = 2.0**14  # of a key with 8-bit values, so that float16 holds small ones too
_LEAST_SCALE = 1e-20  # of values: zeros have the scale 0
_MOST_SUMS = 8192  # a value's columns x queries whose sums stay in registers
_STORED = ("bfloat16", "int8", "float8_e4m3fn")
_WIDTHS = (64, 80, 96, 128, 256)  # of heads
_TILES = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class _Columns:
    """The layout of a row of `heads` heads of one width, and the tile in which one head is read."""

    width: int
    heads: int

    @property
    def tile(self) -> int:
        return next(wide for wide in _TILES if wide >= self.width)

    @property
    def last(self) -> int:
        """The last column that a tile may begin with."""
        return self.width * self.heads - self.tile

    def start(self, head):
        """The column that the tile of a head begins with."""
        return head * self.width if self.tile == self.width else jnp.minimum(head * self.width, self.last)

    def inside(self, head: int) -> int:
        """The column of its tile at which a head begins."""
        return max(0, head * self.width - self.last) if self.tile > self.width else 0


@dataclasses.dataclass(frozen=True)
class _Form:
    """Static parameters of the kernel. keys, values: columns of the pools; rows: queries of a kv head."""

    page: int
    keys: _Columns
    values: _Columns
    rows: int
    splits: int
    scale: float
    tiles: Tiles


# In global memory: q [b, K, rows, tile]; k, v [R, P, Z, K * H]; scales [R, P, K, Z], None of wide rows;
# position [b, rows]; pages.
_Inputs = namedtuple("_Inputs", "q k v k_scale v_scale position pages")


# q [rows, tile]; k, v [stages, Z, tile]; of 8-bit rows, else None: k_scale, v_scale [stages, Z] and wide
# [Z, tile]; weights [rows, Z]; barriers asked, k_came and v_came [stages].
_Scratch = namedtuple("_Scratch", "q k v k_scale v_scale wide weights asked k_came v_came")


def _kernel(form: _Form, x: _Inputs, outs, s: _Scratch):
    """The work of a CTA: some pages of one block, for one kv head."""
    block, head, split = (lax.axis_index(name) for name in ("block", "head", "split"))
    row, (start, count), tiles = x.pages.row[0], x.pages.share(block, split, form.splits), form.tiles
    stages = s.k.shape[0]

    def ask(i) -> None:
        """Start the copies of the i-th page."""
        slot, name = lax.rem(i, stages), x.pages.name(block, start + i)
        for pool, columns, tile, came in ((x.k, form.keys, s.k, s.k_came), (x.v, form.values, s.v, s.v_came)):
            source = pool.at[row, name, :, pl.ds(columns.start(head), columns.tile)]
            plgpu.copy_gmem_to_smem(source, tile.at[slot], came.at[slot])
        scaled = ((x.k_scale, s.k_scale, s.k_came), (x.v_scale, s.v_scale, s.v_came))
        for scales, stage, came in scaled if s.wide is not None else ():
            plgpu.copy_gmem_to_smem(scales.at[row, name, head], stage.at[slot], came.at[slot])

    def widened(tile, piece) -> jax.Array:
        """Some columns of a tile of 8-bit numbers."""
        return tiles.load(tile.at[:, piece]).astype(s.q.dtype)

    def pieces(columns: _Columns) -> list:
        each = min(columns.tile, _MOST_WIDENED // form.page)
        return [pl.ds(first, each) for first in range(0, columns.tile, each)]

    plgpu.copy_gmem_to_smem(x.q.at[block, head], s.q, s.asked)
    for i in range(stages - 1):
        pl.when(i < count)(functools.partial(ask, i))
    plgpu.barrier_wait(s.asked)

    def turn(i, carry):
        top, total, mixed = carry
        slot, key = lax.rem(i, stages), (start + i) * form.page
        plgpu.barrier_wait(s.k_came.at[slot])
        ahead = i + stages - 1
        pl.when(ahead < count)(functools.partial(ask, ahead))
        shape, tile = (form.page, form.rows), s.k.at[slot]
        if x.k_scale is None:
            scores = tiles.products(shape, [(tile, s.q)]) * form.scale
        else:
            parts = ((widened(tile, piece), s.q.at[:, piece]) for piece in pieces(form.keys))
            factor = tiles.load(s.k_scale.at[slot], rows=True) * form.scale
            plgpu.barrier_wait(s.v_came.at[slot])
            v_scale = jnp.maximum(tiles.load(s.v_scale.at[slot], rows=True), _LEAST_SCALE)
            scores = tiles.products(shape, parts) * across(factor, shape) + across(jnp.log(v_scale), shape)
        position = tiles.load(x.position.at[block])  # loaded in each turn, to save registers
        top, weights, decay = x.pages.weigh(tiles, scores, position, key, top)
        counted = weights
        if x.v_scale is not None:  # scales of unseen keys may be NaN
            weights = weights * _MOST_WEIGHT
            counted = jnp.where(weights > 0, weights * across(jnp.reciprocal(v_scale), shape), 0.0)
        total = total * decay + jnp.sum(counted, axis=0)
        tiles.store_transposed(s.weights, weights)
        values = s.v.at[slot] if s.wide is None else s.wide
        if s.wide is None:
            plgpu.barrier_wait(s.v_came.at[slot])
        else:
            for piece in pieces(form.values):
                s.wide.at[:, piece][...] = widened(s.v.at[slot], piece)
        x.pages.clear_unseen(tiles, values, block, key)
        plgpu.commit_smem()
        return top, total, tiles.add_matmul(mixed * down(decay, mixed.shape), values, s.weights)

    top, total = (tiles.constant(value, (form.rows,)) for value in (MASKED, 0.0))
    sums = top, total, tiles.constant(0.0, (form.values.tile, form.rows))
    for out, value in zip(outs, lax.fori_loop(0, count, turn, sums), strict=True):
        out.at[block, head, split][...] = value


def _computed(stored):
    """The dtype of matmuls on stored rows: Hopper converts float8 to float16 in one instruction."""
    return jnp.float16 if stored == jnp.float8_e4m3fn else jnp.bfloat16


def _scratch(form: _Form, stored) -> _Scratch:
    dtype, narrow = _computed(stored), jnp.dtype(stored).itemsize == 1
    stages = 2 if narrow and form.page * max(form.keys.tile, form.values.tile) > _MOST_WIDENED else 3
    scales = plgpu.SMEM((stages, form.page), jnp.float32) if narrow else None
    came = plgpu.Barrier(num_arrivals=1 + narrow, num_barriers=stages)
    return _Scratch(
        q=plgpu.SMEM((form.rows, form.keys.tile), dtype),
        k=plgpu.SMEM((stages, form.page, form.keys.tile), stored),
        v=plgpu.SMEM((stages, form.page, form.values.tile), stored),
        k_scale=scales,
        v_scale=scales,
        wide=plgpu.SMEM((form.page, form.values.tile), dtype) if narrow else None,
        weights=plgpu.SMEM((form.rows, form.page), dtype),
        asked=plgpu.Barrier(),
        k_came=came,
        v_came=came,
    )


def _rows(q, kv_heads: int, queries: int) -> int:
    """Rows of a kv head in a block of `queries`, padded to whole columns of a matmul."""
    return -(-queries * q.shape[2] // kv_heads // 8) * 8


def _columns(q, k, v) -> tuple[_Columns, _Columns]:
    """The columns of keys and of values."""
    heads = k.shape[-1] // q.shape[-1]
    return _Columns(q.shape[-1], heads), _Columns(v.shape[-1] // heads, heads)


def paged_attention(
    q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale, interpret: Any = False
):
    """As `api.paged_attention`."""
    whole, page = q.shape[:2], k.shape[2]
    q, sequence, position = gpu_pages.pieces(q, sequence, position, most_queries(q, k, v))
    blocks, queries, heads, _ = q.shape
    keys, values = _columns(q, k, v)
    kv_heads, each = keys.heads, heads // keys.heads
    rows, real = _rows(q, kv_heads, queries), each * queries
    form = _Form(page, keys, values, rows, 1, scale, Tiles(bool(interpret)))
    work, ctas = blocks * kv_heads, _CTAS
    if k_scale is not None:  # turns are longer than their copies: no more CTAs than run at a time
        ctas = 132 * min(3, SMEM_BYTES // smem_bytes(_scratch(form, k.dtype))) // work * work
    form = dataclasses.replace(form, splits=gpu_pages.splits_of(ctas, work, table.shape[1]))
    q = jnp.clip(q, -65504, 65504).astype(_computed(k.dtype))  # float16's range
    every = jnp.pad(jnp.tile(position, (1, each)), ((0, 0), (0, rows - real)), constant_values=-1)
    # [b, K, rows, tile]: queries of each kv head where its keys lie in their tile; zero elsewhere.
    grouped = q.reshape(blocks, queries, kv_heads, each, keys.width).transpose(2, 0, 3, 1, 4)
    grouped = jnp.pad(grouped.reshape(kv_heads, blocks, real, -1), ((0, 0), (0, 0), (0, rows - real), (0, 0)))
    starts = map(keys.inside, range(kv_heads))
    placed = [
        jnp.pad(one, ((0, 0), (0, 0), (start, keys.tile - keys.width - start)))
        for one, start in zip(grouped, starts, strict=True)
    ]
    pages = gpu_pages.pages_of(position, table, sequence, row, window, page)
    inputs = _Inputs(jnp.stack(placed, axis=1), k, v, k_scale, v_scale, every.astype(jnp.int32), pages)
    mixed = _launch(form, inputs, interpret)[..., :real]
    starts = map(values.inside, range(kv_heads))
    own = [mixed[:, head, start : start + values.width] for head, start in enumerate(starts)]
    mixed = jnp.stack(own, axis=1).reshape(blocks, kv_heads, values.width, each, queries)
    mixed = mixed.transpose(0, 4, 1, 3, 2).reshape(whole[0], -1, heads, values.width)
    return mixed[:, : whole[1]].astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(0, 2))  # lowered once for all layers
def _launch(form: _Form, inputs: _Inputs, interpret: Any):
    """The softmax-weighted sums [b, K, tile, rows]."""
    parts, kernel = (*inputs.q.shape[:2], form.splits), functools.partial(_kernel, form)
    how = {"grid_names": ("block", "head", "split"), "kernel_name": "paged_attention", "interpret": interpret}
    sizes, scratch = (parts, form.rows, form.values.tile), _scratch(form, inputs.k.dtype)
    return gpu_pages.launch(kernel, inputs, scratch, *sizes, grid=parts, **how)


def most_queries(q, k, v) -> int:
    """The most queries of a block that one CTA has room for; may be 0."""
    return next((n for n in range(q.shape[1], 0, -1) if not _too_many(q, k, v, n)), 0)


def _too_many(q, k, v, queries: int) -> str:
    """Why a CTA has no room for so many queries of a block, or ""."""
    (keys, values), page = _columns(q, k, v), k.shape[2]
    rows = _rows(q, keys.heads, queries)
    if rows > (most := min(_MOST_SCORES[k.dtype.itemsize] // page, _MOST_SUMS // values.tile)):
        return f"{q.shape[2] // keys.heads * queries} query heads of a kv head: at most {most}"
    form = _Form(page, keys, values, rows, splits=1, scale=1.0, tiles=Tiles())
    if (need := smem_bytes(_scratch(form, k.dtype))) > SMEM_BYTES:
        return f"{rows} query heads of a kv head, for {need} bytes of shared memory: at most {SMEM_BYTES}"
    return ""


def refuses(q, k, v, *_, k_scale=None, v_scale=None, **__) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    if q.dtype != jnp.bfloat16 or k.dtype.name not in _STORED or v.dtype != k.dtype:
        rows = f"{k.dtype} keys and {v.dtype} values"
        return f"{q.dtype} queries of {rows}: bfloat16 queries, both rows {' or '.join(_STORED)}"
    if {k.dtype.itemsize == 1} != {scale is not None for scale in (k_scale, v_scale)}:
        return f"{k.dtype} rows with these scales: 8-bit rows have two, bfloat16 rows none"
    (keys, values), page = _columns(q, k, v), k.shape[2]
    if any(columns.width not in _WIDTHS for columns in (keys, values)):
        return f"heads {keys.width} and {values.width} wide: {', '.join(map(str, _WIDTHS))}"
    if min(keys.last, values.last) < 0:
        return f"a single kv head {keys.width} and {values.width} wide: {', '.join(map(str, _TILES))}"
    if page not in (64, 128):
        return f"a page of {page} tokens: 64, 128"
    return _too_many(q, k, v, 1)
