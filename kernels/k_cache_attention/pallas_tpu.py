"""Attention from a cache of keys (or inputs) alone on TPU: all heads in one pass over the rows (Mosaic TPU).

A grid step holds a few pages of one sequence. Scores of all heads are one matmul with a block-diagonal query
[N * C, E], the weighted sum of whole rows is another, and XLA applies W_KV afterwards, which has as many
bytes as the W_V that it replaces.

Rotary embedding: a rotation by position t0 + s is a rotation by s followed by one by t0. One table of the
angles within a step rotates every tile by s, and the query is rotated by -t0 once a step, so that no table as
long as the context is streamed.
"""

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

# Static parameters of the kernel. half: columns of half a head, 0 without rotary embedding.
_Form = namedtuple("_Form", "steps half rotated scale threshold")


# q [b, rows, E]; position [b, rows, 1]; cos, sin [keys, half] in a step; cos0, sin0 [slots, 1, half] at its
# first page; pool [R, P, Z, E] and scales [R, P, 1, Z] in HBM. None where there is none.
_Inputs = namedtuple("_Inputs", "q position cos sin cos0 sin0 pool scales")


# pool [2, keys, E]; scales [2, pages, 1, Z]; turned [keys, E]; top, total [rows, 128]; arrived [2].
_Scratch = namedtuple("_Scratch", "pool scales turned top total arrived")


def _turn(x, cos, sin, half: int):
    """Rotate [m, E]: of each slice of 2 * half columns, the two halves are the planes."""
    out = []
    for start in range(0, x.shape[-1], 2 * half):
        a, b = x[:, start : start + half], x[:, start + half : start + 2 * half]
        out += [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate(out, axis=-1)


def _attend(form: _Form, visible, slot, x: _Inputs, out, scratch: _Scratch):
    dtype, turns = x.q.dtype, form.half > 0
    exact = "highest" if dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)

    def turn_tile(sign: float):
        """The tile, rotated by its positions in the step, head by head to stay in registers."""

        def turn(rows):
            cos, sin = x.cos[rows, :], sign * x.sin[rows, :]
            for start in range(0, out.shape[-1], 2 * form.half):
                columns = slice(start, start + 2 * form.half)
                head = scratch.pool[slot, rows, columns].astype(jnp.float32)
                scratch.turned[rows, columns] = _turn(head, cos, sin, form.half).astype(dtype)

        tpu_pages.each_page(form.steps, turn)

    q = x.q[0]
    if turns and not form.rotated:
        turn_tile(1.0)
        q = _turn(q.astype(jnp.float32), x.cos0[0], -x.sin0[0], form.half).astype(dtype)
        keys = scratch.turned[...]
    else:
        keys = scratch.pool[slot].astype(dtype)
    scores = dot(q, keys, (((1,), (1,)), ((), ()))) * form.scale
    if x.scales is not None:
        pages = [scratch.scales[slot, i] for i in range(form.steps.pages)]
        scales = jnp.concatenate(pages, axis=-1)
        scores = scores * scales
    weights, decay = tpu_pages.rescale(scores, visible, scratch.top, scratch.total)
    if x.scales is not None:
        weights = weights * (scales if visible is None else jnp.where(visible, scales, 0.0))
    out[0] = out[0] * decay

    def add():
        if not (turns and form.rotated):
            rows = scratch.pool[slot].astype(dtype)
            out[0] += dot(weights.astype(dtype), rows, (((1,), (0,)), ((), ())))
            return
        turn_tile(-1.0)
        gained = dot(weights.astype(dtype), scratch.turned[...], (((1,), (0,)), ((), ())))
        out[0] += _turn(gained, x.cos0[0], -x.sin0[0], form.half)

    if form.threshold:
        pl.when(jnp.max(weights) >= form.threshold)(add)
    else:
        add()


def _finish(alive, out, scratch: _Scratch):
    out[0] = jnp.where(alive, out[0] / jnp.maximum(scratch.total[...][:, :1], 1e-30), 0.0)


def _sum_rows(q, pool, table, sequence, position, row, window, angles, form: _Form, k_scale, interpret):
    """Softmax-weighted sums of rows [b, N, C, E], in float32, for queries [b, N, C, E] at `position`."""
    (blocks, heads, queries, width), steps = q.shape, form.steps
    rows = heads * queries
    q, position = q.reshape(blocks, rows, width), jnp.tile(position, (1, heads))
    s = tpu_pages.scalars(row, window, table, sequence, position, steps)

    def mine(core, index, s):
        return tpu_pages.block_of(core, index, s), 0, 0

    def page(core, index, s):
        first = tpu_pages.first_page(tpu_pages.worklist.step_of(core, index, s.work.begin), s, steps)
        return jnp.minimum(first, steps.slots - 1), 0, 0

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    whole = pl.BlockSpec((steps.keys, form.half), lambda *_: (0, 0))
    base = pl.BlockSpec((1, 1, form.half), page)
    own = pl.BlockSpec((1, rows, width), mine)
    some = form.half > 0
    specs = _Inputs(
        own,
        pl.BlockSpec((1, rows, 1), mine),
        *((whole, whole, base, base) if some else angles),
        pool=hbm,
        scales=None if k_scale is None else hbm,
    )
    scratch = _Scratch(
        pool=pltpu.VMEM((2, steps.keys, width), pool.dtype),
        scales=None if k_scale is None else pltpu.VMEM((2, steps.pages, *k_scale.shape[2:]), jnp.float32),
        turned=pltpu.VMEM((steps.keys, width), q.dtype) if some else None,
        top=pltpu.VMEM((rows, LANES), jnp.float32),
        total=pltpu.VMEM((rows, LANES), jnp.float32),
        arrived=pltpu.SemaphoreType.DMA((2,)),
    )
    inputs = _Inputs(q, position[..., None], *angles, pool=pool, scales=k_scale), specs
    attend, how = functools.partial(_attend, form), {"interpret": interpret, "name": "k_cache_attention"}
    mixed = tpu_pages.launch(attend, _finish, s, steps, inputs, (q.shape, own), scratch, **how)
    return mixed.reshape(blocks, heads, queries, width)


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
        half, frequencies = q.shape[3] // 2, how.frequencies.astype(jnp.float32)
        inside = jnp.arange(steps.keys)[:, None] * frequencies
        starts = (jnp.arange(steps.slots) * steps.page)[:, None, None] * frequencies
        angles = jnp.cos(inside), jnp.sin(inside), jnp.cos(starts), jnp.sin(starts)
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


def refuses(q, pool, *where, x_scale=None, **__) -> str:
    """Name the unsupported part of a call of either and what is supported instead, or return ""."""
    table, *_ = where[-3:]
    if x_scale is not None:
        return "rows with scales: rows without"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{q.dtype} queries: bfloat16, float32"
    blocks, queries, heads, _ = q.shape
    steps = _steps(pool, table)
    # Two tiles, the turned tile, queries and sums twice, scores.
    rows, width, stored, computed = queries * heads, pool.shape[-1], pool.dtype.itemsize, q.dtype.itemsize
    need = steps.keys * width * (2 * stored + computed) + rows * width * (2 * computed + 8)
    need += rows * steps.keys * 8
    if need > (most := chips.current().vmem_limit):
        return f"{queries} queries per block, for {need} bytes of VMEM: at most {most}, so fewer queries"
    return tpu_pages.refuses(pool, table, blocks, steps.pages)
