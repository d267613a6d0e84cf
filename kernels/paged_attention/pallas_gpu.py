"""Decoding over paged keys and values on Hopper (Mosaic GPU, Warpgroup semantics): split-K, read in place.

Keys stand on the long side of the tensor core: S^T = K q^T and O^T = V^T P^T, so a few queries take 8 columns
and not 64 rows. One CTA takes one kv head of one block of queries over a share of its pages, which come by
TMA into a ring of stages; partial sums of the shares are merged by XLA.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from swiftkv_jax.kernels import worklist
from swiftkv_jax.kernels.gpu_tile import Tiles, down

NO_WINDOW = 1 << 30
_CTAS = 2 * 132  # two on each multiprocessor of a Hopper
_SHORTEST = 4  # pages of a share
_ROWS = 64  # of queries


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is static in the kernel."""

    row: int
    page: int
    width: int
    value: int
    rows: int
    splits: int
    stages: int
    scale: float
    tiles: Tiles


def _kernel(form: _Form, q, k, v, table, sequence, low, high, first, last, window, position, *refs):
    (o, m, total_out), (q_s, k_s, v_s, p_s, o_s, m_s, l_s), (q_in, k_in, v_in) = (
        refs[:3],
        refs[3:10],
        refs[10:],
    )
    block, head, split = (lax.axis_index(name) for name in ("block", "head", "split"))
    share = pl.cdiv(high[block] - low[block], form.splits)
    start = low[block] + split * share
    count = jnp.maximum(jnp.minimum(high[block] - start, share), 0)
    owner = sequence[block]

    def ask(i):
        """Start the copies of the i-th page of this share."""
        slot, name = lax.rem(i, form.stages), table[owner, start + i]
        columns = pl.ds(head * form.width, form.width), pl.ds(head * form.value, form.value)
        plgpu.copy_gmem_to_smem(k.at[form.row, name, :, columns[0]], k_s.at[slot], k_in.at[slot])
        plgpu.copy_gmem_to_smem(v.at[form.row, name, :, columns[1]], v_s.at[slot], v_in.at[slot])

    plgpu.copy_gmem_to_smem(q.at[block, head], q_s, q_in)
    for i in range(form.stages - 1):
        pl.when(i < count)(functools.partial(ask, i))
    plgpu.barrier_wait(q_in)
    tiles, shape = form.tiles, (form.page, form.rows)
    at = tiles.load(position.at[block])

    def turn(i, carry):
        top, total, mixed = carry
        slot = lax.rem(i, form.stages)
        plgpu.barrier_wait(k_in.at[slot])
        pl.when(i + form.stages - 1 < count)(lambda: ask(i + form.stages - 1))
        scores = tiles.matmul(shape, k_s.at[slot], q_s, (False, True)) * form.scale
        key = (start + i) * form.page
        back = down(at, shape) - (key + tiles.row_number(shape))
        seen = (back >= 0) & (back < window[0])
        scores = jnp.where(seen, scores, -1e30)
        higher = jnp.maximum(top, jnp.max(scores, axis=0))
        weights = jnp.where(seen, jnp.exp(scores - down(higher, shape)), 0.0)
        decay = jnp.exp(top - higher)
        tiles.store_transposed(p_s, weights)
        plgpu.barrier_wait(v_in.at[slot])

        @pl.when((key < first[block]) | (key + form.page > last[block]))
        def _():
            whole = (form.page, form.value)
            token = key + tiles.row_number(whole)
            kept = (token >= first[block]) & (token < last[block])
            rows = tiles.load(v_s.at[slot])
            v_s.at[slot][...] = jnp.where(kept, rows, jnp.zeros_like(rows))

        plgpu.commit_smem()
        gained = tiles.matmul((form.value, form.rows), v_s.at[slot], p_s, (True, True))
        mixed = mixed * down(decay, mixed.shape) + gained
        return higher, total * decay + jnp.sum(weights, axis=0), mixed

    carry = (
        tiles.constant(-1e30, (form.rows,)),
        tiles.constant(0.0, (form.rows,)),
        tiles.constant(0.0, (form.value, form.rows)),
    )
    top, total, mixed = lax.fori_loop(0, count, turn, carry)
    o_s[...], m_s[...], l_s[...] = mixed, top, total
    plgpu.commit_smem()
    for source, target in ((o_s, o), (m_s, m), (l_s, total_out)):
        plgpu.copy_smem_to_gmem(source, target.at[block, head, split])
    plgpu.wait_smem_to_gmem(0)


def _splits(work: int, slots: int) -> int:
    """Shares of a block's pages: two CTAs on each multiprocessor, no share shorter than _SHORTEST pages."""
    return max(1, min(-(-_CTAS // work), slots // _SHORTEST))


def paged_attention(
    q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale, interpret: Any = False
):
    """As `api.paged_attention`."""
    del k_scale, v_scale
    (blocks, queries, heads, width), page = q.shape, k.shape[2]
    kv_heads = k.shape[-1] // width
    each, value, slots = heads // kv_heads, v.shape[-1] // kv_heads, table.shape[1]
    real = each * queries
    rows = -(-real // 8) * 8
    form = _Form(
        row, page, width, value, rows, _splits(blocks * kv_heads, slots), 3, scale, Tiles(bool(interpret))
    )
    spread = q.reshape(blocks, queries, kv_heads, each, width).transpose(0, 2, 3, 1, 4)
    spread = spread.reshape(blocks, kv_heads, real, width)
    spread = jnp.pad(spread, ((0, 0), (0, 0), (0, rows - real), (0, 0)))
    every = jnp.pad(jnp.tile(position, (1, each)), ((0, 0), (0, rows - real)), constant_values=-1)
    window = jnp.asarray(NO_WINDOW if window is None else window, jnp.int32).reshape(1)
    work = worklist.make(position, window[0], page, 1, slots, 1)
    edge = work.edge.reshape(-1, 4)
    part = (blocks, kv_heads, form.splits)
    o, m, parts = plgpu.kernel(
        functools.partial(_kernel, form),
        out_type=(
            jax.ShapeDtypeStruct((*part, value, rows), jnp.float32),
            jax.ShapeDtypeStruct((*part, rows), jnp.float32),
            jax.ShapeDtypeStruct((*part, rows), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((rows, width), q.dtype),
            plgpu.SMEM((form.stages, page, width), k.dtype),
            plgpu.SMEM((form.stages, page, value), v.dtype),
            plgpu.SMEM((rows, page), q.dtype),
            plgpu.SMEM((value, rows), jnp.float32),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=form.stages),
            plgpu.Barrier(num_barriers=form.stages),
        ],
        grid=part,
        grid_names=("block", "head", "split"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(
        spread,
        k,
        v,
        table.astype(jnp.int32),
        sequence.astype(jnp.int32),
        work.low,
        work.high,
        edge[:, 0],
        edge[:, 3],
        window,
        every.astype(jnp.int32),
    )
    top = jnp.max(m, axis=2, keepdims=True)
    share = jnp.exp(m - top)
    total = jnp.maximum(jnp.sum(parts * share, axis=2), 1e-30)
    mixed = jnp.sum(o * share[..., None, :], axis=2) / total[..., None, :]
    mixed = mixed[..., :real].reshape(blocks, kv_heads, value, each, queries)
    return mixed.transpose(0, 4, 1, 3, 2).reshape(blocks, queries, heads, value).astype(q.dtype)


def refuses(q, k, v, table, sequence, position, *, k_scale=None, **_) -> str:
    """What of a call is not supported here, and what is, or ""."""
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
        return f"{q.dtype} queries of {k.dtype} rows: both bfloat16"
    kv_heads, page = k.shape[-1] // q.shape[-1], k.shape[2]
    widths = q.shape[-1], v.shape[-1] // kv_heads
    if any(width not in (64, 128) for width in widths):
        return f"heads {widths[0]} and {widths[1]} wide: 64, 128"
    if page not in (64, 128):
        return f"a page of {page} tokens: 64, 128"
    if (rows := q.shape[2] // kv_heads * q.shape[1]) > _ROWS:
        return f"{rows} queries of a kv head: at most {_ROWS}"
    return ""
