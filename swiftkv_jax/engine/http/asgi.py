"""Answers that notice when their client has gone."""

import asyncio
import typing
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing

from starlette.responses import Response

from swiftkv_jax.engine.http.errors import ApiError

_ANSWER = typing.TypeVar("_ANSWER")


async def until_disconnect(receive, work: Coroutine[typing.Any, typing.Any, _ANSWER]) -> _ANSWER:
    """What `work` returns; when the client leaves first, `work` is cancelled.

    Raises:
      ApiError: 499, which nobody reads but the log.
    """
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
            if error.status != 499:  # who left needs no answer, and is no fault to log
                raise

    async def _send(self, send) -> None:
        async with aclosing(self._chunks) as chunks:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
