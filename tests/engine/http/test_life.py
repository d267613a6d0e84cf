"""Requests come, go, fail and leave; the server stays, and nobody else notices."""

import asyncio
import dataclasses
import hmac
import random
import socket
import threading
import time

import generated
import http_server
import httpx
import pytest
import tiny_engine as tiny
from http_server import Canary, Running, error_of, gives_all_back, make_llm, unharmed, wait_for

from swiftkv_jax.engine.http import generate

LONG = {"prompt": "The cache", "max_tokens": 50, "ignore_eos": True}


def raw_request(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def torment(server: Running, seed: int, count: int) -> dict[int, int]:
    """Send `count` generated requests; how often each status came."""
    source, seen = random.Random(seed), {}
    for number in range(count):
        method, route, raw, headers = generated.request(source)
        answer = server.http.request(method, route, content=raw, headers=headers)
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (number, method, route, raw[:300], answer.text)
        if answer.status_code >= 400 and method != "HEAD":
            error_of(answer)
    return seen


def check_torment(server: Running, count: int) -> None:
    seen = unharmed(server, lambda: torment(server, 1, count))
    assert seen[200] > count // 5 and seen[400] > count // 5


def test_a_canary_stays_the_same_beside_generated_requests(served):
    check_torment(served, 2000)


@pytest.mark.slow
def test_a_canary_stays_the_same_beside_many_generated_requests(served):
    check_torment(served, 20000)


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


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    with Running(make_llm(max_queued_requests=3), warm_up=False) as server:
        server.complete("x", max_tokens=50, ignore_eos=True)
        callers = [connect(server) for _ in range(40)]
        for caller in callers:
            caller.sendall(raw_request(b'{"prompt": "abcdefgh", "max_tokens": 50, "ignore_eos": true}'))
        answers = []
        for caller in callers:
            data = b""
            while b"\r\n\r\n" not in data or not data.rstrip().endswith(b"}"):
                data += caller.recv(65536)
            answers.append(data)
            caller.close()
        refused = [data for data in answers if data.startswith(b"HTTP/1.1 503")]
        done = [data for data in answers if data.startswith(b"HTTP/1.1 200")]
        assert len(done) + len(refused) == 40 and len(done) >= 3 and len(refused) >= 10
        assert all(b"\r\nretry-after: " in data and b'"server_is_overloaded"' in data for data in refused)
        wait_for(server.idle)
        assert (
            b'admission_rejections_total{engine="0",model_name="tiny",reason="queue"}'
            in server.http.get("/metrics").content
        )
        too_many = server.http.post("/v1/completions", json={"prompt": ["a"] * 5})
        assert too_many.status_code == 400 and error_of(too_many)["param"] == "n"


def test_a_key_has_its_share():
    with Running(make_llm(), warm_up=False, api_keys=("one", "two"), max_requests_per_key=1) as server:
        with connect(server) as caller:
            body = raw_request(b'{"prompt": "x", "max_tokens": 60, "ignore_eos": true, "stream": true}')
            caller.sendall(body.replace(b"host: x", b"host: x\r\nauthorization: Bearer one"))
            wait_for(lambda: server.api.models.tickets)
            answers = [
                server.http.post(
                    "/v1/completions", json={"prompt": "x"}, headers={"authorization": f"Bearer {k}"}
                )
                for k in ("one", "two")
            ]
            texts = [
                server.http.post("/tokenize", json={"prompt": "x"}, headers={"authorization": f"Bearer {k}"})
                for k in ("one", "two")
            ]
        for found in (answers, texts):  # the tokenizer's time is counted too
            assert [answer.status_code for answer in found] == [429, 200]
            assert error_of(found[0])["type"] == "rate_limit_error" and found[0].headers["retry-after"]


def test_texts_that_wait_for_the_tokenizer_are_bounded_and_given_up_with_their_clients():
    released, asked = threading.Event(), []

    class Slow(tiny.Bytes):
        def encode(self, text, add_special_tokens=True):
            asked.append(text)
            released.wait(60)
            return super().encode(text)

    with Running(make_llm(Slow()), warm_up=False, max_sequences=3) as server:
        callers = [connect(server) for _ in range(3)]
        for number, caller in enumerate(callers):
            caller.sendall(raw_request(b'{"prompt": "%d"}' % number, "/tokenize"))
        wait_for(lambda: server.api.models.tickets == 3)
        refused = server.http.post("/tokenize", json={"prompt": "x"})
        assert refused.status_code == 503 and "3 texts are waiting" in error_of(refused)["message"]
        assert server.http.get("/health").status_code == 200, "the event loop waits for nobody"
        for caller in callers:
            caller.close()
        wait_for(lambda: server.api.models.tickets == 0)
        released.set()
        assert server.http.post("/tokenize", json={"prompt": "last"}).json()["count"] == 4
        assert len(asked) == 2 and asked[1] == "last", "what nobody waits for is not begun"


def test_a_call_larger_than_the_queue_is_taken_when_nothing_waits():
    with Running(make_llm(max_queued_tokens=40), warm_up=False) as server:
        body = server.complete(["a" * 20] * 6, max_tokens=2)
        assert body["usage"]["prompt_tokens"] == 120


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


ROUTES = (
    "/v1/models",
    "/v1/models/tiny",
    "/tokenizer_info",
    "/ready",
    "/metrics",
    "/nowhere",
    "/page",
    "/health/",
)
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def keyed():
    keys = ("first-key", "second-key", "third-key")
    with Running(make_llm(num_pages=64), warm_up=False, api_keys=keys) as server:
        yield server


def test_every_route_but_health_asks_for_a_key(keyed):
    with httpx.Client(base_url=keyed.url, trust_env=False) as stranger:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first-key"},
            {"authorization": "Basic first-key"},
            {"host": "x/health?"},
            {"x-forwarded-path": "/health", "x-original-url": "/health"},
        ):
            for route in ROUTES:
                answer = stranger.get(route, headers=headers)
                assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
            for route in POSTS:
                assert stranger.post(route, json={"prompt": "x"}, headers=headers).status_code == 401
        assert stranger.get("/health").status_code == 200
    for key in ("first-key", "third-key"):
        answer = keyed.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200


def test_keys_are_compared_in_constant_time(keyed, monkeypatch):
    calls, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: calls.append((len(a), len(b))) or compare(a, b))
    for key in ("first-key", "third-key", "f", "wrong" * 100):
        calls.clear()
        keyed.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert calls == [(32, 32)] * 3, "every key, by digests of one length"


def test_no_key_finds_anothers_prefixes(keyed):
    def hits(key: str, **fields) -> int:
        before = keyed.engine.stats.prefix_hits
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "s" * 40, "max_tokens": 1} | fields
        assert keyed.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        wait_for(keyed.idle)
        return keyed.engine.stats.prefix_hits - before

    assert [hits("first-key"), hits("first-key"), hits("second-key")] == [0, 32, 0]
    assert [hits("second-key"), hits("second-key", cache_salt="a"), hits("first-key", cache_salt="a")] == [
        32,
        0,
        0,
    ]


def test_a_key_that_floods_the_prefix_cache_pushes_no_other_out(keyed):
    """64 pages of 8 tokens; one key keeps 4 of them, another sends a hundred times as much as there is."""

    def ask(key: str, prompt: str) -> int:
        before = keyed.engine.stats.prefix_hits
        body = {"prompt": prompt, "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        assert keyed.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        wait_for(keyed.idle)
        return keyed.engine.stats.prefix_hits - before

    ask("first-key", "m" * 40)
    for number in range(120):
        ask("second-key", f"{number:04d}" * 10)
    assert keyed.engine.scheduler.pages.cached > 50, "the cache is full of the second's"
    assert ask("first-key", "m" * 40) == 32
    assert ask("second-key", "0000" * 10) == 0, "of its own it lost the oldest"


def labels(server: Running) -> set[str]:
    lines = server.http.get("/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}


def test_no_label_comes_from_a_request(served):
    before = labels(served)
    torment(served, 9, 60)
    for i in range(30):
        odd = served.http.request(f"ODD{i}", f"/route{i}", headers={"user-agent": f"agent{i}"})
        assert odd.status_code in (404, 405)
        served.http.post("/v1/completions", json={"prompt": "x", "model": f"m{i}", "user": f"u{i}"})
    assert labels(served) == before
    names = "num_requests_running kv_cache_usage_perc prompt_tokens_total time_to_first_token_seconds_count "
    names += "request_success_total compilations_total kv_bytes prefill_tokens_skipped_total"
    for name in names.split():
        assert any(line.startswith(f"swiftkv_{name}") for line in before), name


def test_the_server_calls_nobody(served, monkeypatch):
    callers, real = [], socket.socket.connect

    def watched(self, to):
        callers.append(threading.current_thread())
        return real(self, to)

    monkeypatch.setattr(socket.socket, "connect", watched)
    with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
        image = {"type": "image_url", "image_url": {"url": f"{served.url}/health"}}
        for content in ("hello http://127.0.0.1/", [image]):
            client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        client.post("/v1/completions", json={"prompt": "http://127.0.0.1/", "model": "http://127.0.0.1/"})
    assert callers and set(callers) == {threading.main_thread()}


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


class Controlled(tiny.Bytes):
    """With a control token that texts can spell."""

    special_texts = ("</s>",)


def test_a_message_cannot_hold_a_control_token():
    with Running(make_llm(Controlled()), warm_up=False) as server:
        for message in ({"role": "user", "content": "a</s>b"}, {"role": "</s>", "content": "x"}):
            for route in ("/v1/chat/completions", "/tokenize"):
                answer = server.http.post(route, json={"messages": [message]})
                assert answer.status_code == 400 and error_of(answer)["param"].startswith("messages.0.")


def test_settings_are_one_frozen_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        http_server.HttpSettings(model_name="x").model_name = "y"
