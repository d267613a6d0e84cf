"""The programs: a step of any tokens, and the loop that decodes several, plain or with an exit head's help.

A turn of the plain loop gives every living row one token. With an exit head a turn first runs the lower half
alone, token after token: each is guessed by the exit head from the stream before it. All rows of the cache
come from those streams, so one pass of the upper half over them finds the model's own token at every place,
and those up to the first wrong guess are kept (SwiftKV paper, B.4, with checking added).
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.cache import Cache, Sources, make_batch
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, Tally, sample
from swiftkv_jax.model import Transformer, embed, exit_logits, logits, make_rows, run, step, survivors_of
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Array, Bool, Float, Int, PyTree


@dataclasses.dataclass(frozen=True)
class Exits:
    """What an exit head is used for; hashable, so it is a static argument.

    Attributes:
      drafts: tokens it guesses in a turn of the decode loop, each checked by the upper half.
      threshold: a token it gives more than this probability is not checked: a lossy rule. None: all are.
    """

    drafts: int = 0
    threshold: float | None = None

    @property
    def each(self) -> int:
        """Tokens that a turn may give a row."""
        return 1 + self.drafts


@pytree
class Lanes:
    """Where each row of a launch stands: [Q]; numpy arrays from the host, jax arrays in a launch.

    Attributes:
      token: the last token known, not yet cached. position: its place.
      produced: output tokens so far. alive: whether it decodes.
      history: [Q, S] all tokens known, S = 0 when no row is penalised.
    """

    token: Int[Any, " Q"]
    position: Int[Any, " Q"]
    produced: Int[Any, " Q"]
    alive: Bool[Any, " Q"]
    history: Int[Any, "Q S"]

    def tally(self, vocab: int) -> Tally:
        """What each row has met, for the penalties."""
        length = self.position + 1
        return Tally.of(self.history, length - self.produced, length, vocab if self.history.shape[1] else 0)


@partial(jax.jit, static_argnames=("model", "mode", "steps", "exits"), donate_argnames=("cache",))
def decode(
    model: Transformer,
    mode: Mode,
    steps: int,
    params: PyTree,
    cache: Cache,
    table: Int[Array, "Q slots"],
    lanes: Lanes,
    policy: Policy,
    exits: Exits | None = None,
    sources: Sources | None = None,
) -> tuple[Sampled, Lanes, Cache]:
    """Up to `steps` tokens for every living row, ending early when none is left alive.

    The sampled arrays are [steps, Q, ...]; a token of NO_ID says that the row had ended, or, with exits, that
    this place of its turn stayed empty: a turn gives a row 1 to `exits.each` tokens, of which `steps` is a
    multiple. Dead rows run along and write to the scratch page.
    """
    before, cache = cache.sources, cache.reading(sources)
    each = exits.each if exits else 1
    one = partial(_exit_turn, model, mode, exits) if exits else partial(_turn, model, mode)
    turn = partial(one, params, table, policy)

    def body(carry):
        i, lanes, tally, cache, out = carry
        sampled, lanes, tally, cache = turn(lanes, tally, cache)
        out = jax.tree.map(lambda buffer, new: buffer.at[i].set(new), out, sampled)
        return i + 1, lanes, tally, cache.pinned(), out

    turns, tally = steps // each, lanes.tally(model.config.vocab_size)
    shapes = jax.eval_shape(turn, lanes, tally, cache)[0]
    out = jax.tree.map(lambda s: jnp.zeros((turns, *s.shape), s.dtype), shapes)
    out = dataclasses.replace(out, token=out.token + NO_ID)
    start = (jnp.int32(0), lanes, tally, cache, out)
    _, lanes, _, cache, out = jax.lax.while_loop(lambda c: (c[0] < turns) & c[1].alive.any(), body, start)
    out = jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), out)
    lanes = _remember(lanes, out.token)
    if cache.mesh is not None:  # lanes as the host puts them: a launch behind this one is the same program
        whole = NamedSharding(cache.mesh, PartitionSpec())
        out, lanes = jax.lax.with_sharding_constraint((out, lanes), whole)
    return out, lanes, cache.reading(before)


def _turn(model, mode, params, table, policy, lanes: Lanes, tally: Tally, cache: Cache):
    """One token for every living row: ([1, Q] sampled, lanes, tally, cache)."""
    pool = cache.seen_by(jnp.where(lanes.alive[:, None], table, 0))
    position = jnp.where(lanes.alive, lanes.position, 0)
    scores, pool = step(model, params, lanes.token, position, None, None, pool)
    sampled = sample(scores, policy, tally, lanes.produced, lanes.position + 1, mode)
    token = jnp.where(lanes.alive, sampled.token, NO_ID)
    sampled = jax.tree.map(lambda x: x[None], dataclasses.replace(sampled, token=token))
    return sampled, _advance(lanes, token, policy), tally.add(token), pool.seen_by(cache.table)


def _exit_turn(model, mode, exits: Exits, params, table, policy, lanes: Lanes, tally: Tally, cache: Cache):
    """Guess, check, keep: ([each, Q] sampled, lanes, tally, cache).

    A kept token is sampled, at its own place, from the logits that plain decoding would have had there.
    """
    reach = jnp.arange(exits.each)[:, None]
    # A place beyond the last token allowed has no page: what is guessed there goes to scratch.
    useful = lanes.alive & (reach < policy.max_tokens - lanes.produced)
    position = jnp.where(useful, lanes.position + reach, 0)
    x, guessed, sure, cache = _guess(
        model, mode, exits, params, table, policy, lanes, tally, cache, position, useful
    )

    # A guess whose stream is not finite must not reach its neighbours in the block: 0 x NaN is NaN.
    sane = jnp.isfinite(x).all(-1, keepdims=True)
    final, cache = _check(model, exits, params, table, jnp.where(sane, x, 0), position, useful, sure, cache)
    final = jnp.where(sane, final, jnp.nan)

    def settle(carry, place):
        lanes, tally, going = carry
        scores, guess, sure = place
        sampled = sample(scores, policy, tally, lanes.produced, lanes.position + 1, mode)
        if exits.threshold is not None:
            sampled = choose(sure, guess, sampled)
        sampled = dataclasses.replace(sampled, token=jnp.where(going, sampled.token, NO_ID))
        moved = _advance(dataclasses.replace(lanes, alive=going), sampled.token, policy)
        alive = jnp.where(going, moved.alive, lanes.alive)
        going = moved.alive & (sampled.token == guess.token)
        return (dataclasses.replace(moved, alive=alive), tally.add(sampled.token), going), sampled

    start = (lanes, tally, lanes.alive)
    (lanes, tally, _), sampled = jax.lax.scan(settle, start, (final, guessed, sure))
    return sampled, lanes, tally, cache


def _guess(model, mode, exits: Exits, params, table, policy, lanes, tally, cache, position, useful):
    """The lower half over each row's last token and the guesses that follow it, one after the other.

    Returns (the streams entering the split [each, Q, D], what the exit head samples after each of them,
    whether that needs no check, the cache with the lower rows).
    """
    mode = mode._replace(logprobs=mode.logprobs and exits.threshold is not None)
    wanted = exits.drafts + (
        exits.threshold is not None
    )  # what follows the last guess: the lossy rule's alone

    def one(carry, place):
        token, tally, cache = carry
        i, position, useful = place
        pool = cache.seen_by(jnp.where(useful[:, None], table, 0))
        at, batch = cache.angles.at(position), make_batch(None, position)
        x, pool = run(
            model, params, embed(model, params, token, position), at, batch, pool, range(model.plan.depth)
        )
        cache = pool.seen_by(cache.table)

        def guess():
            where = (lanes.produced + i, lanes.position + 1 + i)
            scores = exit_logits(model, params, x)
            return draw_early(scores, exits.threshold, policy, tally, *where, mode)

        shapes = jax.eval_shape(guess)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        guessed, sure = jax.lax.cond(i < wanted, guess, lambda: none)
        tally = tally.add(jnp.where(useful, guessed.token, NO_ID))
        return (jnp.maximum(guessed.token, 0), tally, cache), (x, guessed, sure)

    places = (jnp.arange(exits.each), position, useful)
    (_, _, cache), (x, guessed, sure) = jax.lax.scan(one, (lanes.token, tally, cache), places)
    return x, guessed, sure, cache


def _check(model, exits: Exits, params, table, x, position, useful, sure, cache):
    """The upper rows of the streams `x`, and the model's logits at every place: ([each, Q, V], cache).

    Where the lossy rule leaves nothing to check, the upper half does not run, and the logits mean nothing.
    """
    each, rows = useful.shape

    def flat(a):  # a row's places side by side: they are one block of queries
        return jnp.swapaxes(a, 0, 1).reshape(each * rows, *a.shape[2:])

    x, valid, place = flat(x), flat(useful), flat(position)
    at, depth = cache.angles.at(place), model.plan.depth
    batch = make_batch(None, place, each)
    seeing = jnp.where(useful, position, -1).T  # -1 is no query
    batch = dataclasses.replace(batch, valid=valid, block_position=seeing)
    pool = make_rows(model, params, depth, x, at, batch, cache.seen_by(table))

    def check():
        upper = range(depth, model.plan.num_layers)
        out = logits(model, params, run(model, params, x, at, batch, pool, upper, made=True)[0])
        return jnp.swapaxes(out.reshape(rows, each, -1), 0, 1)

    if exits.threshold is None:
        final = check()
    else:
        none = jnp.zeros((each, rows, model.config.vocab_size), jnp.float32)
        final = jax.lax.cond((sure | ~useful).all(), lambda: none, check)
    return final, pool.seen_by(cache.table)


def draw_early(
    scores: Float[Array, "Q V"],
    threshold: float | None,
    policy: Policy,
    tally: Tally,
    produced: Int[Array, " Q"],
    position: Int[Array, " Q"],
    mode: Mode,
) -> tuple[Sampled, Bool[Array, " Q"]]:
    """What is sampled from the exit head's logits, by each row's own rules and noise; and whether its largest
    probability is above `threshold`, so that it stands unchecked."""
    sampled = sample(scores, policy, tally, produced, position, mode)
    if threshold is None:
        return sampled, jnp.zeros(scores.shape[0], bool)
    return sampled, (largest_probability(scores) > threshold) & (sampled.token >= 0)


def largest_probability(scores: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Of the softmax over the last axis; never above 1, NaN where a score is."""
    return 1 / jnp.exp(scores - scores.max(-1, keepdims=True)).sum(-1)


def choose(first: Bool[Array, " Q"], a: Sampled, b: Sampled) -> Sampled:
    """Row by row `a` where `first` says so, else `b`."""
    return jax.tree.map(lambda x, y: jnp.where(first.reshape(-1, *(1,) * (x.ndim - 1)), x, y), a, b)


def _advance(lanes: Lanes, token: Int[Array, " Q"], policy: Policy) -> Lanes:
    """Each living row one token further; an end id, the last token allowed or a bad one kills it."""
    alive, produced = lanes.alive, lanes.produced + lanes.alive
    ended = (token[:, None] == policy.stop_ids).any(-1) | (produced >= policy.max_tokens) | (token < NO_ID)
    return Lanes(
        token=jnp.where(alive, token, lanes.token),
        position=lanes.position + alive,
        produced=produced,
        alive=alive & ~ended,
        history=lanes.history,
    )


def _remember(lanes: Lanes, tokens: Int[Array, "steps Q"]) -> Lanes:
    """The history with a launch's tokens in it, for a launch that follows without the host."""
    if not lanes.history.shape[1]:
        return lanes
    given = tokens >= 0
    at = lanes.position + 1 - given.sum(0) + jnp.cumsum(given, axis=0) - 1
    at = jnp.where(given, at, lanes.history.shape[1])
    row = jnp.arange(tokens.shape[1])
    return dataclasses.replace(lanes, history=lanes.history.at[row, at].set(tokens, mode="drop"))


# ---- a step of any tokens -----------------------------------------------------------------------------


@pytree
class Inputs:
    """A flat ragged batch for one step: decoded tokens, and chunks of prompts; numpy arrays from the host.

    Attributes:
      tokens: [T], those of each sequence together. positions: [T] in their sequences.
      query_starts: [Q + 1] the first token of each sequence, then the end of the last.
      survivors: [M] ascending tokens after which one is sampled, padded with T.
      table: [Q, slots] page ids. sources: what each sequence reads of an encoder's output; None without one.
    """

    tokens: Int[Any, " T"]
    positions: Int[Any, " T"]
    query_starts: Int[Any, " Q1"]
    survivors: Int[Any, " M"]
    table: Int[Any, "Q slots"]
    sources: Sources | None = None


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


Scores = tuple[Float[Any, "M V"], Float[Any, "M V"] | None]  # the model's logits, the exit head's


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
    pool = cache.seen_by(inputs.table).reading(inputs.sources)
    x = embed(model, params, inputs.tokens, positions)
    x, pool = run(model, params, x, at, batch, pool, lower)
    last, pool = run(model, params, x, at, batch, pool, upper, survive)
    alive = jnp.clip(inputs.survivors, 0, inputs.tokens.shape[0] - 1)
    scores = logits(model, params, last), exit_logits(model, params, x[alive]) if exits else None
    if cache.mesh is not None:
        scores = jax.lax.with_sharding_constraint(scores, NamedSharding(cache.mesh, PartitionSpec()))
    return scores, pool.seen_by(cache.table).reading(cache.sources).pinned()


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
