"""Attention inside prompts. A named implementation runs or raises; None picks by platform."""

import functools

from jaxtyping import Array, Float, Int

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.prompt_attention import jax_nn, reference

PROMPT_ATTENTION = {
    "reference": Implementation(reference.prompt_attention),
    "xla": Implementation(functools.partial(jax_nn.prompt_attention, by="xla")),
    "cudnn": Implementation(functools.partial(jax_nn.prompt_attention, by="cudnn"), jax_nn.refuses_cudnn),
}


def prompt_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, "B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention of prompts to themselves, from the first token on.

    Args:
      q, k, v: of the same tokens.
      lengths: tokens of each prompt; those after may hold anything, NaN included, and give zeros.
      scale: of the scores, H ** -0.5 by default. window: a query sees the keys at its own position and
        before, fewer than `window` back.
      implementation: "reference", "xla", "cudnn" (bfloat16 and float16, on a GPU), or None.

    Returns:
      An array in q's dtype.

    Raises:
      dispatch.UnsupportedError: heads that do not divide, or a call that the named implementation cannot run.
    """
    if q.shape[2] % k.shape[2]:
        raise dispatch.UnsupportedError(f"{q.shape[2]} query heads do not share {k.shape[2]} kv heads evenly")
    options = {"scale": q.shape[-1] ** -0.5 if scale is None else scale, "window": window}
    args = (q, k, v, lengths)
    return dispatch.call("prompt_attention", PROMPT_ATTENTION, implementation, args, options)
