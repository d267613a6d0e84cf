"""Splash attention, the flash attention for TPUs that comes with JAX, of packed rows.

Compiled for v4, v5p, v5e and v6e, and interpreted on a CPU; never run on hardware. It runs if named, or if
the check on the machine chose it.
"""

import importlib.util

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.kernels.causal_attention.segments import numbered
from swiftkv_jax.kernels.causal_attention.shards import Shards
from swiftkv_jax.kernels.common import chips
from swiftkv_jax.kernels.common.dispatch import divisor

_MODULE = "jax.experimental.pallas.ops.tpu.splash_attention"
_LANES = 128
_QUERIES, _KEYS_AT_ONCE = 1024, 512  # of a block
# Up to this many blocks of keys one kernel makes all gradients; it writes the queries' once for each block.
_FUSED = 8


def refuses(q, k, v, segments, window, *, scale, shards: Shards, interpret=False) -> str:
    """Name the unsupported part of a call, or return ""."""
    try:
        there = importlib.util.find_spec(_MODULE) is not None
    except ModuleNotFoundError:  # a parent package is missing
        there = False
    if not there:
        return f"this JAX: it has no {_MODULE}"
    if not isinstance(window, int):
        return "a window that is known only at run time: give an int"
    cut = shards.of(q.shape[0], q.shape[1], k.shape[2])
    own = q.shape[1] // cut.count(cut.tokens)
    if own % _LANES:
        return f"{own} tokens on a device: give a multiple of {_LANES}"
    if not interpret and (q.shape[-1] % _LANES or v.shape[-1] % _LANES):
        return f"heads of width {q.shape[-1]}: it takes multiples of {_LANES}"
    return ""


def causal_attention(q, k, v, segments, window, *, scale, shards: Shards, interpret=False):
    """As `api.causal_attention`; scores and sums in float32, `interpret` for tests on a CPU."""
    cut = shards.of(q.shape[0], q.shape[1], k.shape[2])
    pieces = cut.count(cut.tokens)
    kernel = _kernel(q.shape[1], pieces, q.shape[2] // k.shape[2], window, interpret)
    where = None
    if cut.rows or cut.tokens or cut.heads:
        mesh = jax.sharding.get_abstract_mesh()
        where = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, cut.tokens or None)))
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    return cut.run(_of_device, q, k, v, numbered(segments), kernel, where)


def _of_device(kernel, q, k, v, own, all_):
    """The kernel takes one kv head and its group of queries, [G, T, H] and [S, H], of one row."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    grouped = grouped.transpose(0, 2, 3, 1, 4)  # B K G T H
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    heads = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, ids), in_axes=(0, 0, 0, None))
    out = jax.vmap(heads)(grouped, k, v, SegmentIds(own, all_))
    return out.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], v.shape[-1]).astype(q.dtype)


def _kernel(tokens: int, pieces: int, group: int, window: int, interpret: bool):
    """The kernel for `tokens` keys; the blocks to skip are found for each of `pieces` equal parts of the
    queries."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (tokens, tokens)
    near = splash.LocalMask(shape, (window - 1, 0), 0)
    mask = splash.CausalMask(shape) if window >= tokens else near
    queries, keys = _block(tokens // pieces, _QUERIES), _block(tokens, chips.current().keys)
    at_once = _block(keys, _KEYS_AT_ONCE)
    fused = tokens // keys <= _FUSED
    sizes: dict = {"block_q": queries, "block_kv": keys, "block_kv_compute": at_once, "block_q_dkv": queries}
    sizes |= {"block_kv_dkv": keys, "block_kv_dkv_compute": at_once}
    sizes |= {} if fused else {"block_q_dq": queries, "block_kv_dq": keys}
    blocks = splash.BlockSizes(**sizes, use_fused_bwd_kernel=fused)
    how = {"block_sizes": blocks, "head_shards": 1, "q_seq_shards": pieces, "interpret": interpret}
    return splash.make_splash_mqa(splash.MultiHeadMask([mask] * group), **how)


def _block(tokens: int, most: int) -> int:
    """The largest divisor up to `most` that is a multiple of the lanes."""
    return _LANES * divisor(tokens // _LANES, most // _LANES)
