"""FFN-SkipLLM (arXiv 2404.03865): tokens whose direction an FFN hardly changes skip the FFNs of later layers.

Attention always runs, so the cache is complete. The criterion is the cosine between the hidden states before
and after an FFN's residual addition. Published descriptions leave open how long a token goes on skipping:
here to the end of the middle layers.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.papers.baselines import dense
from benchmarks.papers.baselines.dense import State, Step
from swiftkv_jax.common.checks import integer, number
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.layers import MLPS, after, before
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Array, Bool, Float, Int, PyTree, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class FFNSkip:
    """Attributes:
      threshold: a token whose cosine reaches it in a middle layer skips the FFNs of the later middle ones.
      cold_first, cold_last: layers at either end that every token runs whole; those between are the middle.
      warm_up: number of tokens at the start of a sequence that skip nothing.

    Raises:
      UsageError: the threshold is not a number, or another one is not an integer of 0 or more.
    """

    threshold: float
    cold_first: int = 1
    cold_last: int = 1
    warm_up: int = 0

    def __post_init__(self):
        number("threshold", self.threshold)
        for name in ("cold_first", "cold_last", "warm_up"):
            integer(name, getattr(self, name), 0)

    def middle(self, layers: int) -> range:
        """The layers whose FFNs may be skipped.

        Raises:
          UsageError: the cold regions leave none.
        """
        middle = range(self.cold_first, layers - self.cold_last)
        if not middle:
            raise UsageError(
                f"cold regions of {self.cold_first} and {self.cold_last} layers leave none of {layers} "
                "to skip in: make them smaller"
            )
        return middle

    def read(self, model, params, tokens, lengths, slots) -> Step:
        """As `generate.read`."""
        places = jnp.arange(tokens.shape[1])
        at = jnp.where(places < lengths[:, None], places, slots)
        state = State(dense.empty(model, len(tokens), slots), lengths)
        return self._run(model, params, tokens, at, state)

    def extend(self, model: Transformer, params: PyTree, tokens: Int[Array, " B"], state: State) -> Step:
        """As `generate.Baseline.extend`. Only a batch of one sequence really skips FFNs; larger ones compute
        all."""
        at = state.length[:, None]
        return self._run(model, params, tokens[:, None], at, State(state.rows, state.length + 1))

    def _run(self, model, params, tokens: Tokens, at, state: State) -> Step:
        """Run the tokens `at`, the last of each sequence among them: (its logits, state, work)."""
        layers, rows, last = model.config.num_layers, state.rows, state.length - 1
        middle, x, works = self.middle(layers), embed(model, params, tokens, at), []
        slots = rows[0].held.shape[1]
        skips = jnp.zeros((len(at), slots), bool)
        for layer in range(layers):
            mixed, at, rows, work = dense.run_layer(model, params, layer, x, at, rows, last, mlp=_none)
            now = jnp.take_along_axis(skips, jnp.minimum(at, slots - 1), axis=1) & (layer in middle)
            x = _through_ffn(model, weights.layer(params, layer)["mlp"], mixed, now, layer in middle)
            if layer in middle:
                reached = (cosine(mixed, x) >= self.threshold) & (at >= self.warm_up)
                skips = dense.put(skips, now | reached, at)
            works.append(dataclasses.replace(work, mlps=(~now & (at < slots)).sum(1)))
        out = dense.last_logits(model, params, x, at, last)
        return out, State(rows, state.length), dense.by_layer(works)


@partial(jax.jit, static_argnames=("model", "layer"))
def cosines(model: Transformer, params: PyTree, tokens: Tokens, layer: int) -> Float[Array, "B T"]:
    """The cosine of each token of full sequences in `layer`, when no token has skipped before. Thresholds for
    a model can be chosen from these values."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, rows = embed(model, params, tokens, at), dense.empty(model, *tokens.shape)
    mixed = x
    for below in range(layer + 1):
        mixed, _, rows, _ = dense.run_layer(model, params, below, x, at, rows, mlp=_none)
        p = weights.layer(params, below)["mlp"]
        x = _through_ffn(model, p, mixed, jnp.zeros(at.shape, bool), False)
    return cosine(mixed, x)


def cosine(a: Float[Array, "*batch D"], b: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    """Cosine of two hidden states, in float32."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / jnp.maximum(lengths, 1e-30)


def _none(config: ModelConfig, p: PyTree, h: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Stands in for an FFN that is skipped: the layer ends after its attention."""
    return jnp.zeros_like(h)


def _through_ffn(
    model: Transformer, p: PyTree, x: Float[Array, "B n D"], skip: Bool[Array, "B n"], may_skip: bool
) -> Float[Array, "B n D"]:
    """The hidden states after an FFN, unchanged where it is skipped; a single token then saves the FFN."""

    config = model.config

    def whole(x):
        return x + after(config, p, MLPS["dense"](config, p, before(config, p, x)))

    if not may_skip:
        return whole(x)
    if skip.size == 1:
        return jax.lax.cond(skip[0, 0], lambda x: x, whole, x)
    return jnp.where(skip[..., None], x, whole(x))
