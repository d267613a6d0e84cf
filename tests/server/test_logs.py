"""Logging never waits for the reader of stderr; dropped lines are counted and reported."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from http_server import Running, make_llm, wait_for

from swiftkv_jax.server import logs

ROOT = Path(__file__).parents[2]


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


def test_a_server_keeps_answering_when_its_log_is_not_read(stalled):
    _, log = stalled
    logger = logging.getLogger("swiftkv_jax.http")
    logger.setLevel(logging.INFO)
    with Running(make_llm(), warm_up=False) as server:
        for _ in range(70):
            assert server.http.post("/v1/completions", json={"prompt": "x" * 100}).status_code == 400
        assert log.dropped >= 10
        assert server.http.get("/health").status_code == 200
        dropped = f'log_lines_dropped_total{{engine="0",model_name="tiny"}} {float(log.dropped)}'
        assert dropped in server.metrics()
    logger.setLevel(logging.NOTSET)


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


FULL = """
import os
import sys
from swiftkv_jax.server import server
from swiftkv_jax.server.main import main

listen, run = server.listen, server.run

def told(*where):
    listener = listen(*where)
    with open(sys.argv[1], "w") as file:
        file.write(str(listener.getsockname()[1]))
    return listener

def full(*arguments):
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)
    return run(*arguments)

server.listen, server.run = told, full
sys.exit(main(["--http", "127.0.0.1:0", "--no-warm-up", "--max-num-seqs", "2"]))
"""


@pytest.mark.slow
def test_the_command_ends_though_its_stderr_is_not_read(tmp_path):
    """The pipe of stderr is full before the command serves; requests are answered, and SIGTERM ends it."""
    reader, writer = os.pipe()
    said = tmp_path / "said"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests")}
    process = subprocess.Popen([sys.executable, "-c", FULL, str(said)], stderr=writer, env=environment)
    try:
        wait_for(lambda: said.exists() and said.read_text(), 120)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{said.read_text()}", timeout=120, trust_env=False
        ) as client:
            for _ in range(20):
                assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)
