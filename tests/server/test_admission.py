"""The bounds on what waits: in sequences, in tokens to read and to generate; and each key's part of them."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
import tiny_engine as tiny
from http_server import Running, connect, error_of, make_llm, raw_request, wait_for
from test_metrics import read


def post(server: Running, key: str, **body) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return server.http.post("/v1/completions", json={"prompt": "x"} | body, headers=headers)


def send(caller: socket.socket, key: str, **body) -> None:
    raw = raw_request(json.dumps({"prompt": "x"} | body).encode())
    caller.sendall(raw.replace(b"host: x", b"host: x\r\nauthorization: Bearer " + key.encode()))


@contextlib.contextmanager
def held_up(server: Running, key: str = "one", **body) -> Iterator[None]:
    """The one lane is taken and its work stands still; a call of `key`'s waits in the engine's queue."""
    engine, step = server.engine, server.engine.step
    engine.step = lambda: (time.sleep(0.005) or []) if engine.scheduler.running else step()
    try:
        with connect(server) as runs, connect(server) as waits:
            send(runs, key, max_tokens=9, ignore_eos=True)
            wait_for(lambda: server.api.service.admission.load.running)  # compiled, run and told
            send(waits, key, **body)
            wait_for(lambda: len(engine.scheduler.waiting))
            yield
    finally:
        engine.step = step
    wait_for(server.idle, 60)


def test_requested_output_tokens_count_in_the_queue():
    """A text of one byte may ask for as much work as a book: every completion of it, to its last token.

    What is refused for it was not read first.
    """
    read = []

    class Counting(tiny.Bytes):
        def encode(self, text, add_special_tokens=True):
            read.append(text)
            return super().encode(text, add_special_tokens)

    llm = make_llm(Counting(), max_num_seqs=1, max_queued_output_tokens=100)
    with Running(llm, warm_up=False) as server, held_up(server, max_tokens=20, n=2):
        demand = server.engine.scheduler.waiting.demand
        assert (demand.sequences, demand.output_tokens) == (2, 40)
        for asked in (
            {"max_tokens": 61},
            {"max_tokens": 16, "n": 4},
            {"max_tokens": 31, "prompt": ["x", "y"]},
        ):
            refused = post(server, "one", **asked)
            assert refused.status_code == 503 and refused.headers["retry-after"], asked
            assert "40 tokens are asked for" in error_of(refused)["message"]
        assert read == ["x", "x"], "those that run and wait"
        chat = {"messages": [{"role": "user", "content": "x"}]}
        whole = server.http.post("/v1/chat/completions", json=chat)  # as much as the context leaves
        assert whole.status_code == 503 and error_of(whole)
        scored = post(server, "one", max_tokens=0, echo=True, n=16)
        assert scored.status_code == 200, "what only scores generates nothing"
        with connect(server) as caller:  # 60 more are just as many as may wait
            send(caller, "one", max_tokens=15, n=4)
            wait_for(lambda: server.engine.scheduler.waiting.demand.output_tokens == 100)


def test_tokens_are_counted_once_they_are_known():
    """The text fits by the first estimate of four bytes per token; the tokenizer makes one of each byte."""
    llm = make_llm(max_num_seqs=1, max_queued_tokens=60)
    with Running(llm, warm_up=False) as server, held_up(server, prompt="a" * 20):
        refused = post(server, "one", prompt="b" * 50, max_tokens=1)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "20 tokens are waiting" in error_of(refused)["message"]
        with connect(server) as caller:
            send(caller, "one", prompt="b" * 40, max_tokens=1)
            wait_for(lambda: server.engine.scheduler.waiting.demand.tokens == 60)


@pytest.mark.parametrize("statuses", [(503, 429), (429, 503), (529, 529)])
def test_refusals_have_the_status_that_was_chosen(statuses):
    """The status is set for a full queue and for a key above its share; shutdown and start stay 503."""
    llm = make_llm(max_num_seqs=1, max_queued_requests=1)
    chosen = dict(zip(("queue_status", "key_status"), statuses, strict=True))
    keys = {"api_keys": ("one", "two"), "max_requests_per_key": 2}
    with Running(llm, warm_up=False, **chosen, **keys) as server, held_up(server):
        full, above = post(server, "two"), post(server, "one")
        assert (full.status_code, above.status_code) == statuses
        assert "busy" in error_of(full)["message"] and "this key" in error_of(above)["message"]
        assert full.headers["retry-after"] and above.headers["retry-after"]
        server.api.service.draining = True
        assert post(server, "two").status_code == 503
        server.api.service.draining = False


@pytest.mark.parametrize("keys", [("one",), ("one", "two")])
def test_with_several_keys_none_can_take_every_place(keys):
    """By default half of all places is the most that one key may have; an only key may have all."""
    several = len(keys) > 1
    llm = make_llm(max_num_seqs=1, max_queued_requests=5)  # six places
    with Running(llm, warm_up=False, api_keys=keys) as server, contextlib.ExitStack() as stack:
        stack.enter_context(held_up(server))
        queue = server.engine.scheduler.waiting
        for waiting in range(1, 2 if several else 5):
            send(stack.enter_context(connect(server)), "one", max_tokens=1)
            wait_for(lambda now=waiting + 1: len(queue) == now)
        refused = post(server, "one")
        assert refused.status_code == (429 if several else 503) and error_of(refused)
        large = post(server, "two" if several else "one", n=4)
        assert large.status_code == (400 if several else 503), "4 can never fit in 3"
        if several:
            send(stack.enter_context(connect(server)), "two", n=3)
            wait_for(lambda: len(queue) == 5)


@pytest.mark.parametrize("bound", ["max_queued_tokens", "max_queued_output_tokens"])
def test_a_key_has_half_of_what_may_wait(bound):
    """One key's long texts, or long answers, leave room for another's."""
    llm = make_llm(max_num_seqs=1, **{bound: 60})
    prompt = "a" * 20 if bound == "max_queued_tokens" else "a"
    body = {"prompt": prompt, "max_tokens": 1 if bound == "max_queued_tokens" else 20}
    with Running(llm, warm_up=False, api_keys=("one", "two")) as server, held_up(server, **body):
        above = post(server, "one", **body | {"prompt": prompt * 2, "max_tokens": body["max_tokens"] * 2})
        assert above.status_code == 429 and "of this key" in error_of(above)["message"]
        with connect(server) as caller:
            send(caller, "two", **body)
            wait_for(lambda: len(server.engine.scheduler.waiting) == 2)


def test_waiting_and_refused_requests_are_counted():
    """One sequence is in the one lane, two wait; then nobody gets in, for each reason there is."""
    llm = make_llm(max_num_seqs=1, max_queued_requests=2, num_pages=16)
    keys = {"api_keys": ("one", "two"), "max_requests_per_key": 3}
    with Running(llm, warm_up=False, **keys) as server, held_up(server, n=2):
        service = server.api.service

        def gauge(name: str) -> float:
            [(_, found)] = read(server)[name]
            return found

        wait_for(lambda: (gauge("num_requests_running"), gauge("num_requests_waiting")) == (1, 2))
        assert gauge("kv_cache_usage_perc") == server.engine.scheduler.pages.used / 16 > 0
        assert [post(server, key).status_code for key in ("one", "one", "two")] == [429, 429, 503]
        service.draining = True
        assert post(server, "two").status_code == 503
        service.draining, service._ready = False, False
        assert [post(server, "two").status_code for _ in range(3)] == [503] * 3
        service._ready = True
        refused = {labels["reason"]: count for labels, count in read(server)["admission_rejections_total"]}
        assert refused == {"key": 2, "queue": 1, "draining": 1, "starting": 3}
