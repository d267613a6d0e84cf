"""Correctness and speed of a candidate: one layer's attention, and the fill, on ragged and on real sizes."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.first_light.candidates import Candidate, register
from benchmarks.first_light.machine import seconds_of
from benchmarks.first_light.shapes import Shape
from benchmarks.first_light.shapes import shape as shape_of
from benchmarks.kernels import attention_work, fill_work
from swiftkv_jax.kernels.check.cases import (
    COLD,
    Attention,
    attention_verdict,
    fill_verdict,
    in_a_row,
    keys_verdict,
)
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases


def by_token(case: Attention, out) -> np.ndarray:
    """The output for each new token of each sequence, [Q, T, N, U] in float32, for any cut; zero
    elsewhere."""
    sequence, place, position = map(np.array, case.blocks)
    out, live = np.asarray(out, np.float32), position >= 0
    got = np.zeros((len(case.sequences), case.tokens, *out.shape[2:]), np.float32)
    number = np.broadcast_to(sequence[:, None], position.shape)
    got[number[live], place[live]] = out[live]
    return got


def attention(sizes: Shape, candidate: Candidate, sequences, **more) -> Attention:
    """An attention case of the shape's model, cut as the candidate asks."""
    config = sizes.config
    base: dict[str, Any] = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    stored = "float8_e4m3fn" if candidate.kind == "fp8 decode" else sizes.computed
    base |= {"width": config.head_dim, "computed": sizes.computed, "stored": stored}
    base |= {"page": candidate.page, "block": candidate.block, "sequences": tuple(sequences)}
    return Attention(**(base | more))


def numerics(shape: str, candidate: dict, module: str | None) -> Iterator[dict]:
    """Yields `right`, and if not `why`."""
    register(module)
    sizes, candidate_ = shape_of(shape), Candidate(**candidate)
    yield {"fill": _fill_is_right, "keys": _keys_are_right}.get(candidate_.kind, _attention_is_right)(
        sizes, candidate_
    )


def _attention_is_right(sizes: Shape, candidate: Candidate) -> dict:
    return attention_verdict(_ragged(sizes, candidate), candidate.implementation)


def _ragged(sizes: Shape, candidate: Candidate) -> Attention:
    decode = candidate.kind != "chunk"
    pairs = [(max(n - 1, 0), min(n, 1)) for n in sizes.lengths] if decode else sizes.ragged
    return attention(sizes, candidate, pairs)


def _fill_case(sizes: Shape, page: int, live: tuple[int, ...], rows: int) -> fill_cases.Case:
    config = sizes.config
    return fill_cases.Case(
        live=live,
        rows=tuple(range(rows)),
        of=rows,
        pages=2 * len(live),
        page=page,
        dim=config.hidden_size,
        heads=config.num_kv_heads,
        width=config.head_dim,
        stored=sizes.computed,
        computed=sizes.computed,
    )


def _fill_is_right(sizes: Shape, candidate: Candidate) -> dict:
    page = candidate.page
    case = _fill_case(sizes, page, (page, 1, page - 1, 0, page, 5), 2)
    return fill_verdict(case, candidate.implementation)


def _keys_case(sizes: Shape, page: int, lengths: tuple[int, ...]) -> k_cache_cases.Case:
    return k_cache_cases.Case(
        lengths=lengths,
        heads=sizes.key_heads,
        width=sizes.config.head_dim,
        group=4,
        page=page,
        slots=-(-max(lengths) // page),
        stored=sizes.computed,
        computed=sizes.computed,
    )


def _keys_are_right(sizes: Shape, candidate: Candidate) -> dict:
    return keys_verdict(_keys_case(sizes, candidate.page, sizes.lengths), candidate.implementation)


def contest(shape: str, candidate: dict, module: str | None, folder: str, safe: bool) -> Iterator[dict]:
    """For each size: seconds, least bytes and FLOPs, and the distance to the safe one's result, which that
    leaves in `folder`."""
    register(module)
    sizes, candidate_ = shape_of(shape), Candidate(**candidate)
    if candidate_.kind == "fill":
        yield from _time_fill(sizes, candidate_)
    elif candidate_.kind == "keys":
        yield from _time_keys(sizes, candidate_)
    else:
        yield from _time_attention(sizes, candidate_, Path(folder), safe)


def _time_attention(sizes: Shape, candidate: Candidate, folder: Path, safe: bool) -> Iterator[dict]:
    if candidate.kind == "chunk":
        timed = {
            f"{sizes.chunk} at {cached}": ([(cached, sizes.chunk)], capacity)
            for cached, capacity in sizes.contexts
        }
    else:
        timed = {
            f"{count} x {length}": ([(length - 1, 1)] * count, length) for count, length in sizes.decodes
        }
    for number, (name, (pairs, capacity)) in enumerate(timed.items()):
        case = attention(sizes, candidate, pairs, capacity=capacity)
        rows = 1 if jax.default_backend() == "cpu" else min(4, math.ceil(COLD / case.bytes))
        case = dataclasses.replace(case, rows=rows)
        args, arrays = case.make()
        first, seconds = _in_a_row(case.call(candidate.implementation), rows, args, arrays)
        off = _off(by_token(case, first), folder / f"{candidate.kind}{number}.npy", safe)
        yield {name: {"seconds": seconds, "bytes": case.bytes, "flops": case.flops, "off": off}}


def _off(got: np.ndarray, path: Path, safe: bool) -> float | None:
    """Distance to the safe one's result, relative to its largest number; None if there is none."""
    if safe:
        np.save(path, got)
    if not path.exists():
        return None
    want = np.load(path)
    distance = float(np.abs(got - want).max() / np.abs(want).max())
    return distance if np.isfinite(distance) else float("inf")


def _in_a_row(call: Callable, rows: int, args: tuple, arrays: dict) -> tuple[jax.Array, float]:
    """(the first result, seconds of each) of calls one after the other on each row of the pool."""
    run = in_a_row(call, rows)
    return run(*args, **arrays)[0], seconds_of(lambda: run(*args, **arrays)) / rows


def _time_fill(sizes: Shape, candidate: Candidate) -> Iterator[dict]:
    tokens, rows = sizes.filled
    case = _fill_case(sizes, candidate.page, (candidate.page,) * (tokens // candidate.page), rows)
    x, makers, cos, sin, pools, names, live = case.make()
    run = jax.jit(
        functools.partial(fill_cases.call, **case.options, implementation=candidate.implementation),
        donate_argnums=4,
    )
    state = {"pools": pools}

    def call():
        state["pools"] = run(x, makers, cos, sin, state["pools"], names, live)
        return state["pools"]

    work = fill_work(case)
    yield {f"{tokens} tokens": {"seconds": seconds_of(call), "bytes": work.bytes, "flops": work.flops}}


def _time_keys(sizes: Shape, candidate: Candidate) -> Iterator[dict]:
    """Time attention over keys alone, and paged attention of the same name with values in another pool."""
    count, length = sizes.keys
    case = _keys_case(sizes, candidate.page, (length,) * count)
    args, arrays = case.make()
    call = functools.partial(
        k_cache_cases.call,
        **{name: value for name, value in case.options.items() if name != "row"},
        implementation=candidate.implementation,
    )
    work = attention_work(case, "k_cache_attention")
    _, seconds = _in_a_row(lambda *a, row, **b: call(*a, row=1, **b), 1, args, arrays)  # row 0 is NaN
    yield {f"{count} x {length}": {"seconds": seconds, "bytes": work.bytes, "flops": work.flops}}
    heads = {"heads": sizes.key_heads, "kv_heads": sizes.key_heads, "rows": 1}
    both = attention(sizes, candidate, [(length - 1, 1)] * count, **heads)
    args, arrays = both.make()
    yield {"keys and values": _in_a_row(both.call(candidate.implementation), 1, args, arrays)[1]}
