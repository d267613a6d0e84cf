"""Measurements, each run in a process that may hang or die; results are always saved to disk.

The supervising process has a `Supervisor`; the measuring one takes its `tasks`.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax

START = 120.0  # seconds a process may take until it is ready
_DETAILS = 4000  # characters of a traceback that are kept
_PRINT = functools.partial(print, flush=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically: a reader always finds either the whole old text or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # the next candidate may take the machine down
    beside.replace(path)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a process is asked to measure.

    Attributes:
      name: unique. task: what the process knows it by. args: of the task, as JSON.
      limit: seconds after which its process is killed. least: with fewer seconds left it is not begun.
      group: measurements of one group share a process while all goes well. env: of that process.
    """

    name: str
    task: str
    args: Mapping
    limit: float
    least: float
    group: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _Failed(Exception):
    """A measurement has no result; the message says why.

    `details`: the end of the traceback, or of what the dead process wrote to stderr. `fatal`: whether the
    process is of no more use: it died, hangs, or its device failed.
    """

    def __init__(self, message: str, details: str = "", fatal: bool = True, status: str = "failed"):
        super().__init__(message)
        self.details, self.fatal, self.status = details[-_DETAILS:], fatal, status


class Supervisor:
    """Runs measurements one after the other in a process of `command`, which is started when one needs it.

    Attributes:
      results: name of a measurement -> the parts of its result so far, and its `status`.
      save: called whenever `results` grows.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        save: Callable[[], None],
        seconds: float,
        env: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = _PRINT,
        folder: Path | None = None,
    ):
        """`seconds`: for all measurements together. env: of all processes; None: this process's, and then no
        measurement may add to it. folder: the processes' working folder. tell: gets each result in a line."""
        self.results: dict[str, dict] = {}
        self.save, self._tell = save, tell
        self._began, self._seconds = time.monotonic(), seconds
        self._command, self._env, self._folder = command, env, folder
        self._process: subprocess.Popen | None = None
        self._key: tuple = ()

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._began + self._seconds - time.monotonic()

    def run(self, measurement: Measurement, say: Callable[[dict], str] = json.dumps) -> dict:
        """Run a measurement and return the parts of its result, as far as it got, in one dict. `status` is
        "done", or "failed", "not started" or "skipped" with the `reason`. `say` puts a result into words."""
        result: dict = {"status": "running"}  # the record that is left if this takes the machine down
        self.results[measurement.name] = result
        began = time.monotonic()
        try:
            if self.left < (least := measurement.least):
                reason = f"needs {least:.0f} s, {max(0.0, self.left):.0f} s are left"
                raise _Failed(reason, fatal=False, status="skipped")
            self.save()
            self._start(measurement)
            for part in self._ask(measurement):
                result |= part
                self.save()
            result["status"] = "done"
        except _Failed as error:
            result |= {"status": error.status, "reason": str(error)}
            result |= {"details": error.details} if error.details else {}
            if error.fatal:
                self.close()
        result["seconds"] = round(time.monotonic() - began, 2)
        self.save()
        words = say(result) if result["status"] == "done" else f"{result['status']}: {result['reason']}"
        minute = (time.monotonic() - self._began) / 60
        self._tell(f"[{minute:5.2f} min] {measurement.name}: {words}")
        return result

    def _start(self, measurement: Measurement) -> None:
        """Have a process of the measurement's group that is ready."""
        key = (measurement.group, *sorted(measurement.env.items()))
        if self._process is not None and self._key == key:
            return
        self.close()
        self._key, self._buffer = key, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        self._process = subprocess.Popen(
            self._command,
            env=None if self._env is None else {**self._env, **measurement.env},
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # its child processes end with it
        )
        limit = min(START, max(1.0, self.left))
        try:
            self._read(time.monotonic() + limit, f"no worker: not ready after {limit:.0f} s")
        except _Failed as error:
            raise _Failed(str(error), error.details, status="not started") from None

    def _ask(self, measurement: Measurement) -> Iterator[dict]:
        """The parts of the result as they come."""
        limit = min(measurement.limit, max(1.0, self.left))
        deadline = time.monotonic() + limit
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading will show why it died
            asked = {"task": measurement.task, "args": measurement.args}
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        while "done" not in (answer := self._read(deadline, f"killed: not finished after {limit:.0f} s")):
            if "failed" in answer:
                raise _Failed(answer["failed"], answer["details"], answer["fatal"])
            yield answer["part"]

    def _read(self, deadline: float, late: str) -> dict:
        """The next answer of the process."""
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _Failed(late)
            more = os.read(pipe, 1 << 16)
            if not more:
                code = self._process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                self._errors.seek(0)
                stderr = self._errors.read().decode(errors="replace").strip()
                last = f"; {stderr.splitlines()[-1][:200]}" if stderr else ""
                raise _Failed(f"its process died: {how}{last}", stderr)
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """End the process, if there is one, and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._errors.close()
            self._process = None


def tasks() -> Iterator[tuple[str, dict, Callable[[Iterable[dict]], None]]]:
    """In the measuring process: each (task, arguments, function that sends the parts of its result) until
    stdin ends. An error of the parts is sent too.

    Everything else, such as the output of compilers and drivers, is kept off stdout.
    """
    with contextlib.suppress(OSError, AttributeError):  # on Linux: do not outlive the supervisor
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**what) -> None:
        print(json.dumps(what), file=answers, flush=True)

    def send(parts: Iterable[dict]) -> None:
        try:
            for part in parts:
                answer(part=part)
            answer(done=True)
        except Exception as error:  # any error of a candidate is its result
            first = (str(error).strip().splitlines() or ["no message"])[0]
            details, fatal = traceback.format_exc()[-_DETAILS:], isinstance(error, jax.errors.JaxRuntimeError)
            answer(failed=f"{type(error).__name__}: {first[:300]}", details=details, fatal=fatal)

    answer(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        yield asked["task"], asked["args"], send
