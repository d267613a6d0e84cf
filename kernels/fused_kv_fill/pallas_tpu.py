"""The fused fill on TPU (Mosaic TPU): a blocked matmul whose epilogue writes whole pages.

Keys and values of the same columns are made in one grid step, so each tile of the stream serves both. The
sum of squares is taken from the same tiles, and 1 / rms is applied to the accumulator. Pages leave by DMA
from two stages: a step waits for the copies of the step before the last.
"""

import dataclasses
import functools
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.kernels.common import chips
from swiftkv_jax.kernels.common.pools import quantise
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools

_LANES = 128
_PoolsOf: Any = Pools  # trees of block specs, shapes or references look like those of arrays
_MakersOf: Any = Makers


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut.

    Attributes:
      tokens: of a step. pieces: of a row's columns. depth: columns of the stream in a step. cores.
    """

    tokens: int
    pieces: int
    depth: int
    cores: int


# x [T, D]; makers with [F, D, E] weights and [F, 1, E] biases; cos, sin [T, H / 2]; pools in HBM.
_Inputs = namedtuple("_Inputs", "x makers cos sin pools")


# sums k, v [tokens, columns]; squares [tokens, 128]; stages [2, tokens, columns] and [2, pages, heads, Z];
# left [2].
_Scratch = namedtuple("_Scratch", "k v squares stage left")


# Static parameters of the kernel; `heads` are those of a piece.
_Form = namedtuple("_Form", "blocks page heads eps tiles depths columns width")


def _kernel(form: _Form, s, x: _Inputs, out, scratch: _Scratch):
    names, live, rows = s
    core, column, tile, depth = (pl.program_id(i) for i in range(4))
    here = column * form.tiles + tile
    pages = form.blocks.tokens // form.page
    exact = "highest" if x.x.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32, precision=exact)

    @pl.when(depth == 0)
    def _():
        scratch.k[...] = jnp.zeros_like(scratch.k)
        scratch.v[...] = jnp.zeros_like(scratch.v)
        scratch.squares[...] = jnp.zeros_like(scratch.squares)

    each = (names[tile * pages + i] < out.k.shape[1] for i in range(pages))
    somewhere = functools.reduce(jnp.logical_or, each)

    @pl.when(somewhere)  # a tile without pages to write costs only its copies
    def _():
        stream = x.x[...]
        scratch.k[...] += dot(stream, x.makers.w_k[0])
        scratch.v[...] += dot(stream, x.makers.w_v[0])
        wide = stream.astype(jnp.float32)
        scratch.squares[...] += jnp.sum(wide * wide, axis=1, keepdims=True)

    def copies(step, slot, act):
        """Act on the copies of the pages that `step` of this core made."""
        block, at = core * form.columns + step // form.tiles, jax.lax.rem(step, form.tiles)
        row, piece = rows[block // form.blocks.pieces], jax.lax.rem(block, form.blocks.pieces)

        def page(i, carry):
            name = names[at * pages + i]

            @pl.when(name < out.k.shape[1])
            def _():
                start = pl.ds(pl.multiple_of(i * form.page, form.page), form.page)
                for source, pool in ((scratch.stage.k, out.k), (scratch.stage.v, out.v)):
                    size = source.shape[-1]
                    target = pool.at[row, name]
                    if form.blocks.pieces > 1:
                        target = target.at[:, pl.ds(pl.multiple_of(piece * size, _LANES), size)]
                    act(pltpu.make_async_copy(source.at[slot, start], target, scratch.left.at[slot]))
                if out.k_scale is not None:
                    scales = ((scratch.stage.k_scale, out.k_scale), (scratch.stage.v_scale, out.v_scale))
                    for source, pool in scales:
                        target = pool.at[row, name]
                        if form.blocks.pieces > 1:
                            target = target.at[pl.ds(pl.multiple_of(piece * form.heads, 8), form.heads)]
                        act(pltpu.make_async_copy(source.at[slot, i], target, scratch.left.at[slot]))

            return carry

        jax.lax.fori_loop(0, pages, page, 0)

    def finish(sums, bias, gain, angles, inverse, alive, rows, stage, scales, slot, i):
        """Finish one page of keys or of values into its stage."""
        width, factors = sums.shape[-1] // form.heads, []
        for head in range(form.heads):
            columns = slice(head * width, (head + 1) * width)
            y = sums[rows, columns] * inverse
            if bias is not None:
                y = y + bias[0, :, columns].astype(jnp.float32)
            if gain is not None:
                y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=1, keepdims=True) + form.eps)
                y = y * gain[0].astype(jnp.float32)
            if angles is not None:
                (cos, sin), half = angles, width // 2
                a, b = y[:, :half], y[:, half:]
                y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
            y = jnp.where(alive, y, 0.0)
            if scales is not None:
                y, factor = quantise(y, stage.dtype)
                factors.append(factor.reshape(-1, 1))
            stage[slot, rows, columns] = y.astype(stage.dtype)
        if scales is not None:
            scales[slot, i] = jnp.concatenate(factors, axis=1).T

    @pl.when(depth == form.depths - 1)
    def _():
        slot = jax.lax.rem(here, 2)

        @pl.when(here >= 2)
        def _():
            copies(here - 2, slot, lambda copy: copy.wait())

        def page(i, carry):
            rows = pl.ds(pl.multiple_of(i * form.page, form.page), form.page)
            mean = scratch.squares[rows, :][:, :1] / form.width
            inverse = jax.lax.rsqrt(mean + form.eps)
            token = jax.lax.broadcasted_iota(jnp.int32, (form.page, 1), 0)
            alive = token < live[tile * pages + i]
            angles = (x.cos[rows, :], x.sin[rows, :])
            stage, makers = scratch.stage, x.makers
            put = functools.partial(finish, inverse=inverse, alive=alive, rows=rows, slot=slot, i=i)
            put(scratch.k, makers.b_k, makers.k_norm, angles, stage=stage.k, scales=stage.k_scale)
            put(scratch.v, makers.b_v, None, None, stage=stage.v, scales=stage.v_scale)
            return carry

        @pl.when(somewhere)
        def _():
            jax.lax.fori_loop(0, pages, page, 0)

        copies(here, slot, lambda copy: copy.start())

        @pl.when(here == form.columns * form.tiles - 1)
        def _():
            if form.columns * form.tiles > 1:
                copies(here - 1, 1 - slot, lambda copy: copy.wait())
            copies(here, slot, lambda copy: copy.wait())


def _vmem_bytes(blocks: Blocks, x, pools: Pools) -> int:
    """VMEM that a grid step takes: operands twice, sums, stages, and sums once more for temporaries."""
    columns = (pools.k.shape[-1] + pools.v.shape[-1]) // blocks.pieces
    operands = 2 * blocks.depth * (blocks.tokens + columns) * x.dtype.itemsize
    angles = 2 * 2 * 4 * _LANES  # cos and sin of a token, whole lanes of them, twice
    return operands + blocks.tokens * (angles + columns * (8 + 2 * pools.k.dtype.itemsize) + 512)


def choose(x, makers: Makers, pools: Pools, heads: int) -> Blocks | None:
    """The cut that fits VMEM and reads the fewest bytes: the stream is read once for each block of columns,
    and weights once, or once for each tile."""
    (tokens, width), filled = x.shape, makers.w_k.shape[0]
    weights = width * filled * (pools.k.shape[-1] + pools.v.shape[-1])

    def moved(blocks: Blocks) -> tuple[int, int, int]:
        again = 1 if blocks.depth == width else -(-tokens // blocks.tokens)
        return filled * blocks.pieces * tokens * width + again * weights, -blocks.tokens, -blocks.depth

    fits = (b for b in _cuts(x, filled, pools, heads) if _vmem_bytes(b, x, pools) <= _vmem_limit())
    return min(fits, key=moved, default=None)


def _vmem_limit() -> int:
    return int(0.85 * chips.current().vmem_limit)


def _cuts(x, filled: int, pools: Pools, heads: int) -> Iterator[Blocks]:
    """Every cut into whole pages, whole lanes and whole tiles of scales, whether it fits or not."""
    (tokens, width), page, cores = x.shape, pools.k.shape[2], chips.current().cores
    tile = 8 if pools.k.dtype.itemsize == 1 else 1
    for pieces in (p for p in range(1, heads + 1) if heads % p == 0):
        lanes = all(pool.shape[-1] // pieces % _LANES == 0 for pool in (pools.k, pools.v))
        if pieces > 1 and not (lanes and heads // pieces % tile == 0):
            continue
        for size in sorted({page * max(1, min(most, tokens) // page) for most in (128, 256, 512)}):
            for depth in (d for d in (width, 4096, 2048, 1024, 512) if width % d == 0):
                yield Blocks(size, pieces, depth, cores if filled * pieces % cores == 0 else 1)


def fused_kv_fill(
    x, makers: Makers, cos, sin, pools: Pools, names, live, *, rows, eps, blocks=None, interpret: Any = False
) -> Pools:
    """As `api.fused_kv_fill`, cut into `blocks`; by default the best cut that fits the chip."""
    (tokens, width), page = x.shape, pools.k.shape[2]
    heads = pools.k.shape[-1] // (2 * cos.shape[-1])
    blocks = blocks or choose(x, makers, pools, heads)
    assert blocks is not None  # `refuses` has looked
    filled, pieces = len(rows), blocks.pieces
    tiles, columns = -(-tokens // blocks.tokens), filled * pieces // blocks.cores
    depths = width // blocks.depth
    form = _Form(blocks, page, heads // pieces, eps, tiles, depths, columns, width)
    spare = tiles * blocks.tokens // page - names.shape[0]
    scalars = (
        jnp.pad(names.astype(jnp.int32), (0, spare), constant_values=pools.k.shape[1]),
        jnp.pad(live.astype(jnp.int32), (0, spare)),
        jnp.array(rows, jnp.int32),
    )

    def block(array, split: int, depth: int):
        """A block of [F, D, E], or of [F, 1, E]: of all of a row's columns, or one of `split` pieces."""

        def place(c, n, t, k, *_):
            column = c * columns + n
            return column // pieces, k if depth > 1 else 0, column % split

        return None if array is None else pl.BlockSpec((1, depth, array.shape[-1] // split), place)

    flat = Makers(*makers[:2], *(None if a is None else a[:, None] for a in makers[2:]))
    cuts = (pieces, blocks.depth), (pieces, blocks.depth), (pieces, 1), (pieces, 1), (1, 1)
    angle = pl.BlockSpec((blocks.tokens, cos.shape[-1]), lambda c, n, t, k, *_: (t, 0))
    hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools)
    inputs = _Inputs(x, flat, cos.astype(jnp.float32), sin.astype(jnp.float32), pools)
    stream = pl.BlockSpec((blocks.tokens, blocks.depth), lambda c, n, t, k, *_: (t, k))
    made_by = _MakersOf(*(block(array, *cut) for array, cut in zip(makers, cuts, strict=True)))
    specs = _Inputs(stream, made_by, angle, angle, hbm)
    sizes = [(blocks.tokens, pool.shape[-1] // pieces) for pool in (pools.k, pools.v)]
    stages = [pltpu.VMEM((2, *size), pools.k.dtype) for size in sizes]
    factors = pltpu.VMEM((2, blocks.tokens // page, form.heads, page), jnp.float32)
    scratch = _Scratch(
        *(pltpu.VMEM(size, jnp.float32) for size in (*sizes, (blocks.tokens, _LANES))),
        stage=_PoolsOf(*stages, *(None if pools.k_scale is None else factors,) * 2),
        left=pltpu.SemaphoreType.DMA((2,)),
    )
    before = len(jax.tree.leaves((scalars, inputs))) - len(jax.tree.leaves(pools))
    flops = 2 * tokens * width * filled * (pools.k.shape[-1] + pools.v.shape[-1])
    return pl.pallas_call(
        lambda *refs: _kernel(form, refs[:3], refs[3], _PoolsOf(*refs[4:8]), _Scratch(*refs[8])),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks.cores, columns, tiles, form.depths),
            in_specs=[specs],
            out_specs=hbm,
            scratch_shapes=[tuple(scratch)],
        ),
        out_shape=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), pools),
        input_output_aliases={before + i: i for i in range(len(jax.tree.leaves(pools)))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=chips.current().vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(flops, 0, filled * pieces * x.nbytes),
        interpret=interpret,
        name="fused_kv_fill",
    )(*scalars, inputs)


def refuses(x, makers: Makers, cos, sin, pools: Pools, *_, **__) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    if x.dtype not in (jnp.bfloat16, jnp.float32) or makers.w_k.dtype != x.dtype:
        return f"a {x.dtype} stream and {makers.w_k.dtype} weights: both bfloat16 or both float32"
    page, tile = pools.k.shape[2], 32 // pools.k.dtype.itemsize
    if pools.k.dtype != pools.v.dtype:
        return f"{pools.k.dtype} keys and {pools.v.dtype} values: both of one dtype"
    if pools.k.dtype == jnp.float16 or page % tile:
        return f"a page of {page} tokens of {pools.k.dtype}: a multiple of {tile}, not of float16"
    if pools.k_scale is not None and page % _LANES:
        return f"a page of {page} tokens with scales: a multiple of {_LANES}"
    heads = pools.k.shape[-1] // (2 * cos.shape[-1])
    if choose(x, makers, pools, heads) is None:
        need = min(_vmem_bytes(b, x, pools) for b in _cuts(x, makers.w_k.shape[0], pools, heads))
        widths = f"rows {pools.k.shape[-1]} and {pools.v.shape[-1]} wide"
        return f"{widths}, for {need} bytes of VMEM in the smallest blocks: at most {_vmem_limit()}"
    return ""
