"""Requests come, go, fail and leave; the server stays, and nobody else notices."""

import asyncio
import dataclasses
import json
import logging
import random
import threading
import time

import http_server
import httpx
import pytest
import tiny_engine as tiny
from http_server import (
    LONG,
    Canary,
    Running,
    connect,
    error_of,
    gives_all_back,
    make_llm,
    raw_request,
    resident,
    torment,
    unharmed,
    wait_for,
)

from swiftkv_jax.engine.http import generate


def check_torment(server: Running, count: int) -> None:
    seen = unharmed(server, lambda: torment(server, 1, count))
    assert seen[200] > count // 5 and seen[400] > count // 5


def test_a_canary_stays_the_same_beside_generated_requests(served):
    check_torment(served, 2000)


@pytest.mark.slow
def test_a_canary_stays_the_same_beside_many_generated_requests(served):
    """64 MiB are the most that 20 000 requests may leave behind: 3 KiB each, a tenth of what one needs."""
    check_torment(served, 500)
    before = resident()
    check_torment(served, 20000)
    assert resident() - before < 64


BALLAST = 2**18  # bytes


def test_memory_stays_where_it_was(served):
    """Each request brings 256 KiB that differ from all others'. If one in eight left its body behind, in
    whatever form and place, 400 requests would leave 12.5 MiB; noise stays well below that. What else a
    server could hold on to is counted one by one (`held`), and none of it may grow.
    """
    torment(served, 2, 150, BALLAST)
    with gives_all_back(served):
        before = resident()
        torment(served, 3, 400, BALLAST)
    assert resident() - before < 12.5


def check_disconnects(server: Running, count: int) -> None:
    source = random.Random(0)
    whole = raw_request(
        b'{"prompt": "abcdefgh", "max_tokens": 50, "n": 2, "ignore_eos": true, "stream": true}'
    )
    for number in range(count):
        sent = whole.replace(b'"stream": true', b'"stream":false') if number % 2 else whole
        cut = len(sent) if source.random() < 0.8 else source.randrange(len(sent))
        with connect(server) as caller:
            caller.sendall(sent[:cut])
            time.sleep(source.choice((0, 0.001, 0.01, 0.05)))
            if source.random() < 0.3 and cut == len(sent) and not number % 2:
                caller.recv(source.randint(1, 400))
    wait_for(server.idle, 10)


def test_who_leaves_takes_nothing_along(served):
    before = served.engine.stats.output_tokens
    with gives_all_back(served):
        check_disconnects(served, 50)
    assert served.engine.stats.output_tokens - before < 50 * 2 * 50 // 2, "answers ran on for nobody"
    assert served.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("when", ["whole", "before it streams", "while it streams"])
def test_who_left_is_in_the_log(served, caplog, monkeypatch, when):
    """One line a request, which says how it ended; the status is one that no client ever sees."""
    caplog.set_level(logging.INFO, "swiftkv_jax.http")
    step, events = served.engine.step, b""
    monkeypatch.setattr(served.engine, "step", lambda: time.sleep(0.05) or step())
    with connect(served) as caller:
        caller.sendall(raw_request(json.dumps(LONG | {"stream": when != "whole"}).encode()))
        wait_for(lambda: served.engine.scheduler.running)
        while when == "while it streams" and b"data: {" not in events:
            events += caller.recv(2**16)
    wait_for(served.idle)
    assert b"[DONE]" not in events
    served.complete("x", max_tokens=2)
    refused = served.http.post("/v1/completions", json={"prompt": "x" * 100})
    assert refused.status_code == 400
    lines = [record.getMessage() for record in caplog.records]
    said = [json.loads(line) for line in lines if line.startswith("{")]
    assert [line["status"] for line in said] == [499, 200, 400]
    assert [line["finished"] for line in said] == [[], ["length"], []]
    assert said[2]["request"] == refused.headers["x-request-id"]


@pytest.mark.slow
def test_many_who_leave_take_nothing_along(served):
    with gives_all_back(served):
        check_disconnects(served, 500)


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_pages_are_back_two_steps_after_a_client_left(served, monkeypatch, stream):
    steps, abort = [], served.engine.abort

    def watched(request_id):
        steps.append(served.engine.stats.steps)
        abort(request_id)

    step = served.engine.step
    monkeypatch.setattr(served.engine, "abort", watched)
    monkeypatch.setattr(served.engine, "step", lambda: time.sleep(0.05) or step())
    body = b'{"prompt": "abcdefgh", "max_tokens": 50, "ignore_eos": true, "stream": %s}' % stream
    with connect(served) as caller:
        caller.sendall(raw_request(body))
        wait_for(lambda: served.engine.scheduler.running)
    wait_for(lambda: steps and served.idle())
    assert served.engine.stats.steps - steps[0] <= 2
    assert b'finished_reason="abort"' in served.http.get("/metrics").content


def test_a_fault_stays_with_its_request(served):
    want = served.complete("canary", max_tokens=40, ignore_eos=True)["choices"][0]["text"]

    def probe(point, request_id):
        group = served.engine._groups.get(request_id)
        if point == "sample" and group and group.request.prompt == "doomed" and group.sequences[0].output:
            raise RuntimeError("secret at 0x7f00")

    served.engine.probe = probe
    try:
        canary = Canary(served)
        canary.start()
        refused = served.http.post("/v1/completions", json=LONG | {"prompt": "doomed"})
        events = served.events(**(LONG | {"prompt": "doomed"}))
        wait_for(lambda: canary.texts)
        canary.stop.set()
        canary.join(30)
    finally:
        served.engine.probe = lambda point, request_id: None
    assert refused.status_code == 500 and refused.headers["x-should-retry"] == "true"
    assert "secret" not in refused.text and refused.json()["error"]["code"] == "internal_error"
    assert events[-1] == "[DONE]" and events[-2]["error"]["type"] == "server_error"
    assert "secret" not in str(events) and set(canary.texts) == {want}


def test_an_engine_that_fails_starts_anew_and_in_the_end_says_so(monkeypatch):
    with Running(make_llm(), warm_up=False) as server:
        step, failures = server.engine.step, iter([True])

        def once():
            if server.engine.scheduler.running and next(failures, False):
                raise ZeroDivisionError("a bug")
            return step()

        monkeypatch.setattr(server.engine, "step", once)
        assert server.http.post("/v1/completions", json=LONG).status_code == 500
        assert server.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2
        monkeypatch.setattr(server.engine, "step", lambda: 1 / 0)
        for _ in range(9):
            answer = server.http.post("/v1/completions", json=LONG)
            assert answer.status_code in (500, 503) and answer.json()["error"]["message"]
        assert server.api.service.dead
        answer = server.http.get("/health")
        assert answer.status_code == 503 and error_of(answer)["code"] == "unhealthy"


def test_a_stuck_engine_is_unhealthy():
    released = threading.Event()
    with Running(make_llm(), warm_up=False, heartbeat_s=0.6) as server:
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
        server.engine.probe = lambda point, request_id: released.wait(30)
        with connect(server) as caller:
            caller.sendall(raw_request(b'{"prompt": "x"}'))
            began = time.monotonic()
            wait_for(lambda: server.http.get("/health").status_code == 503, 5)
            assert time.monotonic() - began < 3
            assert server.http.get("/ready").status_code == 503
            assert server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        released.set()
        wait_for(lambda: server.http.get("/health").status_code == 200)


def test_a_callers_own_id_means_nothing(served):
    """Two calls under one id: the first leaves, and the second is answered whole."""
    want = served.complete(**LONG)["choices"][0]["text"]
    head, answers = {"x-request-id": "1"}, []

    def ask() -> None:
        answers.append(served.http.post("/v1/completions", json=LONG | {"temperature": 0}, headers=head))

    second = threading.Thread(target=ask)
    with served.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=head) as first:
        mine = first.headers["x-request-id"]
        next(first.iter_lines())
        second.start()
        wait_for(lambda: len(served.engine._groups) == 2 or answers)
    second.join(60)
    assert answers[0].json()["choices"][0]["text"] == want
    assert len({mine, answers[0].headers["x-request-id"], "1"}) == 3


def test_a_bug_in_a_route_is_a_500_without_details(served, monkeypatch, caplog):
    monkeypatch.setattr(generate, "completion_call", lambda *_: {}["secret"])
    answer = served.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.headers["x-request-id"] in error_of(answer)["message"]
    wait_for(lambda: "KeyError: 'secret'" in caplog.text)


def test_a_request_that_rules_out_every_token_is_a_400(served):
    body = {"prompt": "x", "allowed_token_ids": [65], "bad_words": ["A"]}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == "allowed_token_ids"
    assert "no token is left" in answer.text
    events = served.events(**(body | {"bad_words": ["AA"], "max_tokens": 9}))
    assert events[-1] == "[DONE]" and "no token is left" in events[-2]["error"]["message"]


def test_a_failure_between_steps_is_contained_too(monkeypatch):
    """Not in the engine's step but where a leaving client's request is aborted."""
    with Running(make_llm(), warm_up=False) as server:
        want = server.complete(**LONG)["choices"][0]["text"]
        abort, failures = server.engine.abort, []

        def once(request_id):
            if not failures:
                failures.append(request_id)
                raise ZeroDivisionError("a bug")
            abort(request_id)

        monkeypatch.setattr(server.engine, "abort", once)
        with connect(server) as caller:
            caller.sendall(raw_request(b'{"prompt": "x", "max_tokens": 60, "ignore_eos": true}'))
            wait_for(lambda: server.engine.scheduler.running)
        wait_for(lambda: failures)
        assert server.complete(**LONG)["choices"][0]["text"] == want and not server.api.models.dead


def test_half_a_request_is_not_waited_for():
    with Running(make_llm(), warm_up=False, header_timeout_s=0.4, body_timeout_s=0.4) as server:
        whole = raw_request(b'{"prompt": "x", "max_tokens": 1}')
        for cut in (0, 10, whole.index(b"\r\n\r\n"), len(whole) - 5):
            with connect(server) as caller:
                caller.sendall(whole[:cut])
                began = time.monotonic()
                data = b"".join(iter(lambda: caller.recv(65536), b""))
                assert data.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in data, cut
                assert 0.2 < time.monotonic() - began < 5
        with connect(server) as caller:  # the second request of a connection too
            caller.sendall(whole)
            assert b"200" in caller.recv(65536)
            caller.sendall(whole[:10])
            while data := caller.recv(65536):
                last = data
            assert b"408" in last


def test_what_is_no_http_gets_the_one_shape(served):
    with connect(served) as caller:
        caller.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        data = caller.recv(65536)
    assert data.startswith(b"HTTP/1.1 400") and b'{"error": {' in data


def test_draining_refuses_the_new_and_finishes_the_old():
    with Running(make_llm(), warm_up=False, shutdown_s=20.0) as server:
        server.complete("x", max_tokens=2)
        want = server.complete("The cache", max_tokens=50, ignore_eos=True)["choices"][0]["text"]
        slow = server.engine.step
        server.engine.step = lambda: time.sleep(0.05) or slow()
        answers = []
        worker = threading.Thread(target=lambda: answers.append(server.complete(**LONG)))
        worker.start()
        wait_for(lambda: server.engine.scheduler.running)
        drained = threading.Thread(target=lambda: asyncio.run(server.api.service.drain()))
        drained.start()
        wait_for(lambda: server.api.service.draining, 1)
        with httpx.Client(base_url=server.url, trust_env=False) as late:
            refused = late.post("/v1/completions", json=LONG)
            assert late.get("/ready").status_code == 503 and late.get("/health").status_code == 200
        assert refused.status_code == 503 and error_of(refused)["message"] == "the server is shutting down"
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        worker.join(30)
        drained.join(30)
        assert answers[0]["choices"][0]["text"] == want


def test_what_outlasts_the_drain_is_aborted_and_told_so():
    with Running(make_llm(), warm_up=False, shutdown_s=0.2) as server:
        server.complete("x", max_tokens=2)
        slow = server.engine.step
        server.engine.step = lambda: time.sleep(0.2) or slow()
        events = []
        worker = threading.Thread(target=lambda: events.extend(server.events(**LONG)))
        worker.start()
        wait_for(lambda: server.engine.scheduler.running)
        asyncio.run(server.api.service.drain())
        worker.join(30)
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "abort"
        wait_for(server.idle)


def test_settings_are_one_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        http_server.HttpSettings(model_name="x").model_name = "y"


class Wide(tiny.Bytes):
    """Knows a token that the model does not: folders of models with such tokenizers are about."""

    def encode(self, text, add_special_tokens=True):
        return [999 if character == "☃" else ord(character) for character in text]


def test_a_tokenizer_with_more_tokens_than_the_model_harms_nobody():
    """As often as failures of the engine would end the process."""
    with Running(make_llm(Wide()), warm_up=False) as server:
        want = server.complete("x", max_tokens=4)["choices"][0]["text"]
        for words in (["☃"], ["a☃"], ["☃b", "qqq"]):
            for _ in range(3):
                assert server.complete("x", max_tokens=4, bad_words=words)["choices"][0]["text"] == want
        refused = server.http.post("/v1/completions", json={"prompt": "a☃"})
        assert refused.status_code == 400 and error_of(refused)["param"] == "prompt"
        assert not server.api.service._restarts
