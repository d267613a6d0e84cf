"""One way to read prompts and to generate, for all systems of this folder."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.baselines.dense import State, Step
from swiftkv_jax.checks import integer
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import Array, Int, PyTree, Tokens


@runtime_checkable
class Baseline(Protocol):
    """A system as a value: frozen, so that it can be a static argument of `jit`."""

    def read(
        self, model: Transformer, params: PyTree, tokens: Tokens, lengths: Int[Array, " B"], slots: int
    ) -> Step:
        """As `generate.read`."""
        ...

    def extend(self, model: Transformer, params: PyTree, tokens: Int[Array, " B"], state: State) -> Step:
        """(logits [B, V] after one more token of each sequence, state, work)."""
        ...


@partial(jax.jit, static_argnames=("model", "baseline", "slots"))
def read(
    model: Transformer,
    params: PyTree,
    baseline: Baseline,
    tokens: Tokens,
    lengths: Int[Array, " B"],
    slots: int,
) -> Step:
    """Read prompts, and give the logits of each one's next token.

    Args:
      model: with a standard plan. Rotary scaling of type `dynamic` stays that of the model's own context.
      tokens: [B, T], padded behind each prompt with any token. lengths: of the prompts, from 1 to T.
      slots: tokens that a sequence will have room for, T or more.

    Returns:
      Float32 logits [B, V]; what `extend` goes on from; and the work that was needed.

    Raises:
      UsageError: the plan is not a standard one, or the baseline does not fit the model.
    """
    if model.plan != KVPlan.standard(model.config.num_layers):
        raise UsageError(
            "these systems read the prompts of a standard model: give the teacher, not a student"
        )
    return baseline.read(model, params, tokens, lengths, slots)


@partial(jax.jit, static_argnames=("model", "baseline", "steps"))
def _greedy(model: Transformer, params: PyTree, baseline: Baseline, first, state: State, steps: int):
    """The tokens of `steps` more steps, [steps, B]."""

    def one(carry, _):
        token, state = carry
        logits, state, _ = baseline.extend(model, params, token, state)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return (token, state), token

    return jax.lax.scan(one, (first, state), length=steps)[1]


def generate(
    model: Transformer,
    params: PyTree,
    baseline: Baseline,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """`max_new_tokens` greedy tokens after each prompt, all in one batch; an end token does not end it.

    Raises:
      UsageError: no prompts, an empty one, ids outside the vocabulary, a sequence longer than the model's
        context, or as in `read`.
    """
    config = model.config
    integer("max_new_tokens", max_new_tokens, 1)
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or not min(lengths):
        raise UsageError("generate needs at least one prompt, and each needs at least one token")
    outside = [token for prompt in prompts for token in prompt if not 0 <= token < config.vocab_size]
    if outside:
        raise UsageError(f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}")
    slots = max(lengths) + max_new_tokens
    if slots > config.max_position_embeddings:
        raise UsageError(
            f"{max(lengths)} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{config.max_position_embeddings}"
        )
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    logits, state, _ = read(model, params, baseline, tokens, jnp.asarray(lengths, jnp.int32), slots)
    first = jnp.argmax(logits, -1).astype(jnp.int32)
    more = _greedy(model, params, baseline, first, state, max_new_tokens - 1)
    return np.concatenate([first[None], more]).T.tolist()
