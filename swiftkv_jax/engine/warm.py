"""Compilation of a runner's programs ahead of use, on other threads, while the first of them are in use."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import jax

from swiftkv_jax.common.errors import first_line

_LOG = logging.getLogger(__name__)


class Program(NamedTuple):
    """A program that launches need.

    Attributes:
      key: what it is for; see `Runner.programs`. call: the function, with arguments of the right shapes.
      send: launches it without any sequence.
    """

    key: tuple
    call: partial
    send: Callable[[], object]


class WarmUp:
    """Programs during warm-up: each is compiled on some thread, then launched once, and then in use.

    Attributes:
      ready: keys of the programs in use. failed: keys of those that could not be compiled or launched, and
        are never used.
      total: number of programs.
    """

    def __init__(self, programs: list[Program], needed: set[tuple], in_order: bool = False):
        """`programs` are in order of importance; `needed` has the keys of those that suffice for any launch.
        As many are compiled at once as there are cores, at most 8.

        in_order: launch them in their order, and take no failure. Several processes need it: their programs
        wait for each other."""
        self._needed, self._in_order = needed, in_order
        self.ready: set[tuple] = set()
        self.failed: set[tuple] = set()
        self.total = len(programs)
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="compile")
        self._left = [(p, self._pool.submit(_compile, _described(p.call))) for p in programs]

    @property
    def waits(self) -> bool:
        """Whether some program is compiled but not yet in use, and its turn has come."""
        return any(future.done() for _, future in self._left[: 1 if self._in_order else None])

    @property
    def usable(self) -> bool:
        """Whether the programs in use suffice for any launch."""
        return self._needed <= self.ready

    @property
    def done(self) -> bool:
        return not self._left

    def take(self) -> None:
        """Wait until some program is compiled, and put all compiled ones into use.

        A compiler's error is raised if the program is needed, else logged. The error of a launch is raised;
        a program that is not needed is then not launched again.
        """
        if not self.waits:
            pending = [future for _, future in self._left]
            wait(pending[:1] if self._in_order else pending, return_when=FIRST_COMPLETED)
        for program, future in list(self._left):
            if not future.done():
                if self._in_order:
                    break
                continue
            optional = program.key not in self._needed
            if (error := future.exception()) is not None:
                if self._in_order or not optional:
                    raise error
                _LOG.error("%s cannot be compiled, others do for it: %s", program.key, first_line(error))
                self._drop(program)
                continue
            try:
                program.send()
            except jax.errors.JaxRuntimeError:
                if optional:
                    self._drop(program)
                raise
            self.ready.add(program.key)
            self._left.remove((program, future))
        if self.done:
            self._pool.shutdown()

    def _drop(self, program: Program) -> None:
        self.failed.add(program.key)
        self._left = [(other, future) for other, future in self._left if other.key != program.key]

    def stop(self) -> None:
        """Cancel compilations that have not begun; `take` then raises CancelledError. Any thread may call
        it."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _described(call: partial) -> partial:
    """The same call with shapes instead of device arrays, which a launch may donate meanwhile."""

    def shape(x):
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)

    args, keywords = jax.tree.map(shape, (call.args, call.keywords))
    return partial(call.func, *args, **keywords)


def _compile(call: partial) -> None:
    """Compile a call: later calls of the same function with such arguments find the program."""
    call.func.lower(*call.args, **call.keywords).compile()
