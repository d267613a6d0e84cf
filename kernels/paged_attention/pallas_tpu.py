"""Attention over paged keys and values on TPU (Mosaic TPU).

A grid step holds a few pages of one sequence, keys and values of all heads. Decoding has few rows of queries,
so several heads share one matmul: their queries form a block-diagonal matrix, and of the weighted sums only
the diagonal blocks are kept. Either way the cache passes through the matrix unit once. Chunks have enough
rows to process the heads one by one.
"""

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.kernels.common import chips, tpu_pages
from swiftkv_jax.kernels.common.tpu_pages import LANES

_ROWS = 128  # of queries, up to which heads share a matmul


# Static parameters of the kernel: `joint` kv heads share a matmul.
_Form = namedtuple("_Form", "steps heads joint scale")


# q [b, K / joint, rows, joint * H]; position [b, rows, 1]; pools and scales [R, P, K, Z] in HBM.
_Inputs = namedtuple("_Inputs", "q position k v k_scale v_scale")


# In VMEM: k [2, keys, K * H]; v [2, keys, K * U]; scales [2, pages, K, Z]; top, total [K / joint, rows, 128];
# semaphores arrived [2].
_Scratch = namedtuple("_Scratch", "k v k_scale v_scale top total arrived")


def _attend(form: _Form, visible, slot, x: _Inputs, out, scratch: _Scratch):
    dtype, (groups, rows) = x.q.dtype, x.q.shape[1:3]
    exact = "highest" if dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    def factors(buffer, group: int):
        """[rows, keys]: the scale of each row's head and each key, by a matmul with ones."""
        heads = slice(group * form.joint, (group + 1) * form.joint)
        scales = [buffer[slot, i][heads] for i in range(form.steps.pages)]
        owner = jax.lax.broadcasted_iota(jnp.int32, (rows, form.joint), 0) // (rows // form.joint)
        mine = owner == jax.lax.broadcasted_iota(jnp.int32, (rows, form.joint), 1)
        scales = jnp.concatenate(scales, axis=-1)
        return dot(mine.astype(jnp.float32), scales, (((1,), (0,)), ((), ())), precision="highest")

    def columns(buffer, group: int):
        width = buffer.shape[-1] // groups
        return buffer[slot, :, group * width : (group + 1) * width].astype(dtype)

    for group in range(groups):
        keys = columns(scratch.k, group)
        scores = dot(x.q[0, group], keys, (((1,), (1,)), ((), ())), precision=exact) * form.scale
        if x.k_scale is not None:
            scores = scores * factors(scratch.k_scale, group)
        weights, decay = tpu_pages.rescale(scores, visible, scratch.top.at[group], scratch.total.at[group])
        if x.k_scale is not None:
            scales = factors(scratch.k_scale if scratch.v is None else scratch.v_scale, group)
            weights = weights * (scales if visible is None else jnp.where(visible, scales, 0.0))
        values = keys if scratch.v is None else columns(scratch.v, group)
        gained = dot(weights.astype(dtype), values, (((1,), (0,)), ((), ())), precision=exact)
        out[0, group] = out[0, group] * decay + gained


def _finish(alive, out, scratch: _Scratch):
    for group in range(out.shape[1]):
        total = jnp.maximum(scratch.total[group][:, :1], 1e-30)
        out[0, group] = jnp.where(alive, out[0, group] / total, 0.0)


def _form(q, k, v, table, scale: float, pages: int | None) -> _Form:
    (_, queries, heads, width), page = q.shape, k.shape[2]
    kv_heads, slots = k.shape[-1] // width, table.shape[1]
    # Computation uses at least two bytes a number, whatever rows are stored in.
    token = (k.shape[-1] + (0 if v is k else v.shape[-1])) * max(2, k.dtype.itemsize)
    most = pages or tpu_pages.step_pages(token, page, slots)
    # So many kv heads share a matmul: of at most _ROWS rows, and of whole lanes if any are.
    whole = (n for n in range(1, kv_heads + 1) if kv_heads % n == 0)
    fits = [n for n in whole if n == 1 or n * heads // kv_heads * queries <= _ROWS]
    joint = max((n for n in fits if n * width % LANES == 0), default=fits[-1])

    def form(pages: int) -> _Form:
        return _Form(tpu_pages.Steps(pages, page, slots), kv_heads, joint, scale)

    # Long blocks of queries leave less room for rows.
    while not pages and most > 1 and _vmem_bytes(form(most), q, k, v) > chips.current().vmem_limit:
        most //= 2
    return form(most)


def paged_attention(
    q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale, pages=None, interpret=False
):
    """As `api.paged_attention`, in grid steps of `pages` pages; by default as many as fit the chip."""
    form = _form(q, k, v, table, scale, pages)
    (blocks, queries, heads, width), joint, steps = q.shape, form.joint, form.steps
    groups, each = form.heads // joint, heads // form.heads
    s = tpu_pages.scalars(row, window, table, sequence, position, steps)
    rows, value = joint * each * queries, v.shape[-1] // form.heads
    # [b, K / joint, joint * G * C, joint * H]: a head's queries in its own columns, zero elsewhere.
    spread = q.reshape(blocks, queries, groups, joint, each, width)
    spread = jnp.einsum("bcjkgh,km->bjkgcmh", spread, jnp.eye(joint, dtype=q.dtype))
    spread = spread.reshape(blocks, groups, rows, joint * width)

    def mine(core, index, s):
        return tpu_pages.block_of(core, index, s), 0, 0, 0

    q_spec = pl.BlockSpec((1, groups, rows, joint * width), mine)
    position_spec = pl.BlockSpec((1, rows, 1), lambda *point: mine(*point)[:3])
    # Values that are the keys' own numbers are read with them.
    pools = (k, None, k_scale, None) if v is k else (k, v, k_scale, v_scale)
    hbm = (None if pool is None else pl.BlockSpec(memory_space=pl.ANY) for pool in pools)
    specs = _Inputs(q_spec, position_spec, *hbm)

    def scales(array):
        return None if array is None else pltpu.VMEM((2, steps.pages, *array.shape[2:]), jnp.float32)

    def rows_of(pool):
        return None if pool is None else pltpu.VMEM((2, steps.keys, pool.shape[-1]), pool.dtype)

    scratch = _Scratch(
        *map(rows_of, pools[:2]),
        *map(scales, pools[2:]),
        top=pltpu.VMEM((groups, rows, LANES), jnp.float32),
        total=pltpu.VMEM((groups, rows, LANES), jnp.float32),
        arrived=pltpu.SemaphoreType.DMA((2,)),
    )
    inputs = _Inputs(spread, jnp.tile(position, (1, joint * each))[..., None], *pools)
    out = (blocks, groups, rows, joint * value), pl.BlockSpec((1, groups, rows, joint * value), mine)
    attend, how = functools.partial(_attend, form), {"interpret": interpret, "name": "paged_attention"}
    mixed = tpu_pages.launch(attend, _finish, s, steps, (inputs, specs), out, scratch, **how)
    mixed = mixed.reshape(blocks, groups, joint, each, queries, joint, value)
    mixed = jnp.einsum("bjkgcku->bcjkgu", mixed)
    return mixed.reshape(blocks, queries, heads, value).astype(q.dtype)


def refuses(q, k, v, table, *_, scale, k_scale=None, v_scale=None, **__) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"{q.dtype} queries: bfloat16, float32"
    form = _form(q, k, v, table, scale, None)
    need = _vmem_bytes(form, q, k, v)
    if need > (most := chips.current().vmem_limit):
        return f"{q.shape[1]} queries per block, for {need} bytes of VMEM: at most {most}, so fewer queries"
    if (k_scale is not None or v_scale is not None) and k.shape[2] % LANES:
        # XLA would copy all scales into whole lanes, at every call.
        return f"a page of {k.shape[2]} tokens with scales: a multiple of {LANES}"
    reasons = (tpu_pages.refuses(pool, table, q.shape[0], form.steps.pages) for pool in (k, v))
    return next(filter(None, reasons), "")


def _vmem_bytes(form: _Form, q, k, v) -> int:
    """VMEM that a grid step takes: two tiles, queries, sums and positions twice, statistics, and what the
    compiler spills of one group's scores and sums."""
    groups, keys = form.heads // form.joint, form.steps.keys
    rows = q.shape[1] * q.shape[2] // groups
    wide = form.joint * (k.shape[-1] // form.heads), form.joint * (v.shape[-1] // form.heads)
    tiles = 2 * keys * (k.shape[-1] + (0 if v is k else v.shape[-1])) * k.dtype.itemsize
    own = groups * rows * (2 * wide[0] * q.dtype.itemsize + 2 * wide[1] * 4 + 2 * LANES * 4)
    return tiles + own + 2 * rows * LANES * 4 + rows * (keys * 12 + wide[1] * 4)
