"""What runs on the device: prompt chunks, and a loop that decodes several tokens a launch."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax import params as weights
from swiftkv_jax.cache import Cache, cache_shardings
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.engine.request import Request
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, Tally, sample
from swiftkv_jax.engine.scheduler import Work, power_of_two
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.model import Transformer, step
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Array, Bool, Int, PyTree

_CAPACITY_STEPS = 4  # cache sizes per doubling: at most a quarter more than asked for
_SMALLEST_CAPACITY = 64


@pytree
class Lanes:
    """Where each lane stands: [Q]; numpy arrays from the host, jax arrays in a launch.

    Attributes:
      token: the last token known, not yet cached. position: its place.
      produced: output tokens so far. alive: whether it decodes.
      history: [Q, S] all tokens known, S = 0 when no lane is penalised.
    """

    token: Int[Any, " Q"]
    position: Int[Any, " Q"]
    produced: Int[Any, " Q"]
    alive: Bool[Any, " Q"]
    history: Int[Any, "Q S"]

    def tally(self, vocab: int) -> Tally:
        """What each lane has met, for the penalties."""
        length = self.position + 1
        return Tally.of(self.history, length - self.produced, length, vocab if self.history.shape[1] else 0)


def new_cache(model: Transformer, params: PyTree, mesh: Mesh | None, lanes: int, capacity: int) -> Cache:
    """An empty dense cache of `lanes` sequences of `capacity` tokens, on `mesh` or where `params` lie.

    Committed there from the start, as every launch's result is: else the second launch would compile again.
    """
    make = partial(Cache.dense, model.config, model.plan, lanes, capacity, jnp.dtype(model.dtype))
    if mesh is None:
        return jax.device_put(make(), jax.tree.leaves(params)[0].sharding)
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), mesh))()


def _pin(cache: Cache, mesh: Mesh | None) -> Cache:
    return cache if mesh is None else jax.lax.with_sharding_constraint(cache, cache_shardings(cache, mesh))


@partial(jax.jit, static_argnames=("model", "mode", "mesh"), donate_argnames=("cache",))
def read_prompts(
    model: Transformer,
    mode: Mode,
    mesh: Mesh | None,
    params: PyTree,
    cache: Cache,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    query_starts: Int[Array, " Q1"],
    survivors: Int[Array, " Q"],
    survivor_lanes: Int[Array, " Q"],
    lanes: Lanes,
    policy: Policy,
) -> tuple[Sampled, Cache]:
    """Cache a flat ragged batch of prompt tokens; one sampled token for each survivor.

    Survivor i is the last token of the prompt in lane `survivor_lanes[i]`; both are padded at the end,
    survivors with T.
    """
    logits, cache = step(model, params, tokens, positions, query_starts, survivors, cache)
    lanes, policy = jax.tree.map(lambda leaf: leaf[survivor_lanes], (lanes, policy))
    sampled = sample(logits, policy, lanes.tally(logits.shape[1]), lanes.produced, lanes.position + 1, mode)
    return sampled, _pin(cache, mesh)


@partial(jax.jit, static_argnames=("model", "mode", "mesh", "steps"), donate_argnames=("cache",))
def decode(
    model: Transformer,
    mode: Mode,
    mesh: Mesh | None,
    steps: int,
    params: PyTree,
    cache: Cache,
    lanes: Lanes,
    policy: Policy,
) -> tuple[Sampled, Lanes, Cache]:
    """Up to `steps` tokens for every living lane, ending early when none is left alive.

    The sampled arrays are [steps, Q, ...]; a token of NO_ID says that the lane had ended. Dead lanes run
    along, under a page table that names no page, so that they write nothing.
    """
    count, vocab = lanes.token.shape[0], model.config.vocab_size
    each = jnp.arange(count + 1, dtype=jnp.int32)
    nowhere = cache.k.shape[1]

    def one(lanes: Lanes, tally: Tally, cache: Cache):
        table = jnp.where(lanes.alive[:, None], cache.table, nowhere)
        position = jnp.where(lanes.alive, lanes.position, 0)
        masked = dataclasses.replace(cache, table=table)
        logits, masked = step(model, params, lanes.token, position, each, each[:-1], masked)
        sampled = sample(logits, policy, tally, lanes.produced, lanes.position + 1, mode)
        token = jnp.where(lanes.alive, sampled.token, NO_ID)
        return dataclasses.replace(sampled, token=token), dataclasses.replace(masked, table=cache.table)

    def body(carry):
        i, lanes, tally, cache, out = carry
        sampled, cache = one(lanes, tally, cache)
        out = jax.tree.map(lambda buffer, new: buffer.at[i].set(new), out, sampled)
        return i + 1, _advance(lanes, sampled.token, policy), tally.add(sampled.token), _pin(cache, mesh), out

    tally = lanes.tally(vocab)
    shapes = jax.eval_shape(one, lanes, tally, cache)[0]
    out = jax.tree.map(lambda s: jnp.zeros((steps, *s.shape), s.dtype), shapes)
    out = dataclasses.replace(out, token=out.token + NO_ID)
    start = (jnp.int32(0), lanes, tally, cache, out)
    _, lanes, _, cache, out = jax.lax.while_loop(lambda c: (c[0] < steps) & c[1].alive.any(), body, start)
    return out, lanes, cache


def _advance(lanes: Lanes, token: Int[Array, " Q"], policy: Policy) -> Lanes:
    """Each living lane one token further; an end id or the last token allowed kills it."""
    alive, produced = lanes.alive, lanes.produced + lanes.alive
    ended = (token[:, None] == policy.stop_ids).any(-1) | (produced >= policy.max_tokens)
    return Lanes(
        token=jnp.where(alive, token, lanes.token),
        position=lanes.position + alive,
        produced=produced,
        alive=alive & ~ended,
        history=lanes.history,
    )


def capacity_for(config: ModelConfig, tokens: int, limit: int) -> int:
    """Cache tokens per lane for sequences of `tokens`: one of a few sizes, never above `limit`.

    Dynamic rotary scaling past the trained length takes its frequencies from the capacity: `limit`, always.
    """
    if config.rope.rope_type == "dynamic" and limit > config.max_position_embeddings:
        return limit
    unit = max(_SMALLEST_CAPACITY, power_of_two(tokens)) // (2 * _CAPACITY_STEPS)
    return min(max(_SMALLEST_CAPACITY, -(-tokens // unit) * unit), limit)


class Runner:
    """A model on its devices with a cache for `lanes` sequences; host lists in, host choices out.

    Attributes:
      cache: the one piece of state, donated to every launch and replaced by its result.
    """

    def __init__(
        self,
        model: Transformer,
        params: PyTree,
        mesh: Mesh | None,
        requests: list[Request],
        lanes: int,
        limit: int,
        steps: int,
    ):
        """`limit` is the context in tokens, `steps` the tokens a decode launch yields at most."""
        self.model, self.mesh, self.steps, self.lanes = model, mesh, steps, lanes
        self.params = params if isinstance(params["lower"], list) else weights.unstack(params)
        self.capacity = capacity_for(model.config, max(r.max_length for r in requests), limit)
        wanted = [request.params for request in requests]
        self.mode = Mode(
            sampled=not all(p.greedy for p in wanted),
            filtered=any(p.filtered for p in wanted),
            penalised=any(p.penalised for p in wanted),
            logprobs=any(p.logprobs is not None for p in wanted),
        )
        self.cache = new_cache(model, self.params, mesh, lanes, self.capacity)
        stops = power_of_two(max(4, *(len(request.stop_ids) for request in requests)))
        self._policy = _idle_policy(lanes, stops)

    def seat(self, sequence: Sequence) -> None:
        """Write a sequence's parameters into its lane, of new arrays: the device may still read the old."""
        p, row = sequence.request.params, sequence.lane
        seed, stops = sequence.seed % 2**64, sequence.request.stop_ids
        values = Policy(
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition=p.repetition_penalty,
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
            seed=(seed >> 32, seed & 0xFFFFFFFF),
            stop_ids=stops + (NO_ID,) * (self._policy.stop_ids.shape[1] - len(stops)),
            min_tokens=p.min_tokens,
            max_tokens=p.max_tokens,
        )

        def put(name):
            array = getattr(self._policy, name).copy()
            array[row] = getattr(values, name)
            return array

        self._policy = Policy(**{f.name: put(f.name) for f in dataclasses.fields(Policy)})

    def read(self, work: list[Work], size: int) -> list[Choice]:
        """Cache each sequence's next chunk; a choice for each one whose prompt is then complete, in order."""
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        counts, survivors = np.zeros(self.lanes, np.int32), np.full(self.lanes, size, np.int32)
        survivor_lanes = np.zeros(self.lanes, np.int32)
        start, done = 0, 0
        for item in work:
            first, stop = item.sequence.cached, start + item.count
            tokens[start:stop] = item.sequence.tokens[first : first + item.count]
            positions[start:stop] = range(first, first + item.count)
            lane = item.sequence.lane
            assert lane is not None  # work is for what runs
            counts[lane] = item.count
            if item.completes:
                survivors[done], survivor_lanes[done] = stop - 1, lane
                done += 1
            start = stop
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lanes = self._lanes([item.sequence for item in work])
        batch = (tokens, positions, starts, survivors, survivor_lanes, lanes, self._policy)
        sampled, self.cache = read_prompts(self.model, self.mode, self.mesh, self.params, self.cache, *batch)
        return _choices(jax.device_get(sampled), [(i,) for i in range(done)]) if done else []

    def decode(self, sequences: list[Sequence]) -> list[list[Choice]]:
        """Up to `steps` more tokens for each of these sequences, whose prompts are all read."""
        lanes = self._lanes(sequences)
        fixed = (self.model, self.mode, self.mesh, self.steps, self.params)
        sampled, _, self.cache = decode(*fixed, self.cache, lanes, self._policy)
        sampled = jax.device_get(sampled)
        lengths = (sampled.token != NO_ID).sum(0)
        return [_choices(sampled, [(i, s.lane) for i in range(lengths[s.lane])]) for s in sequences]

    def _lanes(self, sequences: list[Sequence]) -> Lanes:
        """These sequences' places as arrays; every other lane is dead."""
        out = Lanes(
            token=np.zeros(self.lanes, np.int32),
            position=np.zeros(self.lanes, np.int32),
            produced=np.zeros(self.lanes, np.int32),
            alive=np.zeros(self.lanes, bool),
            history=np.zeros((self.lanes, self.capacity if self.mode.penalised else 0), np.int32),
        )
        for s in sequences:
            out.token[s.lane] = s.output[-1] if s.output else s.request.token_ids[-1]
            out.position[s.lane], out.produced[s.lane] = s.length - 1, len(s.output)
            out.alive[s.lane] = True
            if self.mode.penalised:
                out.history[s.lane, : s.length] = s.tokens
        return out


def _idle_policy(lanes: int, stops: int) -> Policy:
    """Greedy, endless rules for lanes that nobody sits in."""
    zero, one = np.zeros(lanes, np.float32), np.ones(lanes, np.float32)
    whole = np.zeros(lanes, np.int32)
    return Policy(
        temperature=zero,
        top_k=whole,
        top_p=one,
        min_p=zero,
        repetition=one,
        presence=zero,
        frequency=zero,
        seed=np.zeros((lanes, 2), np.uint32),
        stop_ids=np.full((lanes, stops), NO_ID, np.int32),
        min_tokens=whole,
        max_tokens=whole,
    )


def _choices(sampled: Sampled, places: list[tuple]) -> list[Choice]:
    """The device's arrays at some places as plain numbers."""
    out = []
    for at in places:
        top = zip(sampled.top_ids[at].tolist(), sampled.top_logprobs[at].tolist(), strict=True)
        token, logprob, rank = (array[at].item() for array in (sampled.token, sampled.logprob, sampled.rank))
        out.append(Choice(token, logprob, rank, tuple(top)))
    return out
