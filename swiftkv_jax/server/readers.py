"""The threads that use the tokenizer: keys take turns, and short texts do not wait for long ones."""

import threading
import typing
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

LONG = 2**15  # bytes: a text of more takes longer than a handful of short requests may wait
_ANSWER = typing.TypeVar("_ANSWER")


class Readers:
    """One thread for short texts and one for long ones, of which a body's worth takes a second."""

    def __init__(self):
        self._short, self._long = Turns("encode-short"), Turns("encode-long")

    def submit(self, key: str, size: int, work: Callable[[], _ANSWER]) -> Future[_ANSWER]:
        """Run `work`, which reads a text of `size` bytes for a key. Cancelled in time, it is not begun."""
        return (self._long if size > LONG else self._short).submit(key, work)

    def stop(self) -> None:
        """What has not begun never will."""
        for turns in (self._short, self._long):
            turns.stop()


class Turns:
    """A thread that does one piece of work of each key that has any, then the next of each."""

    def __init__(self, name: str):
        self._lines: dict[str, deque[tuple[Future, Callable]]] = {}  # the first key's turn comes first
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, key: str, work: Callable[[], _ANSWER]) -> Future[_ANSWER]:
        future: Future[_ANSWER] = Future()
        with self._lock:
            self._lines.setdefault(key, deque()).append((future, work))
        self._thread.submit(self._next)
        return future

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for line in self._lines.values():
                for future, _ in line:
                    future.cancel()
            self._lines.clear()

    def _next(self) -> None:
        """Whatever is next now: it was called as often as there is work."""
        with self._lock:
            if not self._lines:  # stopped
                return
            key = next(iter(self._lines))
            line = self._lines.pop(key)
            future, work = line.popleft()
            if line:
                self._lines[key] = line
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)
