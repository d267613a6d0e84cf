"""One server for all tests that leave it as it was."""

import http_server
import pytest


@pytest.fixture(scope="session")
def cold():
    """The server of all modules but those that wait for every program."""
    with http_server.Running(http_server.make_llm(), warm_up=False) as server:
        yield server


@pytest.fixture(scope="module")
def running(request):
    """Every program that a request may need takes a minute to make: only a module that says `WARM_UP = True`,
    because it counts compilations, waits for them all, by a server of its own."""
    if not getattr(request.module, "WARM_UP", False):
        yield request.getfixturevalue("cold")
        return
    with http_server.Running(http_server.make_llm()) as server:
        yield server


@pytest.fixture
def served(running):
    """The shared server, idle before and after."""
    http_server.wait_for(running.idle)
    yield running
    http_server.wait_for(running.idle)
