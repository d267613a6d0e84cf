"""One server for all tests of a module that leave it as it was."""

import http_server
import pytest


@pytest.fixture(scope="module")
def running(request):
    """Every program that a request may need takes a minute to make: only a module that says `WARM_UP = True`,
    because it counts compilations, waits for them all."""
    warm_up = getattr(request.module, "WARM_UP", False)
    with http_server.Running(http_server.make_llm(), warm_up=warm_up) as server:
        yield server


@pytest.fixture
def served(running):
    """The shared server, idle before and after."""
    http_server.wait_for(running.idle)
    yield running
    http_server.wait_for(running.idle)
