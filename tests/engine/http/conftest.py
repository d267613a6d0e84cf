"""One server for all tests of a module that leave it as it was."""

import http_server
import pytest


@pytest.fixture(scope="module")
def running():
    with http_server.Running(http_server.make_llm()) as server:
        yield server


@pytest.fixture
def served(running):
    """The shared server, idle before and after."""
    http_server.wait_for(running.idle)
    yield running
    http_server.wait_for(running.idle)
