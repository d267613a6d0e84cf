"""API keys: admission, each key's share of the server, and isolation between keys."""

import hmac
import socket
import threading

import httpx
import pytest
import tiny_engine as tiny
from http_server import Running, connect, error_of, make_llm, raw_request, torment, wait_for


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


ROUTES = "/v1/models /v1/models/tiny /tokenizer_info /metrics /nowhere /page /health/".split()
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def keyed():
    keys = ("first-key", "second-key", "third-key")
    with Running(make_llm(num_pages=64), warm_up=False, api_keys=keys) as server:
        yield server


def test_every_route_but_health_and_ready_asks_for_a_key(keyed):
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
        assert [stranger.get(route).status_code for route in ("/health", "/ready")] == [200, 200]
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


def hits(server: Running, key: str, prompt: str, **fields) -> int:
    """How many tokens of a key's prompt were in the prefix cache."""
    before = server.engine.stats.prefix_hits
    body = {"prompt": prompt, "max_tokens": 1} | fields
    answer = server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    wait_for(server.idle)
    return server.engine.stats.prefix_hits - before


def test_no_key_finds_anothers_prefixes(keyed):
    assert [hits(keyed, key, "s" * 40) for key in ("first-key", "first-key", "second-key")] == [0, 32, 0]
    assert hits(keyed, "second-key", "s" * 40) == 32
    assert [hits(keyed, key, "s" * 40, cache_salt="a") for key in ("second-key", "first-key")] == [0, 0]


def test_a_key_that_floods_the_prefix_cache_pushes_no_other_out(keyed):
    """64 pages of 8 tokens; one key keeps 4 of them, another sends a hundred times as much as there is."""
    hits(keyed, "first-key", "m" * 40)
    for number in range(120):
        hits(keyed, "second-key", f"{number:04d}" * 10)
    assert keyed.engine.scheduler.pages.cached > 50, "the cache is full of the second's"
    assert hits(keyed, "first-key", "m" * 40) == 32
    assert hits(keyed, "second-key", "0000" * 10) == 0, "of its own it lost the oldest"


def labels(server: Running) -> set[str]:
    lines = server.metrics().splitlines()
    return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}


def test_no_metric_label_comes_from_a_request(served):
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


def test_the_server_opens_no_connections(served, monkeypatch):
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
