"""Launches on the device: steps of any tokens, and the loop that decodes several (loop.py)."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftkv_jax.core import sharding
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Caches, Predicted, cached, generator, tail_of, transformers
from swiftkv_jax.core.shapes import Array, Int, PyTree
from swiftkv_jax.engine.arrays import Arrays
from swiftkv_jax.engine.followers import Single, repeated
from swiftkv_jax.engine.loop import decode, draw, read_ahead, read_source, run_any
from swiftkv_jax.engine.sampling import NO_ID, Mode, Sampled, Seats, needed
from swiftkv_jax.engine.scheduler import Work, array_size, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.engine.settings import Settings, empty_pool, of_auxiliary
from swiftkv_jax.engine.warm import Program, WarmUp
from swiftkv_jax.kernels.common import dispatch

# Few, so that few programs are compiled: greedy, sampling, and all that SamplingParams can ask for.
MODES = (Mode(), Mode(sampled=True), Mode(*[True] * len(Mode._fields)))
LOOPS_AHEAD = 2  # decode launches in flight: one runs, the next is queued behind it on the device
_FINGERPRINTED = 64  # numbers of each array, and of each layer where an array has several
_PAGES_CLEARED = 16  # at a time
_TOKENS_A_ROW = 16  # of a step, from which its empty rows cost next to nothing
NewCache = Callable[[PyTree, Callable[[], Cache]], Cache]


@partial(jax.jit, donate_argnums=0)
def _cleared(cache: Cache, pages: Int[Array, " n"], sources: Int[Array, " n"]) -> Cache:
    cross = cache.cross and cache.cross.clear(sources)
    return dataclasses.replace(cache.clear(pages), cross=cross)


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
        rows: list[list[Choice]] = []
        for item, places in zip(self.work, self.places, strict=True):
            rows.append([])
            for i, place in enumerate(places):
                if i and rows[-1][-1].token != item.draft[i - 1]:
                    break
                rows[-1].append(
                    _choice(sampled, (place,), guessed=i > 0, drafted=0 if i else len(item.draft))
                )
        return rows


@dataclasses.dataclass(frozen=True)
class DecodeLaunch:
    """A decode loop that was sent to the device and not yet read; another can be sent behind it.

    Attributes:
      rows: the sequences, row by row. sampled: [steps, Q], `each` steps per iteration.
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
        rows: list[list[Choice]] = []
        for row, sequence in enumerate(self.rows):
            room = sequence.request.max_length - sequence.length - 1
            rows.append([])
            for known, i in enumerate(np.flatnonzero(sampled.token[:, row] != NO_ID).tolist()):
                # An iteration begins with a token that is no draft; as many are drafted as there is room for.
                guessed = i % self.each > 0
                drafted = 0 if guessed else min(self.each - 1, room - known)
                rows[-1].append(_choice(sampled, (i, row), guessed, drafted))
        return rows


def _choice(sampled: Sampled, index: tuple[int, ...], guessed: bool, drafted: int) -> Choice:
    """One entry of the device's arrays as plain numbers."""
    token, logprob, rank = (array[index].item() for array in (sampled.token, sampled.logprob, sampled.rank))
    top = zip(sampled.top_ids[index].tolist(), sampled.top_logprobs[index].tolist(), strict=True)
    return Choice(token, logprob, rank, tuple(top), guessed, drafted)


class Runner:
    """A model on its devices with a pool of pages; sequences in, choices out.

    Attributes:
      cache: the only state, donated to every launch and replaced by its result. auxiliary: the same, of the
        auxiliary model that reads prompts ahead of the model; None without one. tail: as `predict.tail_of`.
      fewest_rows: the minimum number of rows of an array. An engine without precompiled programs raises it as
        it goes, so that a shrinking batch is not compiled again and again.
    """

    def __init__(
        self,
        model: Transformer | Predicted,
        params: PyTree,
        mesh: Mesh | None,
        settings: Settings,
        new: NewCache,
        role: Single | None = None,
    ):
        """`new(weights, make)` makes each of its pools. `role`: the role among the processes whose devices
        hold the model.

        A launch runs in the first of `modes` that covers what its rows need; the last must cover everything.
        With batch invariance, every launch runs in the last, with all lanes and, in a step, the whole budget.
        """
        self._whole, self.tail = (model, params), tail_of(model)
        self.model, self.params = generator(model, params)
        self._new_cache = partial(new, self.params, partial(empty_pool, self.model, settings, mesh))
        self._new_auxiliary: Callable[[], Cache | None] = lambda: None
        if isinstance(model, Predicted):
            make = partial(empty_pool, cached(model)[1], of_auxiliary(settings), mesh)
            self._new_auxiliary = partial(new, params["auxiliary"], make)
        self._make_pools()
        self.role = role or Single()
        self.fewest_rows = 1
        self.lanes, self.budget = settings.max_num_seqs, settings.max_num_batched_tokens
        self.exits, self._fixed = settings.exits, settings.batch_invariant
        self.modes = MODES[-1:] if self._fixed else MODES
        self._accelerated = dispatch.device()[0] != "cpu"
        self._each = self.exits.each if self.exits else 1
        steps = -(-settings.steps_per_launch // LOOPS_AHEAD)
        self.steps = -(-steps // self._each) * self._each
        self._threshold = self.exits.threshold if self.exits else None
        self.arrays = Arrays(self.model, self.cache, settings.lookups)
        self.seats = Seats(self.lanes, self.model.config.vocab_size)
        sizes = {launch_size(n, self.budget) for n in range(1, self.budget + 1)}
        self._sizes = [self.budget] if self._fixed else sorted(sizes | {self.budget})
        self._warming: WarmUp | None = None
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._place = replicated or self.cache.table.sharding

    @property
    def pools(self) -> list[Cache]:
        """The model's cache, then an auxiliary's."""
        return [cache for cache in (self.cache, self.auxiliary) if cache is not None]

    def _make_pools(self) -> None:
        self.cache, self.auxiliary = self._new_cache(), self._new_auxiliary()

    @repeated
    def launch(self, kind: str, *arrays: Any) -> Any:
        """Send the program of a kind, see `_call`; return what it samples, if anything.

        A draw is of the last step's scores. A loop without `lanes` continues the rows of the last one, with
        their sampling parameters.
        """
        match kind:
            case "step":
                self._scores, self.cache = self._call(kind, *arrays)()
            case "draw":
                return self._call(kind, self._scores, *arrays)()
            case "loop":
                mode, table, sources, lanes, policy = arrays
                if lanes is not None:
                    # Placed where a launch leaves them: else `decode` compiles for both placements.
                    self._lanes, self._rules = sharding.put(lanes, self._place), policy
                call = self._call(kind, mode, table, sources, self._lanes, self._rules)
                sampled, self._lanes, self.cache = call()
                return sampled
            case "ahead":
                caches = self._call(kind, *arrays)()
                self.cache, self.auxiliary = caches.base, caches.auxiliary
            case "encode":
                self.cache = self._call(kind, *arrays)()

    def _call(self, kind: str, *arrays: Any) -> partial:
        """The program of a kind of launch, with its arguments."""
        model, params, cache = self.model, self.params, self.cache
        match kind:
            case "step":
                return partial(run_any, model, params, cache, *arrays, exits=self._threshold is not None)
            case "draw":
                scores, mode, survivors, policy = arrays
                return partial(draw, mode, scores, survivors, policy, threshold=self._threshold)
            case "loop":
                mode, table, sources, lanes, policy = arrays
                state = params, cache, table, lanes, policy
                return partial(decode, model, mode, self.steps, *state, self.exits, sources)
            case "ahead":
                return partial(read_ahead, *self._whole, Caches(cache, self.auxiliary), *arrays)
        return partial(read_source, model, params, cache, *arrays)

    def run(self, work: list[Work], size: int) -> StepLaunch | None:
        """Send one step of `work` in arrays of `size` tokens: what is read ahead of the model, then what it
        reads itself. The launch is of the latter, None without any; the former has nothing to read back."""
        if self.tail:
            work, size = self._read_ahead(work, size)
        if not work:
            return None
        rows = [item.sequence for item in work]
        count, size, mode = self._step_for(rows, size)
        inputs, places = self.arrays.inputs(work, size, count)
        self.launch("step", inputs)
        if not any(places):
            return StepLaunch(work, places, None)
        survivors = self.arrays.survivors(rows, places, count, mode)
        sampled = self.launch("draw", mode, survivors, self.seats.policy(rows, count, mode))
        return StepLaunch(work, places, sampled)

    def _step_for(self, rows: list[Sequence], size: int) -> tuple[int, int, Mode]:
        """(rows, tokens, mode) of the smallest step that is ready for these rows and `size` tokens.

        On an accelerator a full step of one prompt has its own program whatever the batch, see `_is_kept`.
        """
        alone = self._accelerated and size == self.budget and len(rows) == 1 and not self._fixed
        counts = itertools.chain((1,) * alone, self._counts(len(rows)))
        steps = itertools.product(counts, self._sizes_from(size), self._modes(rows))
        return next(s for s in steps if self._is_ready("step", *s[:2]) and self._is_ready("draw", s[0], s[2]))

    def _read_ahead(self, work: list[Work], size: int) -> tuple[list[Work], int]:
        """Send the tokens that are read ahead of the model; return the model's own work and its size."""
        ahead = [item for item in work if item.ahead]
        if ahead:
            rows = [item.sequence for item in ahead]
            spans = [(item.sequence, item.sequence.cached, item.ahead) for item in ahead]
            parts = [(start, sequence.slice(start, start + count)) for sequence, start, count in spans]
            tokens = array_size(sum(item.ahead for item in ahead), size)
            sizes = itertools.product(self._counts(len(rows)), self._sizes_from(tokens))
            count, tokens = next(s for s in sizes if self._is_ready("ahead", *s))
            flat = self.arrays.flat(parts, count, tokens)
            self.launch("ahead", *flat, self.arrays.table(rows, count))
        own = [item for item in work if item.ahead < item.count]
        return own, array_size(sum(item.count - item.ahead + len(item.draft) for item in own), size)

    def decode(self, rows: list[Sequence]) -> DecodeLaunch:
        """Send a loop of up to `steps` more tokens per sequence, of whose tokens all but one are cached."""
        loops = itertools.product(self._counts(len(rows)), self._modes(rows))
        count, mode = next(loop for loop in loops if self._is_ready("loop", *loop))
        sampled = self.launch("loop", *self._loop_arrays(rows, count, mode))
        return DecodeLaunch(rows, sampled, mode, self.steps, self._each)

    def _loop_arrays(self, rows: list[Sequence], count: int, mode: Mode) -> tuple:
        pages = self.arrays.table(rows, count), self.arrays.sources(rows, count)
        return mode, *pages, self.arrays.lanes(rows, count, mode), self.seats.loop_policy(rows, count, mode)

    def follow(self, launch: DecodeLaunch) -> DecodeLaunch:
        """Continue the rows from where `launch`, the last one, leaves them, without reading its result."""
        rows, count = launch.rows, launch.sampled.token.shape[1]
        pages = self.arrays.table(rows, count), self.arrays.sources(rows, count)
        return dataclasses.replace(launch, sampled=self.launch("loop", launch.mode, *pages, None, None))

    def encode(self, sequence: Sequence) -> None:
        """Send the launch that encodes a sequence's source into its pages."""
        assert sequence.source is not None
        request, length = sequence.request, sequence.request.source_length
        sizes = (size for size in self.arrays.source_sizes if size >= length)
        size = next(size for size in sizes if self._is_ready("encode", size))
        self.launch("encode", *self.arrays.source(request.source, length, size, sequence.source.pages))
        sequence.source.filled = True

    def clear(self, pages: list[int], sources: tuple | list = ()) -> None:
        """Zero these pages, and these pages of sources, which a faulty request wrote."""
        for start in range(0, max(len(pages), len(sources)), _PAGES_CLEARED):
            padded = np.zeros((2, _PAGES_CLEARED), np.int32)  # with the scratch page
            for row, ids in zip(padded, (pages, sources), strict=True):
                row[: len(ids[start : start + _PAGES_CLEARED])] = ids[start : start + _PAGES_CLEARED]
            self._clear(*padded)

    @repeated
    def _clear(self, pages: Int[np.ndarray, " n"], sources: Int[np.ndarray, " n"]) -> None:
        self.cache = _cleared(self.cache, pages, sources)
        if self.auxiliary is not None:
            self.auxiliary = _cleared(self.auxiliary, pages, sources)

    @repeated
    def restart(self) -> None:
        """Replace the pools by empty ones."""
        for array in jax.tree.leaves(self.pools):  # there may be no room for two
            array.delete()
        self._make_pools()

    def _program(self, kind: str, *sizes: Any) -> Program:
        """The program of a key of `programs`, launched without any sequence."""
        key = (kind, *sizes)
        if kind == "encode":
            arrays = self.arrays.source((), 0, sizes[0], [])
        elif kind == "step":
            arrays = self.arrays.inputs([], sizes[1], sizes[0])[:1]
        elif kind == "ahead":
            arrays = *self.arrays.flat([], *sizes), self.arrays.table([], sizes[0])
        elif kind == "loop":
            arrays = self._loop_arrays([], *sizes)
            mode, table, sources, lanes, policy = arrays
            call = self._call(kind, mode, table, sources, self._placed(lanes), policy)
            return Program(key, call, partial(self.launch, kind, *arrays))
        else:
            count, mode = sizes
            policy = self.seats.policy([], count, mode)
            arrays = mode, self.arrays.survivors([], [], count, mode), policy
            step = self._program("step", count, self._sizes[0]).call
            scores, _ = step.func.eval_shape(*step.args, **step.keywords)
            call = self._call(kind, self._placed(scores), *arrays)
            return Program(key, call, partial(self._step_and_draw, count, arrays))
        return Program(key, self._call(kind, *arrays), partial(self.launch, kind, *arrays))

    def _placed(self, tree: PyTree) -> PyTree:
        """The shapes of arrays that lie where a launch leaves its results."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), tree)

    def _step_and_draw(self, count: int, arrays: tuple) -> None:
        """Run a step and a draw of no sequence in `count` rows, if such a step is in use already."""
        size = next((size for size in self._sizes if self._is_ready("step", count, size)), None)
        if size is not None:
            self.launch("step", *self.arrays.inputs([], size, count)[:1])
            self.launch("draw", *arrays)

    def largest(self, count: int | None = None, mode: Mode | None = None) -> list[partial]:
        """The programs of the largest arrays, with arguments: a full step, a draw (of scores as shapes), a
        loop, and those of what is read ahead and of an encoder. By default they are of all lanes and the last
        mode."""
        keys = self._any_launch(count or self.lanes, mode or self.modes[-1])
        return [self._program(*key).call for key in keys]

    def _any_launch(self, count: int, mode: Mode) -> list[tuple]:
        """Keys of the programs that suffice for any launch of `count` sequences in this mode."""
        keys = [("step", count, self.budget), ("draw", count, mode), ("loop", count, mode)]
        keys += [("ahead", count, self.budget)] * (self.tail > 0)
        return keys + [("encode", size) for size in self.arrays.source_sizes[-1:]]

    def programs(self) -> list[Program]:
        """All programs that launches may need. Those of all lanes, a full step and the last mode come first,
        as they suffice for any launch; then the loops of greedy decoding, and a full step of one sequence.

        Keys are ("step", rows, tokens), ("draw", rows, mode), ("loop", rows, mode) and, with a tail,
        ("ahead", rows, tokens), with an encoder ("encode", positions).
        """
        counts, plain = sorted({self.rows(n) for n in range(1, self.lanes + 1)}), self.modes[0]
        first = self._any_launch(self.lanes, self.modes[-1]) + [("loop", count, plain) for count in counts]
        first += [("step", 1, self.budget), ("draw", 1, plain)] if self._accelerated else []
        reading = ("step", "ahead") if self.tail else ("step",)
        shapes = filter(self._is_kept, itertools.product(counts, self._sizes))
        keys: list[tuple] = [(kind, *shape) for shape in shapes for kind in reading]
        shapes = filter(self._is_kept, itertools.product(counts, self.modes))
        keys += [(kind, *shape) for shape in shapes for kind in ("loop", "draw")]
        keys += [("encode", size) for size in self.arrays.source_sizes]
        keys.sort(key=lambda key: first.index(key) if key in first else len(first))
        return [self._program(*key) for key in keys]

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

    def begin_warm_up(self, keys: Collection[tuple] = ()) -> WarmUp:
        """Compile on other threads; from now on launches use only the programs that are in use already.
        `keys`: of the only programs that will be used; by default, of all `programs`."""
        programs = [program for program in self.programs() if not keys or program.key in keys]
        needed = set(keys or self._any_launch(self.lanes, self.modes[-1]))
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
        return [size, *(larger for larger in self._sizes if larger > size)]

    def _modes(self, rows: list[Sequence]) -> list[Mode]:
        """The modes that cover what these rows need, the plainest first."""
        need = needed(rows)
        return [mode for mode in self.modes if mode.covers(need)]


def new_cache(params: PyTree, make: Callable[[], Cache]) -> Cache:
    """The empty cache that `make` describes, on its mesh or, without one, where `params` are.

    It is committed and pinned there like every launch's result; else the second launch would compile again.
    """
    if jax.eval_shape(make).mesh is None:
        return jax.device_put(make(), jax.tree.leaves(params)[0].sharding)
    return jax.jit(lambda: make().pinned())()


def described(params: PyTree, make: Callable[[], Cache]) -> Cache:
    """The shapes of the cache that `make` returns, with the placement of `new_cache`."""
    cache = jax.eval_shape(make)
    alone = jax.tree.leaves(params)[0].sharding
    places = jax.tree.map(lambda _: alone, cache) if cache.mesh is None else cache.shardings
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), cache, places
    )


def working_bytes(
    model: Transformer | Predicted, params: PyTree, mesh: Mesh | None, settings: Settings
) -> int:
    """Bytes on each device that the largest program takes for intermediate and returned arrays.

    The program is compiled for this, and not run. `params` are arrays, or their shapes with shardings. Any
    `settings.num_pages` will do: pools are updated in place.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    calls = Runner(model, params, mesh, settings, described).largest()
    return max(allocated(call.func.lower(*call.args, **call.keywords).compile()) for call in calls)


def allocated(compiled: Any) -> int:
    """Bytes that a program allocates: its intermediate arrays, and its results except donated arguments."""
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def fingerprint(model: Transformer | Predicted, params: PyTree, mesh: Mesh | None) -> str:
    """16 hex digits that change with the architecture, the plan, the dtype, or training of any part.

    It runs one small program, which all processes of the `mesh` take part in.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.size]
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    seen = jax.device_get(jax.jit(_begin, out_shardings=whole)(leaves))
    names = [repr((part.config, part.plan, part.dtype)) for part in transformers(model)]
    names += [repr(model.prediction)] if isinstance(model, Predicted) else []
    return hashlib.sha256("".join(names).encode() + seen.tobytes()).hexdigest()[:16]


def _begin(arrays: list[jax.Array]) -> jax.Array:
    """The first numbers of the last axis of each array, as one array: one transfer for all.

    Kernels of several layers have a first axis of layers, and something of each is taken. A slice gathers
    nothing of an array that is cut over devices but itself.
    """

    def first(x: jax.Array) -> jax.Array:
        layers = slice(None) if x.ndim > 2 else 0
        corner = x[(layers, *(0,) * (x.ndim - 2))] if x.ndim > 1 else x
        return jnp.ravel(corner[..., :_FINGERPRINTED].astype(jnp.float32))

    return jnp.concatenate([first(x) for x in arrays])
