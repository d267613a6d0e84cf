"""A key that asks little beside one that takes all there is: it waits little longer than alone."""

import asyncio
import contextlib
import json
import random
import statistics
import time

import pytest
from test_overload import Client, start

FLAGS = "--http 127.0.0.1:0 --max-num-seqs 4 --max-num-batched-tokens 128 --queue-timeout 8".split()
FLAGS += "--api-key greedy --api-key modest --max-scored-tokens 64".split()
ASKED = 100  # requests alone, and beside; p99 is the last but one
MOST_S = 900.0
FLOOD = {"prompt": "The function returns " * 10, "max_tokens": 1900, "n": 4, "temperature": 1}
FLOOD |= {"ignore_eos": True}


async def ask(client: Client, count: int) -> list[float]:
    """Seconds of so many requests for 20 tokens, one after the other; all must be answered."""
    taken, body = [], {"prompt": "The cache", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    for _ in range(count):
        began = time.perf_counter()
        salt = f"s{random.getrandbits(60)}"
        status, _, answer = await client.post("/v1/completions", body | {"cache_salt": salt})
        taken.append(time.perf_counter() - began)
        assert status == 200 and answer["usage"]["completion_tokens"] == 20, answer
    return taken


@contextlib.asynccontextmanager
async def flooded(url: str, callers: int = 12):
    """All the while so many callers of the other key ask for all lanes, over and over."""

    async def caller():
        while True:
            with (
                contextlib.closing(Client(url, "greedy")) as client,
                contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError),
            ):
                status, _, _ = await client.post("/v1/completions", FLOOD)
                await asyncio.sleep(0.1 if status == 200 else 0.5)

    tasks = [asyncio.create_task(caller()) for _ in range(callers)]
    try:
        await asyncio.sleep(3)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(url: str) -> dict[str, float]:
    client = Client(url, "modest")
    await ask(client, 5)
    alone = await ask(client, ASKED // 2)
    async with flooded(url):
        beside = await ask(client, ASKED)
    await asyncio.sleep(3)
    alone += await ask(client, ASKED // 2)
    client.close()
    found = {}
    for name, taken in (("alone", sorted(alone)), ("beside", sorted(beside))):
        found[f"{name}_p50_ms"] = 1e3 * statistics.median(taken)
        found[f"{name}_p99_ms"] = 1e3 * taken[-2]
    return found | {"p99_ratio": found["beside_p99_ms"] / found["alone_p99_ms"]}


@pytest.mark.soak
def test_a_flood_of_one_key_makes_another_wait_at_most_five_times_as_long(capsys):
    """Alone on its machine: it measures time."""
    with start(FLAGS) as (_, url):
        found = asyncio.run(asyncio.wait_for(measure(url), MOST_S))
    with capsys.disabled():
        print(f"\nstarvation: {json.dumps(found)}")
    assert found["p99_ratio"] <= 5
