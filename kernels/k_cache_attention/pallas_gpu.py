"""Decoding from a cache of keys alone, or of layer inputs alone, on Hopper (Mosaic GPU, Warpgroup semantics).

Right on an H200 with and without rotary embedding, rotated, in 8 bits and for inputs (docs/results.md). A CPU
can interpret everything except the exchange of scores in a cluster, the matmuls on transposed tiles and the
layouts in registers.

This file cuts the columns of a row for the CTAs of a cluster (cluster_gpu.py), and lays out queries for them.
Keys: a CTA's columns are some of the heads, and it computes the scores of these. Inputs: it computes partial
scores of all heads, which are added up.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import gpu_pages
from swiftkv_jax.kernels.common.gpu_tile import SMEM_BYTES, Tiles, smem_bytes
from swiftkv_jax.kernels.k_cache_attention import cluster_gpu
from swiftkv_jax.kernels.k_cache_attention.cluster_gpu import COLUMNS, KEYS, Form, Inputs, scratch
from swiftkv_jax.kernels.k_cache_attention.reference import Options

_LEAST = 8  # columns of the smallest matmul
_ROWS = 64  # query rows of all heads together
_SLICE = 512  # columns of a CTA at most
_CTAS = 132
_MOST_SUMS = 8192  # half a CTA's columns x query rows whose sums stay in registers
_WIDTHS = (64, 128, 256)  # of heads with rotary embedding
_STORED = ("bfloat16", "int8", "float8_e4m3fn")
_PIECES = {2: (64, 32), 1: (32,)}  # bytes of a number: columns in registers at a time, best first


def cut_keys(q, k, half: int, queries: int) -> Form | None:
    """Whole heads, whole pieces of columns, for blocks of `queries`; None if there is no such cut."""
    heads, width = q.shape[2:]
    for piece, parts in itertools.product(_PIECES[k.dtype.itemsize], range(1, 9)):
        columns, real = heads // parts * width, heads // parts * queries
        whole = heads % parts == 0 and columns % (2 * piece) == 0 and half % piece == 0
        sizes = (1, 2, 4, *range(_LEAST, _ROWS + 1, _LEAST))
        own = next((n for n in sizes if n >= real and n * parts % _LEAST == 0), None)
        if whole and 2 * COLUMNS <= columns <= _SLICE and own and own * parts <= _ROWS:
            return Form(parts, columns, own, max(_LEAST, own), own * parts, piece)
    return None


def cut_inputs(rows: int, width: int) -> Form | None:
    """The fewest CTAs whose shared memory holds whole pieces of `width` columns. Fewer CTAs have wider tiles,
    more CTAs have more scores to add up. None if there is no such cut."""
    rows = -(-rows // _LEAST) * _LEAST
    if rows > _ROWS:
        return None
    parts = (n for n in range(1, 9) if width % (2 * COLUMNS * n) == 0 and width // n <= _SLICE)
    cuts = [Form(n, width // n, rows, rows, rows, COLUMNS) for n in parts]
    return next(
        (cut for cut in cuts if smem_bytes(scratch(cut, jnp.bfloat16)) <= SMEM_BYTES), next(iter(cuts), None)
    )


def queries_of_keys(q, position, cut: Form):
    """q [b, parts, wide, columns]: each query row of a CTA in its own head's columns, zero elsewhere; and the
    position [b, rows] of every query row."""
    blocks, queries, heads, width = q.shape
    local, layers = heads // cut.parts, cut.wide // cut.own
    q = q.reshape(blocks, queries, cut.parts, local, width)
    spread = jnp.einsum("bcpnh,nm->bpncmh", q, jnp.eye(local, dtype=q.dtype))
    spread = spread.reshape(blocks, cut.parts, local * queries, -1)
    spare = cut.own - local * queries
    spread = jnp.pad(spread, ((0, 0), (0, 0), (0, spare), (0, 0)))
    layer = jnp.arange(cut.parts) % layers
    spread = jnp.einsum("bpne,pl->bplne", spread, jax.nn.one_hot(layer, layers, dtype=q.dtype))
    every = jnp.tile(position[:, None], (1, cut.parts, local))
    every = jnp.pad(every, ((0, 0), (0, 0), (0, spare)), constant_values=-1)
    return spread.reshape(blocks, cut.parts, cut.wide, -1), every.reshape(blocks, -1).astype(jnp.int32)


def queries_of_inputs(q, w_k, position, cut: Form):
    """The same for queries with their heads' W_K absorbed: every query row, in the columns of each CTA."""
    blocks, queries, heads, _ = q.shape
    taken = jnp.einsum("bcnh,neh->bnce", q, w_k, preferred_element_type=jnp.float32).astype(q.dtype)
    spare = cut.rows - heads * queries
    taken = jnp.pad(taken.reshape(blocks, heads * queries, -1), ((0, 0), (0, spare), (0, 0)))
    every = jnp.pad(jnp.tile(position, (1, heads)), ((0, 0), (0, spare)), constant_values=-1)
    taken = taken.reshape(blocks, cut.rows, cut.parts, cut.columns)
    return jnp.swapaxes(taken, 1, 2), every.astype(jnp.int32)


def k_cache_attention(q, k, w_kv, *where, interpret: Any = False, **options) -> jax.Array:
    """As `api.k_cache_attention`."""
    how, slots = Options(**options), where[0].shape[1]
    half, angles = 0, (None, None)
    if how.frequencies is not None:
        half, frequencies = q.shape[-1] // 2, how.frequencies.astype(jnp.float32)
        angle = (jnp.arange(slots * KEYS)[:, None] * frequencies).reshape(slots, KEYS, -1)
        angles = jnp.cos(angle), jnp.sin(angle)  # of every position
    cut_of = functools.partial(cut_keys, q, k, half)
    form = {"scale": how.scale, "half": half, "rotated": how.rotated, "tiles": Tiles(bool(interpret))}
    rows = k, how.row, how.window, angles, how.k_scale
    return _attend(q, rows, cut_of, queries_of_keys, w_kv, form, *where, interpret=interpret)


def x_cache_attention(q, x, w_k, w_v, *where, row, scale, window, interpret: Any = False) -> jax.Array:
    """As `api.x_cache_attention`."""

    def cut_of(queries: int) -> Form | None:
        return cut_inputs(q.shape[2] * queries, x.shape[-1])

    def spread(q, position, cut: Form):
        return queries_of_inputs(q, w_k, position, cut)

    rows, form = (x, row, window, (None, None), None), {"scale": scale, "tiles": Tiles(bool(interpret))}
    return _attend(q, rows, cut_of, spread, w_v, form, *where, interpret=interpret)


def _attend(q, rows, cut_of, spread, w, form: dict, table, sequence, position, interpret):
    """Attention by sums of whole rows, which are multiplied by `w` [N, E, U]. `rows`: the pool, its row, the
    window, cosines and sines, scales. `cut_of` a number of queries; `spread` as `queries_of_keys`."""
    (pool, row, window, angles, scales), whole, heads = rows, q.shape, q.shape[2]
    # The most queries that a cluster has room for, at least one.
    cuts = ((n, cut_of(n)) for n in range(q.shape[1], 1, -1))
    room = ((n, cut) for n, cut in cuts if cut and cut.columns // 2 * cut.rows <= _MOST_SUMS)
    fits = (n for n, cut in room if smem_bytes(scratch(cut, pool.dtype)) <= SMEM_BYTES)
    q, sequence, position = gpu_pages.pieces(q, sequence, position, next(fits, 1))
    blocks, queries = q.shape[:2]
    cut = cut_of(queries)
    assert cut is not None  # `refuses` has looked
    splits = gpu_pages.splits_of(_CTAS, blocks * cut.parts, table.shape[1])
    pages = gpu_pages.pages_of(position, table, sequence, row, window, KEYS)
    spread, every = spread(q, position, cut)
    inputs = Inputs(spread, pool, every, pages, angles[0], angles[1], scales)
    mixed = cluster_gpu.launch(cut._replace(**form, splits=splits), inputs, interpret)
    parts = cut.rows // cut.own  # a CTA has its own heads' queries, or every one all heads'
    mixed = mixed.reshape(blocks, -1, parts, cut.own)[..., : heads // parts * queries]
    out = jnp.einsum("benc,neu->bcnu", mixed.reshape(blocks, -1, heads, queries), w.astype(jnp.float32))
    out = jnp.where(position[..., None, None] >= 0, out, 0).astype(q.dtype)
    return out.reshape(whole[0], -1, *out.shape[2:])[:, : whole[1]]


def refuses(q, k, *_, frequencies=None, k_scale=None, **__) -> str:
    """Name the unsupported part of a `k_cache_attention` call and what is supported instead, or return ""."""
    if q.dtype != jnp.bfloat16 or k.dtype.name not in _STORED:
        return f"{q.dtype} queries of {k.dtype} rows: bfloat16 queries, rows {' or '.join(_STORED)}"
    if (k.dtype.itemsize == 1) != (k_scale is not None):
        return f"{k.dtype} rows {'without' if k_scale is None else 'with'} a scale: 8-bit rows have one"
    heads, width = q.shape[2:]
    if frequencies is not None and width not in _WIDTHS:
        return f"heads {width} wide with rotary embedding: {', '.join(map(str, _WIDTHS))}"
    least = _PIECES[k.dtype.itemsize][-1]
    no_cut = (
        f"{heads} heads {width} wide: at most {_ROWS} query rows; slices for 8 CTAs of {2 * COLUMNS} to"
        f" {_SLICE} columns, multiples of {2 * least} in whole heads, and so are halves of {least}"
    )
    return _refuses(k, cut_keys(q, k, 0 if frequencies is None else width // 2, 1), no_cut)


def refuses_inputs(q, x, *_, **__) -> str:
    """Name the unsupported part of an `x_cache_attention` call and what is supported instead, or return
    ""."""
    if q.dtype != jnp.bfloat16 or x.dtype != jnp.bfloat16:
        return f"{q.dtype} queries of {x.dtype} rows: both bfloat16"
    no_cut = (
        f"{q.shape[2]} heads and rows {x.shape[-1]} wide: at most {_ROWS} query rows;"
        f" slices for 8 CTAs of at most {_SLICE} columns, multiples of {2 * COLUMNS}"
    )
    return _refuses(x, cut_inputs(q.shape[2], x.shape[-1]), no_cut)


def _refuses(pool, cut: Form | None, no_cut: str) -> str:
    if pool.shape[2] != KEYS:
        return f"a page of {pool.shape[2]} tokens: {KEYS}"
    if cut is None:
        return no_cut
    need = smem_bytes(scratch(cut, pool.dtype))
    over = f"one query of these heads, for {need} bytes of shared memory: at most {SMEM_BYTES}"
    return over if need > SMEM_BYTES else ""
