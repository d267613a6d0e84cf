"""Logging never waits for the reader of stderr; dropped lines are counted and reported."""

import io
import json
import logging
import threading

import pytest
from http_server import wait_for

from swiftkv_jax.server import logs


class Stalled(io.StringIO):
    """A stream that takes nothing until it is told to."""

    def __init__(self):
        super().__init__()
        self.opened = threading.Event()

    def write(self, text: str) -> int:
        self.opened.wait(60)
        return super().write(text)


@pytest.fixture
def stalled(monkeypatch):
    monkeypatch.setattr(logs, "MOST", 50)
    stream = Stalled()
    log = logs.Log(stream)
    root = logging.getLogger()
    root.addHandler(log)
    yield stream, log
    stream.opened.set()
    root.removeHandler(log)
    log.stop()


def test_a_log_that_nobody_reads_is_dropped_and_counted(stalled):
    stream, log = stalled
    for number in range(200):
        log.say(f"line {number}")
    assert log.dropped == logs.dropped() >= 140
    stream.opened.set()
    assert log.stop()
    lines = stream.getvalue().splitlines()
    kept = [line for line in lines if line.startswith("line")]
    assert kept == [f"line {number}" for number in range(200 - log.dropped)]
    assert f"warning: {log.dropped} lines were dropped here: stderr was not read" in lines


def test_refusals_are_one_line_a_second(served, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "swiftkv_jax.http")
    monkeypatch.setattr(served.api.service, "draining", True)

    def counts() -> list[int]:
        lines = [record.getMessage() for record in caplog.records]
        return [json.loads(line)["refused"]["503"] for line in lines if line.startswith("{")]

    for _ in range(7):
        assert served.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    wait_for(lambda: sum(counts()) == 7)
    assert len(counts()) <= 3
