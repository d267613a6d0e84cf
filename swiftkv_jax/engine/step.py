"""A step on the device: any tokens of any sequences through the model, and sampling after some of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.cache import Cache, make_batch
from swiftkv_jax.engine.loop import choose, draw_early
from swiftkv_jax.engine.sampling import Mode, Policy, Sampled, Tally, sample
from swiftkv_jax.model import Transformer, embed, exit_logits, logits, run, survivors_of
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Array, Float, Int, PyTree


@pytree
class Inputs:
    """A flat ragged batch for one step: decoded tokens, and chunks of prompts; numpy arrays from the host.

    Attributes:
      tokens: [T], those of each sequence together. positions: [T] in their sequences.
      query_starts: [Q + 1] the first token of each sequence, then the end of the last.
      survivors: [M] ascending tokens after which one is sampled, padded with T.
      table: [Q, slots] page ids.
    """

    tokens: Int[Any, " T"]
    positions: Int[Any, " T"]
    query_starts: Int[Any, " Q1"]
    survivors: Int[Any, " M"]
    table: Int[Any, "Q slots"]


@pytree
class Survivors:
    """Whose tokens the survivors of a step are; numpy arrays from the host.

    Attributes:
      rows: [M] the sequence of each, a row of what follows. lengths: [M] its tokens up to this one.
      prompts: [Q] tokens of each prompt. history: [Q, S] as in `Lanes`.
    """

    rows: Int[Any, " M"]
    lengths: Int[Any, " M"]
    prompts: Int[Any, " Q"]
    history: Int[Any, "Q S"]


Scores = tuple[Float[Array, "M V"], Float[Array, "M V"] | None]  # the model's logits, the exit head's


@partial(jax.jit, static_argnames=("model", "exits"), donate_argnames=("cache",))
def run_any(
    model: Transformer, params: PyTree, cache: Cache, inputs: Inputs, exits: bool = False
) -> tuple[Scores, Cache]:
    """Cache a flat ragged batch of tokens; the logits after each survivor, with `exits` the exit head's too.

    Whole on every device. `draw` samples from them, in a small program of its own: the model is compiled once
    for all ways of sampling.
    """
    plan, positions, starts = model.plan, inputs.positions, inputs.query_starts
    at, batch = cache.angles.at(positions), make_batch(starts, positions)
    lower, upper = range(plan.depth), range(plan.depth, plan.num_layers)
    survive = partial(survivors_of, positions, starts, inputs.survivors)
    x, pool = embed(model, params, inputs.tokens), cache.seen_by(inputs.table)
    x, pool = run(model, params, x, at, batch, pool, lower)
    last, pool = run(model, params, x, at, batch, pool, upper, survive)
    alive = jnp.clip(inputs.survivors, 0, inputs.tokens.shape[0] - 1)
    scores = logits(model, params, last), exit_logits(model, params, x[alive]) if exits else None
    if cache.mesh is not None:
        scores = jax.lax.with_sharding_constraint(scores, NamedSharding(cache.mesh, PartitionSpec()))
    return scores, pool.seen_by(cache.table).pinned()


@partial(jax.jit, static_argnames=("mode", "threshold"))
def draw(
    mode: Mode, scores: Scores, survivors: Survivors, policy: Policy, threshold: float | None = None
) -> Sampled:
    """Sample after each survivor, by the rules of its sequence.

    Under a `threshold` the exit head's token stands where the head gives it more probability.
    """
    own, early = scores
    by_sequence = (policy, survivors.history, survivors.prompts)
    policy, history, prompt = jax.tree.map(lambda x: x[survivors.rows], by_sequence)
    tally = Tally.of(history, prompt, survivors.lengths, own.shape[1] if history.shape[1] else 0)
    where = (policy, tally, survivors.lengths - prompt, survivors.lengths, mode)
    sampled = sample(own, *where)
    if early is None:
        return sampled
    guessed, sure = draw_early(early, threshold, *where)
    return choose(sure, guessed, sampled)
