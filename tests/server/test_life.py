"""Requests that fail, are cancelled or disconnect affect neither the server nor other requests."""

import asyncio
import dataclasses
import logging
import random
import threading
import time
import types

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

from swiftkv_jax.server import generate
from swiftkv_jax.server import service as service_module

WARM_UP = True


@pytest.mark.slow("600")
@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_greedy_answer_is_unchanged_beside_generated_requests(served, count):
    """64 MiB are the most that 20,000 requests may leave behind: 3 KiB each, a tenth of what one needs."""
    for some in (count // 40, count):
        before = resident()
        seen = unharmed(served, lambda some=some: torment(served, 1, some))
    assert seen[200] > count // 5 and seen[400] > count // 5
    assert resident() - before < 64


@pytest.mark.slow
def test_memory_does_not_grow_under_many_requests(served):
    """Each request brings 256 KiB that differ from all others'. If one in eight left its body behind, in
    whatever form and place, 400 requests would leave 12.5 MiB; noise stays well below that. What else a
    server could hold on to is counted one by one (`held`), and none of it may grow.
    """
    torment(served, 2, 150, 2**18)
    with gives_all_back(served):
        before = resident()
        torment(served, 3, 400, 2**18)
    assert resident() - before < 12.5


@pytest.mark.parametrize("count", [50, pytest.param(1200, marks=pytest.mark.soak)])
def test_a_client_that_disconnects_leaves_nothing_behind(served, count):
    source, before = random.Random(0), served.engine.stats.output_tokens
    whole = b'{"prompt": "abcdefgh", "max_tokens": 50, "n": 2, "ignore_eos": true, "stream": true}'
    whole = raw_request(whole)
    with gives_all_back(served):
        for number in range(count):
            sent = whole.replace(b'"stream": true', b'"stream":false') if number % 2 else whole
            cut = len(sent) if source.random() < 0.8 else source.randrange(len(sent))
            with connect(served) as caller:
                caller.sendall(sent[:cut])
                time.sleep(source.choice((0, 0.001, 0.01, 0.05)))
                if source.random() < 0.3 and cut == len(sent) and not number % 2:
                    caller.recv(source.randint(1, 400))
        wait_for(served.idle)
    assert served.engine.stats.output_tokens - before < count * 2 * 50 // 2, "answers ran on for nobody"
    assert served.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_pages_are_back_two_steps_after_a_client_left(served, monkeypatch, caplog, stream):
    """Its line in the log has a status that no client ever sees."""
    caplog.set_level(logging.INFO, "swiftkv_jax.http")
    steps, abort, step = [], served.engine.abort, served.engine.step

    def watched(request_id):
        steps.append(served.engine.stats.steps)
        abort(request_id)

    monkeypatch.setattr(served.engine, "abort", watched)
    monkeypatch.setattr(served.engine, "step", lambda: time.sleep(0.05) or step())
    body = b'{"prompt": "abcdefgh", "max_tokens": 50, "ignore_eos": true, "stream": %s}' % stream
    with connect(served) as caller:
        caller.sendall(raw_request(body))
        wait_for(lambda: served.engine.scheduler.running)
    wait_for(lambda: steps and served.idle())
    assert served.engine.stats.steps - steps[0] <= 2
    assert 'finished_reason="abort"' in served.metrics()
    wait_for(lambda: any('"status": 499' in record.getMessage() for record in caplog.records))


def test_a_fault_stays_with_its_request(served):
    want = served.complete("canary", max_tokens=40, ignore_eos=True)["choices"][0]["text"]

    def probe(point, request_id):
        group = served.engine.groups.get(request_id)
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


def test_a_failing_engine_restarts_and_finally_reports_unhealthy(monkeypatch):
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


def test_a_silent_engine_is_unhealthy_unless_it_may_be_compiling(monkeypatch):
    """Compiling may take longer than a heartbeat; where all was compiled before, such silence is a fault."""
    released, clock = threading.Event(), types.SimpleNamespace(**vars(time))
    monkeypatch.setattr(service_module, "time", clock)
    with Running(make_llm(), warm_up=False) as server, connect(server) as caller:
        service, reached = server.api.service, threading.Event()
        server.engine.probe = lambda point, request_id: reached.set() or released.wait(60)
        caller.sendall(raw_request(b'{"prompt": "x", "max_tokens": 1}'))
        assert reached.wait(60), "the engine is silent from here on"
        for silence, warm, healthy, dead in (
            (5, True, True, False),
            (11, False, True, False),
            (11, True, False, False),
            (400, False, True, False),
            (400, True, False, True),
            (2000, False, False, True),
        ):
            service.settings = dataclasses.replace(service.settings, warm_up=warm)
            clock.monotonic = lambda silence=silence: time.monotonic() + silence
            assert (service.healthy, service.dead) == (healthy, dead), (silence, warm)
            code = 200 if healthy else 503
            assert [server.http.get(route).status_code for route in ("/health", "/ready")] == [code] * 2
            assert healthy or server.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        clock.monotonic = time.monotonic
        released.set()
        wait_for(lambda: server.http.get("/health").status_code == 200)


def test_a_callers_request_id_is_only_logged(served):
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
        wait_for(lambda: len(served.engine.groups) == 2 or answers)
    second.join(60)
    assert answers[0].json()["choices"][0]["text"] == want
    assert len({mine, answers[0].headers["x-request-id"], "1"}) == 3


def test_a_bug_in_a_route_is_a_500_without_details(served, monkeypatch, caplog):
    monkeypatch.setattr(generate, "completion_call", lambda *_: {}["secret"])
    answer = served.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.headers["x-request-id"] in error_of(answer)["message"]
    wait_for(lambda: "KeyError: 'secret'" in caplog.text)


class Panicking(tiny.Bytes):
    """A tokenizer in Rust panics by what is no Exception; any other such is the interpreter's own."""

    class PanicException(BaseException):
        pass

    def encode(self, text, add_special_tokens=True):
        if "panic" in text:
            raise self.PanicException("retry-limit-in-match over")
        return super().encode(text, add_special_tokens)


def test_a_panic_is_one_requests_error():
    with Running(make_llm(Panicking()), warm_up=False) as server:
        for route, body in (
            ("/tokenize", {"prompt": "panic"}),
            ("/v1/completions", {"prompt": "panic"}),
            ("/v1/completions", {"prompt": "x", "bad_words": ["panic"]}),
        ):
            answer = server.http.post(route, json=body)
            assert answer.status_code == 500 and error_of(answer)["code"] == "internal_error"
        assert server.complete("x", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_a_request_that_rules_out_every_token_is_a_400(served):
    body = {"prompt": "x", "allowed_token_ids": [65], "bad_words": ["A"]}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and error_of(answer)["param"] == "allowed_token_ids"
    events = served.events(**(body | {"bad_words": ["AA"], "max_tokens": 9}))
    assert events[-1] == "[DONE]" and events[-2]["error"]["param"] == "allowed_token_ids"


def test_a_failure_between_steps_is_contained_too(monkeypatch):
    """The failure is not in the engine's step but where a disconnected client's request is aborted."""
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


def test_an_incomplete_request_times_out():
    with Running(make_llm(), warm_up=False, header_timeout_s=0.4, body_timeout_s=0.4) as server:
        whole = raw_request(b'{"prompt": "x", "max_tokens": 1}')
        for cut in (0, 10, whole.index(b"\r\n\r\n"), len(whole) - 5):
            with connect(server) as caller:
                caller.sendall(whole[:cut])
                began = time.monotonic()
                data = b"".join(iter(lambda: caller.recv(65536), b""))
                assert data.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in data, cut
                assert time.monotonic() - began > 0.2
        with connect(server) as caller:  # the second request of a connection too
            caller.sendall(whole)
            assert b"200" in caller.recv(65536)
            caller.sendall(whole[:10])
            while data := caller.recv(65536):
                last = data
            assert b"408" in last


def test_malformed_http_gets_the_json_error(served):
    with connect(served) as caller:
        caller.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        data = caller.recv(65536)
    assert data.startswith(b"HTTP/1.1 400") and b'{"error": {' in data


def test_draining_refuses_the_new_and_finishes_the_old():
    with Running(make_llm(), warm_up=False, shutdown_s=20.0) as server:
        want = server.complete(**LONG)["choices"][0]["text"]
        slow, answers = server.engine.step, []
        server.engine.step = lambda: time.sleep(0.05) or slow()
        worker = threading.Thread(target=lambda: answers.append(server.complete(**LONG)))
        worker.start()
        wait_for(lambda: server.engine.scheduler.running)
        drained = threading.Thread(target=lambda: asyncio.run(server.api.service.drain()))
        drained.start()
        wait_for(lambda: server.api.service.draining)
        with httpx.Client(base_url=server.url, trust_env=False) as late:
            refused = late.post("/v1/completions", json=LONG)
            assert late.get("/ready").status_code == 503 and late.get("/health").status_code == 200
        assert refused.status_code == 503 and error_of(refused)
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        worker.join(30)
        drained.join(30)
        assert answers[0]["choices"][0]["text"] == want


def test_requests_cut_off_by_a_shutdown_get_errors():
    """Waiting requests are refused at once. Running ones have `shutdown_s`, and then get a 503, or an error
    in a stream that has begun."""
    with Running(make_llm(max_num_seqs=2), warm_up=False, shutdown_s=300.0) as server:
        service, engine, step = server.api.service, server.engine, server.engine.step
        answers, events = {}, []

        def ask(name: str, **fields) -> None:
            answers[name] = server.http.post("/v1/completions", json=LONG | fields)

        def start(target, *arguments) -> threading.Thread:
            worker = threading.Thread(target=target, args=arguments)
            worker.start()
            return worker

        def all_have_begun() -> bool:
            running = engine.scheduler.running
            return len(running) == 2 and all(sequence.output for sequence in running.values())

        engine.step = lambda: [] if all_have_begun() else step()
        run = [start(lambda: events.extend(server.events(**LONG))), start(ask, "runs")]
        wait_for(all_have_begun, 120)
        wait = [start(ask, "waits"), start(lambda: ask("streams", stream=True))]
        wait_for(lambda: len(engine.scheduler.waiting) == 2)
        drains = start(lambda: asyncio.run(service.drain()))
        for worker in wait:
            worker.join(60)
        assert set(answers) == {"waits", "streams"}
        service.settings = dataclasses.replace(service.settings, shutdown_s=0.0)
        asyncio.run(service.drain())
        for worker in [*run, drains]:
            worker.join(60)
        for answer in answers.values():
            assert answer.status_code == 503 and answer.headers["retry-after"] and error_of(answer)
        assert len(answers) == 3 and events[-1] == "[DONE]" and set(events[-2]) == {"error"}
        reasons = [event["choices"][0]["finish_reason"] for event in events[:-2]]
        assert reasons and set(reasons) == {None}
        engine.step = step
        wait_for(server.idle)


class Wide(tiny.Bytes):
    """Knows a token that the model does not: folders of models with such tokenizers are about."""

    def encode(self, text, add_special_tokens=True):
        return [999 if character == "☃" else ord(character) for character in text]


def test_a_tokenizer_with_more_tokens_than_the_model_harms_no_request():
    """The requests are repeated as often as engine failures would end the process."""
    with Running(make_llm(Wide()), warm_up=False) as server:
        want = server.complete("x", max_tokens=4)["choices"][0]["text"]
        for words in (["☃"], ["a☃"], ["☃b", "qqq"]):
            for _ in range(3):
                assert server.complete("x", max_tokens=4, bad_words=words)["choices"][0]["text"] == want
        refused = server.http.post("/v1/completions", json={"prompt": "a☃"})
        assert refused.status_code == 400 and error_of(refused)["param"] == "prompt"
        assert not server.api.service._restarts
