"""Which tokens of packed rows belong together. A segment is a run of equal numbers; a number may return."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether a token is the first of its segment."""
    first = jnp.ones_like(segments[:, :1], bool)
    return jnp.concatenate([first, segments[:, 1:] != segments[:, :-1]], axis=1)


def first_key(segments: Int[Array, "B T"], window: int | Int[Array, ""]) -> Int[Array, "B T"]:
    """The first key that each token sees: of its own segment, and fewer than `window` tokens back."""
    at = jnp.arange(segments.shape[1])
    return jnp.maximum(jax.lax.cummax(jnp.where(starts(segments), at, 0), axis=1), at - window + 1)


def numbered(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """1, 2, ... for the segments of each row: a number that never returns."""
    return jnp.cumsum(starts(segments).astype(jnp.int32), axis=1)
