"""cuDNN's flash attention: of packed rows, for Hopper, and of rows that are one segment each.

cuDNN needs a GPU even for compilation; packed rows ran on an H200, and were not compared with the definition.
JAX's public `jax.nn.dot_product_attention` does not support segments, so they call the function below it.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from swiftkv_jax.kernels.causal_attention.segments import numbered, starts
from swiftkv_jax.kernels.causal_attention.shards import Shards

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_TOKENS = 64  # least mean tokens of a segment, which bounds the segments of a row
_FEWEST = 32  # segments that any row may have, at least


def refuses(q, k, v, segments, window, *, scale, shards: Shards, capable: bool | None = None) -> str:
    """Name the unsupported part of a call, or return "". `capable`: whether the GPU to compile for is from
    Hopper on; None: this machine's."""
    try:
        module = _module()
    except ImportError:
        return f"this JAX: it has no {_MODULE}"
    if segments is not None and not (isinstance(window, int) and window >= q.shape[1]):
        return "windows shorter than the sequence"
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"{q.dtype}: it takes bfloat16 and float16"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"heads of width {q.shape[-1]} and {v.shape[-1]}: it takes equal multiples of 8 up to 256"
    if segments is None:
        return ""
    if shards.of(q.shape[0], q.shape[1], k.shape[2]).tokens:
        return "a mesh that cuts sequences: give mesh.context=1"
    if not (module.check_compute_capability("9.0") if capable is None else capable):
        return "this machine or chip: it needs a GPU from Hopper on, with cuDNN, even to compile"
    return ""


def causal_attention(q, k, v, segments, window, *, scale, shards: Shards, attend=None):
    """As `api.causal_attention`; NaN in a row of more than one segment in 64 tokens, 32 at least.

    cuDNN must know the most segments of a row at compile time, and would silently drop the rest. `attend`
    replaces it, see `stand_in.py`.
    """
    if segments is None:
        near = None if window >= q.shape[1] else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=near, implementation="cudnn"
        )
    cut, attend = shards.of(q.shape[0], q.shape[1], k.shape[2]), attend or _by_cudnn

    def of_device(_, q, k, v, segments, __):
        # A kv head for each query head: JAX 0.10 counts where a segment's keys begin in the queries' heads.
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        most = max(_FEWEST, q.shape[1] // _TOKENS)
        out = attend(q, k, v, *packed(segments, most), scale)
        too_many = jnp.sum(starts(segments), axis=1) > most
        return jnp.where(too_many[:, None, None, None], jnp.nan, out)

    return cut.run(of_device, q, k, v, segments)


def _by_cudnn(q, k, v, lengths, offsets, scale):
    module = _module()
    where = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
    how = {"scale": scale, "mask_type": module.MaskType.PADDING_CAUSAL, "qkv_layout": "BTNH"}
    return module.dot_product_attention(q, k, v, **where, **how)


def packed(segments: Int[Array, "B T"], most: int) -> tuple[Int[Array, "B M"], Int[Array, "B M1"]]:
    """(lengths of each row's segments, their first tokens); -1 for a segment that does not exist.

    Padding is a segment too. Every token has one, so cuDNN writes every row of its output. There is one more
    offset than lengths; it is always -1 here, since JAX fills in the end of the last segment.
    """
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)
    run = numbered(segments)

    def row(run, first):
        lengths = jnp.zeros(most + 1, jnp.int32).at[run].add(1, mode="drop")[1:]
        offsets = jnp.full(most + 1, -1, jnp.int32)
        offsets = offsets.at[jnp.where(first & (run <= most), run - 1, most + 1)].set(places, mode="drop")
        return jnp.where(lengths > 0, lengths, -1), offsets

    return jax.vmap(row)(run, starts(segments))


def _module() -> Any:
    return importlib.import_module(_MODULE)
