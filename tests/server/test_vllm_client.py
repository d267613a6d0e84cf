"""`vllm bench serve` as a client, its requests and reading: the openai and openai-chat backends.

Bodies, headers and the reading of events follow vLLM's description (its benchmarks' endpoint_request_func,
2026): events end with a blank line and may be cut anywhere; one that begins with a colon is a comment; the
first with choices is the first token, whatever its text; one without choices counts tokens; `[DONE]` ends.
"""

import codecs
import dataclasses
import json
import time
import uuid

import pytest
from http_server import Running

PROMPT = "The caché is full of rows"


@dataclasses.dataclass
class Output:
    """A request's record in vLLM's client; times are in seconds from its sending."""

    text: str = ""
    ttft: float = 0.0
    itl: list[float] = dataclasses.field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    prompt_len: int = 0
    done: bool = False


class Messages:
    """Events out of bytes that are cut anywhere."""

    def __init__(self):
        self.rest, self._decoder = "", codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes) -> list[str]:
        *whole, self.rest = (self.rest + self._decoder.decode(data)).split("\n\n")
        return [message.strip() for message in whole if message.strip()]


def bodies(backend: str, tokens: int) -> tuple[str, dict, dict]:
    """(route, body, headers) of a backend."""
    headers = {"x-request-id": f"bench-{uuid.uuid4().hex[:8]}-0", "accept-encoding": "gzip, deflate"}
    headers |= {"user-agent": "Python/3.11 aiohttp/3.14.5", "content-type": "application/json"}
    usage = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    if backend == "openai":
        body = {"model": "tiny", "prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": tokens}
        return "/v1/completions", body | {"logprobs": None} | usage, headers
    content = [{"type": "text", "text": PROMPT}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return "/v1/chat/completions", body | {"max_completion_tokens": tokens} | usage, headers


def ask(server: Running, backend: str, tokens: int, cut: int, **extra) -> Output:
    """One request as vLLM's client makes and reads it; the bytes are handed on in pieces of `cut`."""
    route, body, headers = bodies(backend, tokens)
    out, messages, first = Output(), Messages(), False
    sent = latest = time.perf_counter()
    content = json.dumps(body | extra).encode()
    with server.http.stream("POST", route, content=content, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for data in answer.iter_raw(cut):
            for message in messages.feed(data):
                if message.startswith(":"):
                    continue
                assert message.startswith("data: ")
                chunk = message.removeprefix("data: ")
                if chunk == "[DONE]":
                    out.done = True
                    continue
                event, now = json.loads(chunk), time.perf_counter()
                if choices := event.get("choices"):
                    text = choices[0]["text"] if backend == "openai" else choices[0]["delta"].get("content")
                    if first:
                        out.itl.append(now - latest)
                    else:
                        first, out.ttft = True, now - sent
                    latest, out.text = now, out.text + (text or "")
                elif usage := event.get("usage"):
                    out.output_tokens, out.prompt_len = usage["completion_tokens"], usage["prompt_tokens"]
    assert first and messages.rest == ""
    out.latency = latest - sent
    return out


@pytest.mark.parametrize("cut", [1, 7, 4096])
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_client_reads_the_answers_to_its_requests(served, backend, cut):
    got = ask(served, backend, 13, cut, temperature=0.0)
    assert got.done and got.output_tokens == 13
    whole = json.loads(
        served.http.post(
            bodies(backend, 13)[0],
            json=bodies(backend, 13)[1] | {"temperature": 0.0, "stream": False, "stream_options": None},
        ).content
    )
    choice = whole["choices"][0]
    assert got.text == (choice["text"] if backend == "openai" else choice["message"]["content"])
    assert got.prompt_len == whole["usage"]["prompt_tokens"]
    assert got.ttft > 0 and sum(got.itl) == pytest.approx(got.latency - got.ttft)
    assert 1 <= len(got.itl) <= 12  # an event may hold the tokens of a whole launch


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_first_event_is_one_token(served, backend):
    """No event comes before the first token, and it comes alone: time to first token is not flattered."""
    route, body, _ = bodies(backend, 13)
    name = {"logprobs": True} if backend == "openai-chat" else {"logprobs": 0}
    first = served.events(route, **(body | name))[0]["choices"][0]["logprobs"]
    assert len(first["content" if backend == "openai-chat" else "tokens"]) == 1
