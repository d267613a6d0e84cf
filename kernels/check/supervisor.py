"""Lines of a measurement, each run in a process that may hang or die; results are always saved to disk.

The measuring process runs `answer_tasks`; the supervising one has a `Book`.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import jax

START = 120.0  # seconds a worker may take until it is ready
_DETAILS = 4000  # characters of a traceback that are kept


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
class Line:
    """One measurement.

    Attributes:
      name: unique. task: what the worker knows it by. args: of the task, as JSON.
      limit: seconds after which its process is killed. least: with fewer seconds left it is not begun.
      group: lines of one group share a process while all goes well. env: of that process.
    """

    name: str
    task: str
    args: Mapping
    limit: float
    least: float
    group: str
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Failed(Exception):
    """A line has no result; the message says why.

    Attributes:
      details: the end of the traceback, or of what the dead process wrote to stderr. fatal: whether the
        process is of no more use: it died, hangs, or its device failed.
    """

    status = "failed"

    def __init__(self, message: str, details: str = "", fatal: bool = True):
        super().__init__(message)
        self.details, self.fatal = details[-_DETAILS:], fatal


class NotStarted(Failed):
    """No process could be started to run a line."""

    status = "not started"


class Worker:
    """A process that runs one task at a time. `env` is its whole environment and `folder` its working folder;
    None: this process's."""

    def __init__(
        self, command: tuple[str, ...], env: Mapping[str, str] | None = None, folder: Path | None = None
    ):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # its child processes end with it
        )
        self._buffer = b""

    def ask(self, task: str, args: Mapping, limit: float, each: Callable[[dict], None]) -> None:
        """Run a task; `each` gets the parts of its result as they come.

        Raises:
          Failed: it reported an error, died, or took more than `limit` seconds. Close the worker if it is
            fatal.
        """
        deadline = time.monotonic() + limit
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading will show why it died
            self._process.stdin.write(json.dumps({"task": task, "args": args}).encode() + b"\n")
            self._process.stdin.flush()
        while True:
            answer = self._read(deadline, f"killed: not finished after {limit:.0f} s")
            if "failed" in answer:
                raise Failed(answer["failed"], answer["details"], answer["fatal"])
            if "done" in answer:
                return
            each(answer["part"])

    def wait_ready(self, limit: float = START) -> None:
        """Wait for its first answer, at most `limit` seconds.

        Raises:
          NotStarted: it died, or took too long.
        """
        try:
            self._read(time.monotonic() + limit, f"no worker: not ready after {limit:.0f} s")
        except Failed as error:
            raise NotStarted(str(error), error.details) from None

    def _read(self, deadline: float, late: str) -> dict:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Failed(late)
            more = os.read(pipe, 1 << 16)
            if not more:
                raise self._died()
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _died(self) -> Failed:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        last = f"; {said.splitlines()[-1][:200]}" if said else ""
        return Failed(f"its process died: {how}{last}", said)

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()


def _print(line: str) -> None:
    print(line, flush=True)


class Book:
    """The results so far, and the process for the next line.

    Attributes:
      result: all results, as JSON. save: called with it whenever it grows. env: the environment of all
        workers; None: this process's, and then no line may add to it. folder: their working folder.
      worker: that of the last line, or None.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        save: Callable[[dict], None],
        minutes: float,
        head: Mapping,
        env: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = _print,
        folder: Path | None = None,
    ):
        self.save, self.env, self.folder, self._tell = save, env, folder, tell
        self.result: dict = dict(head) | {"minutes": minutes, "lines": {}}
        self._began, self._seconds, self._command = time.monotonic(), 60 * minutes, command
        self.worker: Worker | None = None
        self._key: tuple | None = None

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._began + self._seconds - time.monotonic()

    def run(self, line: Line, say: Callable[[dict], str] = json.dumps) -> dict:
        """Run a line and return the parts of its result, as far as it got, in one dict. `status` is "done",
        or "failed", "not started" or "skipped" with the reason. `say` formats it for the screen."""
        found: dict = {"status": "running"}  # the record that is left if this takes the machine down
        self.result["lines"][line.name] = found
        began = time.monotonic()
        if self.left < line.least:
            found |= {
                "status": "skipped",
                "reason": f"needs {line.least:.0f} s, {max(0.0, self.left):.0f} s are left",
            }
        else:
            self.save(self.result)
            try:
                self._run(line, found)
                found["status"] = "done"
            except Failed as error:
                found |= {"status": error.status, "reason": str(error)}
                found |= {"details": error.details} if error.details else {}
                if error.fatal:
                    self.close()
        found["seconds"] = round(time.monotonic() - began, 2)
        self.save(self.result)
        told = say(found) if found["status"] == "done" else f"{found['status']}: {found['reason']}"
        minute = (time.monotonic() - self._began) / 60
        self._tell(f"[{minute:5.2f} min] {line.name}: {told}")
        return found

    def _run(self, line: Line, found: dict) -> None:
        key = (line.group, *sorted(line.env.items()))
        if self.worker is None or self._key != key:
            self.close()
            env = None if self.env is None else {**self.env, **line.env}
            self.worker, self._key = Worker(self._command, env, self.folder), key
            self.worker.wait_ready(min(START, max(1.0, self.left)))

        def each(part: dict) -> None:
            found.update(part)
            self.save(self.result)

        self.worker.ask(line.task, line.args, min(line.limit, max(1.0, self.left)), each)

    def close(self) -> None:
        """End the worker, if there is one."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def answer_tasks(tasks: Mapping[str, Callable[..., Iterable[dict]]]) -> None:
    """Serve as the measuring process until stdin ends. stdin has one task a line, and stdout gets the parts
    of its result, one a line. Everything else, such as the output of compilers and drivers, is kept off
    stdout."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**what) -> None:
        print(json.dumps(what), file=answers, flush=True)

    answer(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            for part in tasks[asked["task"]](**asked["args"]):
                answer(part=part)
            answer(done=True)
        except Exception as error:  # any error of a candidate is its result
            said = (str(error).strip().splitlines() or ["no message"])[0]
            details, fatal = traceback.format_exc()[-_DETAILS:], isinstance(error, jax.errors.JaxRuntimeError)
            answer(failed=f"{type(error).__name__}: {said[:300]}", details=details, fatal=fatal)


def _die_with_parent() -> None:
    """On Linux, let a worker die with its supervisor, so that a hanging one does not outlive it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
