"""Attention over the pages of a work list, each brought in one grid step ahead of its use (Mosaic TPU)."""

import dataclasses
import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.kernels.common import chips, mask, worklist

LANES = 128


# Operands of the scalar core: int32 arrays, or references to them inside a kernel. row: [1] of the pool.
# window: [1]. table: [Q * slots]. sequence: [b]. work: the steps.
Scalars = namedtuple("Scalars", "row window table sequence work")


@dataclasses.dataclass(frozen=True)
class Steps:
    """The static shape of a grid step: `pages` pages of `page` tokens, of at most `slots` of a sequence."""

    pages: int
    page: int
    slots: int

    @property
    def keys(self) -> int:
        return self.pages * self.page


def scalars(row, window, table, sequence, position, steps: Steps) -> Scalars:
    """The scalar operands of blocks of queries at `position` [b, C] of sequences `sequence` [b]."""
    window = jnp.asarray(mask.window_of(window), jnp.int32)
    work = worklist.make(position, window, steps.page, steps.pages, steps.slots, chips.current().cores)
    row, table = (jnp.asarray(x, jnp.int32).reshape(-1) for x in (row, table))
    return Scalars(row, window.reshape(1), table, sequence.astype(jnp.int32), work)


def step_pages(keys_bytes: int, page: int, slots: int) -> int:
    """Pages of a grid step when one token takes `keys_bytes` bytes in all operands."""
    return max(1, min(slots, chips.current().tile // (keys_bytes * page)))


def refuses(pool, table, blocks: int, pages: int) -> str:
    """Why whole pages of `pool` cannot be brought in, or ""."""
    tile = 32 // pool.dtype.itemsize
    if pool.dtype == jnp.float16 or pool.dtype.itemsize > 4:
        return f"{pool.dtype} rows: bfloat16, float32, int8, float8_e4m3fn"
    if pool.shape[2] % tile:
        return f"a page of {pool.shape[2]} tokens of {pool.dtype}: a multiple of {tile}"
    slots = table.shape[1]
    need = worklist.smem_bytes(blocks, slots, pages, table.shape[0])
    if need > (most := chips.current().smem):
        return f"a page table and work list of {need} bytes of scalar memory: at most {most}, so larger pages"
    return ""


def block_of(core, index, s: Scalars):
    """The block of queries of grid point (core, index): the index map of queries and outputs."""
    return s.work.owner[worklist.step_of(core, index, s.work.begin)]


def first_page(step, s: Scalars, steps: Steps):
    """The first page, counted in its sequence, of a step."""
    block = s.work.owner[step]
    return s.work.low[block] + (step - s.work.first[block]) * steps.pages


def launch(attend, finish, s: Scalars, steps: Steps, inputs, out, scratch, **options) -> jax.Array:
    """Online softmax over the pages of the work list: sums in float32.

    `attend(visible, slot, x, out, scratch)` adds the keys of a grid point, which are in that slot of buffers.
    Queries see all of them if `visible` is None. `finish(alive, out, scratch)` divides a block's sums by
    their totals. Pages arrive one grid point ahead: of pools [R, P, ...page] in HBM, in buffers
    [2, pages, ...page] or [2, pages * page, E] in VMEM.

    `inputs`: (named tuple of arrays, the same of block specs); a pool that is there is named as its buffer
    in `scratch` is. `out`: (shape, block spec). `options`: of `pl.pallas_call`.
    """
    arrays, specs = inputs

    def kernel(s, x, out, own):
        own = type(scratch)(*own)
        names = [name for name in x._fields if name in own._fields and getattr(x, name) is not None]
        pairs = [(getattr(x, name), getattr(own, name)) for name in names]
        core, index = pl.program_id(0), pl.program_id(1)
        step, end = s.work.begin[core] + index, s.work.begin[core + 1]
        slot = jax.lax.rem(index, 2)

        def copies(step, slot, act):
            block = s.work.owner[step]
            start = first_page(step, s, steps)
            for i in range(steps.pages):

                @pl.when(start + i < s.work.high[block])
                def _(i=i):
                    name = s.table[s.sequence[block] * steps.slots + start + i]
                    for pool, buffer in pairs:
                        flat = buffer.ndim == pool.ndim - 1
                        target = buffer.at[slot, pl.ds(i * steps.page, steps.page) if flat else i]
                        act(pltpu.make_async_copy(pool.at[s.row[0], name], target, own.arrived.at[slot]))

        @pl.when((index == 0) & (step < end))
        def _():
            copies(step, slot, lambda copy: copy.start())

        @pl.when(step + 1 < end)
        def _():
            copies(step + 1, 1 - slot, lambda copy: copy.start())

        @pl.when(step < end)
        def _():
            copies(step, slot, lambda copy: copy.wait())

        last = jnp.minimum(step, end - 1)
        block = s.work.owner[last]
        done = last - s.work.first[block]
        key = first_page(last, s, steps) * steps.page
        inner = (s.work.edge[4 * block + 1] <= key) & (key + steps.keys <= s.work.edge[4 * block + 2])
        live = step < end

        @pl.when(live & (done == 0))
        def _():
            own.top[...] = jnp.full_like(own.top, -1e30)
            own.total[...] = jnp.zeros_like(own.total)
            out[...] = jnp.zeros_like(out)

        @pl.when(live & inner)
        def _():
            attend(None, slot, x, out, own)

        @pl.when(live & ~inner)
        def _():
            def clear(buffer, rows):
                """Zero the rows that no query sees: they may hold NaN, and 0 x NaN is NaN."""
                token = key + rows.start + jax.lax.broadcasted_iota(jnp.int32, (steps.page, 1), 0)
                keep = (token >= s.work.edge[4 * block]) & (token < s.work.edge[4 * block + 3])
                tile = buffer[slot, rows, :]
                tile = tile.astype(jnp.float32) if tile.dtype.itemsize == 1 else tile
                buffer[slot, rows, :] = jnp.where(keep, tile, jnp.zeros_like(tile)).astype(buffer.dtype)

            for _, buffer in pairs:
                if buffer.ndim == 3:  # rows, not scales
                    each_page(steps, functools.partial(clear, buffer))
            position = x.position[0]  # [rows, 1]
            back = position - (key + jax.lax.broadcasted_iota(jnp.int32, (len(position), steps.keys), 1))
            attend((back >= 0) & (back < s.window[0]), slot, x, out, own)

        @pl.when(live & (done == s.work.count[block] - 1))
        def _():
            finish(x.position[0] >= 0, out, own)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=worklist.grid(s.work),
            in_specs=[specs],
            out_specs=out[1],
            scratch_shapes=[tuple(scratch)],
        ),
        out_shape=jax.ShapeDtypeStruct(out[0], jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=chips.current().vmem_limit
        ),
        **options,
    )(s, arrays)


def each_page(steps: Steps, body) -> None:
    """Call `body(rows)` for the rows of each page of a tile; unrolling whole tiles would be slow to
    compile."""

    def turn(i, _):
        body(pl.ds(pl.multiple_of(i * steps.page, steps.page), steps.page))
        return _

    jax.lax.fori_loop(0, steps.pages, turn, 0)


def rescale(scores, visible, top, total):
    """One turn of the online softmax: weights [rows, keys], and the factor [rows, 1] for earlier sums.

    `top` and `total` are [rows, 128] references, equal along the lanes. `visible` is None where all keys are.
    """
    low = jnp.float32(-1e30)
    scores = scores if visible is None else jnp.where(visible, scores, low)
    before = top[...]
    after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - after[:, :1])
    weights = weights if visible is None else jnp.where(visible, weights, 0.0)
    decay = jnp.exp(before - after)
    top[...] = after
    total[...] = total[...] * decay + jnp.sum(weights, axis=1, keepdims=True)
    return weights, decay[:, :1]
