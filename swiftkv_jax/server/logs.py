"""The log, written by its own thread: a stderr that is not read never blocks the server."""

import contextlib
import logging
import queue
import threading
import time

MOST = 4096  # lines that may wait to be written; more are dropped, and counted
_TOGETHER_S = 0.05  # seconds: lines that come within this time are one write
_STOP_S = 2.0


class Log(logging.Handler):
    """A handler of records, and a writer of plain lines, that never waits for `stream`.

    Attributes:
      dropped: number of lines for which there was no room; the next lines written report it.
    """

    def __init__(self, stream):
        """`stream` has `write` and `flush`, such as `sys.stderr`."""
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.dropped = 0
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))

    def say(self, line: str) -> None:
        """Write a line as it is."""
        if self._lines.qsize() < MOST:
            self._lines.put(line)
        else:
            self.dropped += 1

    def stop(self) -> bool:
        """Write the waiting lines; return whether that took at most two seconds."""
        self._lines.put(None)
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reported, stopped = 0, False
        while not stopped:
            lines = [self._lines.get(), *(self._lines.get() for _ in range(self._lines.qsize()))]
            stopped, dropped = None in lines, self.dropped
            if dropped > reported:
                lines.append(f"warning: {dropped - reported} lines were dropped here: stderr was not read")
                reported = dropped
            with contextlib.suppress(OSError, ValueError):  # nobody will ever read it
                self._stream.write("".join(f"{line}\n" for line in lines if line is not None))
                self._stream.flush()
            if not stopped:
                time.sleep(_TOGETHER_S)


def dropped() -> int:
    """The number of lines that the handlers of this process have dropped."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, Log))
