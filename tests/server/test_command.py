"""`serve.py --http`: wrong usage is told in a line; SIGTERM under load loses no request."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_server import ROOT, error_of, started, wait_for

from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.settings import Settings
from swiftkv_jax.server.flags import address, http_settings
from swiftkv_jax.server.main import build_parser, for_server, main
from swiftkv_jax.server.ray import main as replicas

# Programs compile while the server drains, so what runs gets time enough on a busy machine.
SMALL = "--max-num-seqs 2 --max-num-batched-tokens 32 --max-model-len 128 --no-warm-up".split()
SMALL += ["--shutdown-timeout", "300"]


WRONG = (  # beside --http :0; the first flag is named
    "--input x|--api-key-file /nowhere|--metrics-key-file /nowhere|--shutdown-timeout -1|--queue-timeout nan|"
    "--max-queued-requests 0|--busy-status 500|--metrics-prefix a-b|--mesh depth=2 --quiet|"
    "--mesh tensor=4096 --quiet|--mesh tensor=-1 --quiet"
).split("|")


@pytest.mark.parametrize(
    "flags, name",
    [
        (["--http", "0.0.0.0:0"], "key"),
        (["--http", "[::]:0"], "key"),
        *((["--http", where], "--http") for where in ("127.0.0.1:port", "127.0.0.1:70000", "70000", "1:2:3")),
        (["--http", "203.0.113.9:0", "--insecure"], "203.0.113.9:0"),
        *((["--http", ":0", "--api-key", key], "--api-key") for key in ("", "a\tb")),
        (["--http", ":0", "--api-key", "k", "--metrics-key-file", "K"], "API keys"),
        (["--http", ":0", "--temperature", "9"], "temperature"),
        (["--http", ":0", "--metrics-key-file", "accent"], "ASCII"),
        (["--http", ":0", "--api-key-file", "nowhere"], "nowhere: No such file or directory\n"),
        (["--htpp"], "--http"),
        *((["--http", ":0", *words.split()], words.split()[0].lstrip("-")) for words in WRONG),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_a_one_line_error(capsys, tmp_path, monkeypatch, flags, name):
    monkeypatch.chdir(tmp_path)
    Path("K").write_text("k\n")
    Path("accent").write_text("é\n")
    assert main([*flags]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1 and error.startswith("error: ")


def test_replicas_are_counted_from_one(capsys):
    assert replicas(["--replicas", "0"]) == 2
    assert capsys.readouterr().err == "error: --replicas must be at least 1, not 0\n"


def test_host_and_port_are_parsed_from_every_spelling():
    assert address("127.0.0.1:80") == ("127.0.0.1", 80) and address(":9") == ("127.0.0.1", 9)
    assert address("localhost") == ("localhost", 8000) and address("[::1]:5") == ("::1", 5)
    assert address("8001") == ("127.0.0.1", 8001) and address("10.0.0.1") == ("10.0.0.1", 8000)
    args = build_parser().parse_args(["--http", ":0", "--api-key", " one "])
    assert http_settings(args, "model", "two\n").api_keys == ("one", "two"), "without a secret's line end"


def test_every_engine_setting_has_a_flag():
    flags = vars(build_parser().parse_args([]))
    assert {f.name for f in dataclasses.fields(Settings)} - set(flags) == {"prefix_caching"}


def test_two_models_share_what_their_weights_leave_of_a_device():
    class Memory:
        platform = "tpu"

        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 30}

    class Loaded:
        settings, devices, defaults = Settings(max_model_len=64), [Memory()], SamplingParams()

        def replace(self, defaults, **settings):
            assert "num_pages" not in settings, "those that were asked for, or what the fraction leaves"
            return defaults.temperature, settings["memory_fraction"]

    given = for_server(Loaded(), {"temperature": 0.5}, 2)
    assert given == (0.5, pytest.approx(0.3 + (0.9 - 0.3) / 2))


def ports(process: subprocess.Popen) -> set[int]:
    """The ports on which a process accepts connections."""
    place = Path(f"/proc/{process.pid}")
    sockets = {os.readlink(link) for link in (place / "fd").iterdir() if link.is_symlink()}
    tables = [(place / "net" / kind).read_text(encoding="ascii") for kind in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [row for row in rows if row[3] == "0A"]
    return {int(row[1].rpartition(":")[2], 16) for row in listening if f"socket:[{row[9]}]" in sockets}


def check_sigterm(process: subprocess.Popen, client: httpx.Client) -> None:
    """Requests that run when the signal comes are answered whole; later ones are refused; the code is 0."""
    body = {"prompt": "The function", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def ask():
        answers.append(client.post("/v1/completions", json=body))

    def running() -> bool:
        found = re.search(r"num_requests_running\{.*\} ([\d.]+)", client.get("/metrics").text)
        return found is not None and float(found[1]) > 0

    callers = [threading.Thread(target=ask) for _ in range(6)]
    for caller in callers:
        caller.start()
    wait_for(running, 300)
    process.send_signal(signal.SIGTERM)
    for caller in callers:
        caller.join(300)
    assert process.wait(60) == 0
    whole = [json.loads(answer.content) for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) == 6 and whole
    assert all(answer["usage"]["completion_tokens"] == 100 for answer in whole)
    assert all(error_of(answer)["code"] == "server_is_overloaded" for answer in refused)


@contextlib.contextmanager
def running() -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    """A server of the demo's model that is ready, and a client."""
    command = [sys.executable, str(ROOT / "serve.py"), "--http", "127.0.0.1:0", *SMALL]
    headers = {"authorization": "Bearer from-the-environment"}
    with (
        started(command, SWIFTKV_API_KEY="from-the-environment") as (process, url, _),
        httpx.Client(base_url=url, timeout=300, trust_env=False, headers=headers) as client,
    ):
        yield process, client


@pytest.mark.slow
def test_sigterm_under_load_loses_no_request():
    with running() as (process, client):
        stranger = httpx.post(f"{client.base_url}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert stranger.status_code == 401 and error_of(stranger)
        first = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "model": "teacher"})
        assert first.status_code == 200, first.text
        said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        chat = client.post("/v1/chat/completions", json=said)
        assert chat.status_code == 200 and chat.json()["usage"]["completion_tokens"] in (1, 2)
        said["messages"][0]["role"] = "<|end|>"
        chat = client.post("/v1/chat/completions", json=said)
        assert chat.status_code == 400 and str(ROOT) not in chat.text
        assert ports(process) == {client.base_url.port}, "no other than was asked for"
        check_sigterm(process, client)


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    """The first one gives what runs 300 seconds here."""
    body = {"prompt": "The function", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with running() as (process, client), client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: client.get("/ready").status_code == 503, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        with pytest.raises(httpx.TransportError):
            list(lines)


@pytest.mark.soak
def test_twenty_sigterms_under_load_lose_no_request():
    for _ in range(20):
        with running() as (process, client):
            check_sigterm(process, client)
