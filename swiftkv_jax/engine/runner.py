"""What runs on the device: a step of any tokens, and launches of the loop that decodes several (loop.py)."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.cache import Cache, make_batch
from swiftkv_jax.engine.loop import Exits, Lanes, choose, decode, early_exit
from swiftkv_jax.engine.reader import Reader
from swiftkv_jax.engine.request import MOST_STOPS, Request
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, Tally, sample
from swiftkv_jax.engine.scheduler import Work, array_size, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.model import Transformer, embed, logits, run, survivors_of
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Array, Int, PyTree

# Few, so that few programs are compiled: greedy, plain sampling, and all that SamplingParams can ask for.
MODES = (Mode(), Mode(sampled=True), Mode(*[True] * len(Mode._fields)))
_CLEARED = 16  # pages cleared at a time


def new_cache(params: PyTree, make: Callable[[], Cache]) -> Cache:
    """The empty cache that `make` describes, on its mesh or, without one, where `params` lie.

    Committed and pinned there as every launch's result is: else the second launch would compile again.
    """
    if jax.eval_shape(make).mesh is None:
        return jax.device_put(make(), jax.tree.leaves(params)[0].sharding)
    return jax.jit(lambda: make().pinned())()


@pytree
class Inputs:
    """A flat ragged batch for one step: decoded tokens, and chunks of prompts; numpy arrays from the host.

    Attributes:
      tokens: [T], those of each sequence together. positions: [T] in their sequences.
      query_starts: [Q + 1] the first token of each sequence, then the end of the last.
      survivors: [M] ascending tokens after which one is sampled, padded with T. survivor_lanes: [M] the
        sequence of each.
      prompts: [Q] tokens of each prompt. table: [Q, slots] page ids. history: [Q, S] as in `Lanes`.
    """

    tokens: Int[Any, " T"]
    positions: Int[Any, " T"]
    query_starts: Int[Any, " Q1"]
    survivors: Int[Any, " M"]
    survivor_lanes: Int[Any, " M"]
    prompts: Int[Any, " Q"]
    table: Int[Any, "Q slots"]
    history: Int[Any, "Q S"]


@partial(jax.jit, static_argnames=("model", "mode", "threshold"), donate_argnames=("cache",))
def run_any(
    model: Transformer,
    mode: Mode,
    params: PyTree,
    cache: Cache,
    inputs: Inputs,
    policy: Policy,
    threshold: float | None = None,
) -> tuple[Sampled, Cache]:
    """Cache a flat ragged batch of tokens; sample after each survivor.

    Under a `threshold` the exit head's token stands where the head gives it more probability.
    """
    plan, positions, starts = model.plan, inputs.positions, inputs.query_starts
    at, batch = cache.angles.at(positions), make_batch(starts, positions)
    lower, upper = range(plan.depth), range(plan.depth, plan.num_layers)
    survive = partial(survivors_of, positions, starts, inputs.survivors)
    x, pool = embed(model, params, inputs.tokens), cache.seen_by(inputs.table)
    x, pool = run(model, params, x, at, batch, pool, lower)
    last, pool = run(model, params, x, at, batch, pool, upper, survive)
    scores = logits(model, params, last)
    alive = jnp.clip(inputs.survivors, 0, inputs.tokens.shape[0] - 1)
    length = positions[alive] + 1
    by_sequence = (policy, inputs.history, inputs.prompts)
    policy, history, prompt = jax.tree.map(lambda x: x[inputs.survivor_lanes], by_sequence)
    tally = Tally.of(history, prompt, length, scores.shape[1] if history.shape[1] else 0)
    where = (policy, tally, length - prompt, length, mode)
    sampled = sample(scores, *where)
    if threshold is not None:
        guessed, sure = early_exit(model, params, x[alive], threshold, *where)
        sampled = choose(sure, guessed, sampled)
    return sampled, pool.seen_by(cache.table).pinned()


@partial(jax.jit, donate_argnums=0)
def _clear(cache: Cache, pages: Int[Array, " n"]) -> Cache:
    return cache.clear(pages)


def _compile(calls: list[partial], say: Callable[[int, int], None]) -> None:
    """Compile the programs of these calls, as many at once as there are cores, at most 8; nothing runs.

    A later call of the same function with such arguments finds its program. `say` gets (done, of how many).
    """
    say(0, len(calls))
    workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="compile")
    try:
        sent = [workers.submit(lambda f: f.func.lower(*f.args, **f.keywords).compile(), f) for f in calls]
        for done, one in enumerate(as_completed(sent), 1):
            one.result()
            say(done, len(calls))
    finally:
        workers.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class StepLaunch:
    """A step that was sent to the device and not yet read.

    Attributes:
      work: what it runs. sampled: [M] after each survivor. places: of each item's survivors, in `sampled`.
    """

    work: list[Work]
    sampled: Sampled
    places: list[range]

    @property
    def rows(self) -> list[Sequence]:
        return [item.sequence for item in self.work]

    def read(self) -> list[list[Choice]]:
        """Wait for it; each row's tokens: none where its prompt goes on, else one, and one more for each
        guess that proved right."""
        sampled = jax.device_get(self.sampled)
        return [self._standing(sampled, *each) for each in zip(self.work, self.places, strict=True)]

    def _standing(self, sampled: Sampled, item: Work, places: range) -> list[Choice]:
        out: list[Choice] = []
        for i, at in enumerate(places):
            if i and out[-1].token != item.draft[i - 1]:
                break
            out.append(_choice(sampled, (at,), guessed=i > 0, drafted=0 if i else len(item.draft)))
        return out


@dataclasses.dataclass(frozen=True)
class DecodeLaunch:
    """A decode loop that was sent to the device and not yet read; another can be sent behind it.

    Attributes:
      rows: the sequences, row by row. sampled: [steps, Q], `each` of them a turn.
      lanes: where the loop leaves the rows. policy, mode: what they were sampled by.
    """

    rows: list[Sequence]
    sampled: Sampled
    lanes: Lanes
    policy: Policy
    mode: Mode
    steps: int
    each: int

    def read(self) -> list[list[Choice]]:
        """Wait for it; each row's tokens in order."""
        sampled = jax.device_get(self.sampled)
        return [self._given(sampled, row, sequence) for row, sequence in enumerate(self.rows)]

    def _given(self, sampled: Sampled, row: int, sequence: Sequence) -> list[Choice]:
        """The first token of a turn opens it; as many are guessed to follow as the sequence has room for."""
        room = sequence.request.max_length - sequence.length - 1
        out = []
        for known, i in enumerate(np.flatnonzero(sampled.token[:, row] != NO_ID).tolist()):
            guessed = i % self.each > 0
            drafted = 0 if guessed else min(self.each - 1, room - known)
            out.append(_choice(sampled, (i, row), guessed, drafted))
        return out


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
        cache: Cache,
        lanes: int,
        budget: int,
        steps: int,
        drafts: int = 0,
        modes: tuple[Mode, ...] = MODES,
        exits: Exits | None = None,
        reader: Reader | None = None,
    ):
        """`budget` tokens a step and `steps` tokens a decode loop at most (with `exits`, whole turns);
        `drafts` guesses a sequence in a step. `reader`: who reads prompts ahead of the model.

        A launch runs in the first of `modes` that has what its rows need; the last must have all.
        """
        self.model, self.params, self.cache, self.reader = model, params, cache, reader
        self.fewest_rows = 1
        self.lanes, self.budget, self.drafts, self.modes, self.exits = lanes, budget, drafts, modes, exits
        self._each = exits.each if exits else 1
        self.steps = -(-steps // self._each) * self._each
        self._threshold = exits.threshold if exits else None
        self.slots = -(-cache.capacity // cache.page)
        self._policy = _idle_policy(lanes)
        self._seated: dict[tuple, Policy] = {}
        mesh = cache.mesh
        self._place = cache.table.sharding if mesh is None else NamedSharding(mesh, PartitionSpec())

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

    def run(self, work: list[Work], size: int) -> StepLaunch | None:
        """Send one step of `work` in arrays of `size` tokens: what is read ahead, then the model's own.

        The launch is of the latter, None without any; nothing of the former is to be read back.
        """
        if self.reader is not None:
            work, size = self._read_ahead(self.reader, work, size)
        rows = [item.sequence for item in work]
        if not rows:
            return None
        return self._step(work, size, self.rows(len(rows)), self._mode([s.request for s in rows]))

    def _step(self, work: list[Work], size: int, count: int, mode: Mode) -> StepLaunch:
        call, places = self._step_call(work, size, count, mode)
        sampled, self.cache = call()
        return StepLaunch(work, sampled, places)

    def _step_call(self, work: list[Work], size: int, count: int, mode: Mode) -> tuple[partial, list[range]]:
        """(the program with its arguments, the places of each item's survivors in what it samples)."""
        rows, per_row = [item.sequence for item in work], 1 + self.drafts
        tokens, positions, starts = self._flat([_own(item) for item in work], count, size)
        survivors = np.full(count * per_row, size, np.int32)
        survivor_rows = np.zeros(count * per_row, np.int32)
        places: list[range] = []
        done = 0
        for row, item in enumerate(work):
            wanted = 1 + len(item.draft) if item.completes else 0
            survivors[done : done + wanted] = range(starts[row + 1] - wanted, starts[row + 1])
            survivor_rows[done : done + wanted] = row
            places.append(range(done, done + wanted))
            done += wanted
        prompts = np.zeros(count, np.int32)
        prompts[: len(rows)] = [len(s.request.token_ids) for s in rows]
        table, history = self._table(rows, count), self._history(rows, count, mode)
        policy = self._gather(rows, count, mode)
        inputs = Inputs(tokens, positions, starts, survivors, survivor_rows, prompts, table, history)
        fixed = (self.model, mode, self.params)
        return partial(run_any, *fixed, self.cache, inputs, policy, threshold=self._threshold), places

    def _read_ahead(self, reader: Reader, work: list[Work], size: int) -> tuple[list[Work], int]:
        """Send what of a step an auxiliary model reads; the work with tokens of the model's own, its size."""
        ahead = [item for item in work if item.ahead]
        if ahead:
            first = [(item.sequence.cached, item.ahead) for item in ahead]
            parts = [(at, i.sequence.slice(at, at + n)) for i, (at, n) in zip(ahead, first, strict=True)]
            rows, count = [item.sequence for item in ahead], self.rows(len(ahead))
            flat = self._flat(parts, count, array_size(sum(item.ahead for item in ahead), size))
            self._send_ahead(reader, *flat, self._table(rows, count))
        own = [item for item in work if item.ahead < item.count]
        return own, array_size(sum(item.count - item.ahead + len(item.draft) for item in own), size)

    def _send_ahead(self, reader: Reader, *flat: Any) -> None:
        self.cache = reader.read(self.cache, *flat)

    def _flat(self, parts: list[tuple[int, list[int]]], count: int, size: int) -> tuple[Any, Any, Any]:
        """(tokens, positions, query starts) of `count` rows in arrays of `size`: each row's first position
        and its tokens."""
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        starts = np.zeros(count + 1, np.int32)
        start = 0
        for row, (first, some) in enumerate(parts):
            stop = start + len(some)
            tokens[start:stop], positions[start:stop] = some, range(first, first + len(some))
            start = starts[row + 1] = stop
        starts[len(parts) + 1 :] = start
        return tokens, positions, starts

    def decode(self, rows: list[Sequence]) -> DecodeLaunch:
        """Send up to `steps` more tokens for each of these sequences: all their tokens but one are cached."""
        return self._loop(rows, self.rows(len(rows)), self._mode([s.request for s in rows]))

    def _loop(self, rows: list[Sequence], count: int, mode: Mode) -> DecodeLaunch:
        return self._send(rows, self._lanes(rows, count, mode), self._gather(rows, count, mode), mode)

    def _lanes(self, rows: list[Sequence], count: int, mode: Mode) -> Lanes:
        lanes = Lanes(
            token=np.zeros(count, np.int32),
            position=np.zeros(count, np.int32),
            produced=np.zeros(count, np.int32),
            alive=np.arange(count) < len(rows),
            history=self._history(rows, count, mode),
        )
        for row, s in enumerate(rows):
            lanes.token[row], lanes.position[row], lanes.produced[row] = s.last, s.length - 1, len(s.output)
        return jax.device_put(lanes, self._place)  # as a launch leaves them: else `decode` compiles for both

    def follow(self, launch: DecodeLaunch) -> DecodeLaunch:
        """Send the same rows on, from where `launch` will leave them: nothing of it has to be read."""
        return self._send(launch.rows, launch.lanes, launch.policy, launch.mode)

    def _send(self, rows: list[Sequence], lanes: Lanes, policy: Policy, mode: Mode) -> DecodeLaunch:
        sampled, lanes, self.cache = self._decode_call(rows, lanes, policy, mode)()
        return DecodeLaunch(rows, sampled, lanes, policy, mode, self.steps, self._each)

    def _decode_call(self, rows: list[Sequence], lanes: Lanes, policy: Policy, mode: Mode) -> partial:
        table = self._table(rows, lanes.token.shape[0])
        fixed = (self.model, mode, self.steps, self.params)
        return partial(decode, *fixed, self.cache, table, lanes, policy, exits=self.exits)

    def clear(self, pages: list[int]) -> None:
        """Zeros in these pages: what a faulty request left."""
        for at in range(0, len(pages), _CLEARED):
            some = pages[at : at + _CLEARED]
            padded = np.zeros(_CLEARED, np.int32)
            padded[: len(some)] = some
            self.cache = _clear(self.cache, padded)
            if self.reader is not None:
                self.reader.cache = _clear(self.reader.cache, padded)

    def warm_up(self, say: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compile every program that `run` and `decode` may need in `modes`, several at once; how many."""
        sizes = sorted({launch_size(n, self.budget) for n in range(1, self.budget + 1)} | {self.budget})
        counts = sorted({self.rows(n) for n in range(1, self.lanes + 1)})
        programs: list[tuple[partial, Callable]] = []  # with arguments, and what sends it
        for mode, count in itertools.product(self.modes, counts):
            lanes, policy = self._lanes([], count, mode), self._gather([], count, mode)
            loop = self._decode_call([], lanes, policy, mode)
            programs.append((loop, partial(self._loop, [], count, mode)))
            for size in sizes:
                step, _ = self._step_call([], size, count, mode)
                programs.append((step, partial(self._step, [], size, count, mode)))
        if (reader := self.reader) is not None:
            for count, size in itertools.product(counts, sizes):
                flat = (*self._flat([], count, size), self._table([], count))
                programs.append((reader.call(self.cache, *flat), partial(self._send_ahead, reader, *flat)))
        _compile([program for program, _ in programs], say)
        for _, send in programs:
            send()
        self.clear([0])
        jax.block_until_ready(self.cache.stores)
        return len(programs)

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
        """The rows' parameters; kept until somebody takes a seat."""
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


def _own(item: Work) -> tuple[int, list[int]]:
    """(first position, tokens) of what the model itself reads of some work, guesses included."""
    stop = item.sequence.cached + item.count
    first = stop - item.count + item.ahead
    return first, [*item.sequence.slice(first, stop), *item.draft]


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


def _choice(sampled: Sampled, at: tuple[int, ...], guessed: bool, drafted: int) -> Choice:
    """The device's arrays at one place as plain numbers."""
    token, logprob, rank = (array[at].item() for array in (sampled.token, sampled.logprob, sampled.rank))
    top = zip(sampled.top_ids[at].tolist(), sampled.top_logprobs[at].tolist(), strict=True)
    return Choice(token, logprob, rank, tuple(top), guessed, drafted)
