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


def post(server: Running, key: str, route: str = "/v1/completions", **body) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return server.http.post(route, json={"prompt": "x"} | body, headers=headers)


class Counting(tiny.Bytes):
    """Writes down what it is asked to read."""

    def __init__(self):
        self.read = []

    def encode(self, text, add_special_tokens=True):
        self.read.append(text)
        return super().encode(text, add_special_tokens)


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
    tokenizer = Counting()
    llm = make_llm(tokenizer, max_num_seqs=1)
    with (
        Running(llm, warm_up=False, max_queued_output_tokens=100) as server,
        held_up(server, max_tokens=20, n=2),
    ):
        demand = server.engine.scheduler.waiting.demand
        assert (demand.sequences, demand.output_tokens) == (2, 40)
        for asked in (
            {"max_tokens": 61},
            {"max_tokens": 16, "n": 4},
            {"max_tokens": 31, "prompt": ["x"] * 2},
        ):
            refused = post(server, "one", **asked)
            assert refused.status_code == 503 and refused.headers["retry-after"] and error_of(refused), asked
        assert tokenizer.read == ["x", "x"], "those that run and wait"
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
    llm = make_llm(max_num_seqs=1)
    with Running(llm, warm_up=False, max_queued_tokens=60) as server, held_up(server, prompt="a" * 20):
        refused = post(server, "one", prompt="b" * 50, max_tokens=1)
        assert refused.status_code == 503 and refused.headers["retry-after"] and error_of(refused)
        with connect(server) as caller:
            send(caller, "one", prompt="b" * 40, max_tokens=1)
            wait_for(lambda: server.engine.scheduler.waiting.demand.tokens == 60)


@pytest.mark.parametrize("keys", [("one",), ("one", "two")])
def test_with_several_keys_none_can_take_every_place(keys):
    """By default half of all places is the most that one key may have; an only key may have all."""
    several = len(keys) > 1
    llm = make_llm(max_num_seqs=1)
    limits = {"max_queued_requests": 5, "api_keys": keys}  # six places
    with Running(llm, warm_up=False, **limits) as server, contextlib.ExitStack() as stack:
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
    body = {"prompt": "a" * 20, "max_tokens": 1} if bound == "max_queued_tokens" else {"max_tokens": 20}
    twice = {name: value * 2 for name, value in body.items()}
    llm = make_llm(max_num_seqs=1)
    limits = {bound: 60, "api_keys": ("one", "two")}
    with Running(llm, warm_up=False, **limits) as server, held_up(server, **body):
        above = post(server, "one", **twice)
        assert above.status_code == 429 and error_of(above)["type"] == "rate_limit_error"
        with connect(server) as caller:
            send(caller, "two", **body)
            wait_for(lambda: len(server.engine.scheduler.waiting) == 2)


def test_waiting_and_refused_requests_are_counted():
    """One sequence is in the one lane, two wait; then nobody gets in, for each reason there is.

    What is refused was not read first. A full queue and a key above its share have the chosen statuses,
    shutdown and start 503. What a key asks of the tokenizer is of its share.
    """
    tokenizer = Counting()
    llm = make_llm(tokenizer, max_num_seqs=1, num_pages=16)
    keys = {"api_keys": ("one", "two"), "max_requests_per_key": 3, "queue_status": 529}
    keys["max_queued_requests"] = 2
    with Running(llm, warm_up=False, **keys) as server, held_up(server, n=2):
        service = server.api.service

        def gauge(name: str) -> float:
            [(_, found)] = read(server)[name]
            return found

        wait_for(lambda: (gauge("num_requests_running"), gauge("num_requests_waiting")) == (1, 2))
        assert gauge("kv_cache_usage_perc") == server.engine.scheduler.pages.used / 16 > 0
        answers = [post(server, "one"), post(server, "one", "/tokenize"), post(server, "two")]
        assert [answer.status_code for answer in answers] == [429, 429, 529]
        assert all(error_of(answer) and answer.headers["retry-after"] for answer in answers)
        service.draining = True
        assert post(server, "two").status_code == 503
        service.draining, service._ready = False, False
        assert [post(server, "two").status_code for _ in range(3)] == [503] * 3
        service._ready = True
        assert tokenizer.read == ["x", "x"]
        refused = {labels["reason"]: count for labels, count in read(server)["admission_rejections_total"]}
        assert refused == {"key": 2, "queue": 1, "draining": 1, "starting": 3}
