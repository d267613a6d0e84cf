"""The compiled programs: a step of any tokens, and the loop that decodes several, plain or with an exit head.

An iteration of the plain loop gives every active row one token. With an exit head, an iteration first
runs the lower half alone, token by token: the exit head drafts each token from the hidden state of the one
before. All rows of the cache are made from those hidden states, so one pass of the upper half over them gives
the model's own token at every position. The tokens up to the first wrong draft are kept (SwiftKV paper, B.4,
with verification added).
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.core import encoder, predict
from swiftkv_jax.core.cache import Cache, Sources, make_batch
from swiftkv_jax.core.ends import embed, exit_logits, logits
from swiftkv_jax.core.loop import make_rows, run, step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.pytree import pytree
from swiftkv_jax.core.shapes import Array, Bool, Float, Int, PyTree
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, TokenCounts, sample
from swiftkv_jax.kernels.check.machine import flags

# XLA leaves loops out of a GPU's command buffers by default: then the host writes the graph of the loop's
# body anew for every token, and the GPU waits: on an H200 1.5 of the 10.5 ms of Llama-3.1-8B's shape.
_BUFFERS = "xla_gpu_enable_command_buffer"
_LOOPS_IN_BUFFERS = {
    _BUFFERS: "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
_OPTIONS = None if _BUFFERS in flags().get("XLA_FLAGS", "") else _LOOPS_IN_BUFFERS


@dataclasses.dataclass(frozen=True)
class Exits:
    """The uses of an exit head; hashable, so that it can be a static argument.

    Attributes:
      drafts: tokens that it drafts in an iteration of the decode loop, each verified by the upper half.
      threshold: a token with a higher probability than this is not verified: a lossy rule. None: all are.
    """

    drafts: int = 0
    threshold: float | None = None

    @property
    def each(self) -> int:
        """The most tokens that an iteration may give a row."""
        return 1 + self.drafts


@pytree
class Lanes:
    """The state of each row of a launch, [Q]; numpy arrays from the host, jax arrays in a launch.

    Attributes:
      token: the last known token, not yet cached. position: its position.
      produced: output tokens so far. alive: whether the row decodes.
      history: [Q, S] all known tokens, S = 0 when no row is penalised.
    """

    token: Int[Any, " Q"]
    position: Int[Any, " Q"]
    produced: Int[Any, " Q"]
    alive: Bool[Any, " Q"]
    history: Int[Any, "Q S"]

    def counts(self, vocab: int) -> TokenCounts:
        """The tokens that occur in each row, for the penalties."""
        length = self.position + 1
        return TokenCounts.of(
            self.history, length - self.produced, length, vocab if self.history.shape[1] else 0
        )


@partial(
    jax.jit,
    static_argnames=("model", "mode", "steps", "exits"),
    donate_argnames=("cache",),
    compiler_options=_OPTIONS,
)
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
    """Decode up to `steps` tokens for every active row; end early when none is active.

    The sampled arrays are [steps, Q, ...]. A token of NO_ID means that the row had ended or, with exits, that
    this slot of its iteration is empty: an iteration gives a row 1 to `exits.each` tokens, of which `steps`
    is a multiple. Ended rows are computed too, and write to the scratch page.
    """
    before, cache = cache.sources, cache.reading(sources)
    each = exits.each if exits else 1
    program = partial(_exit_iteration, model, mode, exits) if exits else partial(_iteration, model, mode)
    iteration = partial(program, params, table, policy)

    def body(carry):
        i, lanes, counts, cache, out = carry
        sampled, lanes, counts, cache = iteration(lanes, counts, cache)
        out = jax.tree.map(lambda buffer, new: buffer.at[i].set(new), out, sampled)
        return i + 1, lanes, counts, cache.pinned(), out

    iterations, counts = steps // each, lanes.counts(model.config.vocab_size)
    shapes = jax.eval_shape(iteration, lanes, counts, cache)[0]
    out = jax.tree.map(lambda s: jnp.zeros((iterations, *s.shape), s.dtype), shapes)
    out = dataclasses.replace(out, token=out.token + NO_ID)
    start = (jnp.int32(0), lanes, counts, cache, out)
    _, lanes, _, cache, out = jax.lax.while_loop(
        lambda c: (c[0] < iterations) & c[1].alive.any(), body, start
    )
    out = jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), out)
    lanes = _remember(lanes, out.token)
    if cache.mesh is not None:  # as the host places lanes: the launch after this one is the same program
        whole = NamedSharding(cache.mesh, PartitionSpec())
        out, lanes = jax.lax.with_sharding_constraint((out, lanes), whole)
    return out, lanes, cache.reading(before)


def _iteration(model, mode, params, table, policy, lanes: Lanes, counts: TokenCounts, cache: Cache):
    """One token for every active row: ([1, Q] sampled, lanes, counts, cache)."""
    pool = cache.seen_by(jnp.where(lanes.alive[:, None], table, 0))
    position = jnp.where(lanes.alive, lanes.position, 0)
    scores, pool = step(model, params, lanes.token, position, None, None, pool)
    sampled = sample(scores, policy, counts, lanes.produced, lanes.position + 1, mode)
    token = jnp.where(lanes.alive, sampled.token, NO_ID)
    sampled = jax.tree.map(lambda x: x[None], dataclasses.replace(sampled, token=token))
    return sampled, _advance(lanes, token, policy), counts.add(token), pool.seen_by(cache.table)


def _exit_iteration(
    model, mode, exits: Exits, params, table, policy, lanes: Lanes, counts: TokenCounts, cache: Cache
):
    """Draft, verify, accept: ([each, Q] sampled, lanes, counts, cache).

    An accepted token is sampled, at its own position, from the logits that plain decoding would have there.
    """
    reach = jnp.arange(exits.each)[:, None]
    # A position beyond the last allowed token has no page: its draft is written to the scratch page.
    useful = lanes.alive & (reach < policy.max_tokens - lanes.produced)
    position = jnp.where(useful, lanes.position + reach, 0)
    x, guessed, sure, cache = _guess(
        model, mode, exits, params, table, policy, lanes, counts, cache, position, useful
    )

    # A draft whose hidden states are not finite must not affect its neighbours in the block: 0 x NaN is NaN.
    sane = jnp.isfinite(x).all(-1, keepdims=True)
    final, cache = _check(model, exits, params, table, jnp.where(sane, x, 0), position, useful, sure, cache)
    final = jnp.where(sane, final, jnp.nan)

    def verify(carry, place):
        lanes, counts, going = carry
        scores, guess, sure = place
        sampled = sample(scores, policy, counts, lanes.produced, lanes.position + 1, mode)
        if exits.threshold is not None:
            sampled = choose(sure, guess, sampled)
        sampled = dataclasses.replace(sampled, token=jnp.where(going, sampled.token, NO_ID))
        moved = _advance(dataclasses.replace(lanes, alive=going), sampled.token, policy)
        alive = jnp.where(going, moved.alive, lanes.alive)
        going = moved.alive & (sampled.token == guess.token)
        return (dataclasses.replace(moved, alive=alive), counts.add(sampled.token), going), sampled

    start = (lanes, counts, lanes.alive)
    (lanes, counts, _), sampled = jax.lax.scan(verify, start, (final, guessed, sure))
    return sampled, lanes, counts, cache


def _guess(model, mode, exits: Exits, params, table, policy, lanes, counts, cache, position, useful):
    """Run the lower half over each row's last token and the drafts that follow it, one after the other.

    Returns (the hidden states entering the split [each, Q, D], what the exit head samples after each of them,
    whether that needs no verification, the cache with the lower rows).
    """
    mode = mode._replace(logprobs=mode.logprobs and exits.threshold is not None)
    # Only the lossy rule needs the token after the last draft.
    wanted = exits.drafts + (exits.threshold is not None)

    def one(carry, place):
        token, counts, cache = carry
        i, position, useful = place
        pool = cache.seen_by(jnp.where(useful[:, None], table, 0))
        angles, batch = cache.angles.at(position), make_batch(None, position)
        x = embed(model, params, token, position)
        x, pool, *_ = run(model, params, x, angles, batch, pool, range(model.plan.depth))
        cache = pool.seen_by(cache.table)

        def guess():
            where = (lanes.produced + i, lanes.position + 1 + i)
            scores = exit_logits(model, params, x)
            return draw_early(scores, exits.threshold, policy, counts, *where, mode)

        shapes = jax.eval_shape(guess)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        guessed, sure = jax.lax.cond(i < wanted, guess, lambda: none)
        counts = counts.add(jnp.where(useful, guessed.token, NO_ID))
        return (jnp.maximum(guessed.token, 0), counts, cache), (x, guessed, sure)

    places = (jnp.arange(exits.each), position, useful)
    (_, _, cache), (x, guessed, sure) = jax.lax.scan(one, (lanes.token, counts, cache), places)
    return x, guessed, sure, cache


def _check(model, exits: Exits, params, table, x, position, useful, sure, cache):
    """Make the upper rows from the hidden states `x`; return (logits at every position [each, Q, V], cache).

    Where the lossy rule leaves nothing to verify, the upper half does not run and the logits mean nothing.
    """
    each, rows = useful.shape

    def flat(a):  # a row's positions side by side, as one block of queries
        return jnp.swapaxes(a, 0, 1).reshape(each * rows, *a.shape[2:])

    x, valid, place = flat(x), flat(useful), flat(position)
    angles, depth = cache.angles.at(place), model.plan.depth
    batch = make_batch(None, place, each)
    seeing = jnp.where(useful, position, -1).T  # -1 is no query
    batch = dataclasses.replace(batch, valid=valid, block_position=seeing)
    due = model.plan.made_at(depth)
    pool, _ = make_rows(model, params, due, depth, x, angles, batch, cache.seen_by(table))

    def check():
        upper = range(depth, model.plan.num_layers)
        out = logits(model, params, run(model, params, x, angles, batch, pool, upper, given=due).x)
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
    counts: TokenCounts,
    produced: Int[Array, " Q"],
    position: Int[Array, " Q"],
    mode: Mode,
) -> tuple[Sampled, Bool[Array, " Q"]]:
    """Sample from the exit head's logits, with each row's own parameters and noise. Also return whether its
    largest probability is above `threshold`, so that the token is not verified."""
    sampled = sample(scores, policy, counts, produced, position, mode)
    if threshold is None:
        return sampled, jnp.zeros(scores.shape[0], bool)
    largest = 1 / jnp.exp(scores - scores.max(-1, keepdims=True)).sum(-1)  # probability; NaN where a score is
    return sampled, (largest > threshold) & (sampled.token >= 0)


def choose(first: Bool[Array, " Q"], a: Sampled, b: Sampled) -> Sampled:
    """For each row `a` where `first` is true, else `b`."""
    return jax.tree.map(lambda x, y: jnp.where(first.reshape(-1, *(1,) * (x.ndim - 1)), x, y), a, b)


def _advance(lanes: Lanes, token: Int[Array, " Q"], policy: Policy) -> Lanes:
    """Advance each active row by one token; a stop id, the last allowed token or an invalid token ends the
    row."""
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
    """Add a launch's tokens to the history, for a launch that follows without the host."""
    if not lanes.history.shape[1]:
        return lanes
    sampled = tokens >= 0
    index = lanes.position + 1 - sampled.sum(0) + jnp.cumsum(sampled, axis=0) - 1
    index = jnp.where(sampled, index, lanes.history.shape[1])
    row = jnp.arange(tokens.shape[1])
    return dataclasses.replace(lanes, history=lanes.history.at[row, index].set(tokens, mode="drop"))


# ---- a step of any tokens -----------------------------------------------------------------------------


@pytree
class Inputs:
    """A flat ragged batch for one step: decoded tokens, and chunks of prompts; numpy arrays from the host.

    Attributes:
      tokens: [T], those of each sequence together. positions: [T] in their sequences.
      query_starts: [Q + 1] the index of each sequence's first token, then the end of the last.
      survivors: [M] ascending indices of the tokens after which one is sampled, padded with T.
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
    """The sequences that the survivors of a step belong to; numpy arrays from the host.

    Attributes:
      rows: [M] the sequence of each survivor, an index into the [Q] arrays. lengths: [M] its tokens up to
        this one.
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
    """Cache a flat ragged batch of tokens; return the logits after each survivor, with `exits` the exit
    head's too.

    The logits are replicated on every device. `draw` samples from them in a separate small program, so that
    the model is compiled once for all sampling modes.
    """
    pool = cache.seen_by(inputs.table).reading(inputs.sources)
    batch = (inputs.tokens, inputs.positions, inputs.query_starts, inputs.survivors, pool)
    scores, pool = step(model, params, *batch, exits=exits)
    scores = scores if exits else (scores, None)
    if cache.mesh is not None:
        # First as the head makes them: else XLA gathers the head, and not the scores.
        cut = model.config.vocab_size % cache.mesh.shape["tensor"] == 0
        for spec in [PartitionSpec(None, "tensor")] * cut + [PartitionSpec()]:
            scores = jax.lax.with_sharding_constraint(scores, NamedSharding(cache.mesh, spec))
    return scores, pool.seen_by(cache.table).reading(cache.sources).pinned()


@partial(jax.jit, static_argnames=("mode", "threshold"))
def draw(
    mode: Mode, scores: Scores, survivors: Survivors, policy: Policy, threshold: float | None = None
) -> Sampled:
    """Sample after each survivor, with the parameters of its sequence.

    With a `threshold`, the exit head's token is used where the exit head's largest probability is above it.
    """
    own, early = scores
    by_sequence = (policy, survivors.history, survivors.prompts)
    policy, history, prompt = jax.tree.map(lambda x: x[survivors.rows], by_sequence)
    counts = TokenCounts.of(history, prompt, survivors.lengths, own.shape[1] if history.shape[1] else 0)
    where = (policy, counts, survivors.lengths - prompt, survivors.lengths, mode)
    sampled = sample(own, *where)
    if early is None:
        return sampled
    guessed, sure = draw_early(early, threshold, *where)
    return choose(sure, guessed, sampled)


# ---- what is read ahead of the model's own prompt ------------------------------------------------------


@partial(jax.jit, static_argnames=("model",), donate_argnames=("caches",))
def read_ahead(
    model: Transformer | predict.Predicted,
    params: PyTree,
    caches: predict.Caches,
    tokens: Int[jax.Array, " T"],
    positions: Int[jax.Array, " T"],
    query_starts: Int[jax.Array, " Q1"],
    table: Int[jax.Array, "Q slots"],
) -> predict.Caches:
    """Cache a flat ragged batch of prompt tokens in all pools, as `predict.fill`: no logits, no sampling."""
    filled = predict.fill(model, params, tokens, positions, query_starts, caches.seen_by(table))
    base, own = filled.base.seen_by(caches.base.table).pinned(), filled.auxiliary
    if own is not None and caches.auxiliary is not None:
        own = own.seen_by(caches.auxiliary.table).pinned()
    return predict.Caches(base, own)


@partial(jax.jit, static_argnames=("model",), donate_argnames=("cache",))
def read_source(
    model: Transformer, params: PyTree, cache: Cache, source: jax.Array, sources: Sources
) -> Cache:
    """Write the rows of some sources to the cache; the pages that each sequence reads stay the same."""
    return encoder.fill(model, params, source, cache, sources).reading(cache.sources).pinned()
