"""Streaming of a call's completions: from the engine's thread to the event loop, and on to the client."""

import asyncio
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, aclosing

from starlette.responses import Response

from swiftkv_jax.engine.engine import Group
from swiftkv_jax.engine.request import CompletionOutput, Request
from swiftkv_jax.server.admission import Ticket
from swiftkv_jax.server.errors import ApiError

_ANSWER = typing.TypeVar("_ANSWER")
Delta = tuple[int, CompletionOutput]  # prompt number, what is new of one of its completions


class Stream:
    """The completions of one call as they grow. Used as `async with`, which aborts what is left.

    Attributes:
      numbers: request id -> prompt number. sequences: completions in all. left: unfinished ones.
      inbox: what came of them, put there on `loop`.
    """

    def __init__(self, service, requests: list[Request], ticket: Ticket):
        self._service, self.requests, self.ticket = service, requests, ticket
        self.numbers = {request.request_id: number for number, request in enumerate(requests)}
        self.left = self.sequences = sum(request.params.n for request in requests)
        self.ended: set[tuple[str, int]] = set()  # completions whose end was posted; the engine's thread only
        self.loop = asyncio.get_running_loop()
        self.inbox: asyncio.Queue = asyncio.Queue()

    async def __aenter__(self) -> "Stream":
        self._service.enter(self)
        try:
            first = await self.inbox.get()
        except BaseException:
            self._service.leave(self)
            raise
        if isinstance(first, Exception):
            raise first
        return self

    async def __aexit__(self, *_) -> None:
        if self.left:
            self._service.leave(self)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while self.left:
            post = await self.inbox.get()
            if isinstance(post, Exception):
                raise post
            for delta in post:
                self.left -= delta[1].finish_reason is not None
                yield delta


def news(stream: Stream, group: Group) -> list[Delta]:
    """The new part of a group's completions; each end is reported once."""
    out, key = [], group.request.request_id
    for sequence in group.sequences:
        if (key, sequence.child) in stream.ended:
            continue
        delta = sequence.delta()
        if delta.finish_reason:
            stream.ended.add((key, sequence.child))
        if delta.finish_reason or delta.token_ids or delta.text:
            out.append((stream.numbers[key], delta))
    return out


def ends(stream: Stream, request: Request) -> list[Delta]:
    """An error for each completion of a request whose end was not reported yet."""
    key = request.request_id
    left = [child for child in range(request.params.n) if (key, child) not in stream.ended]
    stream.ended |= {(key, child) for child in left}
    why = "the engine could not continue this request"
    outputs = [CompletionOutput(index=child, finish_reason="error", error=why) for child in left]
    return [(stream.numbers[key], output) for output in outputs]


async def until_disconnect(receive, work: Coroutine[typing.Any, typing.Any, _ANSWER]) -> _ANSWER:
    """Return the result of `work`; if the client disconnects first, `work` is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client left")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """Server-sent events. `held` is closed when the stream ends, in whatever way."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], held: AsyncExitStack):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._held = chunks, held

    async def __call__(self, scope, receive, send) -> None:
        try:
            async with self._held:
                await until_disconnect(receive, self._send(send))
        except ApiError as error:
            if error.status != 499:  # a disconnected client needs no answer, and is no error to log
                raise

    async def _send(self, send) -> None:
        async with aclosing(self._chunks) as chunks:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
