"""The fused fill on Hopper (Mosaic GPU, Warpgroup semantics): a blocked matmul whose epilogue writes pages.

A CTA makes some heads of one row for 128 tokens. One warpgroup brings in tiles of the stream and of the
weights by TMA, and two multiply them, 64 tokens each. Their results are scaled by 1 / rms in registers,
normed, rotated, rounded, and stored in place by one TMA store a page.

Keys and values have a launch each, and 1 / rms comes from a small reduction by XLA, so the stream is read
three times. One launch that read it once, and summed the squares itself, was 3 % slower on an H200.
"""

import dataclasses
import functools
import math
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.gpu_tile import SMEM_BYTES, Tiles, across, down, plgpu, smem_bytes
from swiftkv_jax.kernels.common.pools import largest
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools

_TOKENS = 64  # of a warpgroup
_GROUPS = 2  # warpgroups that multiply
_DEPTH = 64  # columns of the stream in a step
_COLUMNS = 256  # of a block at most: 128 accumulators a thread
_STAGES = 4
_NEAR = 16  # tiles of tokens scheduled together over all columns, for reuse of both in the L2 cache
_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class _Form:
    """Static parameters of the kernel.

    heads: of a block, each `width` wide. blocks: of a row's columns. steps: of the depth. near: tiles.
    """

    page: int
    heads: int
    width: int
    blocks: int
    steps: int
    stages: int
    near: int
    eps: float
    tiles: Tiles

    @property
    def columns(self) -> int:
        return self.heads * self.width


# Inputs for keys or for values, in global memory: w [F, D, E]; bias [F, E]; gain [F, H]; cos, sin [T, H / 2];
# pool [R, P, Z, E]; scales [R, P, K, Z]. Missing ones are None.
_Side = namedtuple("_Side", "w bias gain cos sin pool scales")
# In global memory: x [T, D]; inverse [T], 1 / rms; alive [T]; names [T / Z]; rows [F]; and a `_Side`.
_Inputs = namedtuple("_Inputs", "x inverse alive names rows side")
# x [stages * groups, tokens, depth]; w [stages, depth, columns]; out [groups, tokens, H]; scales [groups,
# tokens]; full, free [stages].
_Scratch = namedtuple("_Scratch", "x w out scales full free")


def _kernel(form: _Form, x: _Inputs, s: _Scratch):
    """The work of a warpgroup: 64 tokens of the stream, a row of the makers, a block of its columns."""
    far, column, near, group = (lax.axis_index(name) for name in ("far", "column", "near", "group"))
    tile = (far * form.near + near) * _GROUPS
    row, block, pages = column // form.blocks, lax.rem(column, form.blocks), x.side.pool.shape[1]
    first, last = tile * _TOKENS, x.names.shape[0] - 1
    some = first < x.x.shape[0]
    starts = range(0, _GROUPS * _TOKENS, min(form.page, _TOKENS))
    names = (x.names[jnp.minimum((first + start) // form.page, last)] for start in starts)
    some &= functools.reduce(jnp.logical_or, (name < pages for name in names))  # some page must be written

    @pl.when(some & (group == _GROUPS))
    def _():
        """Keep the ring of stages full."""
        form.tiles.keep_registers(40, "decrease")

        def turn(k, carry):
            slot, deep = lax.rem(k, form.stages), pl.ds(k * _DEPTH, _DEPTH)
            pl.when(k >= form.stages)(lambda: plgpu.barrier_wait(s.free.at[slot]))
            for other in range(_GROUPS):
                tokens = pl.ds((tile + other) * _TOKENS, _TOKENS)
                plgpu.copy_gmem_to_smem(x.x.at[tokens, deep], s.x.at[slot * _GROUPS + other], s.full.at[slot])
            columns = pl.ds(block * form.columns, form.columns)
            plgpu.copy_gmem_to_smem(x.side.w.at[row, deep, columns], s.w.at[slot], s.full.at[slot])
            return carry

        lax.fori_loop(0, form.steps, turn, 0)

    def multiply(sums):
        """Add the products of all stages; each stage is released once the next multiplication has started.
        Returns 1 / rms [tokens]."""

        def turn(k, carry):
            slot = lax.rem(k, form.stages)
            plgpu.barrier_wait(s.full.at[slot])
            plgpu.wgmma(sums, s.x.at[slot * _GROUPS + group], s.w.at[slot])
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(s.free.at[lax.rem(k - 1, form.stages)]))
            return carry

        lax.fori_loop(0, form.steps, turn, 0)
        plgpu.wgmma_wait(0)
        return form.tiles.load(x.inverse.at[pl.ds((tile + group) * _TOKENS, _TOKENS)], rows=True)

    @pl.when(some & (group < _GROUPS))
    def _():
        form.tiles.keep_registers(232, "increase")
        first = (tile + group) * _TOKENS
        sums, inverse = form.tiles.accumulate((_TOKENS, form.columns), multiply)
        for head in range(form.heads):
            _finish(form, x, s, (group, first, row, block), sums, inverse, head)
        plgpu.wait_smem_to_gmem(0)


def _finish(form: _Form, x: _Inputs, s: _Scratch, place: tuple, sums, inverse, head: int) -> None:
    """Finish one head of 64 tokens, from the sums in registers to its pages, as two halves of its width."""
    (group, first, made, block), tiles, side, half = place, form.tiles, x.side, form.width // 2
    shape, tokens = (_TOKENS, half), pl.ds(first, _TOKENS)
    column = (block * form.heads + head) * form.width
    inverse = across(inverse, shape)
    starts = (head * form.width, head * form.width + half)
    parts = [sums[:, start : start + half] * inverse for start in starts]
    if side.bias is not None:
        biases = (side.bias.at[made, pl.ds(column + i * half, half)] for i in range(2))
        parts = [y + down(tiles.load(bias), shape) for y, bias in zip(parts, biases, strict=True)]
    if side.gain is not None:
        squares = jnp.sum(parts[0] * parts[0], axis=1) + jnp.sum(parts[1] * parts[1], axis=1)
        inverse = across(lax.rsqrt(squares / form.width + form.eps), shape)
        gains = (side.gain.at[made, pl.ds(i * half, half)] for i in range(2))
        parts = [y * inverse * down(tiles.load(gain), shape) for y, gain in zip(parts, gains, strict=True)]
    if side.cos is not None:
        (a, b), cos, sin = parts, tiles.load(side.cos.at[tokens]), tiles.load(side.sin.at[tokens])
        parts = [a * cos - b * sin, b * cos + a * sin]
    alive = across(tiles.load(x.alive.at[tokens], rows=True), shape) > 0  # dead tokens may be NaN
    parts = [jnp.where(alive, y, 0.0) for y in parts]
    if head:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous head has left the stage
    if side.scales is not None:
        top = jnp.maximum(*(jnp.max(jnp.abs(y), axis=1) for y in parts))
        scale = top / largest(side.pool.dtype)
        factor = across(jnp.where(scale > 0, 1 / scale, 0.0), shape)
        parts = [y * factor for y in parts]
        parts = [jnp.round(y) for y in parts] if side.pool.dtype == jnp.int8 else parts
        s.scales.at[group][...] = scale
    for i, y in enumerate(parts):
        tiles.store(s.out.at[group, :, pl.ds(i * half, half)], y.astype(side.pool.dtype))
    plgpu.commit_smem()
    each = min(form.page, _TOKENS)
    for i in range(_TOKENS // each):
        page = first + i * each
        name, inside = x.names[page // form.page], pl.ds(lax.rem(page, form.page), each)

        @pl.when(name < side.pool.shape[1])
        def _(i=i, name=name, inside=inside):
            row, here = x.rows[made], pl.ds(i * each, each)
            target = side.pool.at[row, name, inside, pl.ds(column, form.width)]
            plgpu.copy_smem_to_gmem(s.out.at[group, here], target)
            if side.scales is not None:
                target = side.scales.at[row, name, block * form.heads + head, inside]
                plgpu.copy_smem_to_gmem(s.scales.at[group, here], target)


def _scratch(stages: int, heads: int, width: int, dtype) -> _Scratch:
    """Scratch memory for a block of `heads` heads, each `width` wide, of a pool of `dtype`."""
    scaled = jnp.dtype(dtype).itemsize == 1
    return _Scratch(
        x=plgpu.SMEM((stages * _GROUPS, _TOKENS, _DEPTH), jnp.bfloat16),
        w=plgpu.SMEM((stages, _DEPTH, heads * width), jnp.bfloat16),
        out=plgpu.SMEM((_GROUPS, _TOKENS, width), dtype),
        scales=plgpu.SMEM((_GROUPS, _TOKENS), jnp.float32) if scaled else None,
        full=plgpu.Barrier(num_arrivals=_GROUPS + 1, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=stages),
    )


def _block(heads: int, width: int) -> int:
    """Heads of a block."""
    return dispatch.divisor(heads, max(1, _COLUMNS // width))


def _fill(inputs: _Inputs, heads: int, eps: float, interpret: Any) -> tuple:
    """The pool and scales of `inputs`, with all its rows written."""
    x, side = inputs.x, inputs.side
    filled, _, row_width = side.w.shape
    width = row_width // heads
    some, tiles = _block(heads, width), -(-x.shape[0] // (_GROUPS * _TOKENS))
    rings = (_scratch(n, some, width, side.pool.dtype) for n in range(_STAGES, 1, -1))
    scratch = next(ring for ring in rings if smem_bytes(ring) <= SMEM_BYTES)
    form = _Form(
        page=side.pool.shape[2],
        heads=some,
        width=width,
        blocks=heads // some,
        steps=x.shape[1] // _DEPTH,
        stages=scratch.w.shape[0],
        near=min(_NEAR, tiles),
        eps=eps,
        tiles=Tiles(bool(interpret)),
    )
    in_place = functools.partial(jax.new_ref, memory_space=plgpu.GMEM)
    pools = jax.tree.map(in_place, (side.pool, side.scales))
    leaves, tree = jax.tree.flatten(inputs._replace(side=side._replace(pool=None, scales=None)))
    kinds, shape = jax.tree.flatten(scratch)

    def body(*refs):
        pool, scales = jax.tree.unflatten(jax.tree.structure(pools), refs[len(leaves) :])
        read = jax.tree.unflatten(tree, refs[: len(leaves)])
        read = read._replace(side=read.side._replace(pool=pool, scales=scales))
        pl.run_scoped(
            lambda *s: _kernel(form, read, jax.tree.unflatten(shape, s)), *kinds, collective_axes="group"
        )

    pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(-(-tiles // form.near), filled * form.blocks, form.near),
            grid_names=("far", "column", "near"),
            num_threads=_GROUPS + 1,
            thread_name="group",
            kernel_name="fused_kv_fill",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*leaves, *jax.tree.leaves(pools))
    return jax.tree.map(jax.freeze, pools)


def fused_kv_fill(
    x, makers: Makers, cos, sin, pools: Pools, names, live, *, rows, eps, interpret: Any = False
) -> Pools:
    """As `api.fused_kv_fill`."""
    heads, page = pools.k.shape[-1] // (2 * cos.shape[-1]), pools.k.shape[2]
    spare = -x.shape[0] % math.lcm(_GROUPS * _TOKENS, page)
    alive = (jnp.arange(page) < live[:, None]).astype(jnp.float32).reshape(-1)
    cos, sin = (jnp.pad(angle.astype(jnp.float32), ((0, spare), (0, 0))) for angle in (cos, sin))
    wide = x.astype(jnp.float32)
    inverse = jnp.pad(lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps), (0, spare))
    b_k, b_v, k_norm = jax.tree.map(lambda x: x.astype(jnp.float32), makers[2:])  # or None
    keys = _Side(makers.w_k, b_k, k_norm, cos, sin, pools.k, pools.k_scale)
    values = _Side(makers.w_v, b_v, None, None, None, pools.v, pools.v_scale)
    x, alive = jnp.pad(x, ((0, spare), (0, 0))), jnp.pad(alive, (0, spare))
    names = jnp.pad(names.astype(jnp.int32), (0, spare // page), constant_values=pools.k.shape[1])
    inputs = _Inputs(x, inverse, alive, names, jnp.array(rows, jnp.int32), keys)
    k, k_scale = _fill(inputs, heads, eps, interpret)
    v, v_scale = _fill(inputs._replace(side=values), heads, eps, interpret)
    return Pools(k, v, k_scale, v_scale)


def refuses(x, makers: Makers, cos, sin, pools: Pools, *_, **__) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    if x.dtype != jnp.bfloat16 or makers.w_k.dtype != x.dtype:
        return f"a {x.dtype} stream and {makers.w_k.dtype} weights: both bfloat16"
    if pools.k.dtype.name not in _DTYPES or pools.v.dtype != pools.k.dtype:
        return f"{pools.k.dtype} keys and {pools.v.dtype} values: both {' or '.join(_DTYPES)}"
    if x.shape[1] % _DEPTH:
        return f"a stream {x.shape[1]} wide: a multiple of {_DEPTH}"
    if (page := pools.k.shape[2]) % _TOKENS and page not in (16, 32):
        return f"a page of {page} tokens: 16, 32, or a multiple of {_TOKENS}"
    heads = pools.k.shape[-1] // (2 * cos.shape[-1])
    for width in (pools.k.shape[-1] // heads, pools.v.shape[-1] // heads):
        need = smem_bytes(_scratch(2, _block(heads, width), width, pools.k.dtype))
        if width > _COLUMNS or need > SMEM_BYTES:
            return f"heads {width} wide, for {need} bytes of shared memory: at most {SMEM_BYTES}"
        if width % 16:
            return f"heads {width} wide: a multiple of 16, at most {_COLUMNS}"
    return ""
