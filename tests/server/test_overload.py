"""Ten times the load that the server bears: refusals are quick, and what it can do it goes on doing.

And a key that asks little, beside one that takes all there is, waits little longer than alone.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import ROOT, started

FLAGS = "--http 127.0.0.1:0 --max-num-seqs 4 --max-num-batched-tokens 256 --max-model-len 512".split()
FLAGS += "--max-queued-requests 8 --steps-per-launch 8".split()
BODY = {"prompt": "The function returns " * 10, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
OF_TWO_KEYS = "--http 127.0.0.1:0 --max-num-seqs 4 --max-num-batched-tokens 128 --queue-timeout 8".split()
OF_TWO_KEYS += "--api-key greedy --api-key modest --max-scored-tokens 64".split()
GREEDY = BODY | {"max_tokens": 1900, "n": 4, "temperature": 1}
MODEST = {"prompt": "The cache", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
ASKED = 100  # requests alone, and beside; p99 is the last but one


@contextlib.contextmanager
def start(flags: list[str] = FLAGS) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server of the demo's model that has nothing left to compile, and its address."""
    threads = {"NPROC": str(os.cpu_count() or 1)}  # see conftest.py
    command = [sys.executable, str(ROOT / "serve.py"), *flags]
    with started(command, "all is compiled", **threads) as (process, url, _):
        yield process, url


def resident(process: subprocess.Popen) -> float:
    """MiB."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024


class Client:
    """HTTP over kept connections with next to no work of its own: a library's client takes as much of the
    two cores for a refusal as the server, and the server's goodput is what is measured."""

    def __init__(self, url: str, key: str = ""):
        self._key = f"authorization: Bearer {key}\r\n" if key else ""
        self.host, port = re.findall(r"http://([\d.]+):(\d+)", url)[0]
        self.port, self._idle = int(port), []

    async def post(self, path: str, body: dict) -> tuple[int, dict[str, str], dict]:
        """Status, headers and the JSON that came back, within two minutes."""
        async with asyncio.timeout(120):
            return await self._post(path, json.dumps(body).encode())

    async def _post(self, path: str, content: bytes):
        connection = await self._connection()
        reader, writer = connection
        head = f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n{self._key}"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines if x)}
            answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        except BaseException:
            writer.close()
            raise
        if headers.get("connection") == "close":
            writer.close()
        else:
            self._idle.append(connection)
        return int(first.split()[1]), headers, answer

    async def _connection(self):
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():  # else the server has closed it: it was idle too long
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self.host, self.port)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


Answer = tuple[int, float, bool]  # status, seconds, whether it said when to come back


async def send(client: Client, answers: list[Answer], body: dict = BODY) -> None:
    """One request; a status of -1 is an answer that is not whole."""
    began = time.perf_counter()
    salted = body | {"cache_salt": f"s{random.getrandbits(60)}"}
    status, headers, answer = await client.post("/v1/completions", salted)
    seconds = time.perf_counter() - began
    whole = status != 200 or answer["usage"]["completion_tokens"] == body["max_tokens"]
    answers.append((status if whole else -1, seconds, "retry-after" in headers))


async def capacity(client: Client, seconds: float) -> float:
    """Requests a second with every place taken and nobody refused."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds

    async def caller():
        while time.perf_counter() < end:
            await send(client, answers)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(6)))
    assert {status for status, _, _ in answers} == {200}
    return len(answers) / (time.perf_counter() - began)


async def flood(client: Client, rate: float, seconds: float) -> tuple[list, float]:
    """Poisson arrivals for so long; the answers, and how long all took."""
    answers: list[Answer] = []
    source, tasks, began = random.Random(0), [], time.perf_counter()
    due = began
    while due < began + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(client, answers)))
        due += source.expovariate(rate)
    await asyncio.gather(*tasks)
    return answers, time.perf_counter() - began


async def measure(url: str, process: subprocess.Popen, seconds: float) -> dict:
    client = Client(url)
    await capacity(client, 5)
    before = await capacity(client, seconds / 2)
    memory = resident(process)
    answers, took = await flood(client, 10 * before, seconds)
    grown = resident(process) - memory
    after = await capacity(client, seconds / 2)
    client.close()
    refused = sorted(s for status, s, _ in answers if status == 503)
    done = sum(status == 200 for status, _, _ in answers)
    return {
        "capacity": (before, after),
        "sent": len(answers),
        "done": done,
        "others": sorted({status for status, _, _ in answers} - {200, 503}),
        "silent_refusals": sum(status == 503 and not again for status, _, again in answers),
        "goodput": done / took / statistics.mean((before, after)),
        "refusal_p50_ms": 1e3 * statistics.median(refused),
        "refusal_p99_ms": 1e3 * refused[int(0.99 * len(refused))],
        "grown_mib": grown,
    }


@pytest.mark.soak
def test_ten_times_the_load(capsys):
    """Alone on its machine: it measures time."""
    with start() as (process, url):
        found = asyncio.run(measure(url, process, 60.0))
    with capsys.disabled():
        print(f"\noverload: {json.dumps(found)}")
    assert not found["others"] and not found["silent_refusals"] and found["done"] < found["sent"] / 4
    assert found["refusal_p50_ms"] <= 10 and found["refusal_p99_ms"] <= 100
    assert found["goodput"] >= 0.9 and found["grown_mib"] <= 64


@contextlib.asynccontextmanager
async def flooded(url: str, callers: int = 12):
    """All the while so many callers of the greedy key ask for all lanes, over and over."""

    async def caller():
        while True:
            with (
                contextlib.closing(Client(url, "greedy")) as client,
                contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError),
            ):
                status, _, _ = await client.post("/v1/completions", GREEDY)
                await asyncio.sleep(0.1 if status == 200 else 0.5)

    tasks = [asyncio.create_task(caller()) for _ in range(callers)]
    try:
        await asyncio.sleep(3)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_turn(client: Client, count: int) -> list[float]:
    """Seconds of so many modest requests, one after the other; all must be answered whole."""
    answers: list[Answer] = []
    for _ in range(count):
        await send(client, answers, MODEST)
    assert {status for status, _, _ in answers} == {200}
    return [seconds for _, seconds, _ in answers]


async def waits(url: str) -> dict[str, float]:
    """Milliseconds of modest requests alone, before and after the flood, and beside it."""
    with contextlib.closing(Client(url, "modest")) as client:
        await in_turn(client, 5)
        alone = await in_turn(client, ASKED // 2)
        async with flooded(url):
            beside = await in_turn(client, ASKED)
        await asyncio.sleep(3)
        alone += await in_turn(client, ASKED // 2)
    found = {}
    for name, taken in (("alone", sorted(alone)), ("beside", sorted(beside))):
        found |= {f"{name}_p50_ms": 1e3 * statistics.median(taken), f"{name}_p99_ms": 1e3 * taken[-2]}
    return found


@pytest.mark.soak
def test_a_flood_of_one_key_makes_another_wait_at_most_five_times_as_long(capsys):
    """Alone on its machine: it measures time."""
    with start(OF_TWO_KEYS) as (_, url):
        found = asyncio.run(asyncio.wait_for(waits(url), 900.0))
    with capsys.disabled():
        print(f"\nstarvation: {json.dumps(found)}")
    assert found["beside_p99_ms"] <= 5 * found["alone_p99_ms"]
