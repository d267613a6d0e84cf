"""uvicorn's HTTP/1.1 protocol, with limits on what an application never sees."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol

from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.settings import HttpSettings


class _Outgoing:
    """A transport that sends everything written in one turn of the event loop at once.

    A system call releases Python's lock, and while the engine computes it takes milliseconds to get it back.

    `close` before a request is `whole` only half-closes: a client that reads no answer before it has sent
    everything may go on sending for `linger_s` seconds, unread. A full close would reset the connection and
    lose the answer.
    """

    def __init__(self, transport: asyncio.Transport, whole: Callable[[], bool], linger_s: float):
        self._transport, self._whole, self._linger_s = transport, whole, linger_s
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self.lingering = False

    def __getattr__(self, name: str):
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        if self.is_closing() or self._whole():
            return self._transport.close()
        self.lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(self._linger_s, self._transport.close)


def protocol(settings: HttpSettings) -> type[H11Protocol]:

    class Guarded(H11Protocol):
        """Cuts off incomplete heads, clients that do not read, and connections above the limit."""

        _head: asyncio.TimerHandle | None = None
        _write: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:  # pyright: ignore
            super().connection_made(_Outgoing(transport, self._whole, settings.linger_s))  # pyright: ignore
            if len(self.connections) > settings.max_connections:
                self.transport.abort()
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head, self._write = _cancelled(self._head), _cancelled(self._write)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._head is None and (self.cycle is None or self.cycle.response_complete):
                self._await_head()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._head = _cancelled(self._head)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._head = _cancelled(self._head)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write = self.loop.call_later(settings.write_timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            self._write = _cancelled(self._write)
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "this is not a valid HTTP request"))

        def _whole(self) -> bool:
            """Whether the request has arrived completely, so that the client sends nothing more."""
            return self.cycle is not None and not self.cycle.more_body

        def _await_head(self) -> None:
            late = ApiError(408, "the request did not arrive in time")
            self._head = self.loop.call_later(settings.header_timeout_s, self._refuse, late)

        def _refuse(self, error: ApiError) -> None:
            if not self.transport.is_closing():
                body = error.body()
                fields = {"connection": "close", "content-length": len(body), "x-request-id": "none"}
                lines = [f"{name}: {value}\r\n" for name, value in (fields | error.headers()).items()]
                head = f"HTTP/1.1 {error.status} Error\r\n{''.join(lines)}\r\n"
                self.transport.write(head.encode() + body)
                self.transport.close()

    return Guarded


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
