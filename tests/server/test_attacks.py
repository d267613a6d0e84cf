"""A real server under generated requests, disconnects, slow connections and signals; figures for
docs/serving.md."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections import Counter

import generated
import httpx
import pytest
from http_server import wait_for
from test_overload import Client, resident, start

FLAGS = "--http 127.0.0.1:0 --max-num-seqs 4 --max-num-batched-tokens 128 --batch-invariant".split()
FLAGS += "--max-model-len 512 --max-scored-tokens 64 --shutdown-timeout 1".split()
REQUESTS, AT_ONCE, DISCONNECTS, SLOW = 20_000, 24, 300, 4
CANARY = {"prompt": "The function returns a list of", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
LONG = {"prompt": "The function returns", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
HANG_S = 90.0
MOST_S = 1200.0


async def fuzz(url: str, count: int) -> Counter:
    """Statuses of so many generated requests, "hang" for none in time, "cut" for a closed connection."""
    source, found = random.Random(1), Counter()
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=HANG_S, limits=limits) as client:
        left = iter(range(count))

        async def caller() -> None:
            for _ in left:
                method, route, raw, headers = generated.request(source)
                if source.random() < 0.25 and raw:  # a byte is another
                    at = source.randrange(len(raw))
                    raw = raw[:at] + bytes([source.randrange(256)]) + raw[at + 1 :]
                try:
                    answer = await client.request(method, route, content=raw, headers=headers)
                    found[answer.status_code] += 1
                except httpx.TimeoutException as error:
                    found["hang"] += 1
                    print(f"no answer: {error!r} {method} {route} {headers} {raw[:300]}")
                except httpx.TransportError:
                    found["cut"] += 1

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return found


async def disconnect(url: str, count: int) -> None:
    """Leave with half a request sent, at once, or after the first bytes; half of them by RST."""
    source, client = random.Random(2), Client(url)
    body = json.dumps(LONG | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}"
    whole = head.encode() + b"\r\n\r\n" + body
    for _ in range(count):
        _, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(whole if source.random() < 0.7 else whole[: source.randrange(len(whole))])
        await asyncio.sleep(source.choice((0, 0.01, 0.2, 0.5)))
        if source.random() < 0.5:
            linger = b"\1\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()


@contextlib.asynccontextmanager
async def slow_connections(url: str, count: int):
    """So many that send a byte of their head a second."""
    client = Client(url)

    async def caller() -> None:
        while True:
            _, writer = await asyncio.open_connection(client.host, client.port)
            with contextlib.closing(writer), contextlib.suppress(OSError):
                for byte in b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n":
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(1)

    tasks = [asyncio.create_task(caller()) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def canary(url: str, texts: list[str]) -> None:
    """One greedy answer every half second, until it is cancelled; refusals do not count."""
    with contextlib.closing(Client(url)) as client:
        while True:
            status, _, answer = await client.post("/v1/completions", CANARY)
            if status == 200:
                texts.append(answer["choices"][0]["text"])
            await asyncio.sleep(0.5)


async def attack(url: str, pid: int) -> dict:
    with contextlib.closing(Client(url)) as client:
        status, _, alone = await client.post("/v1/completions", CANARY)
    assert status == 200
    texts: list[str] = []
    singer = asyncio.create_task(canary(url, texts))
    began, descriptors = time.monotonic(), len(os.listdir(f"/proc/{pid}/fd"))
    async with slow_connections(url, SLOW):
        found, _ = await asyncio.gather(fuzz(url, REQUESTS), disconnect(url, DISCONNECTS))
    singer.cancel()
    await asyncio.gather(singer, return_exceptions=True)
    return {
        "seconds": time.monotonic() - began,
        "statuses": {str(status): count for status, count in found.most_common()},
        "canaries": len(texts),
        "canaries_that_differ": sum(text != alone["choices"][0]["text"] for text in texts),
        "descriptors_before": descriptors,
    }


def held(url: str, process) -> dict:
    """The resources that the idle server still holds, waiting up to a minute."""
    values: dict[str, float] = {}

    def idle() -> bool:
        lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text.splitlines()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            own = (line for line in lines if line.startswith(f"swiftkv_{name}{{"))
            values[name] = sum(float(line.split()[-1]) for line in own)
        return not any(values.values())

    with contextlib.suppress(AssertionError):
        wait_for(idle)
    descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
    return values | {"descriptors_after": descriptors, "resident_mib": resident(process)}


async def stopped(url: str, process) -> dict[str, int]:
    """Eight requests of 200 tokens on four lanes, and SIGTERM: how many were answered in what way."""

    async def ask() -> str:
        try:
            with contextlib.closing(Client(url)) as client:
                status, _, answer = await client.post("/v1/completions", LONG)
        except (OSError, asyncio.IncompleteReadError):
            return "closed"
        if status != 200:
            return str(status)
        return "whole" if answer["usage"]["completion_tokens"] == LONG["max_tokens"] else "false"

    asked = [asyncio.create_task(ask()) for _ in range(8)]
    await asyncio.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    return dict(Counter(await asyncio.gather(*asked)))


@pytest.mark.soak
def test_a_server_under_attack_keeps_answering_and_leaks_nothing(capsys):
    with start(FLAGS) as (process, url):
        found = asyncio.run(asyncio.wait_for(attack(url, process.pid), MOST_S))
        found |= held(url, process)
        found["after_sigterm"] = asyncio.run(asyncio.wait_for(stopped(url, process), 120))
        found["exit"] = process.wait(60)
    with capsys.disabled():
        print(f"\nattacks: {json.dumps(found)}")
    errors = {status for status in found["statuses"] if status.isdigit() and int(status) >= 500}
    assert errors <= {"503"} and "hang" not in found["statuses"]
    assert found["canaries"] and not found["canaries_that_differ"]
    assert not any(found[f"num_requests_{name}"] for name in ("running", "waiting"))
    assert not found["kv_cache_usage_perc"] and found["exit"] == 0
    assert "false" not in found["after_sigterm"]
