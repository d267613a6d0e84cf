"""One way to read prompts and to generate, for all systems of this folder."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers.baselines.dense import State, Step
from benchmarks.papers.baselines.ffn_skip import FFNSkip
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import Array, Bool, Float, Int, PyTree, Tokens

_PIECE = 16  # tokens that `stream` computes at a time
_SHORTEST = 3  # prompts are padded to 2 to this power at least


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
    """Read prompts and return the logits of each one's next token.

    Args:
      model: a standard one or a student. Rotary scaling of type `dynamic` is that of `slots` tokens, or of
        the model's own context if that is longer.
      tokens: [B, T], padded behind each prompt with any token. lengths: of the prompts, from 1 to T.
      slots: tokens that a sequence will have room for, T or more.

    Returns:
      Float32 logits [B, V]; the state that `extend` continues from; and the work that was needed.

    Raises:
      UsageError: see `check`.
    """
    check(model, baseline)
    return baseline.read(model, params, tokens, lengths, slots)


def check(model: Transformer | Predicted, baseline: Baseline) -> None:
    """Check that a system can read prompts for a model.

    Raises:
      UsageError: a model whose prompts another one reads, rows that are not keys and values of their own, or
        cold regions of FFN-SkipLLM that leave no layer.
    """
    if isinstance(model, Predicted):
        raise UsageError("these systems read the prompts of one model: give the base of this pair alone")
    plan = model.plan
    if plan.forms != ("kv",) or plan.merged or plan.cross:
        raise UsageError(
            f"these systems store keys and values: give a model whose rows are these, not {plan.description}"
        )
    if isinstance(baseline, FFNSkip):
        baseline.middle(plan.num_layers)


@partial(jax.jit, static_argnames=("model", "baseline", "steps"))
def _greedy(model: Transformer, params: PyTree, baseline: Baseline, first, state: State, steps: int):
    """((last token, state), tokens [steps, B]) of `steps` more steps."""

    def one(carry, _):
        token, state = carry
        logits, state, _ = baseline.extend(model, params, token, state)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return (token, state), token

    return jax.lax.scan(one, (first, state), length=steps)


def generate(
    model: Transformer,
    params: PyTree,
    baseline: Baseline,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """`max_new_tokens` greedy tokens after each prompt, in one batch; EOS does not stop a sequence.

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
    if slots > config.longest_context:
        raise UsageError(
            f"{max(lengths)} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{config.longest_context}"
        )
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    logits, state, _ = read(model, params, baseline, tokens, jnp.asarray(lengths, jnp.int32), slots)
    first = jnp.argmax(logits, -1).astype(jnp.int32)
    _, more = _greedy(model, params, baseline, first, state, max_new_tokens - 1)
    return np.concatenate([first[None], more]).T.tolist()


def stream(
    model: Transformer, params: PyTree, baseline: Baseline, prompt: Sequence[int], most: int
) -> Iterator[int]:
    """Yield at most `most` greedy tokens after one prompt, computed a few at a time as they are consumed.

    Raises:
      UsageError: see `check`.
    """
    tokens, length = _padded(prompt)
    slots = tokens.shape[1] + -(-most // _PIECE) * _PIECE
    out, state, _ = read(model, params, baseline, tokens, length, slots)
    token = jnp.argmax(out, -1).astype(jnp.int32)
    yield int(token[0])
    for start in range(1, most, _PIECE):
        (token, state), more = _greedy(model, params, baseline, token, state, _PIECE)
        yield from more[: most - start, 0].tolist()


def follow(
    model: Transformer, params: PyTree, baseline: Baseline, prompt: Sequence[int], following: Sequence[int]
) -> tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Log probability of each token that follows a prompt, and whether it is the likeliest one there.

    The system reads the prompt in its own way; each later token is read as a generated one.

    Raises:
      UsageError: the prompt is empty, or see `check`.
    """
    if not prompt:
        raise UsageError("a baseline needs at least one prompt token before the tokens to score")
    after, _ = _padded(following)
    values, likeliest = _followed(model, params, baseline, *_padded(prompt), after[0])
    return np.asarray(values)[: len(following)], np.asarray(likeliest)[: len(following)]


@partial(jax.jit, static_argnames=("model", "baseline"))
def _followed(model: Transformer, params: PyTree, baseline: Baseline, tokens, length, following):
    slots = tokens.shape[1] + len(following)
    out, state, _ = read(model, params, baseline, tokens, length, slots)

    def one(carry, token):
        out, state = carry
        score = jax.nn.log_softmax(out[0])[token], jnp.argmax(out[0]) == token
        out, state, _ = baseline.extend(model, params, token[None], state)
        return (out, state), score

    return jax.lax.scan(one, (out, state), following)[1]


def _padded(ids: Sequence[int]) -> tuple[Tokens, Int[Array, " one"]]:
    """A batch of one [1, T] with T a power of two, so that few lengths compile, and its length."""
    tokens = np.zeros((1, 1 << max(_SHORTEST, (len(ids) - 1).bit_length())), np.int32)
    tokens[0, : len(ids)] = ids
    return jnp.asarray(tokens), jnp.array([len(ids)], jnp.int32)
