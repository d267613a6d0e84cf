"""Where a run's time goes: the kernels of a GPU, by JAX's profiler."""

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

MOST = 40  # kernels that are kept


def kernels(run: Callable[[], object]) -> dict:
    """Milliseconds from the first kernel to the last (`span_ms`), of all kernels (`busy_ms`), and of the
    longest ones: [name without its number, launches, milliseconds]."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        lines = [line for plane in planes if "/device:GPU" in plane.name for line in plane.lines]
        events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
        return summed([(event.name, event.start_ns, event.start_ns + event.duration_ns) for event in events])


def summed(events: list[tuple[str, float, float]]) -> dict:
    """`kernels` of (name, start, end in ns)."""
    if not events:
        return {"span_ms": 0.0, "busy_ms": 0.0, "kernels": []}
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, start, end in events:
        times[re.sub(r"([_.]\d+)+$", "", name)[:120]].append((end - start) / 1e6)
    longest = sorted(times, key=lambda name: -sum(times[name]))[:MOST]
    span = max(end for *_, end in events) - min(start for _, start, _ in events)
    kernels = [[name, len(times[name]), sum(times[name])] for name in longest]
    return {"span_ms": span / 1e6, "busy_ms": sum(map(sum, times.values())), "kernels": kernels}
