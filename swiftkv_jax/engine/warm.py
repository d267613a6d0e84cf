"""Compiling a runner's programs ahead of use, on other threads, while it may run by the first of them."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import jax

from swiftkv_jax.errors import first_line

_LOG = logging.getLogger(__name__)


class Program(NamedTuple):
    """One of the programs that launches need.

    Attributes:
      key: what it is for; see `Runner.programs`. call: it, with arguments of the right shapes.
      send: a launch of it in which no sequence takes part.
    """

    key: tuple
    call: partial
    send: Callable[[], object]


class WarmUp:
    """Programs on their way: each is compiled on some thread, then launched once, and then in use.

    Attributes:
      ready: keys of those in use. failed: of those that could not be compiled, and never will be in use.
      total: programs in all.
    """

    def __init__(self, programs: list[Program], needed: set[tuple]):
        """`programs`, the most wanted first, and the keys of those that do for any launch. As many are
        compiled at once as there are cores, at most 8."""
        self._needed = needed
        self.ready: set[tuple] = set()
        self.failed: set[tuple] = set()
        self.total = len(programs)
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="compile")
        self._left = [(one, self._pool.submit(_compile, _described(one.call))) for one in programs]

    @property
    def waits(self) -> bool:
        """Whether some program is compiled and not yet in use."""
        return any(future.done() for _, future in self._left)

    @property
    def usable(self) -> bool:
        """Whether the programs in use do for any launch."""
        return self._needed <= self.ready

    @property
    def done(self) -> bool:
        return not self._left

    def take(self) -> None:
        """Wait until some program is compiled, and take what is into use.

        What a compiler raises is raised for a program that is needed, and logged for another.
        """
        pending = [future for _, future in self._left]
        if not self.waits:
            wait(pending, return_when=FIRST_COMPLETED)
        kept: list[tuple[Program, Future]] = []
        for program, future in self._left:
            if not future.done():
                kept.append((program, future))
                continue
            error = future.exception()
            if error is not None and program.key in self._needed:
                raise error
            if error is not None:
                _LOG.error("%s cannot be compiled, others do for it: %s", program.key, first_line(error))
                self.failed.add(program.key)
                continue
            program.send()
            self.ready.add(program.key)
        self._left = kept
        if self.done:
            self._pool.shutdown()

    def stop(self) -> None:
        """What is not being compiled yet never will be; `take` raises CancelledError. Any thread may."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _described(call: partial) -> partial:
    """The same with shapes in place of the device's arrays, which a launch may take away meanwhile."""

    def shape(x):
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)

    args, keywords = jax.tree.map(shape, (call.args, call.keywords))
    return partial(call.func, *args, **keywords)


def _compile(call: partial) -> None:
    """A later call of the same function with such arguments finds its program."""
    call.func.lower(*call.args, **call.keywords).compile()
