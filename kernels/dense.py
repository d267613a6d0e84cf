"""Products with weights, and the norm before them: what every layer is made of."""

import jax
import jax.numpy as jnp


def linear(x: jax.Array, p) -> jax.Array:
    """x @ kernel (+ bias), in x's dtype: fp32 master weights are rounded here, where they are used."""
    y = jnp.tensordot(x, p["kernel"].astype(x.dtype), 1)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm, computed in float32 and rounded before the gain, as the checkpoints expect."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale.astype(x.dtype)
