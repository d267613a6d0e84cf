"""Choose the implementation of each kind of call on this machine, by a check that is kept for the next start.

A check runs in another process, before this one takes its devices. A candidate that hangs is killed, one that
crashes takes only its own process down, and one that takes the machine down is known by the record that was
written before it ran.

A check that runs out of time decides nothing for later starts: each goes on with what is missing. The first
candidate of a check has all the time, and fails if that is not enough. So every check settles at least one,
and a machine that is too slow checks at most as often as there are candidates.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from swiftkv_jax.folder import private
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.kernels.check.calls import CANDIDATES, Call
from swiftkv_jax.kernels.check.cases import OFF
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.check.supervisor import START, Book, Line, write_whole

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
      lines: "kind: implementation" -> the check's result: status, reason, right, why, error, and sizes with
        seconds. kept: the file with this decision, or None.
    """

    names: Mapping[str, str]
    how: str
    lines: Mapping[str, dict] = dataclasses.field(default_factory=dict)
    kept: Path | None = None


def home() -> Path:
    """The folder of kept decisions."""
    return (Path.home() / ".cache" / "swiftkv-jax" / "kernels").resolve()


def decide(
    calls: Sequence[Call],
    machine: Machine,
    folder: Path | None = None,
    *,
    check: bool = True,
    shared: bool = False,
    candidates: Mapping[str, tuple[str, ...]] | None = None,
    module: str | None = None,
    limits: Limits = LIMITS,
) -> Decision:
    """Choose implementations for these calls, each of another kind, by a kept check or a new one.

    Args:
      machine: the machine to choose for. folder: of kept decisions; `home()` by default.
      check: whether a check may run; if not, and none is kept, the safe ones are taken.
      shared: this process already has the device. A candidate may then fail for lack of memory, so such a
        check is not kept.
      candidates: by kind of call, the safe one first; those of the machine's platform by default.
      module: one that the checking process imports first, and whose `register()` it calls: it may put
        implementations into the tables of kernels/*/api.py.
    """
    table = CANDIDATES[machine.platform] if candidates is None else candidates
    contenders = {call.kind: call.known(table[call.kind]) for call in calls}
    safe = {kind: names[0] for kind, names in contenders.items()}
    if all(len(names) == 1 for names in contenders.values()):
        return Decision(safe, "the only ones")
    key = _key(calls, machine, contenders, module)
    folder = (folder or home()).resolve()
    trusted = private(folder)  # its contents decide what is executed
    path = folder / f"{_digest(key)[:24]}.json" if trusted else None
    if path is not None and (kept := _read(path, key, contenders)) and "names" in kept:
        return _kept(kept, machine, path)
    if not check:
        return Decision(safe, "safe ones, not checked")
    if path is None:
        _LOG.warning(
            "kernels are checked at every start: %s must be writable by you alone (chmod 700)", folder
        )
        return _checked(calls, machine, contenders, key, None, {}, module, limits, shared)
    with _alone(folder, limits.total + START) as alone:
        if not alone:
            return Decision(safe, "safe ones: another process has been checking for too long")
        kept = _read(path, key, contenders) or {}
        if "names" in kept:
            return _kept(kept, machine, path)
        before = kept.get("lines", {})
        return _checked(calls, machine, contenders, key, path, before, module, limits, shared)


def _kept(kept: dict, machine: Machine, path: Path) -> Decision:
    return Decision(kept["names"], f"as checked on {machine.kind}", kept["lines"], path)


def _checked(
    calls: Sequence[Call],
    machine: Machine,
    contenders: Mapping[str, tuple[str, ...]],
    key: dict,
    path: Path | None,
    before: Mapping[str, dict],
    module: str | None,
    limits: Limits,
    shared: bool,
) -> Decision:
    """Run the check; `before`: the lines of an interrupted one."""

    def save(result: dict) -> None:
        try:
            if path is not None:
                write_whole(path, _sealed(result))
        except OSError as error:
            _LOG.warning("the result of the kernel check could not be stored: %s", error)

    began = time.monotonic()
    _LOG.warning("checking kernels on this %s, once: at most %.0f s", machine.kind, limits.total)
    spec = importlib.util.find_spec("swiftkv_jax")
    package = Path(spec.origin).parents[1] if spec and spec.origin else None  # searched first by `-m`
    with tempfile.TemporaryDirectory() as scratch:
        command = (sys.executable, "-m", "swiftkv_jax.kernels.check", scratch, machine.platform)
        book = Book(command, save, limits.total / 60, {"key": key}, tell=_LOG.info, folder=package)
        missing = ("skipped", "not started")
        lines = {name: dict(found) for name, found in before.items() if found["status"] not in missing}
        book.result["lines"] = lines
        for found in lines.values():
            if found["status"] == "running":
                found |= {"status": "failed", "reason": "the machine or its process died when this ran"}
        earlier = frozenset(lines)
        try:
            started = all(
                [_examine(book, call, contenders[call.kind], module, limits, earlier) for call in calls]
            )
        except BaseException:  # Ctrl-C is no candidate's fault
            _forget(book.result, "running")
            save(book.result)
            raise
        finally:
            book.close()
    names = {kind: choose(kind, known, lines) for kind, known in contenders.items()}
    took = time.monotonic() - began
    how = f"checked on {machine.kind} in {took:.0f} s"
    starved = shared and any("RESOURCE_EXHAUSTED" in found.get("reason", "") for found in lines.values())
    if starved or not started:  # another process has the TPU, say: the next start tries again
        _forget(book.result, "not started")
        if not starved and book.result["lines"]:
            save(book.result)
        elif path is not None:
            path.unlink(missing_ok=True)
        reasons = [found["reason"] for found in lines.values() if found["status"] == "not started"]
        return Decision(names, how if started else f"safe ones, not checked: {reasons[0]}", lines)
    if any(found["status"] == "skipped" for found in lines.values()):
        save(book.result)
        return Decision(names, f"{how}, in part" + ("; the next start continues" if path else ""), lines)
    book.result["names"] = names
    save(book.result)
    return Decision(names, how, lines, path)


def _forget(result: dict, status: str) -> None:
    """Drop the lines of this status."""
    result["lines"] = {name: found for name, found in result["lines"].items() if found["status"] != status}


def _examine(
    book: Book,
    call: Call,
    names: tuple[str, ...],
    module: str | None,
    limits: Limits,
    earlier: frozenset[str],
) -> bool:
    """Examine each candidate of a kind of call; False if no process could be started for it.

    `earlier`: the lines of earlier checks. One that ends because all time is used up counts as skipped,
    unless it is the first of this check.
    """
    lines, base = book.result["lines"], None
    for name in names if len(names) > 1 else ():
        line = f"{call.kind}: {name}"
        if lines.get(line, {}).get("status") not in ("done", "failed"):
            args = {"call": dataclasses.asdict(call), "name": name, "beside": base or name, "module": module}
            first = lines.keys() <= earlier
            found = book.run(Line(line, "examine", args, limits.each, 1.0, "check"))
            if found["status"] in ("failed", "not started") and book.left <= 0 and not first:
                found["status"] = "skipped"
        if lines[line]["status"] == "not started":
            return False
        if base is None and is_right(lines[line]):
            base = name
    return True


def is_right(found: Mapping) -> bool:
    """Whether a candidate's line shows right results and a time at every size."""
    sizes = sizes_of(found)
    done = found.get("status") == "done" and found.get("right") is True
    return done and bool(sizes) and all(size["off"] <= OFF for size in sizes.values())


def sizes_of(found: Mapping) -> dict[str, dict]:
    """The timed sizes of a line."""
    return {name: value for name, value in found.items() if isinstance(value, dict) and "seconds" in value}


def ahead(pairs: Iterable[tuple[float, float]]) -> float | None:
    """The geometric mean of one's seconds over another's; None unless it is ahead at every size."""
    shares = [mine / its for mine, its in pairs]
    return math.prod(shares) ** (1 / len(shares)) if shares and max(shares) <= AHEAD else None


def choose(kind: str, names: Sequence[str], lines: Mapping[str, dict]) -> str:
    """The fastest candidate that is right and ahead of the first right one; else the first right one."""
    right = [name for name in names if is_right(lines.get(f"{kind}: {name}", {}))]
    if not right:
        return names[0]
    shares = {}
    for name in right[1:]:
        sizes = sizes_of(lines[f"{kind}: {name}"]).values()
        share = ahead((size["seconds"], size["beside"]) for size in sizes)
        if share is not None:
            shares[name] = share
    return min(shares, key=lambda name: shares[name], default=right[0])


def table(decision: Decision) -> str:
    """The results of all candidates as a readable table; `*` marks the chosen ones."""
    rows = [("kind of call", "implementation", "found")]
    for line, found in decision.lines.items():
        kind, _, name = line.partition(": ")
        mark = "*" if decision.names.get(kind) == name else " "
        rows.append((kind, f"{mark} {name}", _words(found)))
    if len(rows) == 1:
        rows += [(kind, f"* {name}", "not checked") for kind, name in decision.names.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
    return "\n".join([*lines, decision.how, *([f"kept in {decision.kept}"] if decision.kept else [])])


def _words(found: Mapping) -> str:
    if found["status"] != "done":
        return f"{found['status']}: {found.get('reason', '')}"
    if not found["right"]:
        return f"not right: {found['why']}"
    sizes = [f"{name}: {1e3 * size['seconds']:.3f} ms" for name, size in sizes_of(found).items()]
    return "; ".join([f"right, error {found['error']:.1e}", *sizes])


def _key(
    calls: Sequence[Call], machine: Machine, contenders: Mapping[str, tuple[str, ...]], module: str | None
) -> dict:
    """All that a decision depends on, as JSON."""
    found = {
        "machine": dataclasses.asdict(machine),
        "versions": machines.versions(),
        "flags": machines.flags(),
        "source": machines.source(),
        "calls": [dataclasses.asdict(call) for call in calls],
        "candidates": dict(contenders),
        "module": module,
    }
    return json.loads(json.dumps(found))


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sealed(result: dict) -> str:
    """The result as JSON with its SHA-256, so that a truncated or edited file is not accepted."""
    result = {name: value for name, value in result.items() if name != "sum"}
    return json.dumps(result | {"sum": _digest(result)}, indent=1) + "\n"


def _read(path: Path, key: dict, contenders: Mapping[str, tuple[str, ...]]) -> dict | None:
    """The result kept under this key; None if there is none, or it was changed."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("too large")
        raw = json.loads(path.read_text(encoding="utf-8"))
        good = raw.pop("sum") == _digest(raw) and raw["key"] == key
        good = good and all("status" in found for found in raw["lines"].values())
        if "names" in raw:
            good = good and raw["names"].keys() == contenders.keys()
            good = good and all(name in contenders[kind] for kind, name in raw["names"].items())
        if not good:
            raise ValueError("not as it was written")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _LOG.warning("%s is not used, and kernels are checked again: %s", path, error)
        return None
    return raw


@contextlib.contextmanager
def _alone(folder: Path, seconds: float) -> Iterator[bool]:
    """Let one of several starting processes check at a time; False: another one took longer than
    `seconds`."""
    deadline = time.monotonic() + seconds
    with (folder / "lock").open("w") as lock:
        while not (locked := _lock(lock)) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield locked


def _lock(file: IO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
