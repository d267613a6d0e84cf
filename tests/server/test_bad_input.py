"""Bad input is always answered by a 4xx in the one shape that names the field, never by a 5xx."""

import http_server
import pytest

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BAD = {  # what is sent to /v1/completions beside a good prompt: (raw JSON of a field, the field)
    "NaN": ('"temperature": NaN', "temperature"),
    "infinity": ('"temperature": 1e999', "temperature"),
    "too hot": ('"temperature": 999999', "temperature"),
    "negative top_p": ('"top_p": -1', "top_p"),
    "no penalty at all": ('"repetition_penalty": 0', "repetition_penalty"),
    "infinite penalty": ('"repetition_penalty": Infinity', "repetition_penalty"),
    "true for an int": ('"max_tokens": true', "max_tokens"),
    "a text for an int": ('"max_tokens": "16"', "max_tokens"),
    "a float for an int": ('"max_tokens": 1.0', "max_tokens"),
    "400 digits": (f'"max_tokens": {"9" * 400}', "max_tokens"),
    "400 digits of seed": (f'"seed": {"9" * 400}', "seed"),
    "zero tokens": ('"max_tokens": 0', "max_tokens"),
    "negative tokens": ('"max_tokens": -1', "max_tokens"),
    "min above max": ('"min_tokens": 9, "max_tokens": 3', "min_tokens"),
    "n of 0": ('"n": 0', "n"),
    "n of 17": ('"n": 17', "n"),
    "n of 16384": ('"n": 16384', "n"),
    "too many logprobs": ('"logprobs": 21', "logprobs"),
    "logprobs -1": ('"logprobs": -1', "logprobs"),
    "an empty stop": ('"stop": ""', "stop"),
    "a million stops": ('"stop": [' + '"a",' * 200000 + '"a"]', "stop"),
    "stop of numbers": ('"stop": [1]', "stop"),
    "bias out of range": ('"logit_bias": {"5": 101}', "logit_bias"),
    "bias of a word": ('"logit_bias": {"word": 1}', "logit_bias"),
    "bias of no token": ('"logit_bias": {"258": 1}', "logit_bias"),
    "stop id of no token": ('"stop_token_ids": [258]', "stop_token_ids"),
    "allowed id of no token": ('"allowed_token_ids": [4000000]', "allowed_token_ids"),
    "nothing allowed": ('"allowed_token_ids": []', "allowed_token_ids"),
    "negative id": ('"stop_token_ids": [-1]', "stop_token_ids"),
    "odd salt": ('"cache_salt": "a b"', "cache_salt"),
    "empty salt": ('"cache_salt": ""', "cache_salt"),
    "best_of": ('"best_of": 4', "best_of"),
    "best_of 0": ('"best_of": 0', "best_of"),
    "suffix": ('"suffix": "x"', "suffix"),
    "0 of a prompt's logprobs": ('"prompt_logprobs": 0', "prompt_logprobs"),
    "ids of tokens": ('"return_token_ids": true', "return_token_ids"),
    "tokens as ids": ('"return_tokens_as_token_ids": true', "return_tokens_as_token_ids"),
    "special tokens by a text": ('"add_special_tokens": "no"', "add_special_tokens"),
    "longer beams": ('"length_penalty": 2.0', "length_penalty"),
    "a long stop": (f'"stop": "{"a" * 1025}"', "stop"),
    "many stops": (f'"stop": {["a"] * 33}'.replace("'", '"'), "stop"),
    "a pattern to stop at": ('"stop_regex": "a+"', "stop_regex"),
    "a chat's limit": ('"max_completion_tokens": 5', "max_completion_tokens"),
    "no spaces": ('"spaces_between_special_tokens": false', "spaces_between_special_tokens"),
    "beams": ('"use_beam_search": true', "use_beam_search"),
    "a grammar": ('"guided_regex": "(a+)+$"', "guided_regex"),
    "a format": ('"response_format": {"type": "json_object"}', "response_format"),
    "embeddings": ('"prompt_embeds": "AAAA"', "prompt_embeds"),
    "LoRA": ('"lora_request": {"path": "/etc"}', "lora_request"),
    "stream of a text": ('"stream": "yes"', "stream"),
    "a list of options": ('"stream_options": []', "stream_options"),
    "options of no stream": ('"stream_options": {"include_usage": true}', "stream_options"),
    "priority below 0": ('"priority": -5', "priority"),
    "model of a number": ('"model": 5', "model"),
}
PROMPTS = {
    "none": "null",
    "empty": '""',
    "empty list": "[]",
    "an empty list in a list": "[[]]",
    "an empty list first": "[[], [1]]",
    "an empty text in a list": '["a", ""]',
    "a mixture": '["a", 1]',
    "ids and lists": "[1, [2]]",
    "a number": "5",
    "an object": '{"a": 1}',
    "a float id": "[1.5]",
    "true": "[true]",
    "a negative id": "[-1]",
    "an id beyond the vocabulary": "[258]",
    "an id beyond 32 bits": "[2147483653]",
    "an id of 400 digits": f"[{'9' * 400}]",
    "too many": "[" + '"a",' * 128 + '"a"]',
    "too long": f'"{"a" * 64}"',
    "far too long": f'"{"a" * 1500000}"',
    "longer in ids than the context": "[" + "1," * 100 + "1]",
}
BODIES = {
    "nothing": b"",
    "no object": b"[]",
    "half an object": b'{"prompt": "x"',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate in a stop string": b'{"prompt": "x", "stop": "\\udfff"}',
    "deep nesting": b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
    "deep nesting in a field that means nothing": b'{"prompt": "x", "y": ' + b"[" * 100000,
}


def post(server, raw: bytes, route: str = "/v1/completions"):
    return server.http.post(route, content=raw, headers={"content-type": "application/json"})


def check_is_refused(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    return http_server.error_of(answer)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_named(served, case):
    fields, name = BAD[case]
    error = check_is_refused(post(served, f'{{"prompt": "x", {fields}}}'.encode()))
    assert error["param"].split(".")[0] == name and name in error["message"]


@pytest.mark.parametrize("case", PROMPTS)
def test_a_bad_prompt_is_named(served, case):
    error = check_is_refused(post(served, f'{{"prompt": {PROMPTS[case]}, "max_tokens": 1}}'.encode()))
    assert error["param"].split(".")[0] == "prompt" and len(error["message"]) < 250


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(served, route, case):
    check_is_refused(post(served, BODIES[case], route))


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        [5],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}],
        [{"role": "assistant", "content": None, "tool_calls": "now"}],
        [{"role": "user", "content": "x", "name": []}, "x"],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
        [{"role": "user", "content": "x"}] * 1025,
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_messages(served, messages):
    answer = served.http.post("/v1/chat/completions", json={"messages": messages})
    assert check_is_refused(answer)["param"].split(".")[0] == "messages"


@pytest.mark.parametrize(
    "field, value",
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("modalities", ["audio"]),
        ("top_logprobs", 2),
        ("continue_final_message", True),
        ("add_generation_prompt", None),
        ("documents", [{"text": "x"}]),
        ("reasoning_effort", "low"),
        ("include_reasoning", False),
        ("return_token_ids", True),
        ("max_completion_tokens", 0),
        ("add_special_tokens", True),
        ("echo", True),
    ],
)
def test_unsupported_chat_fields_are_refused_by_name(served, field, value):
    error = check_is_refused(served.http.post("/v1/chat/completions", json=CHAT | {field: value}))
    assert error["param"] == field


def test_neutral_values_of_unsupported_fields_are_accepted(served):
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "stop": None,
        "n": None,
    }
    nothing |= {"include_reasoning": True, "continue_final_message": False, "add_generation_prompt": True}
    nothing |= {"add_special_tokens": False, "echo": False}
    nothing |= {"user": "someone", "store": False, "a_field_of_tomorrow": {"deep": [1]}, "max_tokens": 2}
    assert served.http.post("/v1/chat/completions", json=CHAT | nothing).status_code == 200
    nothing = {"best_of": 1, "suffix": "", "prompt_logprobs": None, "use_beam_search": False, "max_tokens": 1}
    nothing |= {"spaces_between_special_tokens": True, "max_completion_tokens": None}
    assert served.http.post("/v1/completions", json={"prompt": "x"} | nothing).status_code == 200


def test_the_bounds_of_stop_are_checked_and_named(served):
    for stop in ("a" * 1025, ["a"] * 33, "", [""], 5):
        error = check_is_refused(served.http.post("/v1/completions", json={"prompt": "x", "stop": stop}))
        assert (
            error["message"]
            == "stop: must be a text of 1 to 1024 characters, or a list of at most 32 of them"
        )
    for stop in ("a" * 1024, ["a"] * 32, []):
        body = {"prompt": "x", "stop": stop, "max_tokens": 1}
        assert served.http.post("/v1/completions", json=body).status_code == 200


def test_max_tokens_left_out_takes_what_the_context_leaves(served):
    """16 tokens, as OpenAI's completions do, or fewer: nobody asked for more."""
    for tokens, want in ((40, 16), (60, 4), (63, 1)):
        body = served.complete([5] * tokens, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == want
        assert body["choices"][0]["finish_reason"] == "length"
    said = post(served, b'{"prompt": "%s", "max_tokens": 16}' % (b"a" * 60))
    assert check_is_refused(said)["code"] == "context_length_exceeded"


def test_long_values_are_not_echoed(served):
    word = "q" * 5000
    for raw in (
        {"prompt": "x", "model": word},
        {"prompt": "x", "cache_salt": word},
        {"prompt": "x", "logit_bias": {word: 1}},
        {"prompt": "x", "lora_request": word},
        {"prompt": {word: word}},
        {"prompt": "x", "logit_bias": {"🙂" * 5000: 1}},
        {"prompt": "x", "model": "🙂" * 500},
    ):
        answer = served.http.post("/v1/completions", json=raw)
        assert 400 <= answer.status_code < 500 and "q" * 101 not in answer.text
        http_server.error_of(answer)  # 1 KiB, though a character may take four bytes, or twelve if escaped


def test_wrong_routes_methods_and_types(served):
    check_is_refused(served.http.get("/nowhere"), 404)
    check_is_refused(served.http.get("/v1/completions/"), 404)
    check_is_refused(served.http.post("/../../etc/passwd"), 404)
    refused = served.http.get("/v1/completions")
    check_is_refused(refused, 405)
    assert "POST" in refused.headers["allow"]
    check_is_refused(served.http.request("BREW", "/health"), 405)
    check_is_refused(served.http.post("/v1/completions", content=b"prompt=x"), 415)
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    check_is_refused(served.http.post("/v1/completions", content=b"x", headers=headers), 415)


def test_requests_above_the_limits_are_refused(served):
    check_is_refused(post(served, b'{"prompt": "' + b"a" * (2 * 2**20) + b'"}'), 413)

    def pieces():
        for _ in range(64):
            yield b" " * 2**16

    headers = {"content-type": "application/json"}
    refused = served.http.post("/v1/completions", content=pieces(), headers=headers)
    check_is_refused(refused, 413)
    many = {f"x-{i}": "1" for i in range(70)}
    check_is_refused(served.http.get("/health", headers=many), 431)
    check_is_refused(served.http.get("/health", headers={"x": "1" * 17000}), 431)
    far = served.http.get("/health", headers={"x": "1" * 200000})
    assert far.status_code == 400 and http_server.error_of(far)


def test_detokenizing_strange_ids(served):
    for tokens in ([258], [-1], [2**31], ["a"], "abc", None, [1.5], [True]):
        answer = served.http.post("/detokenize", json={"tokens": tokens})
        assert check_is_refused(answer)["param"].split(".")[0] == "tokens"
    check_is_refused(served.http.post("/tokenize", json={}))
    check_is_refused(served.http.post("/tokenize", json={"prompt": "a", "messages": CHAT["messages"]}))
