"""Chat templates are programs that come with a model, so each is rendered in an expendable process."""

import contextlib
import datetime
import importlib.util
import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax.common.errors import UsageError

SECONDS = 0.8  # of CPU time for one chat; the longest published templates take a hundredth
BYTES = 2**29  # of address space, Python's own included
LONGEST = 2**24  # characters of a rendered chat
PATIENCE = 40.0  # seconds of wall time after which a process is considered stuck
_WORKER = Path(__file__).with_name("template_worker.py")


class Template:
    """A chat template. Its process is started for the first chat, and ends with the object.

    Attributes:
      source: the template itself, in Jinja's language. process: of the last chat, if it still stands ready.
    """

    def __init__(self, source: str):
        self.source = source
        self._lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self._end: weakref.finalize | None = None

    def render(self, values: Mapping, now: datetime.date | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of one chat, and the characters [start, end) of its `{% generation %}` blocks.

        Args:
          values: what the template sees, as JSON; what JSON cannot say becomes the name of its type.
          now: the date it may ask for; today if None.
        """
        when = None if now is None else now.isoformat()
        request = {"template": self.source, "values": dict(values), "now": when}
        line = json.dumps(request, default=lambda value: f"<{type(value).__name__}>")
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise UsageError(" ".join(str(answer["error"]).split()) or "no reason given")
        return answer["text"], [(start, end) for start, end in answer["spans"]]

    def _ask(self, line: str) -> dict:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None  # it was started with pipes
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            _end_if_late(process, process.stdout.fileno())
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer.endswith("\n"):
            return json.loads(answer)
        self.close()
        return {"error": f"it takes more than {SECONDS} seconds or {BYTES >> 20} MiB"}

    def _running(self) -> subprocess.Popen:
        if self.process is None or self.process.poll() is not None:
            self.close()
            roots = set()
            for name in ("jinja2", "markupsafe"):
                spec = importlib.util.find_spec(name)
                if spec is None or spec.origin is None:
                    raise UsageError(f"chat templates need the package {name}: pip install {name}")
                roots.add(str(Path(spec.origin).parent.parent))
            limits = [str(SECONDS), str(BYTES), str(LONGEST)]
            command = [sys.executable, "-I", "-S", str(_WORKER), *limits, *sorted(roots)]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
            )
            self._end = weakref.finalize(self, _stop, self.process)
        return self.process

    def close(self) -> None:
        """End the process; the next chat starts another."""
        if self._end is not None:
            self._end()
        self.process = self._end = None


def _end_if_late(process: subprocess.Popen, answer: int) -> None:
    """Wait until `answer` can be read; kill the process if it used far too much time or never answers.

    The process has its own timer, exact to a tick. This function ends the process if the timer does not fire,
    or if the process waits for something. The limit is twice as long, since it includes the process's start.
    """
    late = time.monotonic() + PATIENCE
    most = _spent(process.pid) + 2 * SECONDS
    poll = select.poll()
    poll.register(answer, select.POLLIN)
    while not poll.poll(1000 * 0.1):
        if _spent(process.pid) > most or time.monotonic() > late:
            return process.kill()


def _spent(pid: int) -> float:
    """CPU seconds that a child process has used; 0 if it has ended, or outside of Linux."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python lacks
    except OSError:
        return 0.0


def _stop(process: subprocess.Popen) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # the rest of the input has no reader
                pipe.close()
    process.wait()
