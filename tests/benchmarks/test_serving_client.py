"""The client of `benchmarks.serving`: when it sees tokens."""

import asyncio
import json
import types

import pytest

from benchmarks.serving import client
from benchmarks.serving.client import Events


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_events_may_be_cut_anywhere(cut):
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
    events, got = Events(), []
    for at in range(0, len(stream), cut):
        got += events.feed(stream[at : at + cut])
    assert got == [b'{"a": 1}', '{"b": "é"}'.encode(), b"[DONE]"]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": ""}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


def test_the_client_timestamps_every_event_with_tokens(monkeypatch):
    """The client reads a clock that each piece of the answer advances. Events without choices are ignored."""
    now = [0.0]
    monkeypatch.setattr(client, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    pieces = [
        (1.0, HEAD),
        (1.5, usage(2, 0)),
        (2.0, TOKEN + TOKEN[:9]),
        (2.5, TOKEN[9:-1]),
        (4.0, b"\n: ping\n\n" + TOKEN + TOKEN),
        (7.0, usage(2, 4)),
        (9.0, DONE),
    ]

    class Reader:
        async def read(self, most: int) -> bytes:
            now[0], piece = pieces.pop(0)
            return piece

    moments: list[float] = []
    counted: dict[str, int] = {}
    connection = client.h11.Connection(client.h11.CLIENT)
    connection.send(client.h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(client.h11.EndOfMessage())
    asyncio.run(client.receive(connection, Reader(), moments, counted))
    assert moments == [2.0, 4.0, 4.0, 4.0] and counted == {"prompt_tokens": 2, "completion_tokens": 4}
