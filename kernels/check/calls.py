"""The operations and their candidates: whether an implementation is right for a kind of call, and how long it
takes.

The numbers are compared with the definition's in float32, with NaN in every row and page that no query sees,
and with those of a second run, whose bits must be the same.
"""

import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention import cases as causal
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.case import Call, Case
from swiftkv_jax.kernels.common.dispatch import Implementation, UnsupportedError
from swiftkv_jax.kernels.expert_mlp import cases as experts
from swiftkv_jax.kernels.expert_mlp.api import EXPERT_MLP
from swiftkv_jax.kernels.fused_kv_fill import cases as fill
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.fused_kv_fill.cases import UNFUSED
from swiftkv_jax.kernels.k_cache_attention import cases as keys
from swiftkv_jax.kernels.k_cache_attention.api import K_CACHE, X_CACHE
from swiftkv_jax.kernels.page_write import cases as write
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE
from swiftkv_jax.kernels.paged_attention import cases as paged
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION


class Operation(NamedTuple):
    """An operation of kernels/: its implementations, the class of its cases, and its small and real cases."""

    table: Mapping[str, Implementation]
    case: type[Case]
    small: Mapping[str, Case] = {}
    real: Mapping[str, Case] = {}


OPERATIONS = {
    "paged_attention": Operation(PAGED_ATTENTION, paged.Case, paged.SMALL, paged.REAL),
    "k_cache_attention": Operation(K_CACHE, keys.Case, keys.SMALL, keys.REAL),
    "x_cache_attention": Operation(X_CACHE, keys.Case, keys.INPUTS_SMALL, keys.INPUTS_REAL),
    "fused_kv_fill": Operation(FUSED_KV_FILL, fill.Case, fill.SMALL, fill.REAL),
    "page_write": Operation(PAGE_WRITE, write.Case, write.SMALL, write.REAL),
    "expert_mlp": Operation(EXPERT_MLP, experts.Case, experts.SMALL, experts.REAL),
    "causal_attention": Operation(CAUSAL_ATTENTION, causal.Case),
}
# By platform and kind of call. The first is the safe one: XLA's, on GPUs and TPUs without a loop of unknown
# length. For kinds that are not listed, the platform's choice is the only candidate.
CANDIDATES = {
    "gpu": {
        "decode": ("xla_one_turn", "pallas_gpu"),
        "chunk": ("xla_one_turn", "pallas_gpu", "cudnn"),
        "fill": (UNFUSED, "xla", "pallas_gpu"),
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


def known(call: Call, names: Iterable[str]) -> tuple[str, ...]:
    """The `names` that are implementations of the call's operation."""
    table = OPERATIONS[call.operation].table
    return tuple(name for name in names if name in table or (call.kind == "fill" and name == UNFUSED))


def preferred(call: Call) -> str:
    """The implementation that runs if none is named: the platform's choice, and no fused fill."""
    if call.kind == "fill":
        return UNFUSED
    operation = OPERATIONS[call.operation]
    _, case = next(operation.case.checked(call))
    args, arrays = case.shapes()
    return dispatch.preferred(operation.table, args, case.options | arrays)


def examine(call: dict, name: str, beside: str, module: str | None = None) -> Iterator[dict]:
    """Check whether an implementation is correct, and if so time it at each size beside another one.

    Args:
      call: the fields of a `Call`. beside: the other's name; if it is `name`, it is timed alone.
      module: imported first; its `register()` may put implementations into the tables of kernels/*/api.py.
    """
    _register(module)
    asked = Call(**{**call, "windows": tuple(call["windows"])})
    cases = OPERATIONS[asked.operation].case
    try:
        result = verdict(cases.checked(asked) if name != UNFUSED else (), name)  # the model's own computation
        yield result
        for size, case in cases.sizes(asked) if result["right"] else ():
            mine, other = case.timed(name), case.timed(beside)
            off = 0.0
            if case.compared and name != beside:
                off = float(_relative_error(mine()[0], other()[0]))
            seconds = medians([mine]) * 2 if name == beside else medians([mine, other])
            mine_s, other_s = (x / case.repeats for x in seconds)
            work = {"bytes": case.bytes, "flops": case.flops}
            yield {size: {"seconds": mine_s, "beside": other_s, "off": off if off < 1e9 else 1e9, **work}}
    except UnsupportedError as error:
        yield {"right": False, "why": str(error)}


@functools.cache
def _register(module: str | None) -> None:
    if module is not None:
        getattr(importlib.import_module(module), "register", lambda: None)()


def verdict(cases: Iterable[tuple[str, Case]], implementation: str) -> dict:
    """Whether an implementation is `right` in all cases, each with a word for what it is; `why` not; and the
    largest `error`."""
    worst, why = 0.0, []
    for where, case in cases:
        run = jax.jit(case.by(implementation), donate_argnums=case.donated)
        results, again = case.results(run), case.results(run)
        faults = [] if results.intact else ["memory was written that is not the call's"]
        for name, most in case.tolerances.items():
            got, repeated = results.parts[name], again.parts[name]
            error = float(_relative_error(got, _expected(case)[name]))
            part = f"{name}: " if name else ""
            if not math.isfinite(error):
                strange = int((~jnp.isfinite(got)).sum())
                faults.append(f"{part}{strange} of {got.size} numbers are not finite")
            elif error > most:
                faults.append(f"{part}off by {error:.2g} of the largest number; {most:.2g} is allowed")
            if jax.device_get(got).tobytes() != jax.device_get(repeated).tobytes():
                faults.append(f"{part}two runs differ")
            worst = max(worst, error if math.isfinite(error) else 0.0)
        why += [f"{where}: {'; '.join(faults)}"] if faults else []
    return {"right": not why, "why": "; ".join(why)[:500], "error": worst}


@functools.lru_cache(maxsize=32)  # the same for every implementation
def _expected(case: Case) -> dict[str, Any]:
    return jax.device_get(case.expected())


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """The largest difference over the largest number that is wanted, which may be zero."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.abs(got - want).max() / jnp.maximum(jnp.abs(want).max(), 1e-30)


def medians(calls: Sequence[Callable], enough: float = 0.05, rounds: int = 5) -> list[float]:
    """Median seconds of each call, repeated for `enough` seconds per round, after a first call that compiles
    it.

    A round times every call once, so that changes of the clock rate affect all of them alike. Long calls are
    timed in two rounds.
    """

    def seconds_of(call: Callable, count: int) -> float:
        began, out = time.perf_counter(), None
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / count

    inner, longest = [], 0.0
    for call in calls:
        jax.block_until_ready(call())
        once = seconds_of(call, 1)
        longest = max(longest, once)
        inner.append(max(1, min(50, round(enough / max(once, 1e-6)))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds if longest < 10 * enough else min(2, rounds)):
        for call, count, seconds in zip(calls, inner, times, strict=True):
            seconds.append(seconds_of(call, count))
    return [statistics.median(seconds) for seconds in times]
