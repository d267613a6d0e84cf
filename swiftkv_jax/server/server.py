"""uvicorn with strict timeouts and a graceful shutdown."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.server.app import Api
from swiftkv_jax.server.logs import Log
from swiftkv_jax.server.protocol import protocol
from swiftkv_jax.server.settings import TELL_S

_LOOK_S = 0.25  # seconds between checks of the engine's health
_BACKLOG = 2048
# Seconds that a thread may keep Python's lock while the event loop waits for it (Python's default: 0.005).
_SWITCH_S = 0.0005


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(api: Api, listener: socket.socket, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once. Return the exit code.

    It is 0 after a signal, and 1 if the engine was given up, so that a supervisor starts another process.
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
        looks = 0  # two in a row: a process that was paused is not dead when it resumes
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
        say(f"error: {api.models.reason_of_death}")
    return int(api.models.dead)


async def _progress(api: Api, say: Callable[[str], None]) -> None:
    """Print a line for every tenth of the warm-up and every two seconds until requests are accepted, one when
    they are, and one when everything is compiled."""
    clock = asyncio.get_running_loop().time
    began, tenths, ready = clock(), 0, False
    spoke = began
    while not (ready and api.models.warm):
        done, total = api.models.progress
        if api.models.ready and not ready:
            ready = True
            rest = "" if api.models.warm else f" with {api.models.how_far}; the others are being compiled"
            if not api.settings.warm_up:
                rest = "; without a warm-up the first requests wait while their programs are compiled"
            say(f"ready in {clock() - began:.1f} s{rest}")
        elif (total and 10 * done // total > tenths) or (not ready and clock() - spoke > TELL_S):
            tenths, spoke = 10 * done // total if total else 0, clock()
            state = f": {api.models.how_far}" if total else " has begun"
            say(f"compiling{state}, {spoke - began:.0f} s so far")
        await asyncio.sleep(0.05)
    if not api.settings.warm_up:
        return
    count = api.metrics.compilations
    say(f"all is compiled after {clock() - began:.1f} s: {count} programs, made or read from the cache")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on an address that no other socket listens on; port 0 takes a free one."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)  # at once: two sockets can be bound to one port as long as none listens
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"cannot listen on {host}:{port} ({reason}): choose another --http HOST:PORT"
        ) from error
    listener.setblocking(False)
    return listener


def run(api: Api, listener: socket.socket, quiet: bool) -> int:
    """Serve on a bound socket until told to stop; return the exit code.

    If the engine was given up, or nobody reads stderr, it ends the process instead of returning: a stuck
    thread would keep the process from ending.
    """
    log = Log(sys.stderr)
    logging.basicConfig(level=logging.INFO, handlers=[log])
    logging.captureWarnings(True)
    sys.setswitchinterval(_SWITCH_S)
    code = asyncio.run(serve(api, listener, (lambda _: None) if quiet else log.say))
    if not log.stop() or code:
        os._exit(code)
    return code
