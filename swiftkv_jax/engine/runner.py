"""Launches on the device: steps of any tokens, and the loop that decodes several (loop.py)."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.core import sharding
from swiftkv_jax.core.cache import Cache, Sources
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Array, Int, PyTree
from swiftkv_jax.engine.followers import Single, repeated
from swiftkv_jax.engine.loop import Exits, Inputs, Lanes, Scores, Survivors, decode, draw, run_any
from swiftkv_jax.engine.reader import Reader
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, Sampled, Seats, needed
from swiftkv_jax.engine.scheduler import Work, array_size, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.engine.sources import SourceReader, read_source
from swiftkv_jax.engine.warm import Program, WarmUp
from swiftkv_jax.kernels.common import dispatch

# Few, so that few programs are compiled: greedy, plain sampling, and all that SamplingParams can ask for.
MODES = (Mode(), Mode(sampled=True), Mode(*[True] * len(Mode._fields)))
_CLEARED = 16  # pages cleared at a time
_TOKENS_A_ROW = 16  # of a step, from which its empty rows cost next to nothing


@partial(jax.jit, donate_argnums=0)
def _cleared(cache: Cache, pages: Int[Array, " n"], sources: Int[Array, " n"]) -> Cache:
    cross = cache.cross and cache.cross.clear(sources)
    return dataclasses.replace(cache.clear(pages), cross=cross)


def _padded(pages: list[int]) -> Int[np.ndarray, " n"]:
    """Page ids in an array of fixed size, padded with the scratch page."""
    return np.array(pages + [0] * (_CLEARED - len(pages)), np.int32)


@dataclasses.dataclass(frozen=True)
class StepLaunch:
    """A step that was sent to the device and not yet read.

    Attributes:
      work: what it runs. places: the survivors of each item. sampled: [M] a token after each, or None.
    """

    work: list[Work]
    places: list[range]
    sampled: Sampled | None

    @property
    def rows(self) -> list[Sequence]:
        return [item.sequence for item in self.work]

    def read(self) -> list[list[Choice]]:
        """Wait for the step; return each row's tokens: none within a prompt, else one and drafts."""
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
      rows: the sequences, row by row. sampled: [steps, Q], `each` steps per turn.
      mode: the sampling mode.
    """

    rows: list[Sequence]
    sampled: Sampled
    mode: Mode
    steps: int
    each: int

    def read(self) -> list[list[Choice]]:
        """Wait for the loop; return each row's tokens in order."""
        sampled = jax.device_get(self.sampled)
        return [self._given(sampled, row, sequence) for row, sequence in enumerate(self.rows)]

    def _given(self, sampled: Sampled, row: int, sequence: Sequence) -> list[Choice]:
        """A turn begins with a token that is no draft; as many are drafted as the sequence has room for."""
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
      cache: the only state, donated to every launch and replaced by its result.
      fewest_rows: the minimum number of rows of an array. An engine without precompiled programs raises it as
        it goes, so that a shrinking batch is not compiled again and again.
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
        role: Single | None = None,
        fixed: bool = False,
    ):
        """`empty` makes its pool. A step has at most `budget` tokens, a decode loop at most `steps` tokens a
        row (with `exits`, whole turns), and a sequence at most `drafts` draft tokens in a step. `reader`: the
        auxiliary model that reads prompts ahead of the model. `role`: the role among the processes whose
        devices hold the model. `fixed`: every launch has arrays of all lanes and, in a step, of `budget`
        tokens, and runs in the last of `modes`.

        A launch runs in the first of `modes` that covers what its rows need; the last must cover everything.
        """
        self.model, self.params, self.reader, self._empty = model, params, reader, empty
        self.role = role or Single()
        self.cache = cache = empty()
        self.fewest_rows = 1
        self.lanes, self.budget, self.drafts, self.exits = lanes, budget, drafts, exits
        self._fixed, self.modes = fixed, modes[-1:] if fixed else modes
        self._accelerated = dispatch.device()[0] != "cpu"
        self._each = exits.each if exits else 1
        self.steps = -(-steps // self._each) * self._each
        self._threshold = exits.threshold if exits else None
        self.slots = -(-cache.capacity // cache.page)
        self.seats = Seats(lanes, model.config.vocab_size)
        sizes = {launch_size(n, budget) for n in range(1, budget + 1)}
        self._sizes = [budget] if fixed else sorted(sizes | {budget})
        self._warming: WarmUp | None = None
        self._encoder = SourceReader(model, cache) if model.config.encoder is not None else None
        mesh = cache.mesh
        self._place = cache.table.sharding if mesh is None else NamedSharding(mesh, PartitionSpec())

    def run(self, work: list[Work], size: int) -> StepLaunch | None:
        """Send one step of `work` in arrays of `size` tokens: what an auxiliary model reads, then the model's
        own. The launch is of the latter, None without any; the former has nothing to read back."""
        if self.reader is not None:
            work, size = self._read_ahead(self.reader, work, size)
        if not work:
            return None
        rows = [item.sequence for item in work]
        count, size, mode = self._step_for(rows, size)
        inputs, places = self._inputs(work, size, count)
        self._score(inputs)
        if not any(places):
            return StepLaunch(work, places, None)
        return StepLaunch(work, places, self._draw(*self._asked(rows, places, count, mode)))

    def _step_for(self, rows: list[Sequence], size: int) -> tuple[int, int, Mode]:
        """(rows, tokens, mode) of the smallest step that is ready for these rows and `size` tokens.

        On an accelerator a full step of one prompt has its own program whatever the batch, see `_is_kept`.
        """
        alone = self._accelerated and size == self.budget and len(rows) == 1 and not self._fixed
        counts = itertools.chain((1,) * alone, self._counts(len(rows)))
        steps = itertools.product(counts, self._sizes_from(size), self._modes(rows))
        return next(s for s in steps if self._is_ready("step", *s[:2]) and self._is_ready("draw", s[0], s[2]))

    @repeated
    def _score(self, inputs: Inputs) -> None:
        self._scores, self.cache = self._score_call(inputs)()

    @repeated
    def _draw(self, mode: Mode, survivors: Survivors, policy: Policy) -> Sampled:
        """Sample a token after each survivor of the last `_score`."""
        return self._draw_call(self._scores, mode, survivors, policy)()

    def _score_call(self, inputs: Inputs) -> partial:
        exits = self._threshold is not None
        return partial(run_any, self.model, self.params, self.cache, inputs, exits=exits)

    def _inputs(self, work: list[Work], size: int, count: int) -> tuple[Inputs, list[range]]:
        """(the step of `work` in `size` tokens and `count` rows, the places of each item's survivors)."""
        tokens, positions, starts = self._flat([_own(item) for item in work], count, size)
        survivors = np.full(count * (1 + self.drafts), size, np.int32)
        places: list[range] = []
        done = 0
        for row, item in enumerate(work):
            wanted = 1 + len(item.draft) if item.completes else 0
            survivors[done : done + wanted] = range(starts[row + 1] - wanted, starts[row + 1])
            places.append(range(done, done + wanted))
            done += wanted
        rows = [item.sequence for item in work]
        where = self._table(rows, count), self._sources(rows, count)
        return Inputs(tokens, positions, starts, survivors, *where), places

    def _draw_call(self, scores: Scores, mode: Mode, survivors: Survivors, policy: Policy) -> partial:
        return partial(draw, mode, scores, survivors, policy, threshold=self._threshold)

    def _asked(
        self, rows: list[Sequence], places: list[range], count: int, mode: Mode
    ) -> tuple[Mode, Survivors, Policy]:
        """(mode, the sequences of the survivors, their sampling parameters)."""
        owner, lengths = np.zeros((2, count * (1 + self.drafts)), np.int32)
        for row, (sequence, some) in enumerate(zip(rows, places, strict=True)):
            owner[some.start : some.stop] = row
            # Known tokens, then draft tokens.
            lengths[some.start : some.stop] = range(sequence.length, sequence.length + len(some))
        prompts = np.zeros(count, np.int32)
        prompts[: len(rows)] = [len(s.request.token_ids) for s in rows]
        survivors = Survivors(owner, lengths, prompts, self._history(rows, count, mode))
        return mode, survivors, self.seats.policy(rows, count, mode)

    def _read_ahead(self, reader: Reader, work: list[Work], size: int) -> tuple[list[Work], int]:
        """Send the tokens that an auxiliary model reads; return the model's own work and its size."""
        ahead = [item for item in work if item.ahead]
        if ahead:
            first = [(item.sequence.cached, item.ahead) for item in ahead]
            parts = [(at, i.sequence.slice(at, at + n)) for i, (at, n) in zip(ahead, first, strict=True)]
            rows, tokens = [item.sequence for item in ahead], array_size(sum(i.ahead for i in ahead), size)
            sizes = itertools.product(self._counts(len(rows)), self._sizes_from(tokens))
            count, tokens = next(s for s in sizes if self._is_ready("ahead", *s))
            flat = self._flat(parts, count, tokens)
            self._send_ahead(*flat, self._table(rows, count))
        own = [item for item in work if item.ahead < item.count]
        return own, array_size(sum(item.count - item.ahead + len(item.draft) for item in own), size)

    def _ahead_call(self, reader: Reader, count: int, size: int) -> partial:
        return reader.call(self.cache, *self._flat([], count, size), self._table([], count))

    @repeated
    def _send_ahead(self, *flat: Any) -> None:
        assert self.reader is not None
        self.cache = self.reader.read(self.cache, *flat)

    def _flat(self, parts: list[tuple[int, list[int]]], count: int, size: int) -> tuple[Any, Any, Any]:
        """(tokens, positions, query starts) of `count` rows; `parts`: a row's first position, tokens."""
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
        """Send a loop of up to `steps` more tokens per sequence, of whose tokens all but one are cached."""
        loops = itertools.product(self._counts(len(rows)), self._modes(rows))
        count, mode = next(loop for loop in loops if self._is_ready("loop", *loop))
        turns = *self._turns(rows, count, mode), self._sources(rows, count)
        return self._launched(rows, self._loop(mode, *turns), mode)

    def follow(self, launch: DecodeLaunch) -> DecodeLaunch:
        """Continue the rows from where `launch`, the last one, leaves them, without reading its result."""
        rows, count = launch.rows, launch.sampled.token.shape[1]
        where = self._table(rows, count), None, None, self._sources(rows, count)
        return self._launched(rows, self._loop(launch.mode, *where), launch.mode)

    def _launched(self, rows: list[Sequence], sampled: Sampled, mode: Mode) -> DecodeLaunch:
        return DecodeLaunch(rows, sampled, mode, self.steps, self._each)

    def _turns(self, rows: list[Sequence], count: int, mode: Mode) -> tuple[Any, Lanes, Policy]:
        """(page table, state of these rows, their sampling parameters)."""
        lanes = _lanes(rows, count, self._history(rows, count, mode))
        return self._table(rows, count), lanes, self.seats.loop_policy(rows, count, mode)

    @repeated
    def _loop(
        self,
        mode: Mode,
        table: Any,
        lanes: Lanes | None = None,
        policy: Policy | None = None,
        sources: Sources | None = None,
    ) -> Sampled:
        """Decode; without `lanes`, continue the rows of the last loop with their sampling parameters."""
        if lanes is not None and policy is not None:
            # Placed where a launch leaves them: else `decode` compiles for both placements.
            self._lanes, self._rules = sharding.put(lanes, self._place), policy
        call = self._loop_call(mode, table, self._lanes, self._rules, sources)
        sampled, self._lanes, self.cache = call()
        return sampled

    def _loop_call(
        self, mode: Mode, table: Any, lanes: Lanes, policy: Policy, sources: Sources | None
    ) -> partial:
        fixed = (self.model, mode, self.steps, self.params)
        return partial(decode, *fixed, self.cache, table, lanes, policy, self.exits, sources)

    def encode(self, sequence: Sequence) -> None:
        """Send the launch that encodes a sequence's source into its pages."""
        assert self._encoder is not None and sequence.source is not None
        length = sequence.request.source_length
        size = next(s for s in self._encoder.sizes if s >= length and self._is_ready("encode", s))
        arrays = self._encoder.arrays(sequence.request.source, length, size, sequence.source.pages)
        self._encode(*arrays)
        sequence.source.filled = True

    @repeated
    def _encode(self, source: Any, sources: Sources) -> None:
        self.cache = self._encode_call(source, sources)()

    def _encode_call(self, source: Any, sources: Sources) -> partial:
        return partial(read_source, self.model, self.params, self.cache, source, sources)

    def _sources(self, rows: list[Sequence], count: int) -> Sources | None:
        return self._encoder and self._encoder.read_by(rows, count)

    def clear(self, pages: list[int], sources: list[int] | None = None) -> None:
        """Zero these pages, and these pages of sources, which a faulty request wrote."""
        sources = sources or []
        for at in range(0, max(len(pages), len(sources)), _CLEARED):
            self._clear(*(_padded(some[at : at + _CLEARED]) for some in (pages, sources)))

    @repeated
    def _clear(self, pages: Int[np.ndarray, " n"], sources: Int[np.ndarray, " n"]) -> None:
        self.cache = _cleared(self.cache, pages, sources)
        if self.reader is not None:
            self.reader.cache = _cleared(self.reader.cache, pages, sources)

    @repeated
    def restart(self) -> None:
        """Replace the pools by empty ones."""
        for array in jax.tree.leaves(self.cache):  # there may be no room for two
            array.delete()
        self.cache = self._empty()
        if self.reader is not None:
            self.reader.restart()

    def largest(self, count: int | None = None, mode: Mode | None = None) -> list[partial]:
        """The programs of the largest arrays, with arguments: a full step, a draw (of scores as shapes), a
        loop, and those of a reader and an encoder. By default they are of all lanes and the last mode."""
        mode, count, size = mode or self.modes[-1], count or self.lanes, self.budget
        loop = self._loop_call(mode, *self._turns([], count, mode), self._sources([], count))
        ahead = [self._ahead_call(reader, count, size) for reader in (self.reader,) if reader is not None]
        inputs, _ = self._inputs([], size, count)
        draw = self._draw_call(self._scores_like(inputs), *self._asked([], [], count, mode))
        sources = [self._encode_call(*e.nothing(e.sizes[-1])) for e in (self._encoder,) if e is not None]
        return [self._score_call(inputs), draw, loop, *ahead, *sources]

    def _scores_like(self, inputs: Inputs) -> Scores:
        """The shapes of what `_score` returns for these inputs."""
        step = self._score_call(inputs)
        scores, _ = step.func.eval_shape(*step.args, **step.keywords)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), scores)

    def programs(self) -> list[Program]:
        """All programs that launches may need. Those of all lanes, a full step and the last mode come first,
        as they suffice for any launch; then the loops of greedy decoding, and a full step of one sequence.

        Keys are ("step", rows, tokens), ("draw", rows, mode), ("loop", rows, mode) and, with a reader,
        ("ahead", rows, tokens), with an encoder ("encode", positions).
        """
        counts = sorted({self.rows(n) for n in range(1, self.lanes + 1)})
        found = []
        for count, size in filter(self._is_kept, itertools.product(counts, self._sizes)):
            inputs, _ = self._inputs([], size, count)
            step = self._score_call(inputs)
            found.append(Program(("step", count, size), step, partial(self._score, inputs)))
            if (reader := self.reader) is not None:
                call = self._ahead_call(reader, count, size)
                flat = call.args[-4:]  # all but the model, the weights and the caches
                found.append(Program(("ahead", count, size), call, partial(self._send_ahead, *flat)))
        for count, mode in filter(self._is_kept, itertools.product(counts, self.modes)):
            table, lanes, policy = self._turns([], count, mode)
            sources = self._sources([], count)
            loop = self._loop_call(mode, table, sharding.put(lanes, self._place), policy, sources)
            send = partial(self._loop, mode, table, lanes, policy, sources)
            found.append(Program(("loop", count, mode), loop, send))
            asked, least = self._asked([], [], count, mode), self._inputs([], self._sizes[0], count)[0]
            draw = self._draw_call(self._scores_like(least), *asked)
            found.append(Program(("draw", count, mode), draw, partial(self._step_and_draw, count, asked)))
        for size, given in self._encoder.every() if self._encoder is not None else ():
            found.append(Program(("encode", size), self._encode_call(*given), partial(self._encode, *given)))
        plain = self.modes[0]
        first = [*self._any_launch(), *(("loop", count, plain) for count in counts)]
        first += [("step", 1, self.budget), ("draw", 1, plain)] if self._accelerated else []
        return sorted(found, key=lambda one: first.index(one.key) if one.key in first else len(first))

    def _is_kept(self, of: tuple[int, int | Mode]) -> bool:
        """Whether there is a program for so many rows and tokens, or rows and mode.

        A step whose tokens outweigh empty rows, and the rarest sampling mode, use the program of more rows. A
        step with fewer tokens than rows uses that of more tokens. An accelerator has all programs of one row:
        with more rows a prompt's chunk is cut into shorter blocks, and as many empty ones are computed.
        """
        count, what = of
        if isinstance(what, int) and what < min(count, self.budget):
            return False
        if count == self.lanes or (count == 1 and self._accelerated):
            return True
        more = min(16 * count, self.lanes)
        return what < _TOKENS_A_ROW * more if isinstance(what, int) else what != self.modes[-1]

    def _any_launch(self) -> list[tuple]:
        """Keys of the programs that suffice for any launch."""
        count, size, mode = self.lanes, self.budget, self.modes[-1]
        keys = [("step", count, size), ("draw", count, mode), ("loop", count, mode)]
        if self._encoder is not None:
            keys.append(("encode", self._encoder.sizes[-1]))
        return keys if self.reader is None else [*keys, ("ahead", count, size)]

    def _step_and_draw(self, count: int, asked: tuple) -> None:
        """Run a step and a draw of no sequence in `count` rows, if such a step is in use already."""
        size = next((size for size in self._sizes if self._is_ready("step", count, size)), None)
        if size is not None:
            self._score(self._inputs([], size, count)[0])
            self._draw(*asked)

    def begin_warm_up(self, keys: Collection[tuple] = ()) -> WarmUp:
        """Compile on other threads; from now on launches use only the programs that are in use already.
        `keys`: of the only programs that will be used; by default, of all `programs`."""
        programs = [program for program in self.programs() if not keys or program.key in keys]
        needed = set(keys or self._any_launch())
        self._warming = WarmUp(programs, needed, in_order=self.role.several)
        return self._warming

    @repeated
    def warm_up(self, say: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compile all `programs`, several at once; return how many."""
        warming = self.begin_warm_up()
        say(0, warming.total)
        while not warming.done:
            warming.take()
            say(len(warming.ready), warming.total)
        self.end_warm_up()
        return warming.total

    def end_warm_up(self) -> None:
        """End the warm-up: every program that could be compiled is in use."""
        if self._warming is not None and not self._warming.failed:
            self._warming = None
        self.clear([0])
        jax.block_until_ready(self.cache.stores)

    def _is_ready(self, kind: str, *of: Any) -> bool:
        kept = kind == "encode" or self._is_kept(of)  # sources have a program for each size
        return kept and (self._warming is None or (kind, *of) in self._warming.ready)

    def rows(self, n: int) -> int:
        """Rows of a launch: a power of 16, or all lanes. Empty rows cost an accelerator next to nothing."""
        return next(self._counts(n))

    def _counts(self, n: int) -> Iterator[int]:
        """Numbers of rows of launches that have room for `n` sequences, the fewest first."""
        count = self.lanes if self._fixed else min(self.fewest_rows, self.lanes)
        while count < self.lanes:
            if count >= n:
                yield count
            count = min(16 * count, self.lanes)
        yield self.lanes

    def _sizes_from(self, size: int) -> list[int]:
        return [size, *(one for one in self._sizes if one > size)]

    def _table(self, rows: list[Sequence], count: int):
        table = np.zeros((count, self.slots), np.int32)
        for row, sequence in enumerate(rows):
            table[row, : len(sequence.pages)] = sequence.pages
        return table

    def _modes(self, rows: list[Sequence]) -> list[Mode]:
        """The modes that cover what these rows need, the plainest first."""
        need = needed(rows)
        return [mode for mode in self.modes if mode.covers(need)]

    def _history(self, rows: list[Sequence], count: int, mode: Mode):
        history = np.zeros((count, self.cache.capacity if mode.penalised else 0), np.int32)
        for row, s in enumerate(rows if mode.penalised else []):
            history[row, : s.length] = s.tokens
        return history


def _lanes(rows: list[Sequence], count: int, history) -> Lanes:
    """The state of these rows, in arrays of the host."""
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
    """(first position, tokens) of what the model itself reads of some work, draft tokens included."""
    stop = item.sequence.cached + item.count
    first = stop - item.count + item.ahead
    return first, [*item.sequence.slice(first, stop), *item.draft]


def _choice(sampled: Sampled, at: tuple[int, ...], guessed: bool, drafted: int) -> Choice:
    """One entry of the device's arrays as plain numbers."""
    token, logprob, rank = (array[at].item() for array in (sampled.token, sampled.logprob, sampled.rank))
    top = zip(sampled.top_ids[at].tolist(), sampled.top_logprobs[at].tolist(), strict=True)
    return Choice(token, logprob, rank, tuple(top), guessed, drafted)
