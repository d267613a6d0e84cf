"""A case: one call of an operation at some sizes, and all that can be known of it without an implementation.

An operation's folder has a subclass in `cases.py`, with small cases for tests and real ones. Tests, ahead-of-
time compilation, the check of kernels on a machine, and the benchmark use nothing else.
"""

import dataclasses
import functools
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.dispatch import ByKind
from swiftkv_jax.kernels.common.pools import Pool, encode

# Relative to the largest number, by the dtype of a computation or of stored rows: one rounding, or those of
# attention's weights.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "int8": 1e-2, "float8_e4m3fn": 4e-2}
OFF = 2e-2  # largest difference between two right implementations, relative to the largest number
COLD = 4e8  # bytes read by consecutive calls before one reads the same again: more than a cache holds
MOST_ROWS = 8  # of a pool, that are timed one after the other
_ROUND = 128  # tokens, a multiple of both usual page sizes, so that a pool's contents do not depend on them
_SPARE = 3  # pages that belong to no sequence
_LONG, _LONGEST = 1000, 5000  # tokens of the longest sequence whose numbers are checked
_TIMED_BYTES = 2**31  # of rows that are timed at once, at most
_SHORT_BLOCK = 32  # queries of the shortest block that is a chunk's
# What a case has of its call's model, if it has a field of that name.
_OF_MODEL = "heads kv_heads width computed stored page rope dim bias k_norm shared".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One kind of call, at the sizes of an engine.

    Attributes:
      kind: "decode", blocks of at most `ByKind.FEW` queries; "chunk", longer ones; "fill", a prompt's pages;
        "write", rows of any batch into their pages; "train", whole packed rows, forward and backward.
      operation: as in `check.calls.OPERATIONS`.
      heads: of queries; kv_heads: of keys, one device's. width: of a head. computed, stored: dtypes of
        queries and of rows. page: tokens. capacity: tokens of a page table.
      lanes: sequences that decode. tokens: of a step.
      alone: rows of the program that runs one sequence's chunk. block: queries of its blocks.
      spread: (queries, number) of the blocks of a full step of all lanes.
      windows: of the model's layers, all different ones; None: a layer sees everything.
      row: numbers stored of a token that is read whole, keys or inputs. rope: whether such keys turn.
      shared: width of values that are the first numbers of their keys; 0: they have rows of their own.
      expanded: widths of keys and of values that such rows are expanded to in a long chunk of one sequence.
      dim: width of the stream, rows: made at once, bias, k_norm: of the makers; of a fill.
    """

    kind: str
    operation: str
    heads: int
    kv_heads: int
    width: int
    computed: str
    stored: str
    page: int
    capacity: int
    lanes: int
    tokens: int
    alone: int = 1
    block: int = 128
    spread: tuple[int, int] = (1, 0)
    windows: tuple[int | None, ...] = (None,)
    row: int = 0
    rope: bool = True
    shared: int = 0
    expanded: tuple[int, ...] = ()
    dim: int = 0
    rows: int = 1
    bias: bool = False
    k_norm: bool = False

    @property
    def is_spread(self) -> bool:
        """Whether the pieces of prompts in a step of all lanes are a chunk's blocks."""
        return self.lanes > 1 and self.spread[0] > ByKind.FEW


class Results(NamedTuple):
    """What a call gave.

    Attributes:
      parts: name -> numbers to compare with the expected ones. intact: whether all memory is as it was that
        the call must not write.
    """

    parts: dict[str, jax.Array]
    intact: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operation.

    Attributes:
      computed: dtype of the computation.
    """

    operation: ClassVar[Callable]  # of what `make` returns, the options and an implementation's name
    donated: ClassVar[tuple[int, ...]] = ()  # arguments that the call updates in place
    compared: ClassVar[bool] = True  # whether results of `timed` are compared

    computed: str = "float32"

    @property
    def options(self) -> dict:
        """The static options of the call."""
        raise NotImplementedError

    def shapes(self) -> tuple[tuple, dict]:
        """Arguments and array options of an implementation, as `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(self.make)

    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """Arguments and array options, random; NaN in everything that the call must not read."""
        raise NotImplementedError

    def by(self, implementation: str) -> Callable:
        """The operation by this implementation, as a function of what `make` returns."""
        return functools.partial(self.operation, **self.options, implementation=implementation)

    @classmethod
    def of_model(cls, call: Call, **sizes) -> "Case":
        """A case of the call's model."""
        fields = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: getattr(call, name) for name in _OF_MODEL if name in fields} | sizes)

    @classmethod
    def checked(cls, call: Call) -> Iterator[tuple[str, "Case"]]:
        """(what it is, a case) whose numbers must be right for an implementation to serve the call."""
        raise NotImplementedError

    @classmethod
    def sizes(cls, call: Call) -> Iterator[tuple[str, "Case"]]:
        """(name of the size, a case) at which the call is timed."""
        raise NotImplementedError

    @property
    def flops(self) -> float:
        """The least that one call computes; 0: not known."""
        return 0.0

    @property
    def bytes(self) -> float:
        """The least that one call reads and writes; 0: not known."""
        return 0.0

    @property
    def tolerance(self) -> float:
        """Largest error of a right result. Only CPUs multiply in full float32 by default."""
        return TOLERANCE[self.computed if jax.default_backend() == "cpu" else "bfloat16"]

    @property
    def tolerances(self) -> Mapping[str, float]:
        """That of each part of the results."""
        return {"": self.tolerance}

    def results(self, run: Callable) -> Results:
        """What `run`, the compiled operation, gives for new arrays."""
        args, arrays = self.make()
        return Results({"": run(*args, **arrays)})

    def expected(self) -> dict[str, jax.Array]:
        """The definition's results, of a computation in float32."""
        args, arrays = self.make()
        exact = untuned(self.by("reference"))
        return {"": exact(args[0].astype(jnp.float32), *args[1:], **arrays)}

    @property
    def repeats(self) -> int:
        """Calls in a row that `timed` makes."""
        return 1

    def timed(self, implementation: str) -> Callable[[], Any]:
        """A function that makes the call `repeats` times; its result begins with that of the first."""
        args, arrays = self.make()
        run = jax.jit(self.by(implementation))
        return lambda: (run(*args, **arrays),)


def normals(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[jax.Array]:
    """Random arrays, parts of one draw: each draw more takes a CPU a tenth of a second to compile."""
    sizes = list(map(math.prod, shapes))
    drawn = jax.random.normal(jax.random.key(seed, impl="rbg"), (sum(sizes),), dtype)
    parts = jnp.split(drawn, list(itertools.accumulate(sizes))[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def untuned(function: Callable) -> Callable:
    """`function` compiled without XLA's search for the fastest kernels, which on a GPU takes seconds."""
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    return jax.jit(function, compiler_options=options)


def decode(pool: Pool) -> jax.Array:
    """[R, P, Z, E] in float32; 8-bit rows are multiplied by their scales."""
    rows = pool.data.astype(jnp.float32)
    if pool.scale is None:
        return rows
    heads = rows.reshape(*rows.shape[:3], pool.scale.shape[2], -1)
    return (heads * jnp.swapaxes(pool.scale, 2, 3)[..., None]).reshape(rows.shape)


def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether elements have the same bits, or are both NaN: conversions of a pool keep no NaN's bits."""
    unsigned = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    bits_a, bits_b = (jax.lax.bitcast_convert_type(x, unsigned) for x in (a, b))
    return (bits_a == bits_b) | (jnp.isnan(a.astype(jnp.float32)) & jnp.isnan(b.astype(jnp.float32)))


def pairs(cached: int, new: int, window: int | None = None) -> float:
    """(query, key) pairs of causal attention: `new` tokens see themselves and those before, fewer than
    `window` back."""

    def until(tokens: int) -> float:
        near = tokens if window is None else min(tokens, window)
        return near * (near + 1) / 2 + (tokens - near) * near

    return until(cached + new) - until(cached)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCase(Case):
    """Attention over a paged pool, of the same numbers however they are cut into pages and blocks.

    Attributes:
      lengths: tokens of each sequence. queries: its last ones that ask, or a number for each sequence; those
        that it lacks are empty ones before the others.
      block: most queries of a block, 0: all of a sequence. lanes: rows of the page table, most: blocks; the
        last ones are empty, as in a program of many rows, where the sequences need fewer.
      heads: of queries; width: of each. page: tokens. slots: pages of each sequence, 0: as many as it needs.
      capacity: tokens of a table's row; entries behind a sequence's pages name a spare page.
      rows: of the pool, the first of which is NaN and not read. window: keys that a query sees, its own
        included; None: all.
      stored: dtype of the rows, which in 8 bits have scales.
    """

    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 1
    block: int = 0
    lanes: int = 0
    most: int = 0
    heads: int = 4
    width: int = 64
    page: int = 32
    slots: int = 0
    capacity: int = 0
    rows: int = 2
    window: int | None = None
    stored: str = "float32"

    @property
    def scaled(self) -> bool:
        """Whether rows are 8 bits wide and have scales."""
        return jnp.dtype(self.stored).itemsize == 1

    @property
    def new(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        return (self.queries,) * len(self.lengths) if isinstance(self.queries, int) else self.queries

    @property
    def held(self) -> int:
        """Pages of each sequence."""
        whole = math.lcm(_ROUND, self.page)
        return self.slots or -(-max(self.lengths) // whole) * whole // self.page

    @property
    def blocks(self) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """(sequence [b], place [b, C] among its queries, position [b, C]: -1 is no query)."""
        longest = max(self.new)
        size = min(self.block or longest, longest)
        sequence, place, position = [], [], []
        for number, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            for start in range(0, max(new, 1), size):
                index = range(start, start + size)
                sequence.append(number)
                place.append([min(i, longest - 1) for i in index])
                position.append([max(length - new + i, -1) if i < new else -1 for i in index])
        empty = self.most - len(sequence)
        sequence += [max(self.lanes, len(self.lengths)) - 1] * empty
        place += [[0] * size] * empty
        position += [[-1] * size] * empty
        return sequence, place, position

    def arrays(self, seed: int, stored: Mapping[str, tuple[int, int]]) -> tuple:
        """(queries, {name: pool}, {name: scale or None}, (table, sequence, position)); `stored`: name ->
        (heads with a scale each, width of one) of a pool.

        Pages are in no order. Every row that no query sees is NaN, and every page of no sequence.
        """
        count, tokens = len(self.lengths), self.held * self.page
        sequence, place, position = (jnp.array(x, jnp.int32) for x in self.blocks)
        shapes = [(self.rows - 1, count, tokens, *of_one) for of_one in stored.values()]
        asked = count, max(self.new), self.heads, self.width
        q, *drawn = normals(seed, asked, *shapes, dtype=self.computed)
        pages = count * self.held + _SPARE
        names = jnp.array(array("i", random.Random(seed).sample(range(pages), pages)))
        table, spare = names[: count * self.held].reshape(count, self.held), names[-1]
        ends, new = jnp.array(self.lengths)[:, None], jnp.array(self.new)[:, None]
        seen = (jnp.arange(tokens) < ends) & (new > 0)
        if self.window is not None:
            seen &= jnp.arange(tokens) > ends - new - self.window

        def paged(rows):
            """[R, Q, S, n] in pages [1 + R, P, Z, n]; int8 has no NaN, but its scales do."""
            empty = 127 if rows.dtype == jnp.int8 else jnp.nan
            rows = jnp.where(seen[..., None], rows, jnp.asarray(empty, rows.dtype))
            rows = rows.reshape(rows.shape[0], count, self.held, self.page, -1)
            pool = jnp.full((1 + len(rows), pages, *rows.shape[3:]), empty, rows.dtype)
            return pool.at[1:, table].set(rows)

        pools, scales = {}, {}
        for name, numbers in zip(stored, drawn, strict=True):
            rows, scale = encode(numbers, self.stored)
            pools[name] = paged(rows.reshape(*rows.shape[:3], -1))
            scales[name] = None if scale is None else jnp.swapaxes(paged(scale), 2, 3)
        more = max(0, self.lanes - count), max(0, -(-self.capacity // self.page) - self.held)
        table = jnp.pad(table, [(0, n) for n in more], constant_values=spare)
        q = q[jnp.minimum(sequence, count - 1)[:, None], place]
        return q, pools, scales, (table, sequence, position)

    @property
    def seen(self) -> int:
        """Keys that some query sees, over all sequences."""
        far = self.window or math.inf
        return sum(int(min(n, far + new - 1)) for n, new in zip(self.lengths, self.new, strict=True) if new)

    @property
    def pairs(self) -> float:
        """(query, key) pairs, over all sequences."""
        both = ((n, min(n, new)) for n, new in zip(self.lengths, self.new, strict=True))
        return sum(pairs(n - new, new, self.window) for n, new in both)

    @property
    def repeats(self) -> int:
        return self.rows - 1

    def timed(self, implementation: str) -> Callable[[], Any]:
        """Calls on each row of the pool, one after the other, as one program. The queries of each call are
        the result of the one before, so that none can be optimised away."""
        args, arrays = self.make()
        attend = self.by(implementation)

        @jax.jit
        def run(q, *rest, **arrays):
            out = [q]
            for row in range(1, self.rows):
                out.append(attend(out[-1], *rest, row=row, **arrays))
            return out[1], out[-1]

        return lambda: run(*args, **arrays)

    @classmethod
    def checked(cls, call: Call) -> Iterator[tuple[str, Case]]:
        """Blocks of the shortest and the longest form of the call's kind, at ragged lengths around a page's
        edge."""
        if call.kind == "decode":
            forms = [(1, False), (ByKind.FEW, False), (ByKind.FEW, True)]
        else:
            forms = [(block, True) for block in dict.fromkeys((min(_SHORT_BLOCK, call.block), call.block))]
            spread = dict.fromkeys((_SHORT_BLOCK, call.spread[0])) if call.is_spread else ()
            forms += [(block, False) for block in spread]
        page = call.page
        for window in call.windows:
            long = min(_LONGEST, max(_LONG, (window or 0) + page + 1))  # some are outside of the window
            lengths = (1, page - 1, page, page + 1, long)
            for block, alone in forms:
                if alone:  # the last block is begun; a block shorter than the longest has no other beside it
                    short = call.kind == "chunk" and block < call.block
                    cached = page + 1 if window is None else long
                    pairs = [(cached, block if short else 2 * block + 3)]
                elif block == 1:
                    pairs = [(0, 0), *((n - 1, 1) for n in lengths if n)]
                else:  # two blocks of each, the second begun
                    pairs = [(0, 0), (page, 1), *((n, block + 3) for n in (0, *lengths))]
                many = block > 1 and (not alone or call.alone > 1)  # lanes and blocks at the end are empty
                empty = {"lanes": len(pairs) + 1, "most": 2 * len(pairs) + 1} if many else {}
                where = f"blocks of {block}" + ("" if window is None else f", window {window}")
                sizes = {"lengths": tuple(map(sum, pairs)), "queries": tuple(new for _, new in pairs)}
                sizes |= {"block": block, "window": window}
                yield where + (", one sequence" if alone else ""), cls.of_model(call, **sizes, **empty)

    @classmethod
    def sizes(cls, call: Call) -> Iterator[tuple[str, Case]]:
        """Decoding by one lane and by all; a prompt's chunk, and pieces of many prompts."""
        half = max(1, call.capacity // 2)
        token = (call.row or 2 * call.kv_heads * call.width) * jnp.dtype(call.stored).itemsize

        def length(lanes: int) -> int:
            return min(half, max(call.page, _TIMED_BYTES // (token * lanes)))

        for window in call.windows:
            end = "" if window is None else f", window {window}"
            if call.kind == "decode":
                for lanes in dict.fromkeys((1, call.lanes)):
                    n = length(lanes)
                    yield f"{lanes} x {n}{end}", cls._launched(call, lanes, n - 1, 1, window)
                continue
            tokens = min(call.tokens, call.capacity)
            for cached in dict.fromkeys((0, min(half, call.capacity - tokens))):
                yield f"{tokens} at {cached}{end}", cls._launched(call, 1, cached, tokens, window)
            if call.is_spread:  # pieces of many prompts, a block of each
                each = min(call.spread[0], call.capacity)
                lanes = min(call.lanes, call.tokens // each)
                cached = max(0, length(lanes) - each)
                yield f"{lanes} x {each} at {cached}{end}", cls._launched(call, lanes, cached, each, window)

    @classmethod
    def _launched(cls, call: Call, lanes: int, cached: int, tokens: int, window: int | None) -> Case:
        """Attention of `lanes` sequences as the engine launches it: a chunk in a program of one row, pieces
        of many in that of all lanes. More rows than a cache holds are read one after the other."""
        block, most = call.spread if lanes > 1 else (call.block, call.spread[1] if call.alone > 1 else 0)
        chunk = {"lanes": call.alone if lanes == 1 else call.lanes, "most": most}
        sizes = {"lengths": (cached + tokens,) * lanes, "queries": tokens, "block": min(block, tokens)}
        sizes |= {"capacity": call.capacity, "window": window} | (chunk if call.kind == "chunk" else {})
        case = cls.of_model(call, **sizes)
        rows = 1 if jax.default_backend() == "cpu" else min(MOST_ROWS, math.ceil(COLD / case.bytes))
        return dataclasses.replace(case, rows=1 + rows)
