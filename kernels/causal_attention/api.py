"""Causal attention of packed sequences. A named implementation runs or raises; None picks by platform."""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.causal_attention import native_cpu, reference, xla
from swiftkv_jax.kernels.dispatch import Implementation

CAUSAL_ATTENTION = {
    "reference": Implementation(reference.causal_attention),
    "xla": Implementation(xla.causal_attention),
    "native_cpu": Implementation(native_cpu.causal_attention, native_cpu.refuses),
}


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    window: int | jax.Array,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention inside each segment; it can be differentiated by q, k and v.

    Args:
      q: [B, T, N, H]. k: [B, T, K, H]. v: [B, T, K, U]: of the same tokens.
      segments: [B, T] a number for each token; a segment is a run of tokens of one number.
      window: a query sees keys of its own segment, at or before it, fewer than `window` tokens back.
      implementation: "reference", "xla", "native_cpu" (needs a C++ compiler), or None.

    Returns:
      [B, T, N, U] in q's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    dispatch.expect(
        k_and_v=(k.shape[:-1], v.shape[:-1]),
        q_and_k=((*q.shape[:2], q.shape[-1]), (*k.shape[:2], k.shape[-1])),
        q_and_segments=(q.shape[:2], segments),
    )
    if q.shape[2] % k.shape[2]:
        raise dispatch.UnsupportedError(f"{q.shape[2]} query heads do not share {k.shape[2]} kv heads evenly")
    args = (q, k, v, first_key(segments, window))
    options = {"scale": q.shape[-1] ** -0.5}
    return dispatch.call("causal_attention", CAUSAL_ATTENTION, implementation, args, options)


def first_key(segments: jax.Array, window: int | jax.Array) -> jax.Array:
    """[B, T]: the first key that each token sees, of its own run of equal segment numbers."""
    at = jnp.arange(segments.shape[1])
    new = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    return jnp.maximum(jax.lax.cummax(jnp.where(new, at, 0), axis=1), at - window + 1)
