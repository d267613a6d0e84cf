"""Attention from a cache of keys (or inputs) alone on TPU: all heads in one pass over the rows (Mosaic TPU).

A grid step holds a few pages of one sequence. Scores of all heads are one matmul with a block-diagonal query
[N * C, E], the weighted sum of whole rows is another, and XLA applies W_KV afterwards, which has as many
bytes as the W_V that it replaces.

Rotary embedding: a rotation by position t0 + s is a rotation by s followed by one by t0. One table of the
angles within a step rotates every tile by s, and the query is rotated by -t0 once a step, so that no table as
long as the context is streamed.
"""

import dataclasses
import functools
from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.kernels.common import chips, tpu_pages
from swiftkv_jax.kernels.common.tpu_pages import LANES
from swiftkv_jax.kernels.k_cache_attention.reference import Options


@dataclasses.dataclass(frozen=True)
class _Form:
    """Static parameters of the kernel. half: columns of half a head, 0 without rotary embedding."""

    steps: tpu_pages.Steps
    half: int
    rotated: bool
    scale: float
    threshold: float


# q [b, rows, E]; position [b, rows, 1]; cos, sin [keys, half] in a step; cos0, sin0 [slots, 1, half] at its
# first page; pool [R, P, Z, E] and scales [R, P, 1, Z] in HBM. None where there is none.
_Inputs = namedtuple("_Inputs", "q position cos sin cos0 sin0 pool scales")


# tile [2, keys, E]; scales [2, pages, 1, Z]; turned [keys, E]; top, total [rows, 128]; arrived [2].
_Scratch = namedtuple("_Scratch", "tile scales turned top total arrived")


def _turn(x, cos, sin, half: int):
    """Rotate [m, E]: of each slice of 2 * half columns, the two halves are the planes."""
    out = []
    for start in range(0, x.shape[-1], 2 * half):
        a, b = x[:, start : start + half], x[:, start + half : start + 2 * half]
        out += [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate(out, axis=-1)


def _kernel(form: _Form, s: tpu_pages.Scalars, x: _Inputs, out, scratch: _Scratch):
    optional = [] if x.scales is None else [(x.scales, scratch.scales)]
    pools, buffers = zip((x.pool, scratch.tile), *optional, strict=True)
    place = tpu_pages.arrive(s, form.steps, pools, buffers, scratch.arrived)
    dtype = x.q.dtype
    exact = "highest" if dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    @pl.when(place.live & place.is_first)
    def _():
        scratch.top[...] = jnp.full_like(scratch.top, -1e30)
        scratch.total[...] = jnp.zeros_like(scratch.total)
        out[...] = jnp.zeros_like(out)

    def turn_tile(sign: float):
        """The tile, rotated by its positions in the step, head by head to stay in registers."""

        def turn(rows):
            cos, sin = x.cos[rows, :], sign * x.sin[rows, :]
            for start in range(0, out.shape[-1], 2 * form.half):
                columns = slice(start, start + 2 * form.half)
                head = scratch.tile[place.slot, rows, columns].astype(jnp.float32)
                scratch.turned[rows, columns] = _turn(head, cos, sin, form.half).astype(dtype)

        tpu_pages.each_page(form.steps, turn)

    def attend(inner: bool):
        q = x.q[0]
        if not inner:
            tpu_pages.clear_unseen(scratch.tile, place, s, form.steps)
        if form.half and not form.rotated:
            turn_tile(1.0)
            q = _turn(q.astype(jnp.float32), x.cos0[0], -x.sin0[0], form.half).astype(dtype)
            keys = scratch.turned[...]
        else:
            keys = scratch.tile[place.slot].astype(dtype)
        scores = dot(q, keys, (((1,), (1,)), ((), ()))) * form.scale
        visible = None if inner else tpu_pages.seen(x.position[0], place, s, form.steps)
        scales = None
        if x.scales is not None:
            scales = jnp.concatenate(
                [scratch.scales[place.slot, i] for i in range(form.steps.pages)], axis=-1
            )
            scores = scores * scales
        weights, decay = tpu_pages.rescale(scores, visible, scratch.top, scratch.total)
        if scales is not None:
            weights = weights * (scales if visible is None else jnp.where(visible, scales, 0.0))
        out[0] = out[0] * decay

        def add():
            if not (form.half and form.rotated):
                out[0] += dot(
                    weights.astype(dtype), scratch.tile[place.slot].astype(dtype), (((1,), (0,)), ((), ()))
                )
                return
            turn_tile(-1.0)
            gained = dot(weights.astype(dtype), scratch.turned[...], (((1,), (0,)), ((), ())))
            out[0] += _turn(gained, x.cos0[0], -x.sin0[0], form.half)

        if form.threshold:
            pl.when(jnp.max(weights) >= form.threshold)(add)
        else:
            add()

    @pl.when(place.live & place.is_inner)
    def _():
        attend(inner=True)

    @pl.when(place.live & ~place.is_inner)
    def _():
        attend(inner=False)

    @pl.when(place.live & place.is_last)
    def _():
        alive = x.position[0] >= 0
        out[0] = jnp.where(alive, out[0] / jnp.maximum(scratch.total[...][:, :1], 1e-30), 0.0)


def _sum_rows(q, pool, table, sequence, position, row, window, angles, form: _Form, k_scale, interpret):
    """Softmax-weighted sums of rows [b, N, C, E], in float32, for queries [b, N, C, E] at `position`."""
    (blocks, heads, queries, width), steps = q.shape, form.steps
    rows = heads * queries
    q, position = q.reshape(blocks, rows, width), jnp.tile(position, (1, heads))
    s = tpu_pages.scalars(row, window, table, sequence, position, steps)
    step = functools.partial(tpu_pages.first_page, steps=steps)

    def mine(core, index, s):
        return tpu_pages.block_of(core, index, s), 0, 0

    def page(core, index, s):
        return (
            jnp.minimum(step(tpu_pages.worklist.step_of(core, index, s.work.begin), s), steps.slots - 1),
            0,
            0,
        )

    cos, sin, cos0, sin0 = angles
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    whole = pl.BlockSpec((steps.keys, form.half), lambda *_: (0, 0))
    base = pl.BlockSpec((1, 1, form.half), page)
    own = pl.BlockSpec((1, rows, width), mine)
    some = form.half > 0
    specs = _Inputs(
        q=own,
        position=pl.BlockSpec((1, rows, 1), mine),
        cos=whole if some else None,
        sin=whole if some else None,
        cos0=base if some else None,
        sin0=base if some else None,
        pool=hbm,
        scales=None if k_scale is None else hbm,
    )
    scratch = _Scratch(
        tile=pltpu.VMEM((2, steps.keys, width), pool.dtype),
        scales=None if k_scale is None else pltpu.VMEM((2, steps.pages, *k_scale.shape[2:]), jnp.float32),
        turned=pltpu.VMEM((steps.keys, width), q.dtype) if some else None,
        top=pltpu.VMEM((rows, LANES), jnp.float32),
        total=pltpu.VMEM((rows, LANES), jnp.float32),
        arrived=pltpu.SemaphoreType.DMA((2,)),
    )
    mixed = pl.pallas_call(
        lambda *refs: _kernel(form, refs[0], refs[1], refs[2], _Scratch(*refs[3])),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tpu_pages.worklist.grid(s.work),
            in_specs=[specs],
            out_specs=own,
            scratch_shapes=[tuple(scratch)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=chips.current().vmem_limit
        ),
        interpret=interpret,
        name="k_cache_attention",
    )(s, _Inputs(q, position[..., None], cos, sin, cos0, sin0, pool, k_scale))
    return mixed.reshape(blocks, heads, queries, width)


def _tables(frequencies, steps: tpu_pages.Steps):
    """cos, sin [keys, half] in a step, and cos, sin [slots, 1, half] of the angle at each page's start."""
    frequencies = frequencies.astype(jnp.float32)
    inside = jnp.arange(steps.keys)[:, None] * frequencies
    starts = (jnp.arange(steps.slots) * steps.page)[:, None, None] * frequencies
    return jnp.cos(inside), jnp.sin(inside), jnp.cos(starts), jnp.sin(starts)


def _steps(pool, table, pages: int | None = None) -> tpu_pages.Steps:
    page, width = pool.shape[2:]
    # Computation uses at least two bytes a number, whatever rows are stored in.
    pages = pages or tpu_pages.step_pages(width * max(2, pool.dtype.itemsize), page, table.shape[1])
    return tpu_pages.Steps(pages, page, table.shape[1])


def k_cache_attention(
    q, k, w_kv, table, sequence, position, *, pages: int | None = None, interpret: Any = False, **options
):
    """As `api.k_cache_attention`, in grid steps of `pages` pages; by default as many as fit the chip."""
    how, heads = Options(**options), q.shape[2]
    steps = _steps(k, table, pages)
    # [b, N, C, E]: head n's query in its own columns of a row, zero elsewhere.
    spread = jnp.einsum("bcnh,nm->bncmh", q, jnp.eye(heads, dtype=q.dtype))
    spread = spread.reshape(*spread.shape[:3], -1)
    half, angles = 0, (None,) * 4
    if how.frequencies is not None:
        half, angles = q.shape[3] // 2, _tables(how.frequencies, steps)
    form = _Form(steps, half, how.rotated, how.scale, how.threshold)
    places = table, sequence, position, how.row, how.window
    mixed = _sum_rows(spread, k, *places, angles, form, how.k_scale, interpret)
    return jnp.einsum("bnce,neu->bcnu", mixed, w_kv, preferred_element_type=jnp.float32).astype(q.dtype)


def x_cache_attention(
    q, x, w_k, w_v, table, sequence, position, *, row, scale, window, pages=None, interpret: Any = False
):
    """As `api.x_cache_attention`, in grid steps of `pages` pages."""
    absorbed = jnp.einsum("bcnh,neh->bnce", q, w_k, preferred_element_type=jnp.float32).astype(q.dtype)
    form = _Form(_steps(x, table, pages), 0, False, scale, 0.0)
    places = table, sequence, position, row, window
    mixed = _sum_rows(absorbed, x, *places, (None,) * 4, form, None, interpret)
    return jnp.einsum("bnce,neu->bcnu", mixed, w_v, preferred_element_type=jnp.float32).astype(q.dtype)


def refuses_keys(q, k, w_kv, table, *_, **__) -> str:
    """Name the unsupported part of a `k_cache_attention` call and what is supported instead, or return ""."""
    del w_kv
    return _refuses(q, k, table)


def refuses_inputs(q, x, w_k, w_v, table, *_, x_scale=None, **__) -> str:
    """The same for `x_cache_attention`."""
    del w_k, w_v
    return "rows with scales: rows without" if x_scale is not None else _refuses(q, x, table)


def _refuses(q, pool, table) -> str:
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{q.dtype} queries: bfloat16, float32"
    blocks, queries, heads, _ = q.shape
    steps = _steps(pool, table)
    need = _vmem_bytes(queries * heads, pool.shape[-1], steps.keys, pool.dtype.itemsize, q.dtype.itemsize)
    if need > (most := chips.current().vmem_limit):
        return f"{queries} queries per block, for {need} bytes of VMEM: at most {most}, so fewer queries"
    return tpu_pages.refuses(pool, table, blocks, steps.pages)


def _vmem_bytes(rows: int, width: int, keys: int, stored: int, computed: int) -> int:
    """VMEM that a grid step takes: two tiles, the turned tile, queries and sums twice, scores."""
    return keys * width * (2 * stored + computed) + rows * width * (2 * computed + 8) + rows * keys * 8
