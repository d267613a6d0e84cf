"""What runs on the device: a step of any tokens, and a loop that decodes several tokens a launch."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax.cache import Cache, cache_shardings
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, Tally, sample
from swiftkv_jax.engine.scheduler import Work, launch_size, power_of_two
from swiftkv_jax.engine.sequence import BAD, Choice, Sequence
from swiftkv_jax.model import Transformer, step
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Array, Bool, Int, PyTree

# Few, so that few programs are compiled: greedy, plain sampling, and all that SamplingParams can ask for.
MODES = (Mode(), Mode(sampled=True), Mode(*[True] * len(Mode._fields)))
_STOPS = 8  # stop ids a launch has room for without being compiled anew
_CLEARED = 16  # pages cleared at a time


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


def new_cache(model: Transformer, params: PyTree, mesh: Mesh | None, make) -> Cache:
    """The empty cache that `make` describes, on `mesh` or where `params` lie.

    Committed there from the start, as every launch's result is: else the second launch would compile again.
    """
    if mesh is None:
        return jax.device_put(make(), jax.tree.leaves(params)[0].sharding)
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), mesh))()


def _pin(cache: Cache, mesh: Mesh | None) -> Cache:
    return cache if mesh is None else jax.lax.with_sharding_constraint(cache, cache_shardings(cache, mesh))


@partial(jax.jit, static_argnames=("model", "mode", "mesh"), donate_argnames=("cache",))
def run_any(
    model: Transformer,
    mode: Mode,
    mesh: Mesh | None,
    params: PyTree,
    cache: Cache,
    table: Int[Array, "Q slots"],
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    query_starts: Int[Array, " Q1"],
    survivors: Int[Array, " M"],
    survivor_rows: Int[Array, " M"],
    prompts: Int[Array, " Q"],
    history: Int[Array, "Q S"],
    policy: Policy,
) -> tuple[Sampled, Cache]:
    """Cache a flat ragged batch of tokens, decoded ones and chunks of prompts; sample after each survivor.

    Survivor i is a token of row `survivor_rows[i]`; both are padded at the end, survivors with T. Row q's
    prompt has `prompts[q]` tokens.
    """
    logits, pool = step(
        model, params, tokens, positions, query_starts, survivors, dataclasses.replace(cache, table=table)
    )
    length = positions[jnp.clip(survivors, 0, tokens.shape[0] - 1)] + 1
    policy, history, prompt = jax.tree.map(lambda x: x[survivor_rows], (policy, history, prompts))
    tally = Tally.of(history, prompt, length, logits.shape[1] if history.shape[1] else 0)
    sampled = sample(logits, policy, tally, length - prompt, length, mode)
    return sampled, _pin(dataclasses.replace(pool, table=cache.table), mesh)


@partial(jax.jit, static_argnames=("model", "mode", "mesh", "steps"), donate_argnames=("cache",))
def decode(
    model: Transformer,
    mode: Mode,
    mesh: Mesh | None,
    steps: int,
    params: PyTree,
    cache: Cache,
    table: Int[Array, "Q slots"],
    lanes: Lanes,
    policy: Policy,
) -> tuple[Sampled, Lanes, Cache]:
    """Up to `steps` tokens for every living row, ending early when none is left alive.

    The sampled arrays are [steps, Q, ...]; a token of NO_ID says that the row had ended. Dead rows run along
    and write to the scratch page.
    """
    vocab = model.config.vocab_size

    def one(lanes: Lanes, tally: Tally, cache: Cache):
        at = dataclasses.replace(cache, table=jnp.where(lanes.alive[:, None], table, 0))
        position = jnp.where(lanes.alive, lanes.position, 0)
        logits, at = step(model, params, lanes.token, position, None, None, at)
        sampled = sample(logits, policy, tally, lanes.produced, lanes.position + 1, mode)
        token = jnp.where(lanes.alive, sampled.token, NO_ID)
        return dataclasses.replace(sampled, token=token), dataclasses.replace(at, table=cache.table)

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
    _, lanes, tally, cache, out = jax.lax.while_loop(lambda c: (c[0] < steps) & c[1].alive.any(), body, start)
    return out, _remember(lanes, out.token), cache


def _advance(lanes: Lanes, token: Int[Array, " Q"], policy: Policy) -> Lanes:
    """Each living row one token further; an end id, the last token allowed or a bad one kills it."""
    alive, produced = lanes.alive, lanes.produced + lanes.alive
    ended = (token[:, None] == policy.stop_ids).any(-1) | (produced >= policy.max_tokens) | (token == BAD)
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
    count = (tokens >= 0).sum(0)
    at = lanes.position + 1 - count + jnp.arange(tokens.shape[0])[:, None]
    at = jnp.where(tokens >= 0, at, lanes.history.shape[1])
    row = jnp.arange(tokens.shape[1])
    return dataclasses.replace(lanes, history=lanes.history.at[row, at].set(tokens, mode="drop"))


@partial(jax.jit, donate_argnums=0)
def _clear(cache: Cache, pages: Int[Array, " n"]) -> Cache:
    return cache.clear(pages)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What was sent to the device and not yet read.

    Attributes:
      rows: the sequences, row by row. places: for each row, where its tokens stand in `sampled`.
      work: what a step ran; empty for a decode loop of `steps` steps.
    """

    rows: list[Sequence]
    sampled: Sampled
    places: list[list[tuple[int, ...]]]
    work: list[Work] = dataclasses.field(default_factory=list)
    lanes: Lanes | None = None
    steps: int = 0
    table: Any = None
    policy: Policy | None = None
    mode: Mode | None = None

    def read(self) -> list[list[Choice]]:
        """Wait for it; each row's tokens in order."""
        sampled = jax.device_get(self.sampled)
        if self.work:
            return [[_choice(sampled, at) for at in places] for places in self.places]
        counts = (sampled.token != NO_ID).sum(0)
        return [[_choice(sampled, (i, row)) for i in range(counts[row])] for row in range(len(self.rows))]


class Runner:
    """A model on its devices with a pool of pages; sequences in, choices out.

    Attributes:
      cache: the one piece of state, donated to every launch and replaced by its result.
      fewest_rows: arrays never have fewer rows; an engine without precompiled programs raises it as it goes,
        so that a batch that thins out is not compiled again and again.
    """

    def __init__(
        self,
        model: Transformer,
        params: PyTree,
        mesh: Mesh | None,
        cache: Cache,
        lanes: int,
        budget: int,
        steps: int,
        drafts: int = 0,
        modes: tuple[Mode, ...] = MODES,
    ):
        """`budget` tokens a step and `steps` tokens a decode loop at most; `drafts` guesses a sequence.

        A launch runs in the first of `modes` that has what its rows need; the last must have all.
        """
        self.model, self.mesh, self.params, self.cache = model, mesh, params, cache
        self.fewest_rows = 1
        self.lanes, self.budget, self.steps, self.drafts, self.modes = lanes, budget, steps, drafts, modes
        self.slots = -(-cache.capacity // cache.page)
        self._policy = _idle_policy(lanes, _STOPS)
        self._seated: dict[tuple, Policy] = {}

    def seat(self, sequence: Sequence) -> None:
        """Write a sequence's parameters into its lane."""
        p, row = sequence.request.params, sequence.lane
        seed, stops = sequence.seed % 2**64, sequence.request.stop_ids
        room = self._policy.stop_ids.shape[1]
        if len(stops) > room:
            wider = np.full((self.lanes, power_of_two(len(stops))), NO_ID, np.int32)
            wider[:, :room] = self._policy.stop_ids
            self._policy = dataclasses.replace(self._policy, stop_ids=wider)
        values = {
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition": p.repetition_penalty,
            "presence": p.presence_penalty,
            "frequency": p.frequency_penalty,
            "seed": (seed >> 32, seed & 0xFFFFFFFF),
            "stop_ids": stops + (NO_ID,) * (self._policy.stop_ids.shape[1] - len(stops)),
            "min_tokens": p.min_tokens,
            "max_tokens": p.max_tokens,
        }
        for name, value in values.items():
            getattr(self._policy, name)[row] = value
        self._seated = {}

    def run(self, work: list[Work], size: int) -> Launch:
        """Send one step of `work` in arrays of `size` tokens."""
        rows = [item.sequence for item in work]
        count, per_row = self.rows(len(rows)), 1 + self.drafts
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        starts = np.zeros(count + 1, np.int32)
        survivors = np.full(count * per_row, size, np.int32)
        survivor_rows = np.zeros(count * per_row, np.int32)
        places: list[list[tuple[int, ...]]] = []
        start = done = 0
        for row, item in enumerate(work):
            first, known = item.sequence.cached, start + item.count
            stop = known + len(item.draft)
            tokens[start:known] = item.sequence.slice(first, first + item.count)
            tokens[known:stop] = item.draft
            positions[start:stop] = range(first, first + stop - start)
            wanted = 1 + len(item.draft) if item.completes else 0
            survivors[done : done + wanted] = range(known - 1, known - 1 + wanted)
            survivor_rows[done : done + wanted] = row
            places.append([(done + i,) for i in range(wanted)])
            done, start = done + wanted, stop
            starts[row + 1] = stop
        starts[len(rows) + 1 :] = start
        mode, policy, history = self._sampling(rows, count)
        prompts = np.zeros(count, np.int32)
        prompts[: len(rows)] = [len(s.request.token_ids) for s in rows]
        batch = (tokens, positions, starts, survivors, survivor_rows, prompts, history, policy)
        fixed = (self.model, mode, self.mesh, self.params)
        sampled, self.cache = run_any(*fixed, self.cache, self._table(rows, count), *batch)
        return Launch(rows, sampled, places, work)

    def decode(self, rows: list[Sequence], steps: int) -> Launch:
        """Send up to `steps` more tokens for each of these sequences: all their tokens but one are cached."""
        count = self.rows(len(rows))
        mode, policy, history = self._sampling(rows, count)
        lanes = Lanes(
            token=np.zeros(count, np.int32),
            position=np.zeros(count, np.int32),
            produced=np.zeros(count, np.int32),
            alive=np.arange(count) < len(rows),
            history=history,
        )
        for row, s in enumerate(rows):
            lanes.token[row], lanes.position[row], lanes.produced[row] = s.last, s.length - 1, len(s.output)
        table = self._table(rows, count)
        return self._loop(rows, steps, table, lanes, policy, mode)

    def follow(self, launch: Launch) -> Launch:
        """Send the same rows on, from where `launch` will leave them: nothing of it has to be read."""
        table = self._table(launch.rows, launch.table.shape[0])
        return self._loop(launch.rows, launch.steps, table, launch.lanes, launch.policy, launch.mode)

    def _loop(self, rows, steps, table, lanes, policy, mode) -> Launch:
        fixed = (self.model, mode, self.mesh, steps, self.params)
        sampled, lanes, self.cache = decode(*fixed, self.cache, table, lanes, policy)
        return Launch(rows, sampled, [], [], lanes, steps, table, policy, mode)

    def clear(self, pages: list[int]) -> None:
        """Zeros in these pages: what a faulty request left."""
        for at in range(0, len(pages), _CLEARED):
            some = pages[at : at + _CLEARED]
            padded = np.zeros(_CLEARED, np.int32)
            padded[: len(some)] = some
            self.cache = _clear(self.cache, padded)

    def warm_up(self, say=lambda done, total: None) -> int:
        """Compile every program that `run` and `decode` may need in `modes`; how many."""
        sizes = sorted({launch_size(n, self.budget) for n in range(1, self.budget + 1)})
        counts = sorted({self.rows(n) for n in range(1, self.lanes + 1)})
        jobs = [(mode, count, size) for mode in self.modes for count in counts for size in [0, *sizes]]
        for done, (mode, count, size) in enumerate(jobs):
            say(done, len(jobs))
            table, zero = np.zeros((count, self.slots), np.int32), np.zeros(count, np.int32)
            policy, history = self._gather([], count, mode), self._history([], count, mode)
            if size:
                many = np.zeros(count * (1 + self.drafts), np.int32)
                flat, starts = np.zeros(size, np.int32), np.zeros(count + 1, np.int32)
                batch = (flat, flat, starts, many + size, many, zero, history, policy)
                fixed = (self.model, mode, self.mesh, self.params)
                _, self.cache = run_any(*fixed, self.cache, table, *batch)
                continue
            lanes = Lanes(zero, zero, zero, np.zeros(count, bool), history)
            for _ in range(2):  # from the host, and from the launch before
                lanes = self._loop([], self.steps, table, lanes, policy, mode).lanes
        self.clear([0])
        jax.block_until_ready(self.cache.k)
        return len(jobs)

    def rows(self, n: int) -> int:
        """Rows of a launch: a power of four, or all lanes."""
        count = self.fewest_rows
        while count < n:
            count *= 4
        return min(count, self.lanes)

    def _table(self, rows: list[Sequence], count: int):
        table = np.zeros((count, self.slots), np.int32)
        for row, sequence in enumerate(rows):
            table[row, : len(sequence.pages)] = sequence.pages
        return table

    def _sampling(self, rows: list[Sequence], count: int) -> tuple[Mode, Policy, Any]:
        mode = self._mode([s.request.params for s in rows])
        return mode, self._gather(rows, count, mode), self._history(rows, count, mode)

    def _mode(self, wanted: list[SamplingParams]) -> Mode:
        need = Mode(
            sampled=not all(p.greedy for p in wanted),
            filtered=any(p.filtered for p in wanted),
            penalised=any(p.penalised for p in wanted),
            biased=any(p.biased for p in wanted),
            logprobs=any(p.logprobs is not None for p in wanted),
        )
        return next(mode for mode in self.modes if mode.covers(need))

    def _gather(self, rows: list[Sequence], count: int, mode: Mode) -> Policy:
        """The rows' parameters; kept on the device until somebody takes a seat."""
        key = (tuple(s.lane for s in rows), count, mode)
        if key not in self._seated or mode.biased:
            lanes = [s.lane for s in rows] + [0] * (count - len(rows))
            taken = {f.name: getattr(self._policy, f.name)[lanes] for f in dataclasses.fields(Policy)}
            taken["bias"] = self._bias(rows, count, mode)
            self._seated[key] = Policy(**taken)
        return self._seated[key]

    def _bias(self, rows: list[Sequence], count: int, mode: Mode):
        bias = np.zeros((count, self.model.config.vocab_size if mode.biased else 0), np.float32)
        for row, s in enumerate(rows if mode.biased else []):
            if s.request.params.allowed_token_ids is not None:
                bias[row] = -np.inf
                bias[row, list(s.request.params.allowed_token_ids)] = 0
            for token, value in dict(s.request.params.logit_bias or ()).items():
                bias[row, token] += value
            bias[row, s.forbidden()] = -np.inf
        return bias

    def _history(self, rows: list[Sequence], count: int, mode: Mode):
        history = np.zeros((count, self.cache.capacity if mode.penalised else 0), np.int32)
        for row, s in enumerate(rows if mode.penalised else []):
            history[row, : s.length] = s.tokens
        return history


def _idle_policy(lanes: int, stops: int) -> Policy:
    """Greedy, endless rules for lanes that nobody sits in."""
    zero, one = np.zeros(lanes, np.float32), np.ones(lanes, np.float32)
    whole = np.zeros(lanes, np.int32)
    return Policy(
        temperature=zero,
        top_k=whole,
        top_p=one,
        min_p=zero.copy(),
        repetition=one.copy(),
        presence=zero.copy(),
        frequency=zero.copy(),
        seed=np.zeros((lanes, 2), np.uint32),
        stop_ids=np.full((lanes, stops), NO_ID, np.int32),
        min_tokens=whole.copy(),
        max_tokens=whole.copy(),
        bias=np.zeros((lanes, 0), np.float32),
    )


def _choice(sampled: Sampled, at: tuple[int, ...]) -> Choice:
    """The device's arrays at one place as plain numbers."""
    token, logprob, rank = (array[at].item() for array in (sampled.token, sampled.logprob, sampled.rank))
    top = zip(sampled.top_ids[at].tolist(), sampled.top_logprobs[at].tolist(), strict=True)
    return Choice(token, logprob, rank, tuple(top))
