"""The client of `benchmarks.serving`: what it sends, when it sees tokens, and what it counts as failed."""

import asyncio
import json
import threading
import types
from contextlib import contextmanager

import pytest

from benchmarks.serving import client
from benchmarks.serving.client import Ask, Events, Target, run
from benchmarks.serving.timeline import summary


@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_events_may_be_cut_anywhere(cut):
    stream = b': ping\n\ndata: {"a": 1}\r\n\r\ndata:{"b": "\xc3\xa9"}\n\ndata: [DONE]\n\n'
    events, got = Events(), []
    for at in range(0, len(stream), cut):
        got += events.feed(stream[at : at + cut])
    assert got == [b'{"a": 1}', '{"b": "é"}'.encode(), b"[DONE]"]


class Script:
    """A server that answers request i as `answers[i]` says: bytes to send and seconds to wait."""

    def __init__(self, *answers):
        self.answers, self.heads, self.most, self.now = list(answers), [], 0, 0

    async def __call__(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.heads.append((head, json.loads(await reader.readexactly(length))))
        self.now += 1
        self.most = max(self.most, self.now)
        for part in self.answers.pop(0):
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(part)
                await writer.drain()
        self.now -= 1
        writer.close()


@contextmanager
def scripted(*answers):
    script, ready, loop = Script(*answers), threading.Event(), asyncio.new_event_loop()
    server: list = []

    async def start():
        server.append(await asyncio.start_server(script, "127.0.0.1", 0))
        ready.set()

    def serve():
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        port = server[0].sockets[0].getsockname()[1]
        yield Target(f"http://127.0.0.1:{port}/", "m"), script
    finally:

        async def stop():
            server[0].close()
            rest = asyncio.all_tasks(loop) - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), loop)
        thread.join(20)
        loop.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"text": ""}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int) -> bytes:
    return b'data: {"choices": [], "usage": {"prompt_tokens": %d, "completion_tokens": %d}}\n\n' % (
        prompt,
        completion,
    )


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


def test_failed_requests_are_counted_and_never_timed():
    def refuse(status: str, content: str) -> list[bytes]:
        return [f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n{content}".encode()]

    broken = [HEAD, TOKEN, b'data: {"error": {"message": "the model failed"}}\n\n', DONE]
    short = [HEAD, TOKEN, usage(1, 1), DONE]
    good = [HEAD, TOKEN, usage(1, 2), DONE]
    cases = {
        "HTTP 503: <html>busy": refuse("503 Busy", "<html>busy"),
        "HTTP 429: one at a time": refuse("429 No", '{"error": {"message": "one at a time"}}'),
        "without [DONE]": [HEAD, TOKEN, usage(1, 2)],
        "the model failed": broken,
        "the server counted 1 and 1": short,
        "JSONDecodeError": [HEAD, b"data: {oops\n\n"],
        "AttributeError": [HEAD, b"data: 7\n\n"],
        "RemoteProtocolError": [b"SMTP ready\r\n\r\n"],
    }
    asks = [Ask((4,), 2)] * (len(cases) + 1)
    with scripted(*cases.values(), good) as (target, _):
        # One after the other, so that request i gets answer i.
        timelines, seconds = run(target, asks, [0.0] * len(asks), max_concurrency=1)
    errors = [t.error for t in timelines]
    assert errors.pop() == ""
    assert all(want in got for want, got in zip(cases, errors, strict=True)), errors
    got = summary(timelines, seconds)
    assert (got["completed"], got["failed"], got["total_output_tokens"]) == (1, len(cases), 2)
    assert got["mean_ttft_ms"] == 1e3 * timelines[-1].ttft
    gone, _ = run(target, asks[:1], [0.0])
    assert "OSError" in gone[0].error or "Refused" in gone[0].error


def test_no_more_than_max_concurrency_are_under_way():
    parts = [HEAD, 0.05, TOKEN, usage(1, 1), DONE]
    with scripted(*[parts] * 6) as (target, script):
        timelines, _ = run(target, [Ask((4,), 1)] * 6, [0.0] * 6, max_concurrency=2)
    assert script.most == 2 and not any(t.error for t in timelines)
    queued = sorted(t.queued for t in timelines)
    assert queued[1] < queued[2] >= 0.04  # two go at once, the others wait for them
