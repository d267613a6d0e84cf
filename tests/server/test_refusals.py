"""A refusal is cheap, and it arrives: one write, before the body is read, and no reset behind it."""

import asyncio
import http.client
import threading

import pytest
from http_server import Running, connect, make_llm, wait_for

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.limits import Keys
from swiftkv_jax.server.server import listen

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HEAD += b"content-length: %d\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "in pieces"])
def test_a_client_that_sends_a_too_large_body_before_reading_gets_413(served, chunked):
    """32 MiB, which no buffer of the system holds: the connection is not reset while they are sent."""
    content = (b"x" * 2**20 for _ in range(32)) if chunked else b"x" * 2**25
    caller = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    caller.request("POST", "/v1/completions", content, {"content-type": "application/json"})
    answer = caller.getresponse()
    assert answer.status == 413 and b'"body_too_large"' in answer.read()
    caller.close()
    assert served.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_client_that_keeps_sending_after_a_refusal_is_disconnected():
    with Running(make_llm(), warm_up=False, linger_s=0.5) as server, connect(server) as caller:
        caller.sendall(HEAD % 2**30)
        assert caller.recv(65536).startswith(b"HTTP/1.1 413")
        with pytest.raises(ConnectionError):
            while True:
                caller.sendall(b" " * 2**16)
        wait_for(lambda: not server.uvicorn.server_state.connections)


def test_a_full_server_refuses_before_the_body_comes_in_one_write(monkeypatch):
    """The connection stays open: the body is skipped when it comes."""
    writes: list[bytes] = []
    write = asyncio.selector_events._SelectorSocketTransport.write  # pyright: ignore

    def watched(self, data):
        writes.append(bytes(data))
        return write(self, data)

    with Running(make_llm(), warm_up=False, api_keys=("one", "two"), max_requests_per_key=1) as server:
        key = b"\r\nauthorization: Bearer one\r\n\r\n"
        head = HEAD.replace(b"\r\n\r\n", key)
        release = threading.Event()
        server.engine.probe = lambda point, request_id: point == "run" and release.wait(60)
        with connect(server) as first, connect(server) as caller:
            body = b'{"prompt": "x", "max_tokens": 1}'
            first.sendall(head % len(body) + body)
            wait_for(lambda: server.api.models.tickets)
            monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write", watched)
            for _ in range(2):
                caller.sendall(head % len(body))
                answer = caller.recv(65536)
                assert answer.startswith(b"HTTP/1.1 429") and b"retry-after" in answer
                assert answer.endswith(b"}}") and writes == [answer], "head and body together"
                writes.clear()
                caller.sendall(body)
            release.set()
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            wait_for(lambda: not server.api.models.tickets)
            caller.sendall(head % len(body) + body)
            assert caller.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_port_that_another_server_has_is_an_error_at_once():
    """Before that one serves, and before a model is loaded for nothing."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match=f"{port}"):
            listen("127.0.0.1", port)
    listen("127.0.0.1", port).close()


OPEN = (  # statuses for an unknown key, an API key and the metrics key
    ((), None, [200, 200, 200]),
    (("one",), None, [401, 200, 401]),
    (("one", "two"), None, [401, 403, 401]),
    ((), "m", [403, 403, 200]),
    (("one",), "m", [401, 403, 200]),
)


def test_metrics_are_open_to_the_right_keys_only():
    """Without keys they are open."""
    for keys, metrics_key, statuses in OPEN:
        found = []
        for key in (b"Bearer x", b"Bearer one", b"bearer m"):
            try:
                Keys(keys, metrics_key).check_metrics(key)
                found.append(200)
            except ApiError as error:
                found.append(error.status)
        assert found == statuses, (keys, metrics_key)
