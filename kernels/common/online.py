"""Online softmax over a few keys at a time, in plain jax.numpy: the loop of the `xla` implementations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite: nothing seen gives zeros, never NaN
TURN_KEYS = 4096  # keys that one turn reads, of all blocks together


def softmax_sum(turn: Callable, first, last, shape: tuple[int, ...], width: int) -> jax.Array:
    """Softmax-weighted sums [*shape, width] in float32 over the keys of turns `first` to `last`.

    `turn(i)` returns (scores [*shape, keys], seen of the same shape or broadcast to it, weigh). The result is
    the sum of `weigh(weights [*shape, keys]) -> [*shape, width]`; queries that see no key get zeros.
    """

    def step(i, carry):
        top, total, mixed = carry
        scores, seen, weigh = turn(i)
        scores = jnp.where(seen, scores.astype(jnp.float32), MASKED)
        higher = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
        decay = jnp.exp(top - higher)
        return higher, total * decay + weights.sum(-1), mixed * decay[..., None] + weigh(weights)

    top, nothing = (jnp.full(shape, value, jnp.float32) for value in (MASKED, 0))
    carry = top, nothing, jnp.zeros((*shape, width), jnp.float32)
    _, total, mixed = lax.fori_loop(first, last, step, carry)
    return mixed / jnp.maximum(total, 1e-30)[..., None]


def span(position: jax.Array, window, keys: int) -> tuple[jax.Array, jax.Array]:
    """The turns of `keys` keys, [first, last), that hold a key some query at `position` (-1: none) sees."""
    last = jnp.max(position) + 1
    first = jnp.maximum(jnp.min(jnp.where(position < 0, last, position)) - window + 1, 0)
    return first // keys, -(-last // keys)
