"""Replicas of the server behind Ray Serve: `swiftkv replicas MODEL --replicas 2`.

    Ray's proxy -> Front, which names the prompt -> PrefixRouter, which chooses -> Replica: the whole server

Takes the flags of `serve.py --http` and some of its own. Each replica has an engine, a queue and metrics of
its own: `/metrics`, `/ready` and `/health` are answered by one of them; Ray replaces one that is unhealthy.
"""

import argparse
import asyncio
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Mapping

from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code
from swiftkv_jax.engine.settings import Settings
from swiftkv_jax.server import affinity, flags
from swiftkv_jax.server import main as serving

_SCOPE = ("http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")
_ROUTER = "swiftkv_jax.server.ray_router.PrefixRouter"
_REPLICAS_PER_FRONT = 8


class Replica:
    """One server, made by Ray on its own machine. Ray sends it nothing before it is warm."""

    async def __init__(self, args: argparse.Namespace):
        settings, sampling = serving.server_settings(args, None)
        self._name = _ray("ray.serve").get_replica_context().replica_id.unique_id.encode()
        self.api = serving.make_api(args, settings, sampling)
        self.api.models.start()
        while not (self.api.models.ready or self.api.models.dead):
            await asyncio.sleep(0.05)

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica for which this raises."""
        if not self.api.models.healthy:
            raise RuntimeError("the engine does not answer")

    async def answer(self, _: list[bytes], scope: dict, body: bytes) -> AsyncGenerator[dict, None]:
        """The ASGI messages that answer a request; `_` is for the router alone."""
        outbox: asyncio.Queue = asyncio.Queue()
        inbox: asyncio.Queue = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body})

        async def run() -> None:
            try:
                await self.api.asgi(scope | {"type": "http"}, inbox.get, outbox.put)
            finally:
                outbox.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await outbox.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", self._name)]
                yield message
            await task
        finally:  # the client disconnected, or the answer is complete
            inbox.put_nowait({"type": "http.disconnect"})
            await asyncio.gather(task, return_exceptions=True)

    def __del__(self):
        if hasattr(self, "api"):
            self.api.models.stop()


class Front:
    """Reads a whole request, names its prompt, and forwards a replica's answer."""

    def __init__(self, replicas, page_size: int, max_body_bytes: int, max_audio_bytes: int):
        self._replicas, self._page_size = replicas.options(stream=True), page_size
        self._most, self._most_audio = max_body_bytes, max_audio_bytes

    def __serve_build_asgi_app__(self):
        async def app(scope, receive, send) -> None:  # a function: a method would be taken for ASGI 2
            await self.call(scope, receive, send)

        return app

    async def call(self, scope, receive, send) -> None:
        """Answer a request (an ASGI application)."""
        from swiftkv_jax.server.errors import ApiError
        from swiftkv_jax.server.limits import AUDIO
        from swiftkv_jax.server.streams import until_disconnect

        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        sound = scope["path"].startswith(AUDIO)
        most, body, more = self._most_audio if sound else self._most, bytearray(), True
        while more and len(body) <= most:  # a replica refuses what is longer
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        with contextlib.suppress(ApiError):  # the client disconnected
            await until_disconnect(receive, self._relay(scope, bytes(body), send))

    async def _relay(self, scope, body: bytes, send) -> None:
        """Forward a replica's answer. If the replica dies, this answer ends with an error."""
        from swiftkv_jax.server.errors import ApiError

        lost_by = (_ray("ray.exceptions").RayError, _ray("ray.serve.exceptions").RayServeException)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        key = dict(scope["headers"]).get(b"authorization", b"")
        stream = self._replicas.answer.remote(affinity.names(body, key, self._page_size), plain, body)
        begun = over = False
        try:
            async for message in stream:
                await send(message)
                begun = True
            over = True
        except lost_by:
            over = True
            lost = ApiError(503, "the replica that was answering has ended; try again", retry_after=1)
            if not begun:
                heads = [(k.encode(), v.encode()) for k, v in lost.headers().items()]
                await send({"type": "http.response.start", "status": lost.status, "headers": heads})
            event = b"data: " + lost.body() + b"\n\n"
            await send({"type": "http.response.body", "body": event if begun else lost.body()})
        finally:
            if not over:
                stream.cancel()


def _ray(module: str):
    """Import a module of Ray by its name: to some tools, `import ray` in this folder looks like this file."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"this needs {error.name}: pip install 'swiftkv-jax[ray]'") from error


def build_parser() -> Parser:
    """The flags of serve.py, and Ray's."""
    p = serving.build_parser()
    p.usage = "%(prog)s [--model DIR] [--replicas N] [--http HOST:PORT] [flags of serve.py --http]"
    group = p.add_argument_group("ray")
    p.flag("--replicas N", "servers (default 2)", group, type=int, default=2)
    p.flag("--num-cpus X", "for each (default 1)", group, type=float, default=1.0)
    p.flag("--num-gpus X", "for each (default 0)", group, type=float, default=0.0)
    about = "address of a Ray cluster: HOST:PORT, or auto for this machine's (default local: a new cluster)"
    p.flag("--ray-address X", about, group, default="local")
    p.set_defaults(http=flags.DEFAULT)
    return p


def application(args: argparse.Namespace, environment: Mapping[str, str]):
    """Ray Serve's application of `args`; its replicas have `environment` besides their machines' own."""
    serve = _ray("ray.serve")
    settings, _ = serving.server_settings(args, None)
    most = (args.max_num_seqs or Settings.max_num_seqs) + settings.max_queued_requests
    replicas = serve.deployment(
        name="Replica",
        num_replicas=args.replicas,
        max_ongoing_requests=2 * most,  # a server refuses what exceeds its queue, and says when to retry
        ray_actor_options={
            "num_cpus": args.num_cpus,
            "num_gpus": args.num_gpus,
            "runtime_env": {"env_vars": dict(environment)},
        },
        request_router_config=serve.config.RequestRouterConfig(request_router_class=_ROUTER),
        graceful_shutdown_timeout_s=settings.shutdown_s,
    )(Replica)
    fronts = serve.deployment(
        name="Front",
        num_replicas=-(-args.replicas // _REPLICAS_PER_FRONT),
        max_ongoing_requests=4 * most * _REPLICAS_PER_FRONT,
        ray_actor_options={"num_cpus": 0.1},
    )(serve.ingress()(Front))
    page_size = args.page_size or Settings.page_size
    return fronts.bind(replicas.bind(args), page_size, settings.max_body_bytes, settings.max_audio_bytes)


def main(
    argv: list[str] | None = None, api_key: str | None = None, environment: Mapping[str, str] | None = None
) -> int:
    """Serve until SIGTERM or Ctrl-C; exit code 0, 2 for bad usage, 1 for a failure.

    Args:
      api_key: one more key. environment: variables of the replicas' processes.
    """
    return exit_code(lambda: _run(build_parser().parse_args(argv), api_key, environment or {}))


def _run(args: argparse.Namespace, api_key: str | None, environment: Mapping[str, str]) -> int:
    if api_key:
        args.api_key = [*(args.api_key or ()), api_key]
    integer("--replicas", args.replicas, 1)
    serving.server_settings(args, None)
    host, port = flags.address(args.http)
    if args.compare or not port:
        raise UsageError("--compare and port 0 are for serve.py; with replicas give one model and a port")
    ray, serve = _ray("ray"), _ray("ray.serve")
    own = {"include_dashboard": False} if args.ray_address == "local" else {}
    ray.init(address=args.ray_address, log_to_driver=False, **own)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(args, environment), name="swiftkv", route_prefix="/")
        if not args.quiet:
            print(f"listening http://{host}:{port} ({args.replicas} replicas)", file=sys.stderr, flush=True)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0
