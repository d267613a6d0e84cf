"""Which keys a query sees: its own position's and those before, fewer than a window back."""

import jax
import jax.numpy as jnp

_ALL = 1 << 30  # further back than any context


def window_of(window):
    """`window`, or for None one that includes every key."""
    return _ALL if window is None else window


def visible(position: jax.Array, keys: int, window) -> jax.Array:
    """[b, C, keys]: key t is seen from position p if 0 <= p - t < window. Position -1 sees nothing."""
    back = position[..., None] - jnp.arange(keys)
    return (back >= 0) & (back < window_of(window))


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Scores, or logits, that approach `softcap` and do not pass it (Gemma 2); None changes nothing."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def bias_of(bias: jax.Array, back: jax.Array) -> jax.Array:
    """The bias [N, ...] of scores at distances `back` [...], from `bias` [N, S] by head and distance."""
    return bias[:, jnp.clip(back, 0, bias.shape[1] - 1)]


def weights_of(scores: jax.Array, seen: jax.Array) -> jax.Array:
    """Softmax over the seen scores of the last axis; zeros if none is seen."""
    top = jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True)
    raw = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
    return raw / jnp.maximum(raw.sum(-1, keepdims=True), 1e-30)
