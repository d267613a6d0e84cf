"""The server refuses the same input under `python -O`, which drops every `assert`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import test_bad_input as bad
from http_server import error_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SERVER = """
import sys

sys.path.insert(0, sys.argv[1])
from http_server import Running, make_llm

assert False, "this is not python -O"
with Running(make_llm(), warm_up=False, api_keys=("key",)) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def client():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests")}
    command = [sys.executable, "-O", "-c", SERVER, str(Path(__file__).parent)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert process.stdin and process.stdout
    try:
        url = process.stdout.readline().strip()
        headers = {"authorization": "Bearer key", "content-type": "application/json"}
        with httpx.Client(base_url=url, timeout=300, trust_env=False, headers=headers) as client:
            yield client
        process.stdin.close()
        assert process.wait(60) == 0, "it fell before it was told to end"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def post(client: httpx.Client, raw: str | bytes, route: str = "/v1/completions") -> dict:
    """The error that must come."""
    answer = client.post(route, content=raw)
    assert answer.status_code == 400, (raw[:200], answer.text)
    return error_of(answer)


def test_bad_input_is_refused_without_asserts_too(client):
    body = {"prompt": "x", "max_tokens": 9, "temperature": 0}
    want = client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    for fields, name in bad.BAD.values():
        assert post(client, f'{{"prompt": "x", {fields}}}')["param"].split(".")[0] == name
    for prompt in bad.PROMPTS.values():
        assert post(client, f'{{"prompt": {prompt}, "max_tokens": 1}}')["param"].split(".")[0] == "prompt"
    for raw in bad.BODIES.values():
        for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            post(client, raw, route)
    for tokens in ("[258]", "[-1]", "[2147483648]", "null", "[true]"):
        assert post(client, f'{{"tokens": {tokens}}}', "/detokenize")["param"].split(".")[0] == "tokens"
    assert client.post("/v1/completions", json=body).json()["choices"] == want


def test_keys_and_limits_hold_without_asserts_too(client):
    for headers, code in (
        ({"authorization": "Bearer kex"}, 401),
        ({"authorization": ""}, 401),
        ({"content-type": "text/plain"}, 415),
        ({"x": "1" * 17000}, 431),
    ):
        answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == code and error_of(answer)
    large = client.post("/v1/completions", content=b" " * (2**21 + 1))
    assert large.status_code == 413 and error_of(large)
    where = client.base_url.host, client.base_url.port
    with socket.create_connection(where, timeout=5) as caller:  # the body's own time-out is 10 s
        head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\n"
        caller.sendall(head + b"content-length: %d\r\n\r\n" % (2**21 + 1))
        assert caller.recv(2**16).startswith(b"HTTP/1.1 413"), "the length that was announced is enough"
