"""Causal attention and its gradients in C++, for CPUs: `native_cpu.cc`, called through XLA's FFI."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.segments import first_key
from swiftkv_jax.kernels.common import native

_SOURCE = Path(__file__).with_name("native_cpu.cc")
_FORWARD, _BACKWARD = "swiftkv_causal_attention", "swiftkv_causal_attention_backward"


def refuses(*_, **__) -> str:
    """Name the unsupported part of a call, or return ""."""
    return native.refuses(_SOURCE, CausalAttention=_FORWARD, CausalAttentionBackward=_BACKWARD)


def causal_attention(q, k, v, segments, window, *, scale, shards=None):
    """As `api.causal_attention`, computed in float32."""
    q32, k32, v32 = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    first = jnp.asarray(first_key(segments, window), jnp.int32)
    return jnp.asarray(_attend(float(scale), q32, k32, v32, first), q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, q, k, v, first):
    return _forward(scale, q, k, v, first)[0]


def _forward(scale, q, k, v, first):
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), jnp.float32)
    sums = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    call = jax.ffi.ffi_call(_FORWARD, (out, sums), vmap_method="sequential")
    out, sums = call(q, k, v, first, scale=scale)
    return out, (q, k, v, first, out, sums)


def _backward(scale, kept, given):
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in kept[:3])
    call = jax.ffi.ffi_call(_BACKWARD, shapes, vmap_method="sequential")
    return *call(*kept, given, scale=scale), None


_attend.defvjp(_forward, _backward)
