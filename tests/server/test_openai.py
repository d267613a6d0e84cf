"""The `openai` client, unmodified, against a real server: the same tokens as `LLM.generate`."""

import http_server
import openai
import pytest
import tiny_engine as tiny

from swiftkv_jax.engine.request import SamplingParams

GREEDY = {"model": http_server.NAME, "temperature": 0}
PROMPTS = ["The cache", "x", "a list of words", "to be or not to be"]


@pytest.fixture(scope="module")
def llm():
    return http_server.make_llm()


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def want(llm, prompts, **params):
    outputs = llm.generate(prompts, SamplingParams(**({"temperature": 0.0} | params)), use_tqdm=False)
    return [output.outputs for output in outputs]


def test_completions_equal_those_of_generate(served, client, llm):
    expected = want(llm, PROMPTS, max_tokens=12)
    answer = client.completions.create(prompt=PROMPTS, max_tokens=12, **GREEDY)
    assert [c.text for c in answer.choices] == [outputs[0].text for outputs in expected]
    assert [c.finish_reason for c in answer.choices] == [outputs[0].finish_reason for outputs in expected]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert answer.usage.completion_tokens == sum(len(outputs[0].token_ids) for outputs in expected)


@pytest.mark.parametrize("form", [list(b"The cache"), [list(b"The cache"), list(b"x")]], ids=["ids", "lists"])
def test_prompts_may_be_token_ids(served, client, llm, form):
    texts = ["The cache", "x"] if isinstance(form[0], list) else ["The cache"]
    answer = client.completions.create(prompt=form, max_tokens=5, **GREEDY)
    assert [c.text for c in answer.choices] == [o[0].text for o in want(llm, texts, max_tokens=5)]


def test_a_stream_joins_to_the_whole(served, client, llm):
    expected = want(llm, PROMPTS, max_tokens=12)
    texts, ends, usage = [""] * 4, [None] * 4, None
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(prompt=PROMPTS, max_tokens=12, **GREEDY, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert usage is None and "usage" in chunk.model_fields_set  # null but in the last
        usage = chunk.usage
    assert texts == [outputs[0].text for outputs in expected]
    assert ends == [outputs[0].finish_reason for outputs in expected]
    assert usage.completion_tokens == sum(len(outputs[0].token_ids) for outputs in expected)


def test_offsets_of_a_streamed_choice_are_those_of_the_whole(served):
    """Although text is held back while a stop string may have begun."""
    fields = {"max_tokens": 12, "logprobs": 0, "temperature": 1, "ignore_eos": True, "stop": ["never"]}
    fields["allowed_token_ids"] = list(b"abcde ")
    for seed, prompt in enumerate(("The cache", "é🙂")):
        body = fields | {"prompt": prompt, "seed": seed, "echo": True}
        chunks = [chunk["choices"][0]["logprobs"] for chunk in served.events(**body)[:-1]]
        streamed = [offset for chunk in chunks if chunk for offset in chunk["text_offset"]]
        whole = served.complete(**body)["choices"][0]
        assert streamed == whole["logprobs"]["text_offset"]
        for token, offset in zip(whole["logprobs"]["tokens"], streamed, strict=True):
            assert whole["text"].startswith(token, offset) or token.startswith("bytes:")


def test_chats(served, client, llm):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    ids = tiny.Bytes().encode_chat(messages, True)
    expected = want(llm, [ids], max_tokens=9)[0][0]
    whole = client.chat.completions.create(messages=messages, max_completion_tokens=9, **GREEDY)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(ids) and whole.object == "chat.completion"
    parts = [*messages[:1], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    chunks = list(client.chat.completions.create(messages=parts, max_tokens=9, stream=True, **GREEDY))
    assert "".join(c.choices[0].delta.content for c in chunks) == expected.text
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


def test_n_and_seed(served, client, llm):
    expected = want(llm, PROMPTS[:2], n=3, seed=7, temperature=1.0, max_tokens=8)
    fields = {"model": "tiny", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    answer = client.completions.create(prompt=PROMPTS[:2], **fields)
    assert [c.text for c in answer.choices] == [o.text for outputs in expected for o in outputs]
    assert [c.index for c in answer.choices] == list(range(6))
    again = client.completions.create(prompt=PROMPTS[:2], **fields)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    assert len({c.text for c in answer.choices}) > 2


def test_logprobs(served, client, llm):
    expected = want(llm, ["The cache"], max_tokens=6, logprobs=3)[0][0]
    chosen = [next(iter(entry.values())).logprob for entry in expected.logprobs]
    answer = client.completions.create(prompt="The cache", max_tokens=6, logprobs=3, **GREEDY)
    got = answer.choices[0].logprobs
    assert got.token_logprobs == pytest.approx(chosen, abs=1e-5) and len(got.tokens) == 6
    assert got.token_logprobs == [max(top.values()) for top in got.top_logprobs] and got.text_offset[0] == 0
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True, **GREEDY}
    content = client.chat.completions.create(top_logprobs=2, **fields).choices[0].logprobs.content
    assert len(content) == 4 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    assert bytes(content[0].bytes).decode(errors="replace") == content[0].token
    plain = client.chat.completions.create(**fields).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)


def test_tokens_with_partial_characters_are_reported_as_bytes(served, client):
    """An emoji is four tokens here: each is its own key, and together they are the text again."""
    answer = served.complete("é🙂!", max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert answer["tokens"] == [f"bytes:\\x{byte:02x}" for byte in "é🙂".encode()] + ["!"]
    assert answer["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, **GREEDY}
    rules = {"allowed_token_ids": [0xF0, 0x9F], "ignore_eos": True}
    chat = client.chat.completions.create(top_logprobs=20, extra_body=rules, **fields)
    [entry] = chat.choices[0].logprobs.content
    assert entry.bytes in ([0xF0], [0x9F]) and entry.token == "\ufffd"
    assert all(len(each.bytes) == 1 or each.token == "</s>" for each in entry.top_logprobs)
    body = {"prompt": "x", "max_tokens": 1, "logprobs": 20, "temperature": 0}
    tops = served.complete(**body)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(tops) >= 20, "no two share a key"


def test_usage_reports_tokens_from_the_prefix_cache(served):
    """Pages of 8 tokens; two prompts of a call count both."""
    body = {"max_tokens": 3, "cache_salt": "usage"}

    def cached(prompt) -> int:
        found = served.complete(prompt, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        http_server.wait_for(served.idle)
        return found

    assert [cached("q" * 30), cached("q" * 30), cached(["q" * 30, "q" * 17])] == [0, 24, 40]
    body |= {"n": 3}
    assert cached("q" * 30) == 24, "of the prompt, not of each completion"


def test_errors_are_the_clients_exception_types(served, client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "tiny"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="x", max_tokens=5, model="tiny", temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(prompt="x", model="other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="x" * 60, max_tokens=20, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(tools=[tool], **chat)
    assert caught.value.param == "tools"
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 64
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_a_streamed_echo_ends_once_at_its_end(served):
    *events, done = served.events(prompt="x", echo=True, temperature=0)
    assert done == "[DONE]"
    reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"]]
    assert reasons[-1] is not None and set(reasons[:-1]) == {None}
    assert events[0]["choices"][0]["text"].startswith("x")


def test_tokenizing_there_and_back(served):
    def ask(route: str, **body) -> dict:
        return served.http.post(route, json=body).json()

    found = ask("/tokenize", prompt="Grüße", add_special_tokens=True)
    assert found["tokens"] == list("Grüße".encode())
    assert (found["count"], found["max_model_len"]) == (7, 64)
    assert ask("/detokenize", tokens=found["tokens"]) == {"prompt": "Grüße"}
    assert bytes(ask("/tokenize", messages=[{"role": "user", "content": "x"}])["tokens"]) == b"u:x|A:"
    assert "eos_token" in served.http.get("/tokenizer_info").json()
