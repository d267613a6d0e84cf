"""Causal attention of packed sequences. A named implementation runs or raises; None picks by platform."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swiftkv_jax.kernels.causal_attention import cudnn, native_cpu, reference, splash, xla
from swiftkv_jax.kernels.causal_attention.shards import WHOLE, Shards
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation

CAUSAL_ATTENTION = {
    "reference": Implementation(reference.causal_attention),
    "xla": Implementation(xla.causal_attention),
    "native_cpu": Implementation(native_cpu.causal_attention, native_cpu.refuses),
    "splash": Implementation(splash.causal_attention, splash.refuses),
    "cudnn": Implementation(cudnn.causal_attention, cudnn.refuses),
}


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K U"],
    segments: Int[Array, "B T"] | None,
    window: int | Int[Array, ""],
    *,
    bias: Float[Array, "N S"] | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
    shards: Shards = WHOLE,
) -> Float[Array, "B T N U"]:
    """Causal attention inside each segment; it can be differentiated by q, k and v.

    Args:
      q, k, v: of the same tokens.
      segments: a number for each token; a segment is a run of tokens of one number. None: each row is one
        segment, which "cudnn" can compute on more GPUs and under any window.
      window: a query sees keys of its own segment, at or before it, fewer than `window` tokens back.
      bias: added to the scores, by head and by how far back a key is; "reference" and "xla" take one.
      softcap: largest absolute score, as in `mask.capped`, for the same two.
      implementation: "reference", "xla", "native_cpu" (needs a C++ compiler), "splash" (TPU), "cudnn" (GPUs
        from Hopper on, from Ampere on without segments), or None.
      shards: the axes of the mesh that "splash" and "cudnn" are cut over; the others the compiler cuts.

    Returns:
      An array in q's dtype.

    Raises:
      dispatch.UnsupportedError: heads that do not divide, or a call that the named implementation cannot run.
    """
    if q.shape[2] % k.shape[2]:
        raise dispatch.UnsupportedError(f"{q.shape[2]} query heads do not share {k.shape[2]} kv heads evenly")
    if segments is None and implementation != "cudnn":
        segments = jnp.zeros(q.shape[:2], jnp.int32)
    args = (q, k, v, segments, window)
    options = {"scale": q.shape[-1] ** -0.5, "shards": shards}
    return dispatch.call("causal_attention", CAUSAL_ATTENTION, implementation, args, options, bias, softcap)
