"""A real server on a free port of this machine, around a tiny model; and clients for it."""

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import generated
import httpx
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_engine as tiny

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.server import protocol, server
from swiftkv_jax.server.app import Api
from swiftkv_jax.server.settings import HttpSettings

_T = typing.TypeVar("_T")
NAME, WATCHER = "tiny", "watcher"
ROOT = Path(__file__).parents[2]
SIZES = tiny.SIZES
LONG = {"prompt": "The cache", "max_tokens": 50, "ignore_eos": True}


@functools.cache
def model():
    """Two layers: compiling is what these tests wait for."""
    return tiny.make_model(KVPlan.swiftkv(2, 1), num_layers=2)


def make_llm(tokenizer=None, **changes) -> LLM:
    return LLM.from_model(*model(), tokenizer or tiny.Bytes(), **(SIZES | changes))


class Running:
    """A server in a thread. Attributes: api; url; http, a client with a key when there is one."""

    def __init__(self, llm: LLM, others: dict[str, LLM] | None = None, name: str = NAME, **settings):
        if len(settings.get("api_keys", ())) > 1:
            settings.setdefault("metrics_key", WATCHER)
        self.api = Api(llm, HttpSettings(model_name=name, **settings), others)
        self._listener = server.listen("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        key = self.api.settings.api_keys[:1]
        headers = {"authorization": f"Bearer {key[0]}"} if key else {}
        self.http = httpx.Client(base_url=self.url, timeout=300, trust_env=False, headers=headers)
        config = uvicorn.Config(
            self.api.asgi,
            http=protocol.protocol(self.api.settings),
            lifespan="on",
            log_config=None,
            access_log=False,
            ws="none",
            h11_max_incomplete_event_size=2 * self.api.settings.max_header_bytes,
        )
        self.uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.uvicorn.serve([self._listener])

    def __enter__(self) -> "Running":
        self._thread.start()
        try:
            wait_for(lambda: self.uvicorn.started and self.api.models.warm, 1500)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.http.close()
        self.uvicorn.should_exit = self.uvicorn.force_exit = True
        self._thread.join(30)
        services = {name: model.service for name, model in self.api.models.by_name.items()}
        left = [name for name, service in services.items() if service._thread.is_alive()]
        assert not left and not self._thread.is_alive(), f"outlive their server: {left}"

    @property
    def engine(self):
        return self.api.llm.engine

    def metrics(self) -> str:
        """The text of `/metrics`, read with the metrics key if there is one."""
        key = self.api.settings.metrics_key
        answer = self.http.get("/metrics", headers={"authorization": f"Bearer {key}"} if key else {})
        assert answer.status_code == 200, answer.text
        return answer.text

    def idle(self) -> bool:
        """Nothing runs, and every page, lane and ticket is back."""
        engines = [model.llm.engine for model in self.api.models.by_name.values()]
        pages = [engine.scheduler.pages for engine in engines]
        free = all(each.available == each.total for each in pages)
        return free and not any(engine.busy for engine in engines) and not self.api.models.tickets

    def read_all(self) -> None:
        """Return when the server has begun all that was sent to it: one is answered that came after it."""
        assert httpx.get(f"{self.url}/health", trust_env=False, timeout=60).status_code == 200

    def complete(self, prompt, **fields) -> dict:
        """The body of a completion that must succeed."""
        answer = self.http.post("/v1/completions", json={"prompt": prompt, "temperature": 0} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, route: str = "/v1/completions", **body) -> list:
        """The events of a streamed answer, [DONE] included as a string."""
        with self.http.stream("POST", route, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Canary(threading.Thread):
    """Streams one greedy answer again and again; `texts` is what came."""

    def __init__(self, server: Running):
        super().__init__(daemon=True)
        self.server, self.texts, self.stop = server, [], threading.Event()

    def run(self) -> None:
        body = {"prompt": "canary", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as client:
            while not self.stop.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [json.loads(x[6:]) for x in answer.iter_lines() if x.startswith("data: {")]
                self.texts.append("".join(line["choices"][0]["text"] for line in lines))


def held(server: Running) -> dict[str, int]:
    """Counts of resources that a server could leak; some are of the whole process."""
    pools = ("encode", "score", "asyncio")  # they grow to a bound, and stay
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(pools)]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks(server.loop)),
        "threads": len(threads),
        "streams": len(server.api.service._streams),
        "groups": len(server.engine.groups),
        "programs": server.api.metrics.compilations,
    }


@contextlib.contextmanager
def gives_all_back(server: Running) -> Iterator[None]:
    """After the block the idle server holds nothing that it did not before, and has compiled nothing."""
    wait_for(server.idle)
    before = held(server)
    yield
    server.read_all()
    wait_for(server.idle)
    before["descriptors"] += 8  # connections that a client keeps for later
    left: dict = {}

    def back() -> bool:
        left.update({name: (before[name], now) for name, now in held(server).items()})
        return all(now <= most for most, now in left.values())

    try:
        wait_for(back)
    except AssertionError:
        raise AssertionError(left) from None


def unharmed(server: Running, harm: Callable[[], _T]) -> _T:
    """Return `harm()`; the server must leak nothing, and a canary request must always get the same text."""
    want = server.complete("canary", max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    with gives_all_back(server):
        canary = Canary(server)
        canary.start()
        try:
            found = harm()
            wait_for(lambda: len(canary.texts) > 3, 60)
        finally:
            canary.stop.set()
            canary.join(60)
        assert not canary.is_alive() and set(canary.texts) == {want}
    return found


def resident() -> float:
    """MiB of memory that this process holds, the server with all else; what can be given back is."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def raw_request(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def torment(server: Running, seed: int, count: int, ballast: int = 0) -> dict[int, int]:
    """Send `count` generated requests; how often each status came. `ballast`: more bytes in each body."""
    source, seen = random.Random(seed), {}
    for number in range(count):
        method, route, raw, headers = generated.request(source)
        if ballast and raw.endswith(b"}"):
            raw = raw[:-1] + b', "ballast": "%s"}' % source.randbytes(ballast // 2).hex().encode()
        answer = server.http.request(method, route, content=raw, headers=headers)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (number, method, route, raw[:300], answer.text)
        if answer.status_code >= 400 and method != "HEAD":
            error_of(answer)
    return seen


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def error_of(answer: httpx.Response) -> dict:
    """The one shape: an object with four fields, small, JSON, with an id."""
    assert answer.headers["content-type"] == "application/json", answer.text
    assert answer.headers["x-request-id"] and len(answer.content) <= 1024
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 500
    assert "Traceback" not in error["message"] and "0x" not in error["message"]
    assert answer.headers["x-should-retry"] == str(answer.status_code in (408, 429, 503, 529)).lower()
    return error


@contextlib.contextmanager
def started(command: list[str], until: str = "ready", **environment: str):
    """(process, address, lines on stderr so far) of a command that has said a line beginning with `until`."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    try:
        for line in process.stderr:
            said.append(line)
            if line.startswith(until):
                break
        else:
            raise AssertionError("".join(said))
        reader.start()
        yield process, (re.findall(r"http://[\d.:]+", "".join(said)) or [""])[0], said
    finally:
        process.kill()
        process.wait()
        if reader.is_alive():
            reader.join(10)
        process.stderr.close()
