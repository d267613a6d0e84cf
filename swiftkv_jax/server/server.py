"""Listening, and stopping: a shutdown ends what runs in time, and tells everybody else to come back."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from swiftkv_jax.errors import UsageError
from swiftkv_jax.server.app import Api
from swiftkv_jax.server.logs import Log
from swiftkv_jax.server.protocol import protocol
from swiftkv_jax.server.settings import TELL_S

_LOOK_S = 0.25  # between looks at the engine's health
_BACKLOG = 2048
_SWITCH_S = (
    0.0005  # how long a thread may keep Python's lock while the event loop waits for it; Python: 0.005
)


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
        say(f"error: {api.models.last_words}")
    return int(api.models.dead)


async def _progress(api: Api, say: Callable[[str], None]) -> None:
    """A line for every tenth of the warm-up, and every two seconds until requests are taken; one when they
    are, and one when nothing is left."""
    clock = asyncio.get_running_loop().time
    began, told, ready = clock(), 0, False
    spoke = began
    while not (ready and api.models.warm):
        done, total = api.models.progress
        if api.models.ready and not ready:
            ready = True
            say(f"ready in {clock() - began:.1f} s{_left_to_compile(api)}")
        elif (total and 10 * done // total > told) or (not ready and clock() - spoke > TELL_S):
            told, spoke = 10 * done // total if total else 0, clock()
            how = f": {api.models.how_far}" if total else " has begun"
            say(f"compiling{how}, {spoke - began:.0f} s so far")
        await asyncio.sleep(0.05)
    if not api.settings.warm_up:
        return
    count = api.metrics.compilations
    say(f"all is compiled after {clock() - began:.1f} s: {count} programs, made or read from the cache")


def _left_to_compile(api: Api) -> str:
    """What requests may yet wait for, as the end of a line."""
    if not api.settings.warm_up:
        return "; without a warm-up the first requests wait while their programs are compiled"
    return "" if api.models.warm else f" with {api.models.how_far}; the others are being compiled"


def listen(host: str, port: int) -> socket.socket:
    """A socket that nobody else can listen at, as callers see once it is served; port 0 takes a free one.

    Raises:
      UsageError: the address is not to be had.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)  # at once: two that are only bound to one port may both be
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


def run(api: Api, listener: socket.socket, quiet: bool) -> int:
    """Serve on a bound socket until told to stop; the exit code.

    No return when the engine was given up, or when nobody reads stderr: a thread that is stuck would keep the
    process from ending.
    """
    log = Log(sys.stderr)
    logging.basicConfig(level=logging.INFO, handlers=[log])
    logging.captureWarnings(True)
    sys.setswitchinterval(_SWITCH_S)
    code = asyncio.run(serve(api, listener, (lambda _: None) if quiet else log.say))
    if not log.stop() or code:
        os._exit(code)
    return code
