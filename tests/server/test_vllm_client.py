"""What `vllm bench serve` asks for and relies on: the openai and openai-chat backends.

Bodies and headers follow vLLM's description (its benchmarks' endpoint_request_func, 2026): the first event
with choices is the first token, whatever its text; one without choices counts tokens; `[DONE]` ends.
"""

import json

import pytest

PROMPT = "The caché is full of rows"


def body_of(backend: str) -> tuple[str, dict]:
    """(route, body) of a backend."""
    asked = {"model": "tiny", "ignore_eos": True, "temperature": 0.0}
    if backend == "openai":
        asked |= {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 13, "logprobs": None}
        return "/v1/completions", asked
    content = [{"type": "text", "text": PROMPT}]
    asked |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 13}
    return "/v1/chat/completions", asked


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllms_client_reads_the_answers_to_its_requests(served, backend):
    """Of a stream as of the whole answer; bytes are UTF-8 and events end with a blank line."""
    route, body = body_of(backend)
    headers = {"x-request-id": "bench-1-0", "accept-encoding": "gzip", "user-agent": "aiohttp/3.14.5"}
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = served.http.post(route, json=streamed, headers=headers)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "") and all(event.startswith("data: {") for event in events)
    *chunks, counted = (json.loads(event.removeprefix("data: ")) for event in events)
    parts = [chunk["choices"][0] for chunk in chunks]
    text = "".join(part["text"] if backend == "openai" else part["delta"]["content"] or "" for part in parts)
    whole = served.http.post(route, json=body).json()
    choice = whole["choices"][0]
    assert text == (choice["text"] if backend == "openai" else choice["message"]["content"])
    assert counted["choices"] == [] and counted["usage"]["completion_tokens"] == 13 >= len(chunks)
    assert counted["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_first_event_is_one_token(served, backend):
    """No event comes before the first token, and it comes alone: time to first token is not flattered."""
    route, body = body_of(backend)
    name = {"logprobs": True} if backend == "openai-chat" else {"logprobs": 0}
    first = served.events(route, **(body | name))[0]["choices"][0]["logprobs"]
    assert len(first["content" if backend == "openai-chat" else "tokens"]) == 1
