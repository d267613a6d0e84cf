"""What runs on the device: a step of any tokens, and launches of the loop that decodes several (loop.py)."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax.cache import Cache, cache_shardings
from swiftkv_jax.engine.loop import Exits, Lanes, choose, decode, early_exit, pin
from swiftkv_jax.engine.request import MOST_STOPS, Request
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, Tally, sample
from swiftkv_jax.engine.scheduler import Work, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.model import Transformer, logits, read, run_upper, survive
from swiftkv_jax.shapes import Array, Int, PyTree

# Few, so that few programs are compiled: greedy, plain sampling, and all that SamplingParams can ask for.
MODES = (Mode(), Mode(sampled=True), Mode(*[True] * len(Mode._fields)))
_CLEARED = 16  # pages cleared at a time


def new_cache(model: Transformer, params: PyTree, mesh: Mesh | None, make) -> Cache:
    """The empty cache that `make` describes, on `mesh` or where `params` lie.

    Committed there from the start, as every launch's result is: else the second launch would compile again.
    """
    if mesh is None:
        return jax.device_put(make(), jax.tree.leaves(params)[0].sharding)
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), mesh))()


@partial(jax.jit, static_argnames=("model", "mode", "mesh", "threshold"), donate_argnames=("cache",))
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
    threshold: float | None = None,
) -> tuple[Sampled, Cache]:
    """Cache a flat ragged batch of tokens, decoded ones and chunks of prompts; sample after each survivor.

    Survivor i is a token of row `survivor_rows[i]`; both are padded at the end, survivors with T. Row q's
    prompt has `prompts[q]` tokens. Under a `threshold` the exit head's token stands where it is surer.
    """
    at_table = dataclasses.replace(cache, table=table)
    x, at, _, pool = read(model, params, tokens, positions, query_starts, at_table)
    x, at, batch = survive(x, at, positions, query_starts, survivors)
    scores = logits(model, params, run_upper(model, params, x, at, batch, pool))
    length = positions[jnp.clip(survivors, 0, tokens.shape[0] - 1)] + 1
    policy, history, prompt = jax.tree.map(lambda x: x[survivor_rows], (policy, history, prompts))
    tally = Tally.of(history, prompt, length, scores.shape[1] if history.shape[1] else 0)
    where = (policy, tally, length - prompt, length, mode)
    sampled = sample(scores, *where)
    if threshold is not None:
        guessed, sure = early_exit(model, params, x, threshold, *where)
        sampled = choose(sure, guessed, sampled)
    return sampled, pin(dataclasses.replace(pool, table=cache.table), mesh)


@partial(jax.jit, donate_argnums=0)
def _clear(cache: Cache, pages: Int[Array, " n"]) -> Cache:
    return cache.clear(pages)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What was sent to the device and not yet read.

    Attributes:
      rows: the sequences, row by row. places: for each row, where its tokens stand in `sampled`.
      work: what a step ran; empty for a decode loop of `steps` steps, `each` of them a turn.
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
    each: int = 1

    def read(self) -> list[list[Choice]]:
        """Wait for it; each row's tokens in order."""
        sampled = jax.device_get(self.sampled)
        if self.work:
            return [[_choice(sampled, at) for at in places] for places in self.places]
        given = sampled.token != NO_ID
        return [
            [_choice(sampled, (i, row), i % self.each > 0) for i in np.flatnonzero(given[:, row]).tolist()]
            for row in range(len(self.rows))
        ]


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
        exits: Exits | None = None,
    ):
        """`budget` tokens a step and `steps` tokens a decode loop at most (with `exits`, whole turns);
        `drafts` guesses a sequence in a step.

        A launch runs in the first of `modes` that has what its rows need; the last must have all.
        """
        self.model, self.mesh, self.params, self.cache = model, mesh, params, cache
        self.fewest_rows = 1
        self.lanes, self.budget, self.drafts, self.modes, self.exits = lanes, budget, drafts, modes, exits
        self._each = exits.each if exits else 1
        self.steps = -(-steps // self._each) * self._each
        self._threshold = exits.threshold if exits else None
        self.slots = -(-cache.capacity // cache.page)
        self._policy = _idle_policy(lanes)
        self._seated: dict[tuple, Policy] = {}

    def seat(self, sequence: Sequence) -> None:
        """Write a sequence's parameters into its lane."""
        p, row = sequence.request.params, sequence.lane
        seed, stops = sequence.seed % 2**64, sequence.request.stop_ids[:MOST_STOPS]
        values = {
            "temperature": p.temperature,
            "top_k": p.top_k,
            "top_p": p.top_p,
            "min_p": p.min_p,
            "repetition": p.repetition_penalty,
            "presence": p.presence_penalty,
            "frequency": p.frequency_penalty,
            "seed": (seed >> 32, seed & 0xFFFFFFFF),
            "stop_ids": stops + (NO_ID,) * (MOST_STOPS - len(stops)),
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
        table = self._table(rows, count)
        sampled, self.cache = run_any(*fixed, self.cache, table, *batch, threshold=self._threshold)
        return Launch(rows, sampled, places, work)

    def decode(self, rows: list[Sequence]) -> Launch:
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
        return self._loop(rows, table, lanes, policy, mode)

    def follow(self, launch: Launch) -> Launch:
        """Send the same rows on, from where `launch` will leave them: nothing of it has to be read."""
        table = self._table(launch.rows, launch.table.shape[0])
        return self._loop(launch.rows, table, launch.lanes, launch.policy, launch.mode)

    def _loop(self, rows, table, lanes, policy, mode) -> Launch:
        steps = self.steps
        fixed = (self.model, mode, self.mesh, steps, self.params)
        sampled, lanes, self.cache = decode(*fixed, self.cache, table, lanes, policy, exits=self.exits)
        return Launch(rows, sampled, [], [], lanes, steps, table, policy, mode, self._each)

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
                _, self.cache = run_any(*fixed, self.cache, table, *batch, threshold=self._threshold)
                continue
            lanes = Lanes(zero, zero, zero, np.zeros(count, bool), history)
            for _ in range(2):  # from the host, and from the launch before
                lanes = self._loop([], table, lanes, policy, mode).lanes
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
        mode = self._mode([s.request for s in rows])
        return mode, self._gather(rows, count, mode), self._history(rows, count, mode)

    def _mode(self, wanted: list[Request]) -> Mode:
        params = [request.params for request in wanted]
        need = Mode(
            sampled=not all(p.greedy for p in params),
            filtered=any(p.filtered for p in params),
            penalised=any(p.penalised for p in params),
            biased=any(request.biased for request in wanted),
            logprobs=any(p.logprobs is not None for p in params),
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


def _idle_policy(lanes: int) -> Policy:
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
        stop_ids=np.full((lanes, MOST_STOPS), NO_ID, np.int32),
        min_tokens=whole.copy(),
        max_tokens=whole.copy(),
        bias=np.zeros((lanes, 0), np.float32),
    )


def _choice(sampled: Sampled, at: tuple[int, ...], guessed: bool = False) -> Choice:
    """The device's arrays at one place as plain numbers."""
    token, logprob, rank = (array[at].item() for array in (sampled.token, sampled.logprob, sampled.rank))
    top = zip(sampled.top_ids[at].tolist(), sampled.top_logprobs[at].tolist(), strict=True)
    return Choice(token, logprob, rank, tuple(top), guessed)
