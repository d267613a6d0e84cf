"""The definition of rotary angles."""

import jax.numpy as jnp


def rotary_angles(position, frequency, *, factor: float):
    """As `api.rotary_angles`."""
    angle = position[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor
