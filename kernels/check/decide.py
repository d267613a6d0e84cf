"""Choose the implementation of each kind of call on this machine, by a check that is kept for the next start.

A check runs in another process, before this one takes its devices. A candidate that hangs is killed, one that
crashes takes only its own process down, and one that takes the machine down is known by the record that was
written before it ran.

A check that times out is resumed at the next start. Its first candidate may use the whole time limit, so
every start makes progress, and a machine that is too slow checks at most as often as there are candidates.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from swiftkv_jax.common.folder import private
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.kernels.check.calls import CANDIDATES, known
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.check.supervisor import START, Measurement, Supervisor, write_whole
from swiftkv_jax.kernels.common.case import OFF, Call

AHEAD = 0.95  # largest ratio to the safe one's time, at every size
_LARGEST = 2**20  # bytes of a kept file
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that one candidate may take for one kind of call, and that all together may take."""

    each: float = 30.0
    total: float = 240.0


LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Decision:
    """The chosen implementations.

    Attributes:
      names: kind of call -> implementation. how: in a few words, the basis of the choice.
      results: "kind: implementation" -> the check's result: status, reason, right, why, error, and sizes with
        seconds. kept: the file with this decision, or None.
    """

    names: Mapping[str, str]
    how: str
    results: Mapping[str, dict] = dataclasses.field(default_factory=dict)
    kept: Path | None = None


def decide(
    calls: Sequence[Call],
    machine: Machine,
    folder: Path | None = None,
    *,
    taken: bool = False,
    candidates: Mapping[str, tuple[str, ...]] | None = None,
    module: str | None = None,
    limits: Limits = LIMITS,
) -> Decision:
    """Choose implementations for these calls, each of another kind, by a kept check or a new one.

    Args:
      machine: the machine to choose for. folder: of kept decisions; ~/.cache/swiftkv-jax/kernels by default.
      taken: this process already has the device. Then a TPU is not checked. A candidate may fail for lack of
        a GPU's memory, so such a check is not kept.
      candidates: by kind of call, the safe one first; those of the machine's platform by default.
      module: one that the checking process imports first, and whose `register()` it calls: it may put
        implementations into the tables of kernels/*/api.py.
    """
    table = CANDIDATES[machine.platform] if candidates is None else candidates
    contenders = {call.kind: known(call, table[call.kind]) for call in calls}
    safe = {kind: names[0] for kind, names in contenders.items()}
    if all(len(names) == 1 for names in contenders.values()):
        return Decision(safe, "the only ones")
    folder = folder or Path.home() / ".cache" / "swiftkv-jax" / "kernels"
    file = File(folder.resolve(), inputs_of(calls, machine, contenders, module), contenders)
    as_kept = f"as checked on {machine.kind}"
    if "names" in (kept := file.read()):
        return Decision(kept["names"], as_kept, kept["results"], file.path)
    if taken and machine.platform == "tpu":
        return Decision(safe, "safe ones, not checked")
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(file.locked(limits.total + START)):
            return Decision(safe, "safe ones: another process has been checking for too long")
        if "names" in (kept := file.read()):  # by the process that had the lock
            return Decision(kept["names"], as_kept, kept["results"], file.path)
        began = time.monotonic()
        _LOG.warning("checking kernels on this %s, once: at most %.0f s", machine.kind, limits.total)
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        command = (sys.executable, "-m", "swiftkv_jax.kernels.check", scratch, machine.platform)
        spec = importlib.util.find_spec("swiftkv_jax")
        package = Path(spec.origin).parents[1] if spec and spec.origin else None  # searched first by `-m`
        how = {"tell": _LOG.info, "folder": package}
        supervisor = Supervisor(command, lambda: file.write(results), limits.total, **how)
        stack.callback(supervisor.close)
        results = supervisor.results
        results |= _without(kept.get("results", {}), "skipped", "not started")
        for result in results.values():
            if result["status"] == "running":
                result |= {"status": "failed", "reason": "the machine or its process died when this ran"}
        earlier = frozenset(results)
        try:
            for call in calls:
                names = contenders[call.kind]
                for title, args in contest(call, call.kind, names if len(names) > 1 else (), results, module):
                    if results.get(title, {}).get("status") in ("done", "failed"):
                        continue
                    is_first = results.keys() <= earlier
                    result = supervisor.run(Measurement(title, "examine", args, limits.each, 1.0, "check"))
                    if result["status"] != "done" and supervisor.left <= 0 and not is_first:
                        result["status"] = "skipped"
                    if result["status"] == "not started":
                        break
        except BaseException:  # Ctrl-C is no candidate's fault
            file.write(_without(results, "running"))
            raise
        how = f"checked on {machine.kind} in {time.monotonic() - began:.0f} s"
        chosen = {kind: choose(kind, names, results) for kind, names in contenders.items()}
        reasons = {result["status"]: result.get("reason", "") for result in results.values()}
        if taken and any("RESOURCE_EXHAUSTED" in result.get("reason", "") for result in results.values()):
            file.write({})
            return Decision(chosen, how, results)
        if "not started" in reasons:  # another process has the TPU, say: the next start tries again
            file.write(_without(results, "not started"))
            return Decision(chosen, f"safe ones, not checked: {reasons['not started']}", results)
        if "skipped" in reasons:
            file.write(results)
            more = "; the next start continues" if file.path else ""
            return Decision(chosen, f"{how}, in part{more}", results)
        file.write(results, chosen)
        return Decision(chosen, how, results, file.path)


def _without(results: Mapping[str, dict], *statuses: str) -> dict[str, dict]:
    return {name: dict(result) for name, result in results.items() if result["status"] not in statuses}


def contest(
    call: Call, title: str, names: Sequence[str], results: Mapping[str, dict], module: str | None = None
) -> Iterator[tuple[str, dict]]:
    """(name of the measurement, arguments of `calls.examine`) of every candidate, each made when the ones
    before have results: a candidate is timed beside the first that is right."""
    base = None
    for name in names:
        measurement = f"{title}: {name}"
        args = {"call": dataclasses.asdict(call), "name": name, "beside": base or name, "module": module}
        yield measurement, args
        if base is None and is_right(results.get(measurement, {})):
            base = name


def is_right(result: Mapping) -> bool:
    """Whether a candidate has right results and a time at every size."""
    sizes = sizes_of(result)
    done = result.get("status") == "done" and result.get("right") is True
    return done and bool(sizes) and all(size["off"] <= OFF for size in sizes.values())


def sizes_of(result: Mapping) -> dict[str, dict]:
    """The timed sizes of a result."""
    return {name: value for name, value in result.items() if isinstance(value, dict) and "seconds" in value}


def choose(title: str, names: Sequence[str], results: Mapping[str, dict]) -> str:
    """The fastest candidate, by the geometric mean of its sizes, that is right and ahead of the first right
    one at every size; else the first right one."""
    right = [name for name in names if is_right(results.get(f"{title}: {name}", {}))]
    ratios = {}
    for name in right[1:]:
        sizes = sizes_of(results[f"{title}: {name}"]).values()
        shares = [size["seconds"] / size["beside"] for size in sizes]
        if max(shares) <= AHEAD:
            ratios[name] = math.prod(shares) ** (1 / len(shares))
    return min(ratios, key=lambda name: ratios[name], default=(right or names)[0])


def table(decision: Decision) -> str:
    """The results of all candidates as a readable table; `*` marks the chosen ones."""
    rows = [("kind of call", "implementation", "found")]
    for title, result in decision.results.items():
        kind, _, name = title.partition(": ")
        mark = "*" if decision.names.get(kind) == name else " "
        if result["status"] != "done":
            words = f"{result['status']}: {result.get('reason', '')}"
        elif not result["right"]:
            words = f"not right: {result['why']}"
        else:
            times = (f"{size}: {1e3 * each['seconds']:.3f} ms" for size, each in sizes_of(result).items())
            words = "; ".join([f"right, error {result['error']:.1e}", *times])
        rows.append((kind, f"{mark} {name}", words))
    if len(rows) == 1:
        rows += [(kind, f"* {name}", "not checked") for kind, name in decision.names.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
    return "\n".join([*lines, decision.how, *([f"kept in {decision.kept}"] if decision.kept else [])])


def inputs_of(
    calls: Sequence[Call], machine: Machine, contenders: Mapping[str, tuple[str, ...]], module: str | None
) -> dict:
    """All that a decision depends on, as JSON."""
    inputs = {
        "machine": dataclasses.asdict(machine),
        "versions": machines.versions(),
        "flags": machines.flags(),
        "source": machines.source(),
        "calls": [dataclasses.asdict(call) for call in calls],
        "candidates": dict(contenders),
        "module": module,
    }
    return json.loads(json.dumps(inputs))


class File:
    """The kept results of a check, and its decision if it was finished, in a file named by its `inputs`.

    In a folder that others can write to nothing is kept or read, since it decides what is executed: `path` is
    None.
    """

    def __init__(self, folder: Path, inputs: dict, contenders: Mapping[str, tuple[str, ...]]):
        self.path = folder / f"{_digest(inputs)[:24]}.json" if private(folder) else None
        self._folder, self._inputs, self._contenders = folder, inputs, contenders

    def read(self) -> dict:
        """`results`, and `names` of a finished check; empty if there are none, or the file was changed."""
        try:
            if self.path is None or not self.path.exists():
                return {}
            if self.path.stat().st_size > _LARGEST:
                raise ValueError("too large")
            raw = json.loads(self.path.read_text(encoding="utf-8"))
            good = raw.pop("sum") == _digest(raw) and raw["inputs"] == self._inputs
            good = good and all("status" in result for result in raw["results"].values())
            if "names" in raw:
                good = good and raw["names"].keys() == self._contenders.keys()
                good = good and all(name in self._contenders[kind] for kind, name in raw["names"].items())
            if not good:
                raise ValueError("not as it was written")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            _LOG.warning("%s is not used, and kernels are checked again: %s", self.path, error)
            return {}
        return raw

    def write(self, results: Mapping[str, dict], names: Mapping[str, str] | None = None) -> None:
        """Keep `results`, and `names` of a finished check, with the SHA-256 of both, so that a truncated or
        edited file is not accepted; no file without results."""
        raw = {"inputs": self._inputs, "results": results, **({"names": names} if names else {})}
        try:
            if self.path is not None and results:
                write_whole(self.path, json.dumps(raw | {"sum": _digest(raw)}, indent=1) + "\n")
            elif self.path is not None:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("the result of the kernel check could not be stored: %s", error)

    @contextlib.contextmanager
    def locked(self, seconds: float) -> Iterator[bool]:
        """Let one of several starting processes check at a time. False: another took longer."""
        if self.path is None:
            _LOG.warning(
                "kernels are checked at every start: %s must be writable by you alone (chmod 700)",
                self._folder,
            )
            yield True
            return
        deadline = time.monotonic() + seconds
        with (self.path.parent / "lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        yield False
                        return
                    time.sleep(0.2)
                    continue
                yield True
                return


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
