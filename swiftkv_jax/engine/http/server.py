"""Listening, and stopping: uvicorn with a patient ear for nobody, and a shutdown that loses no request."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swiftkv_jax.engine.http.app import Api
from swiftkv_jax.engine.http.errors import ApiError
from swiftkv_jax.engine.http.settings import HttpSettings
from swiftkv_jax.errors import UsageError

log = logging.getLogger("swiftkv_jax.http")
_LOOK_S = 0.25  # between looks at the engine's health


def protocol(settings: HttpSettings) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1, with time limits on what an application never sees."""

    class Guarded(H11Protocol):
        """Half a head, a client that does not read, and one connection too many are cut off."""

        _head: asyncio.TimerHandle | None = None
        _write: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:  # pyright: ignore
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                transport.abort()
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head, self._write = _cancelled(self._head), _cancelled(self._write)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
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

        def _await_head(self) -> None:
            self._head = self.loop.call_later(settings.header_timeout_s, self._too_slow)

        def _too_slow(self) -> None:
            self._refuse(ApiError(408, "the request did not arrive in time"))

        def _refuse(self, error: ApiError) -> None:
            if not self.transport.is_closing():
                body = error.body()
                head = (
                    f"HTTP/1.1 {error.status} Error\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
                )
                lines = "".join(f"{name}: {value}\r\n" for name, value in error.headers().items())
                self.transport.write(f"{head}{lines}x-request-id: none\r\n\r\n".encode() + body)
                self.transport.close()

    return Guarded


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Uvicorn(uvicorn.Server):
    """Signals are `serve`'s business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(api: Api, listener: socket.socket, say: Callable[[str], None]) -> int:
    """Answer until SIGTERM or SIGINT, then drain; a second signal stops at once. The exit code.

    0 after a signal; 1 when the engine was given up, so that a supervisor starts another process.
    """
    config = uvicorn.Config(
        api.asgi,
        http=protocol(api.settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=2 * api.settings.max_header_bytes,
        timeout_graceful_shutdown=5,
    )
    server, stop = _Uvicorn(config), asyncio.Event()

    def on_signal() -> None:
        server.should_exit = server.force_exit = stop.is_set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    api.models.start()
    running = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(_progress(api, say))
    try:
        looks = 0  # two in a row: a process that was paused as a whole is not dead when it wakes
        while not (stop.is_set() or running.done() or looks == 2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)
            looks = looks + 1 if api.models.dead else 0
        if stop.is_set() and not api.models.dead:
            say(f"stopping: {api.models.tickets} requests may finish within {api.settings.shutdown_s:g} s")
            draining = asyncio.create_task(api.models.drain())
            while not (draining.done() or server.force_exit):
                await asyncio.sleep(0.01)
            draining.cancel()
        server.should_exit = True
        await running
    finally:
        watching.cancel()
        api.models.stop()
    if api.models.dead:
        say("error: the engine has stopped; see the log")
    return int(api.models.dead)


async def _progress(api: Api, say: Callable[[str], None]) -> None:
    """A line for every tenth of the warm-up, and one when all is ready."""
    began, told = asyncio.get_running_loop().time(), -1
    while not api.models.ready:
        done, total = api.models.progress
        if total and 10 * done // total > told:
            told = 10 * done // total
            say(f"warming up: {done} of {total} programs")
        await asyncio.sleep(0.05)
    seconds = asyncio.get_running_loop().time() - began
    say(f"ready in {seconds:.1f} s; {api.metrics.compilations} programs compiled or read from the cache")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises:
      UsageError: the address is not to be had.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"cannot listen on {host}:{port} ({reason}); choose another --http HOST:PORT"
        ) from error
    listener.setblocking(False)
    return listener


def run(api: Api, listener: socket.socket, say: Callable[[str], None]) -> int:
    """Serve on a bound socket until told to stop; the exit code. When the engine was given up, no return."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    code = asyncio.run(serve(api, listener, say))
    if code:  # a thread that is stuck in the device would keep the process from ending
        logging.shutdown()
        os._exit(code)
    return code
