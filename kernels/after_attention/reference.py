"""The definition of what a layer does after its attention."""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.dense import linear, rms_norm


def after_attention(x, mixed, p, *, eps: float):
    """As `api.after_attention`."""
    x = x + linear(mixed, p["o_proj"])
    return x + mlp(p, rms_norm(x, p["post_norm"], eps))


def mlp(p, h):
    """The gated SiLU feed-forward network."""
    if "gate_up_proj" in p:
        gate, up = jnp.unstack(linear(h, p["gate_up_proj"]), axis=-2)
    else:
        gate, up = linear(h, p["gate_proj"]), linear(h, p["up_proj"])
    return linear(jax.nn.silu(gate) * up, p["down_proj"])
