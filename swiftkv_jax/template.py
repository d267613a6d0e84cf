"""Chat templates come with a model and are programs: each is rendered in a process that can be lost."""

import datetime
import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax.errors import UsageError

SECONDS = 0.8  # of the processor's time for one chat; the longest published templates take a hundredth
BYTES = 2**29  # of address space, Python's own included
LONGEST = 2**24  # characters of a rendered chat
_WORKER = Path(__file__).with_name("template_worker.py")


class Template:
    """A chat template. Its process is started by the first chat, and ends with the object."""

    def __init__(self, source: str):
        self.source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._end: weakref.finalize | None = None

    def render(self, values: Mapping, now: datetime.date | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of one chat, and the characters [start, end) of its `{% generation %}` blocks.

        Args:
          values: what the template sees, as JSON; what JSON cannot say becomes the name of its type.
          now: the date it may ask for; today if None.

        Raises:
          UsageError: the template refuses the values, or takes too much time, memory or text; its message is
            one line.
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
            said = process.stdout.readline()
        except BrokenPipeError:
            said = ""
        if said.endswith("\n"):
            return json.loads(said)
        self.close()
        return {"error": f"it takes more than {SECONDS} seconds or {BYTES >> 20} MiB"}

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            self.close()
            roots = {str(Path(_origin(name)).parent.parent) for name in ("jinja2", "markupsafe")}
            limits = [str(SECONDS), str(BYTES), str(LONGEST)]
            command = [sys.executable, "-I", "-S", str(_WORKER), *limits, *sorted(roots)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
            )
            self._end = weakref.finalize(self, _stop, self._process)
        return self._process

    def close(self) -> None:
        """End the process; the next chat starts another."""
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _origin(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise UsageError(f"chat templates need the package {name}: pip install {name}")
    return found.origin


def _stop(process: subprocess.Popen) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # what was still to be written has no reader
                continue
    process.wait()
