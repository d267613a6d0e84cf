"""What runs on the device: steps of any tokens, and launches of the loop that decodes several (loop.py)."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.cache import SELF, Cache
from swiftkv_jax.engine.loop import Exits, Inputs, Lanes, Scores, Survivors, decode, draw, run_any
from swiftkv_jax.engine.reader import Reader
from swiftkv_jax.engine.request import MOST_STOPS
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled
from swiftkv_jax.engine.scheduler import Work, array_size, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.model import Transformer
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


@partial(jax.jit, donate_argnums=0)
def _clear(cache: Cache, pages: Int[Array, " n"]) -> Cache:
    return cache.clear(pages)


def _compiled(calls: list[partial]) -> Iterator[None]:
    """Compile the programs of these calls, as many at once as there are cores, at most 8; nothing runs.

    A later call of the same function with such arguments finds its program. Yields after each.
    """
    workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="compile")
    try:
        sent = [workers.submit(lambda f: f.func.lower(*f.args, **f.keywords).compile(), f) for f in calls]
        for one in as_completed(sent):
            yield one.result()
    finally:
        workers.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class StepLaunch:
    """A step that was sent to the device and not yet read.

    Attributes:
      work: what it runs. places: of each item's survivors. sampled: [M] after each; None without any.
    """

    work: list[Work]
    places: list[range]
    sampled: Sampled | None

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
        empty: Callable[[], Cache],
        lanes: int,
        budget: int,
        steps: int,
        drafts: int = 0,
        modes: tuple[Mode, ...] = MODES,
        exits: Exits | None = None,
        reader: Reader | None = None,
    ):
        """`empty` makes its pool; `budget` tokens a step and `steps` tokens a decode loop at most (with
        `exits`, whole turns); `drafts` guesses a sequence in a step. `reader`: who reads prompts ahead of the
        model.

        A launch runs in the first of `modes` that has what its rows need; the last must have all.
        """
        self.model, self.params, self.reader, self._empty = model, params, reader, empty
        self.cache = cache = empty()
        self.fewest_rows = 1
        self.lanes, self.budget, self.drafts, self.modes, self.exits = lanes, budget, drafts, modes, exits
        self._each = exits.each if exits else 1
        self.steps = -(-steps // self._each) * self._each
        self._threshold = exits.threshold if exits else None
        self.slots = -(-cache.capacity // cache.page)
        self._policy = _idle_policy(lanes)
        self._seated: dict[tuple, Policy] = {}
        mesh = cache.mesh
        self._place = cache.tables[SELF].sharding if mesh is None else NamedSharding(mesh, PartitionSpec())

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
        if not work:
            return None
        rows = [item.sequence for item in work]
        count = self.rows(len(rows))
        inputs, places = self._inputs(work, size, count)
        scores = self._score(inputs)
        if not any(places):
            return StepLaunch(work, places, None)
        return StepLaunch(work, places, self._draw_call(scores, rows, places, count, self._mode(rows))())

    def _score(self, inputs: Inputs) -> Scores:
        scores, self.cache = self._score_call(inputs)()
        return scores

    def _score_call(self, inputs: Inputs) -> partial:
        exits = self._threshold is not None
        return partial(run_any, self.model, self.params, self.cache, inputs, exits=exits)

    def _inputs(self, work: list[Work], size: int, count: int) -> tuple[Inputs, list[range]]:
        """(the step of `work` in arrays of `size` tokens and `count` rows, each item's places among the
        survivors)."""
        tokens, positions, starts = self._flat([_own(item) for item in work], count, size)
        survivors = np.full(count * (1 + self.drafts), size, np.int32)
        places: list[range] = []
        done = 0
        for row, item in enumerate(work):
            wanted = 1 + len(item.draft) if item.completes else 0
            survivors[done : done + wanted] = range(starts[row + 1] - wanted, starts[row + 1])
            places.append(range(done, done + wanted))
            done += wanted
        table = self._table([item.sequence for item in work], count)
        return Inputs(tokens, positions, starts, survivors, table), places

    def _draw_call(
        self, scores: Scores, rows: list[Sequence], places: list[range], count: int, mode: Mode
    ) -> partial:
        owner, lengths = np.zeros((2, count * (1 + self.drafts)), np.int32)
        for row, (sequence, some) in enumerate(zip(rows, places, strict=True)):
            owner[some.start : some.stop] = row
            # What is known, then what was guessed.
            lengths[some.start : some.stop] = range(sequence.length, sequence.length + len(some))
        prompts = np.zeros(count, np.int32)
        prompts[: len(rows)] = [len(s.request.token_ids) for s in rows]
        survivors = Survivors(owner, lengths, prompts, self._history(rows, count, mode))
        policy = self._gather(rows, count, mode)
        return partial(draw, mode, scores, survivors, policy, threshold=self._threshold)

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

    def _ahead_call(self, reader: Reader, count: int, size: int) -> partial:
        return reader.call(self.cache, *self._flat([], count, size), self._table([], count))

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
        return self._loop(rows, self.rows(len(rows)), self._mode(rows))

    def _loop(self, rows: list[Sequence], count: int, mode: Mode) -> DecodeLaunch:
        return self._send(rows, self._lanes(rows, count, mode), self._gather(rows, count, mode), mode)

    def _lanes(self, rows: list[Sequence], count: int, mode: Mode) -> Lanes:
        # As a launch leaves them: else `decode` compiles for both.
        return jax.device_put(_lanes(rows, count, self._history(rows, count, mode)), self._place)

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

    def restart(self) -> None:
        """New, empty pools."""
        for array in jax.tree.leaves(self.cache):  # there may be no room for two
            array.delete()
        self.cache = self._empty()
        if self.reader is not None:
            self.reader.restart()

    def largest(self) -> list[partial]:
        """The programs that make the largest arrays, with arguments: of a full step, and of all lanes; scores
        are described."""
        mode, count, size = self.modes[-1], self.lanes, self.budget
        inputs, _ = self._inputs([], size, count)
        lanes = _lanes([], count, self._history([], count, mode))
        loop = self._decode_call([], lanes, self._gather([], count, mode), mode)
        ahead = [self._ahead_call(reader, count, size) for reader in (self.reader,) if reader is not None]
        step = self._score_call(inputs)
        scores, _ = step.func.eval_shape(*step.args, **step.keywords)
        scores = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), scores)
        return [step, self._draw_call(scores, [], [], count, mode), loop, *ahead]

    def warm_up(self, say: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compile every program that `run` and `decode` may need in `modes`, several at once; how many."""
        sizes = sorted({launch_size(n, self.budget) for n in range(1, self.budget + 1)} | {self.budget})
        counts = sorted({self.rows(n) for n in range(1, self.lanes + 1)})
        models: list[tuple[partial, Callable]] = []  # programs with arguments, and what sends them
        scores: dict[int, Scores] = {}  # of as many rows

        def score(count: int, inputs: Inputs) -> None:
            scores[count] = self._score(inputs)

        for mode, count in itertools.product(self.modes, counts):
            loop = self._decode_call([], self._lanes([], count, mode), self._gather([], count, mode), mode)
            models.append((loop, partial(self._loop, [], count, mode)))
        for count, size in itertools.product(counts, sizes):
            inputs, _ = self._inputs([], size, count)
            models.append((self._score_call(inputs), partial(score, count, inputs)))
            if (reader := self.reader) is not None:
                call = self._ahead_call(reader, count, size)
                flat = call.args[-4:]  # all but what the last launch left
                models.append((call, partial(self._send_ahead, reader, *flat)))
        total = len(models) + len(self.modes) * len(counts)
        say(0, total)
        for done, _ in enumerate(_compiled([program for program, _ in models]), 1):
            say(done, total)
        for _, send in models:
            send()
        pairs = itertools.product(self.modes, counts)
        draws = [self._draw_call(scores[count], [], [], count, mode) for mode, count in pairs]
        for done, _ in enumerate(_compiled(draws), len(models) + 1):
            say(done, total)
        for call in draws:
            call()
        self.clear([0])
        jax.block_until_ready(self.cache.stores)
        return total

    def rows(self, n: int) -> int:
        """Rows of a launch: a power of 16, or all lanes. Empty rows cost an accelerator next to nothing."""
        count = self.fewest_rows
        while count < n:
            count *= 16
        return min(count, self.lanes)

    def _table(self, rows: list[Sequence], count: int):
        table = np.zeros((count, self.slots), np.int32)
        for row, sequence in enumerate(rows):
            table[row, : len(sequence.pages)] = sequence.pages
        return table

    def _mode(self, rows: list[Sequence]) -> Mode:
        wanted = [sequence.request for sequence in rows]
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


def _lanes(rows: list[Sequence], count: int, history) -> Lanes:
    """Where these rows stand, in arrays of the host."""
    lanes = Lanes(
        token=np.zeros(count, np.int32),
        position=np.zeros(count, np.int32),
        produced=np.zeros(count, np.int32),
        alive=np.arange(count) < len(rows),
        history=history,
    )
    for row, s in enumerate(rows):
        lanes.token[row], lanes.position[row], lanes.produced[row] = s.last, s.length - 1, len(s.output)
    return lanes


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
