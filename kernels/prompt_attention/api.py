"""Attention inside prompts. A named implementation runs or raises; None picks by platform."""

import functools

import jax

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.dispatch import Implementation
from swiftkv_jax.kernels.prompt_attention import jax_nn, reference

PROMPT_ATTENTION = {
    "reference": Implementation(reference.prompt_attention),
    "xla": Implementation(functools.partial(jax_nn.prompt_attention, by="xla")),
    "cudnn": Implementation(functools.partial(jax_nn.prompt_attention, by="cudnn"), jax_nn.refuses_cudnn),
}


def prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of prompts to themselves, from the first token on.

    Args:
      q: [B, T, N, H]. k, v: [B, T, K, H] of the same tokens.
      lengths: [B] tokens of each prompt; those after may hold anything, NaN included, and give zeros.
      scale: of the scores, H ** -0.5 by default. window: a query sees the keys at its own position and
        before, fewer than `window` back.
      implementation: "reference", "xla", "cudnn" (bfloat16 and float16, on a GPU), or None.

    Returns:
      [B, T, N, H] in q's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    dispatch.expect(
        k_and_v=(k, v),
        q_and_k=((*q.shape[:2], q.shape[-1]), (*k.shape[:2], k.shape[-1])),
        q_and_lengths=(q.shape[:1], lengths),
    )
    if q.shape[2] % k.shape[2]:
        raise dispatch.UnsupportedError(f"{q.shape[2]} query heads do not share {k.shape[2]} kv heads evenly")
    options = {"scale": q.shape[-1] ** -0.5 if scale is None else scale, "window": window}
    args = (q, k, v, lengths)
    return dispatch.call("prompt_attention", PROMPT_ATTENTION, implementation, args, options)
