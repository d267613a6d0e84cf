"""Two replicas of the demo behind Ray Serve: both used, beginnings kept together, a death contained.

A command of its own (`make test-ray`): Ray is 466 MB, and takes a minute to come up.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from documents import ROOT, shell

from swiftkv_jax.server.affinity import CHARACTERS

pytest.importorskip("ray", reason="Ray Serve is not installed (the `ray` extra)")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

START_S, PAGE, LANES = 540, 16, 4
PATIENT = {  # of Ray: a busy machine is slow to start it
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
}
[COMMAND] = shell(r"swiftkv replicas (?!.*--num-gpus)")
FLAGS = f"--num-cpus 0.5 --max-num-seqs {LANES} --page-size {PAGE} --max-model-len 512"
FLAGS += " --max-num-batched-tokens 128 --max-queued-tokens 65536 --no-warm-up --queue-timeout 900"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[str, int]]:
    """The address of what the documents' command starts, and the process that started it all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = {"DIR": "demo/teacher", "127.0.0.1:8000": address}
    words = [here.get(word, word) for word in shlex.split(COMMAND.text)[1:]]
    command = [sys.executable, "-m", "swiftkv_jax", *words, *FLAGS.split()]
    env = PATIENT | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | os.environ
    env |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs"))}  # one compiles for both
    process = subprocess.Popen(command, cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + START_S
        seen: set[str] = set()
        while len(seen) < 2:
            assert process.poll() is None, "Ray did not come up"
            assert time.monotonic() < deadline, f"after {START_S} s there are {len(seen)} replicas"
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"http://{address}/ready", trust_env=False, timeout=30)
                if answer.status_code == 200:
                    seen.add(answer.headers["x-replica"])
            time.sleep(0.5)
        yield f"http://{address}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()


def prompt(number: int, tail: str = "") -> str:
    """Ten pages that begin with a number of their own, and a tail."""
    size = 10 * PAGE * CHARACTERS
    return f"{number} {'a row of the cache is made once and read often ' * size}"[:size] + tail


async def complete(
    client: httpx.AsyncClient, text: str, tokens: int = 4, begun: asyncio.Event | None = None
) -> tuple[str, str]:
    """(replica, text), of a stream that must end well; `begun` is set when its first token has come."""
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    said, ended = "", False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code == 503 and b"has ended; try again" in await answer.aread():
            raise Lost
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise Lost(answer.headers["x-replica"])
                said += event["choices"][0]["text"]
                if begun:
                    begun.set()
            ended |= line == "data: [DONE]"
        if not ended:
            raise Lost(answer.headers["x-replica"])
        return answer.headers["x-replica"], said


class Lost(Exception):
    """A stream that a replica did not finish."""


def together(url: str, *calls: tuple, apart: float = 0.0) -> list:
    """The answers to calls of `complete` that begin `apart` seconds after each other."""

    async def run() -> list:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=900, trust_env=False, limits=limits) as client:
            tasks = []
            for call in calls:
                tasks.append(asyncio.create_task(complete(client, *call)))
                await asyncio.sleep(apart)
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_a_hundred_requests_are_all_answered_and_both_replicas_used(served):
    url, _ = served
    answers = together(url, *[(prompt(i),) for i in range(100)])
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    used = Counter(replica for replica, _ in answers)
    assert len(used) == 2 and min(used.values()) >= 20, used


def test_an_idle_replica_gets_the_prompts_whose_beginning_it_has_read(served):
    url, _ = served
    kept, homes = [], set()
    for number in range(1000, 1010):
        home, *later = [together(url, (prompt(number, f"tail {i}"),))[0][0] for i in range(5)]
        kept += [replica == home for replica in later]
        homes.add(home)
    assert sum(kept) >= 0.9 * len(kept) and len(homes) == 2


def test_a_bad_request_and_an_unknown_route_are_answered_by_the_server(served):
    with httpx.Client(base_url=served[0], trust_env=False, timeout=60) as client:
        bad = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        large = client.post("/v1/completions", content=b"x" * (2**21 + 9))
        assert [bad.status_code, large.status_code, client.get("/nowhere").status_code] == [400, 413, 404]
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["teacher"]


def test_a_replica_that_is_killed_under_load_loses_only_its_own_streams(served):
    """The last test: one of two is left, until Ray has started another."""
    url, root = served

    async def run() -> list:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=900, trust_env=False, limits=limits) as client:
            begun, processes = asyncio.Event(), replicas(root)
            calls = [complete(client, prompt(4000 + i), 200, begun) for i in range(8)]
            tasks = [asyncio.create_task(call) for call in calls]
            await begun.wait()
            os.kill(processes[0], signal.SIGKILL)
            under_way = [task for task in tasks if not task.done()]
            return await asyncio.gather(*under_way, return_exceptions=True)

    answers = asyncio.run(run())
    lost = [answer for answer in answers if isinstance(answer, Exception)]
    well = [answer for answer in answers if not isinstance(answer, Exception)]
    assert lost and all(isinstance(error, Lost) for error in lost), lost
    dead = {str(error) for error in lost} - {""}  # nobody's name where no token had come
    assert well and len({replica for replica, _ in well} | dead) == 1 + len(dead) <= 2
    after = together(url, *[(prompt(5000 + i),) for i in range(10)])
    assert not [answer for answer in after if isinstance(answer, Exception)], "the other one takes all"


def replicas(root: int) -> list[int]:
    """The processes of our replicas below `root`, by the titles that Ray gives them."""
    parents, titles = {}, {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[pid] = (folder / "cmdline").read_text()

    def below(pid: int) -> bool:
        return pid == root or (pid in parents and below(parents[pid]))

    found = [pid for pid, title in titles.items() if "ServeReplica:swiftkv:Replica" in title and below(pid)]
    assert len(found) == 2, [title for pid, title in titles.items() if below(pid)]
    return found
