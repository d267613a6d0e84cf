"""What a layer does after its attention. A named implementation runs or raises; None picks by platform."""

from collections.abc import Mapping
from typing import Any

import jax

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.after_attention import native_cpu, reference
from swiftkv_jax.kernels.dispatch import Implementation

AFTER_ATTENTION = {
    "xla": Implementation(reference.after_attention),
    "native_cpu": Implementation(native_cpu.after_attention, native_cpu.refuses),
}


def after_attention(
    x: jax.Array, mixed: jax.Array, p: Mapping[str, Any], *, eps: float, implementation: str | None = None
) -> jax.Array:
    """The stream leaving a layer: x + mixed @ o_proj, and the gated SiLU MLP of its norm added to that.

    Args:
      x: [..., D], the stream entering the layer. mixed: [..., N], what its heads give, side by side.
      p: the layer's `post_norm` [D], and trees of `kernel` and perhaps `bias`: `o_proj` [N, D], `down_proj`
        [F, D], and either `gate_proj` and `up_proj`, [D, F] each, or `gate_up_proj` [D, 2, F].
      eps: of the norm.
      implementation: "xla", which is the definition; "native_cpu" (needs a C++ compiler), for 48 to 128
        tokens [T, D] in float32 with one `gate_up_proj`, without a gradient; or None.

    Returns:
      [..., D] in x's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    kernel = {name: p[name]["kernel"].shape for name in ("o_proj", "down_proj")}
    dispatch.expect(
        x_and_mixed=(x.shape[:-1], mixed.shape[:-1]),
        o_proj_and_mixed_by_x=(kernel["o_proj"], (mixed.shape[-1], x.shape[-1])),
        post_norm_and_x=(p["post_norm"], x.shape[-1:]),
        down_proj_and_x=(kernel["down_proj"][1:], x.shape[-1:]),
    )
    return dispatch.call(
        "after_attention", AFTER_ATTENTION, implementation, (x, mixed, p), {"eps": float(eps)}
    )
