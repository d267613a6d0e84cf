"""Requests over HTTP, streamed and timed: a task for each, on asyncio and h11 to stay light."""

import asyncio
import dataclasses
import json
import os
import ssl
import time
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

import h11

from benchmarks.serving.timeline import Timeline

# What an answer that does not follow this API leads to.
_WRONG = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, h11.ProtocolError)
_LONGEST_S = 6 * 60 * 60  # for one request, as vLLM's client has it


@dataclasses.dataclass(frozen=True)
class Ask:
    """Token ids to read, and how many tokens to answer; the answer may not end before."""

    prompt: tuple[int, ...]
    outputs: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A server: its address without a path, and the model to name."""

    url: str
    model: str


class Failed(Exception):
    """A request did not get what it asked for."""


class Events:
    """Parser of server-sent events from bytes that may be cut anywhere; comments are dropped."""

    def __init__(self):
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event completed by these bytes."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        lines = [line for event in whole for line in event.split(b"\n")]
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def run(
    target: Target, asks: Sequence[Ask], delays: Sequence[float], max_concurrency: int | None = None
) -> tuple[list[Timeline], float]:
    """Send each request after its delay in seconds; their timelines, and the seconds all of it took."""
    return asyncio.run(_run(target, asks, delays, max_concurrency))


async def _run(target, asks, delays, most) -> tuple[list[Timeline], float]:
    places = asyncio.Semaphore(most or len(asks) or 1)
    began = time.perf_counter()

    async def one(ask: Ask, delay: float) -> Timeline:
        due = began + delay
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        async with places:
            return await send(target, ask, due)

    timelines = await asyncio.gather(*(one(*pair) for pair in zip(asks, delays, strict=True)))
    return timelines, time.perf_counter() - began


async def send(target: Target, ask: Ask, due: float) -> Timeline:
    """Send one request; any failure becomes its timeline's error."""
    sent, moments = time.perf_counter(), []
    usage: dict[str, int] = {}
    error = ""
    try:
        async with asyncio.timeout(_LONGEST_S):
            await _stream(target, ask, moments, usage)
        got = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if got != (len(ask.prompt), ask.outputs) or not moments:
            wanted = f"{len(ask.prompt)} tokens in and {ask.outputs} out"
            raise Failed(f"asked for {wanted}, the server counted {got[0]} and {got[1]}")
    except Failed as failure:
        error = str(failure)
    except _WRONG as failure:
        error = f"{type(failure).__name__}: {failure}"
    tokens = {"prompt_tokens": usage.get("prompt_tokens", len(ask.prompt))}
    tokens |= {"output_tokens": usage.get("completion_tokens", 0)}
    return Timeline(due=due, sent=sent, events=tuple(moments), error=error, **tokens)


def body(target: Target, ask: Ask) -> dict:
    """The request that `vllm bench serve --ignore-eos --temperature 0` sends, with the prompt as ids."""
    sampling = {"repetition_penalty": 1.0, "temperature": 0.0, "logprobs": None, "ignore_eos": True}
    lengths = dict.fromkeys(("max_tokens", "min_tokens"), ask.outputs)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": target.model, "prompt": list(ask.prompt)} | sampling | lengths | stream


async def _stream(target: Target, ask: Ask, moments: list[float], usage: dict[str, int]) -> None:
    """Fill in the moments of events with choices, and the server's token counts, as they arrive."""
    where = urlsplit(target.url)
    tls = ssl.create_default_context() if where.scheme == "https" else None
    port = where.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(where.hostname, port, ssl=tls)
    try:
        connection = h11.Connection(h11.CLIENT)
        content = json.dumps(body(target, ask)).encode()
        headers = {"Host": where.netloc, "Content-Type": "application/json", "Connection": "close"}
        headers |= {"Content-Length": str(len(content)), "x-request-id": f"bench-{uuid.uuid4().hex}"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        path = f"{where.path.rstrip('/')}/v1/completions"
        head = h11.Request(method="POST", target=path, headers=list(headers.items()))
        for event in (head, h11.Data(data=content), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        await receive(connection, reader, moments, usage)
    finally:
        writer.close()


async def receive(connection: h11.Connection, reader, moments: list[float], usage: dict[str, int]) -> None:
    """Read to the end of the stream.

    Raises:
      Failed: the server refused, reported an error, or stopped before `[DONE]`.
    """
    status, events, refusal, now = 0, Events(), b"", time.perf_counter()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data, now = await reader.read(2**16), time.perf_counter()
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status != 200:
            refusal += event.data
        elif isinstance(event, h11.Data):
            for message in events.feed(bytes(event.data)):
                if message == b"[DONE]":
                    return
                answer = json.loads(message)
                if problem := answer.get("error"):
                    raise Failed(f"after {len(moments)} events: {problem.get('message', problem)}")
                if answer.get("choices"):
                    moments.append(now)
                elif answer.get("usage"):
                    usage |= answer["usage"]
        elif status != 200 and isinstance(event, h11.EndOfMessage):
            try:
                reason = json.loads(refusal)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                reason = refusal[:200].decode(errors="replace")
            raise Failed(f"HTTP {status}: {reason}")
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            raise Failed(f"the stream ended after {len(moments)} events, without [DONE]")
