"""Tests of limits: what should have been ended by its own limit is ended here, and the test fails."""

import contextlib
import threading
from collections.abc import Iterator

from swiftkv_jax.text.template import Template


@contextlib.contextmanager
def no_longer_than(seconds: float, template: Template) -> Iterator[None]:
    """Kill the template's process after so long, whatever the machine's load; then the test has failed."""
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        template.process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    assert not late, f"the template went on for {seconds:g} seconds: nothing limits it"
