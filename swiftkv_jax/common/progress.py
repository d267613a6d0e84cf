"""Lines that say what is being done, how far it is and for how long: on a terminal or in a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import TypeVar

T = TypeVar("T")
Say = Callable[[str], None]
LIVE = 1.0  # seconds between lines on a terminal, which overwrites them
_LOGGED, LATER, _FIRST = 2.0, 10.0, 60.0  # the same in a log; more after the first minute


def show(line: str, passing: bool = False) -> None:
    """Print a line; on a terminal the next one replaces it if it is `passing`."""
    live = sys.stdout.isatty()
    print(f"\r\x1b[K{line}" if live else line, end="" if live and passing else "\n", flush=True)


def pause(say: Say, seconds: float) -> float:
    """Seconds until the next progress line of what has taken `seconds`: few on a terminal, which overwrites
    them, and in a log more after the first minute."""
    if say is show and sys.stdout.isatty():
        return LIVE
    return _LOGGED if seconds < _FIRST else LATER


@contextlib.contextmanager
def ticking(tell: Callable[[float], None], every: Callable[[float], float]) -> Iterator[None]:
    """Call `tell` with the elapsed seconds again and again, from a thread; `every` maps them to the seconds
    until the next call."""
    done, began = threading.Event(), time.monotonic()

    def tick() -> None:
        with contextlib.suppress(BrokenPipeError):  # the work itself reports it
            while not done.wait(every(time.monotonic() - began)):
                tell(time.monotonic() - began)

    teller = threading.Thread(target=tick, name="working", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


class Doing:
    """How far a piece of work is, for `working` to report."""

    place = ""

    def counted(self, items: Iterable[T], count: int | None = None) -> Iterator[T]:
        """Yield the items and count them; `count` is their number, if known."""
        count = len(items) if count is None and isinstance(items, Sized) else count
        of = "" if count is None else f" of {count}"
        number = 0
        for number, item in enumerate(items, 1):
            self.place = f"{number - 1}{of}, "
            yield item
        self.place = f"{number}{of}, "


@contextlib.contextmanager
def working(say: Say, what: str, every: float | None = None) -> Iterator[Doing]:
    """Report what is being done, and every `every` seconds how far it is and for how long, until it is done.

    every: None: the seconds that `pause` returns.
    """
    doing, began = Doing(), time.monotonic()
    until = partial(pause, say) if every is None else lambda seconds: every
    tell = (lambda line: show(line, passing=True)) if say is show else say
    tell(f"{what} ...")
    try:
        with ticking(lambda seconds: tell(f"{what}: {doing.place}{seconds:.0f} s so far"), until):
            yield doing
    finally:
        if say is show and sys.stdout.isatty():
            show(f"{what}: {time.monotonic() - began:.1f} s")
