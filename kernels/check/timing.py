"""How long calls take: medians of rounds in which all of them take turns."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax


def medians(calls: Sequence[Callable], enough: float = 0.05, rounds: int = 5) -> list[float]:
    """Median seconds of each call, repeated for `enough` seconds per round, after a first call that compiles
    it.

    A round times every call once, so that changes of the clock rate affect all of them alike. Long calls are
    timed in two rounds.
    """
    inner, longest = [], 0.0
    for call in calls:
        jax.block_until_ready(call())
        once = _seconds(call, 1)
        longest = max(longest, once)
        inner.append(max(1, min(50, round(enough / max(once, 1e-6)))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds if longest < 10 * enough else 2):
        for call, count, found in zip(calls, inner, times, strict=True):
            found.append(_seconds(call, count))
    return [statistics.median(found) for found in times]


def _seconds(call: Callable, count: int) -> float:
    began, out = time.perf_counter(), None
    for _ in range(count):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / count
