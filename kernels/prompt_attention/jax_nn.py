"""Attention inside prompts by `jax.nn.dot_product_attention`: cuDNN's flash attention, or XLA's composition.

cuDNN's can be neither compiled nor run without a GPU; tests check only that its arguments are right.
"""

from typing import Literal

import jax
import jax.numpy as jnp

_WIDEST = 256


def prompt_attention(q, k, v, lengths, *, scale, window, by: Literal["xla", "cudnn"]):
    """As `api.prompt_attention`; `by` is jax.nn's implementation."""
    live = (jnp.arange(q.shape[1]) < lengths[:, None])[..., None, None]
    k, v = (jnp.where(live, x, 0) for x in (k, v))  # 0 x NaN of a dead token is NaN
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        query_seq_lengths=lengths.astype(jnp.int32),
        key_value_seq_lengths=lengths.astype(jnp.int32),
        local_window_size=None if window is None else (window - 1, 0),
        implementation=by,
    )
    return jnp.where(live, mixed, 0)


def refuses_cudnn(q, k, v, *_, **__) -> str:
    """Name the part of a call that cuDNN does not support and what it supports instead, or return ""."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"{q.dtype} queries, {k.dtype} keys and {v.dtype} values: all bfloat16 or all float16"
    if (width := q.shape[-1]) % 8 or width > _WIDEST:
        return f"heads {width} wide: multiples of 8 up to {_WIDEST}"
    return ""
