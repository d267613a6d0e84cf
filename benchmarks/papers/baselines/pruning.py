"""Pruning of prompt tokens, at random or by a probe's attention (KV prediction paper, section 5).

Kept tokens keep their original positions; pruned tokens are never seen again.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from benchmarks.papers.baselines import dense
from benchmarks.papers.baselines.dense import Slots, State, Step
from swiftkv_jax.common.checks import above, integer
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Array, Float, Int, PyTree, Tokens

PROBED = 4  # static pruning probes one layer in so many, rounded up


class Pruning:
    """What is common: a token that is generated sees all kept tokens."""

    def extend(self, model: Transformer, params: PyTree, tokens: Int[Array, " B"], state: State) -> Step:
        """As `generate.Baseline.extend`."""
        at = state.length[:, None]
        x = embed(model, params, tokens[:, None], at)
        out, rows, work = dense.run_layers(model, params, x, at, state.rows, state.length)
        return out, State(rows, state.length + 1, state.left), work


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomPruning(Pruning):
    """RP: keep a random share of a prompt's tokens. The choice depends only on the prompt and the seed.

    Attributes:
      keep: the share that stays, rounded up to whole tokens, the ones below included.
      keep_first: number of tokens at the start that are always kept, as is the last token.

    Raises:
      UsageError: keep is not in (0, 1], or keep_first or seed is not an integer of 0 or more.
    """

    keep: float
    keep_first: int = 0
    seed: int = 0

    def __post_init__(self):
        above("keep", self.keep, 0, 1)
        integer("keep_first", self.keep_first, 0)
        integer("seed", self.seed, 0, 2**31 - 1)

    def read(self, model, params, tokens, lengths, slots) -> Step:
        """As `generate.read`."""
        shares = self.scores(tokens, lengths)
        kept = chosen(shares, lengths, self.keep, self.keep_first)
        return read_some(model, params, tokens, lengths, slots, kept, self.keep, self.keep_first)

    def scores(self, tokens: Tokens, lengths: Int[Array, " B"]) -> Float[Array, "B T"]:
        """Uniform numbers; those of a prompt do not depend on its neighbours, nor on how far it is padded."""
        places = jnp.arange(tokens.shape[1])
        at_each = jax.vmap(jax.random.fold_in, (None, 0))

        def row(tokens, length):
            odd = jax.vmap(jax.random.bits)(at_each(jax.random.key(self.seed), places))
            mark = jnp.where(places < length, tokens.astype(jnp.uint32) * odd, 0).sum(dtype=jnp.uint32)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), length), mark)
            return jax.vmap(jax.random.uniform)(at_each(key, places))

        return jax.vmap(row)(tokens, lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticPruning(Pruning):
    """SP: the first quarter of the layers (the probe) reads the whole prompt. Then all layers read only the
    tokens with the highest attention weights of the last token, averaged over the probe's layers and heads.

    Attributes:
      keep: the share of tokens that stays, rounded up; the last token always does.

    Raises:
      UsageError: keep is not in (0, 1].
    """

    keep: float

    def __post_init__(self):
        above("keep", self.keep, 0, 1)

    def read(self, model, params, tokens, lengths, slots) -> Step:
        """As `generate.read`. The probe's work is counted."""
        probed = math.ceil(model.config.num_layers / PROBED)
        length = tokens.shape[1]
        places, last = jnp.arange(length), lengths - 1
        at = jnp.where(places < lengths[:, None], places, length)
        x, scores, works = embed(model, params, tokens, at), jnp.zeros(tokens.shape, jnp.float32), []
        rows = dense.empty(model, len(tokens), length)
        for layer in range(probed):
            entering = dense.only(x, at, last)
            x, at, rows, work = dense.run_layer(model, params, layer, x, at, rows, last)
            read = rows[model.plan.reads[layer]]
            scores += dense.importance(model, params, layer, entering, last[:, None], read) / probed
            works.append(work)
        kept = chosen(scores, lengths, self.keep)
        out, state, work = read_some(model, params, tokens, lengths, slots, kept, self.keep)
        more = jax.tree.map(lambda all, probe: all.at[:probed].add(probe), work, dense.by_layer(works))
        return out, state, more


def chosen(scores: Float[Array, "B T"], lengths: Int[Array, " B"], keep: float, keep_first: int = 0) -> Slots:
    """The tokens to keep: those that must stay, then the best of the others."""
    places = jnp.arange(scores.shape[1])
    there = places < lengths[:, None]
    must = there & ((places < keep_first) | dense.one(len(places), lengths - 1))
    count = jnp.maximum(jnp.asarray(dense.counts(keep, len(places)))[lengths], must.sum(1))
    return dense.best(jnp.where(must, jnp.inf, scores), there, count)


def read_some(
    model: Transformer,
    params: PyTree,
    tokens: Tokens,
    lengths: Int[Array, " B"],
    slots: int,
    kept: Slots,
    keep: float,
    keep_first: int = 0,
) -> Step:
    """Read the `kept` tokens of each prompt and no other: (logits of the last, state, work)."""
    length = tokens.shape[1]
    most = min(length, max(int(dense.counts(keep, length)[-1]), keep_first + 1))
    at = dense.in_order(kept, most)
    x = embed(model, params, jnp.take_along_axis(tokens, jnp.minimum(at, length - 1), axis=1), at)
    at = jnp.where(at < length, at, slots)
    rows = dense.empty(model, len(tokens), slots)
    out, rows, work = dense.run_layers(model, params, x, at, rows, lengths - 1)
    return out, State(rows, lengths), work
