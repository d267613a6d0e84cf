"""The kinds of call that an engine makes, the candidate implementations, and the checks that they must
pass."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.check import cases, timing
from swiftkv_jax.kernels.check.cases import Attention, Training
from swiftkv_jax.kernels.common.dispatch import ByKind, UnsupportedError, preferred
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.fused_kv_fill.pages import Tokens, fill_pages
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.k_cache_attention.api import K_CACHE, X_CACHE
from swiftkv_jax.kernels.page_write import cases as write_cases
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE, page_write
from swiftkv_jax.kernels.paged_attention import cases as paged_cases
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

UNFUSED = "unfused"  # rows made by XLA and written token by token
TABLES: Mapping[str, Mapping[str, Any]] = {
    "paged_attention": PAGED_ATTENTION,
    "k_cache_attention": K_CACHE,
    "x_cache_attention": X_CACHE,
    "fused_kv_fill": {UNFUSED: None, **FUSED_KV_FILL},
    "page_write": PAGE_WRITE,
    "causal_attention": CAUSAL_ATTENTION,
}
# By platform and kind of call. The first is the safe one: XLA's, on GPUs and TPUs without a loop of unknown
# length. For kinds that are not listed, the platform's choice is the only candidate.
CANDIDATES = {
    "gpu": {
        "decode": ("xla_one_turn", "pallas_gpu"),
        "chunk": ("xla_one_turn", "pallas_gpu", "cudnn"),
        "fill": (UNFUSED, "xla", "pallas_gpu", "pallas_gpu_once"),
        "train": ("xla", "cudnn"),
    },
    "tpu": {
        "decode": ("xla_one_turn", "pallas_tpu"),
        "chunk": ("xla_one_turn", "pallas_tpu"),
        "fill": (UNFUSED, "xla", "pallas_tpu"),
        "write": ("xla", "pallas_tpu"),
        "train": ("xla", "splash"),
    },
    "cpu": {"decode": ("xla",), "chunk": ("xla",), "fill": (UNFUSED,), "train": ("xla",)},
}
_LONG, _LONGEST = 1000, 5000  # tokens of the longest sequence whose numbers are checked
_MOST = 2**31  # bytes of keys and values that are timed at once
_MOST_ROWS = 8  # of a pool, that are read one after the other
_ROW, _LONG_ROW = 1024, 4096  # tokens of a packed row whose numbers are checked, and the most with a window
_SHORT_BLOCK = 32  # queries of the shortest block that is a chunk's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One kind of call, at the sizes of an engine.

    Attributes:
      kind: "decode", blocks of at most `ByKind.FEW` queries; "chunk", longer ones; "fill", a prompt's pages;
        "write", rows of any batch into their pages; "train", whole packed rows, forward and backward.
      operation: a folder of kernels/, of `TABLES`.
      heads: of queries; kv_heads: of keys, one device's. width: of a head. computed, stored: dtypes of
        queries and of rows. page: tokens. capacity: tokens of a page table.
      lanes: sequences that decode. tokens: of a step.
      alone: rows of the program that runs one sequence's chunk. block: queries of its blocks.
      spread: (queries, number) of the blocks of a full step of all lanes.
      windows: of the model's layers, all different ones; None: a layer sees everything.
      row: numbers stored of a token that is read whole, keys or inputs. rope: whether such keys turn.
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
    dim: int = 0
    rows: int = 1
    bias: bool = False
    k_norm: bool = False

    @property
    def preferred(self) -> str:
        """The implementation that runs if none is named: the platform's choice, and no fused fill."""
        if self.kind == "fill":
            return UNFUSED
        if self.kind == "write":
            case = _write_case(self, ((0, 1),))
            return preferred(PAGE_WRITE, case.shapes(), case.options)
        queries, window = 1 if self.kind == "decode" else self.block, self.windows[0]
        if self.row:
            case = _keys_case(self, (self.page,), queries, window)
        else:
            case = paged_cases.Case(
                lengths=(self.page,),
                queries=queries,
                heads=self.heads,
                kv_heads=self.kv_heads,
                width=self.width,
                page=self.page,
                slots=1,
                stored=self.stored,
                computed=self.computed,
            )
        args, arrays = case.shapes()
        return preferred(TABLES[self.operation], args, case.options | arrays)

    @property
    def numbers(self) -> int:
        """Numbers stored for a token."""
        return self.row or 2 * self.kv_heads * self.width

    def known(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The `names` that are implementations of the operation."""
        return tuple(name for name in names if name in TABLES[self.operation])


@dataclasses.dataclass(frozen=True)
class Timed:
    """A call of one size, to be timed.

    Attributes:
      name: of the size. by: implementation -> a function that makes the call `count` times in a row; its
        result begins with that of the first call, if results are to be compared.
      bytes, flops: the least that one call reads, and computes; 0: not known.
    """

    name: str
    count: int
    by: Callable[[str], Callable[[], Any]]
    compared: bool = True
    bytes: float = 0.0
    flops: float = 0.0


def examine(call: dict, name: str, beside: str, module: str | None) -> Iterator[dict]:
    """Check whether an implementation is correct, and if so time it at each size beside another one.

    Args:
      call: the fields of a `Call`. beside: the other's name; if it is `name`, it is timed alone.
      module: imported first; its `register()` may put implementations into the tables of kernels/*/api.py.
    """
    _register(module)
    asked = Call(**{**call, "windows": tuple(call["windows"])})
    try:
        yield from _examined(asked, name, beside)
    except UnsupportedError as error:
        yield {"right": False, "why": str(error)}


def _examined(call: Call, name: str, beside: str) -> Iterator[dict]:
    said = _verdict(call, name)
    yield said
    if not said["right"]:
        return
    for timed in _timed(call):
        mine, other = timed.by(name), timed.by(beside)
        off = cases.distance(mine()[0], other()[0]) if timed.compared and name != beside else 0.0
        seconds = timing.medians([mine]) * 2 if name == beside else timing.medians([mine, other])
        mine_s, other_s = (x / timed.count for x in seconds)
        work = {"bytes": timed.bytes, "flops": timed.flops}
        yield {timed.name: {"seconds": mine_s, "beside": other_s, "off": min(off, 1e9), **work}}


@functools.cache
def _register(module: str | None) -> None:
    if module is not None:
        getattr(importlib.import_module(module), "register", lambda: None)()


def _verdict(call: Call, name: str) -> dict:
    """The verdict over all cases."""
    if name == UNFUSED:
        return {"right": True, "why": "", "error": 0.0}  # the model's own computation
    verdicts = {
        "fused_kv_fill": _fill_verdicts,
        "k_cache_attention": _keys_verdicts,
        "x_cache_attention": _keys_verdicts,
        "page_write": _write_verdicts,
        "causal_attention": _train_verdicts,
    }
    found = verdicts.get(call.operation, _attention_verdicts)(call, name)
    worst, why = 0.0, []
    for where, said in found:
        worst = max(worst, said["error"] or 0.0)
        why += [f"{where}: {said['why']}"] if said["why"] else []
    return {"right": not why, "why": "; ".join(why)[:500], "error": worst}


def _is_spread(call: Call) -> bool:
    """Whether the pieces of prompts in a step of all lanes are a chunk's blocks."""
    return call.lanes > 1 and call.spread[0] > ByKind.FEW


def _forms(call: Call) -> list[tuple[int, bool]]:
    """(queries of a block, whether one sequence has them all) of the shortest and the longest blocks of the
    call's kind."""
    if call.kind == "decode":
        return [(1, False), (ByKind.FEW, False), (ByKind.FEW, True)]
    alone = dict.fromkeys((min(_SHORT_BLOCK, call.block), call.block))
    spread = dict.fromkeys((_SHORT_BLOCK, call.spread[0])) if _is_spread(call) else ()
    return [*((block, True) for block in alone), *((block, False) for block in spread)]


def _attention_verdicts(call: Call, name: str) -> Iterator[tuple[str, dict]]:
    page = call.page
    for window in call.windows:
        for block, alone in _forms(call):
            lengths = (1, page - 1, page, page + 1, _long(call, window))
            if alone:  # the last block is begun; a block shorter than the longest has no other beside it
                short = call.kind == "chunk" and block < call.block
                pairs = [(page + 1, block if short else 2 * block + 3)]
            elif block == 1:
                pairs = [(0, 0), *((n - 1, 1) for n in lengths if n)]
            else:  # two blocks of each, the second begun
                pairs = [(0, 0), (page, 1), *((n, block + 3) for n in (0, *lengths))]
            many = not alone or call.alone > 1  # lanes and blocks at the end are then empty
            empty = {"lanes": len(pairs) + 1, "most": 2 * len(pairs) + 1} if many and block > 1 else {}
            case = _attention(call, pairs, block, window, **empty)
            where = _where(block, window) + (", one sequence" if alone else "")
            yield where, cases.attention_verdict(case, name)


def _attention(call: Call, pairs, block: int, window: int | None, **more) -> Attention:
    return Attention(
        sequences=tuple(pairs),
        heads=call.heads,
        kv_heads=call.kv_heads,
        width=call.width,
        computed=call.computed,
        stored=call.stored,
        page=call.page,
        block=block,
        window=window,
        **more,
    )


def _long(call: Call, window: int | None) -> int:
    """Tokens of the longest sequence whose numbers are checked; some are outside of the window."""
    return min(_LONGEST, max(_LONG, (window or 0) + call.page + 1))


def _where(block: int, window: int | None) -> str:
    return f"blocks of {block}" + ("" if window is None else f", window {window}")


def _keys_case(call: Call, lengths: tuple[int, ...], queries: int, window: int | None) -> k_cache_cases.Case:
    return k_cache_cases.Case(
        lengths=lengths,
        queries=queries,
        heads=call.heads,
        width=call.width,
        inputs=call.row if call.operation == "x_cache_attention" else 0,
        rope=call.rope,
        page=call.page,
        slots=-(-max(lengths) // call.page),
        window=window,
        stored=call.stored,
        computed=call.computed,
    )


def _keys_verdicts(call: Call, name: str) -> Iterator[tuple[str, dict]]:
    page = call.page
    for window in call.windows:
        for block, alone in _forms(call):
            lengths = (0, 1, page - 1, page, page + 1, page + block, _long(call, window))
            case = _keys_case(call, lengths[-1:] if alone else lengths, block, window)
            yield _where(block, window) + (", one sequence" if alone else ""), cases.keys_verdict(case, name)


def _fill_case(call: Call, live: tuple[int, ...], rows: int) -> fill_cases.Case:
    return fill_cases.Case(
        live=live,
        rows=tuple(range(rows)),
        of=rows,
        pages=2 * len(live),
        page=call.page,
        dim=call.dim,
        heads=call.kv_heads,
        width=call.width,
        bias=call.bias,
        k_norm=call.k_norm,
        stored=call.stored,
        computed=call.computed,
    )


def _fill_verdicts(call: Call, name: str) -> Iterator[tuple[str, dict]]:
    page = call.page
    case = _fill_case(call, (page, 1, page - 1, 0, page, min(5, page)), min(2, call.rows))
    yield "ragged pages", cases.fill_verdict(case, name)


def _write_case(call: Call, sequences: tuple[tuple[int, int], ...], rows: int = 2) -> write_cases.Case:
    return write_cases.Case(
        sequences=sequences,
        rows=(rows - 1,),
        of=rows,
        page=call.page,
        heads=call.kv_heads,
        width=call.width,
        stored=call.stored,
        computed=call.computed,
    )


def _write_verdicts(call: Call, name: str) -> Iterator[tuple[str, dict]]:
    case = dataclasses.replace(_write_case(call, write_cases.ragged(call.page)), padding=3)
    yield "ragged sequences", cases.write_verdict(case, name)


def _train_verdicts(call: Call, name: str) -> Iterator[tuple[str, dict]]:
    for window in call.windows:
        case = _training(call, min(call.tokens, _LONG_ROW, max(_ROW, _far(window))), window)
        yield (
            "packed rows" + ("" if window is None else f", window {window}"),
            cases.training_verdict(case, name),
        )


def _far(window: int | None) -> int:
    """Tokens of a row that exceeds a window, as whole lanes of a TPU."""
    return -(-(window or 0) // 128) * 128 + 128


def _training(call: Call, tokens: int, window: int | None) -> Training:
    return Training(
        tokens=tokens,
        heads=call.heads,
        kv_heads=call.kv_heads,
        width=call.width,
        computed=call.computed,
        window=window,
    )


def _timed(call: Call) -> Iterator[Timed]:
    """The sizes at which a kind of call is timed."""
    if call.kind == "write":
        inside = call.page // 2  # a chunk begins where the one before has ended
        yield _timed_write(call, f"{call.tokens} tokens", ((inside, call.tokens),))
        yield _timed_write(call, f"{call.lanes} x 1", ((inside, 1),) * call.lanes)
        return
    if call.kind == "fill":
        yield _timed_fill(call)
        return
    if call.kind == "train":
        for window in call.windows:
            yield _timed_training(call, window)
        return
    half = max(1, call.capacity // 2)
    for window in call.windows:
        end = "" if window is None else f", window {window}"
        if call.kind == "chunk":
            tokens = min(call.tokens, call.capacity)
            for cached in dict.fromkeys((0, min(half, call.capacity - tokens))):
                yield _timed_attention(call, f"{tokens} at {cached}{end}", 1, cached, tokens, window)
            if _is_spread(call):  # pieces of many prompts, a block of each
                each = min(call.spread[0], call.capacity)
                lanes = min(call.lanes, call.tokens // each)
                cached = max(0, _length(call, half, lanes) - each)
                yield _timed_attention(
                    call, f"{lanes} x {each} at {cached}{end}", lanes, cached, each, window
                )
        else:
            for lanes in dict.fromkeys((1, call.lanes)):
                length = _length(call, half, lanes)
                yield _timed_attention(call, f"{lanes} x {length}{end}", lanes, length - 1, 1, window)


def _length(call: Call, tokens: int, lanes: int) -> int:
    """Tokens of each of `lanes` sequences that are timed: `tokens`, or as many as `_MOST` bytes hold."""
    token = call.numbers * jnp.dtype(call.stored).itemsize
    return min(tokens, max(call.page, _MOST // (token * lanes)))


def _timed_attention(call: Call, name: str, lanes: int, cached: int, tokens: int, window) -> Timed:
    """Attention of `lanes` sequences as the engine launches it: a chunk in a program of one row, pieces of
    many in that of all lanes."""
    block, most = call.spread if lanes > 1 else (call.block, call.spread[1] if call.alone > 1 else 0)
    how = {"lanes": call.alone if lanes == 1 else call.lanes, "most": most} if call.kind == "chunk" else {}
    how |= {"capacity": call.capacity, "rows": 1}
    case = _attention(call, [(cached, tokens)] * lanes, min(block, tokens), window, **how)
    read = case.bytes * call.numbers / (2 * call.kv_heads * call.width)
    rows = 1 if jax.default_backend() == "cpu" else max(1, min(_MOST_ROWS, math.ceil(cases.COLD / read)))
    if call.row:
        return dataclasses.replace(_timed_keys(call, name, case, rows), bytes=read)
    case = dataclasses.replace(case, rows=rows)
    args, arrays = case.make()

    def by(implementation: str):
        run = cases.in_a_row(case.call(implementation), rows)
        return lambda: run(*args, **arrays)

    return Timed(name, rows, by, bytes=read, flops=case.flops)


def _timed_keys(call: Call, name: str, like: Attention, count: int) -> Timed:
    """The same for rows that are read whole; `count` times as many rows are read one after the other."""
    (cached, new), lanes = like.sequences[0], len(like.sequences)
    case = _keys_case(call, (cached + new,) * lanes * count, like.block, like.window)
    (q, *read, table, _, _), arrays = case.make()
    more = max(0, like.lanes - lanes), max(0, -(-call.capacity // call.page) - table.shape[1])  # the engine's
    table = jnp.pad(table.reshape(count, lanes, -1), ((0, 0), *((0, n) for n in more)))
    sequence, _, position = (jnp.array(x, jnp.int32) for x in like.blocks)
    q = q[sequence]

    def by(implementation: str):
        options = case.options | {"implementation": implementation}

        @jax.jit
        def run(q, *read, **arrays):
            out = [q]
            for turn in range(count):
                where = (table[turn], sequence, position)
                out.append(case.door(out[-1], *read, *where, **options, **arrays))
            return out[1], out[-1]

        return lambda: run(q, *read, **arrays)

    return Timed(name, count, by)


def _timed_fill(call: Call) -> Timed:
    """A chunk of a prompt that begins at a page: written as pages by the fused fill, or token by token."""
    pages = max(1, call.tokens // call.page)
    case = _fill_case(call, (call.page,) * pages, call.rows)
    x, makers, cos, sin, pools, _, _ = case.make()
    count = len(x)
    tokens = Tokens(x, cos, sin, jnp.zeros(count, jnp.int32), jnp.arange(count), jnp.ones(count, bool))
    # As many rows as in the step: the tokens that may continue a page are as many as these allow.
    table = jnp.zeros((call.alone, pages), jnp.int32).at[0].set(jnp.arange(pages))

    def by(implementation: str):
        fused = None if implementation == UNFUSED else implementation
        rows = {"rows": case.rows, "eps": 1e-5, "chunks": fused is not None, "implementation": fused}
        run = jax.jit(functools.partial(fill_pages, **rows), donate_argnums=2)
        held = {"pools": jax.tree.map(jnp.copy, (Pool(pools.k, pools.k_scale), Pool(pools.v, pools.v_scale)))}

        def once():
            held["pools"] = run(tokens, makers, held["pools"], table)
            return held["pools"][:1]

        return once

    numbers = count * len(case.rows) * 2 * case.heads * case.width
    return Timed(f"{count} tokens", 1, by, compared=False, flops=2.0 * numbers * case.dim)


def _timed_training(call: Call, window: int | None) -> Timed:
    """Attention of a packed row, with gradients."""
    case = _training(call, call.tokens, window)
    arrays = case.make()

    def by(implementation: str):
        run = jax.jit(case.call(implementation))
        return lambda: run(*arrays)

    return Timed(f"{call.tokens}" + ("" if window is None else f", window {window}"), 1, by)


def _timed_write(call: Call, name: str, sequences: tuple[tuple[int, int], ...]) -> Timed:
    """Writing of one array of some rows, one row after the other."""
    case = _write_case(call, sequences, _MOST_ROWS)
    pool, *rest = case.make()

    def by(implementation: str):
        @functools.partial(jax.jit, donate_argnums=0)
        def run(pool, *rest):
            for row in range(case.of):
                pool = page_write(pool, *rest, rows=(row,), implementation=implementation)
            return pool

        held = {"pool": jax.tree.map(jnp.copy, pool)}

        def once():
            held["pool"] = run(held["pool"], *rest)
            return (held["pool"],)

        return once

    return Timed(name, case.of, by, compared=False)
