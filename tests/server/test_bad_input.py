"""Bad input is always answered by a 4xx in the one shape that names the field, never by a 5xx."""

import http_server
import pytest

CHAT = {"messages": [{"role": "user", "content": "x"}]}
BAD = {  # sent to /v1/completions beside a good prompt: a field, and raw JSON values of it
    "temperature": ("NaN", "1e999", "999999"), "top_p": ("-1",), "repetition_penalty": ("0", "Infinity"),
    "max_tokens": ("true", '"16"', "1.0", "9" * 400, "0", "-1"), "seed": ("9" * 400,),
    "min_tokens": ('9, "max_tokens": 3',), "n": ("0", "17", "16384"), "logprobs": ("21", "-1"),
    "stop": (
        '""', "[1]", "5", '[""]', f'"{"a" * 1025}"', '["a"' + ', "a"' * 32 + "]",
        '["a"' + ', "a"' * 200_000 + "]",
    ),
    "logit_bias": ('{"5": 101}', '{"word": 1}', '{"258": 1}'), "stop_token_ids": ("[258]", "[-1]"),
    "allowed_token_ids": ("[4000000]", "[]"), "cache_salt": ('"a b"', '""'), "best_of": ("4", "0"),
    "suffix": ('"x"',), "prompt_logprobs": ("0",), "return_token_ids": ("true",),
    "return_tokens_as_token_ids": ("true",), "add_special_tokens": ('"no"',), "length_penalty": ("2.0",),
    "stop_regex": ('"a+"',), "max_completion_tokens": ("5",), "spaces_between_special_tokens": ("false",),
    "use_beam_search": ("true",), "guided_regex": ('"(a+)+$"',), "prompt_embeds": ('"AAAA"',),
    "response_format": ('{"type": "json_object"}',), "lora_request": ('{"path": "/etc"}',),
    "stream": ('"yes"',), "stream_options": ("[]", '{"include_usage": true}'), "priority": ("-5",),
    "model": ("5",),
    "prompt": (
        "null", '""', "[]", "[[]]", "[[], [1]]", '["a", ""]', '["a", 1]', "[1, [2]]", "5", '{"a": 1}',
        "[1.5]", "[true]", "[-1]", "[258]", "[2147483653]", f"[{'9' * 400}]", "[" + '"a",' * 128 + '"a"]',
        f'"{"a" * 64}"', f'"{"a" * 1_500_000}"', "[" + "1," * 100 + "1]",
    ),
}  # fmt: skip
BODIES = (
    *(b"", b"[]", b'{"prompt": "x"', '{"prompt": "x"}'.encode("utf-16"), b'{"prompt": "\xff\xfe"}'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "x", "stop": "\\udfff"}'),  # lone surrogates
    b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
    b'{"prompt": "x", "y": ' + b"[" * 100000,  # in a field that means nothing
)
MESSAGES = (
    *(None, [], [5], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": None}]),
    [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": "now"}],
    [{"role": "user", "content": "x", "name": []}, "x"],
    [{"role": "", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}],
    [{"role": "user", "content": "x"}] * 1025,
)
UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "response_format": {"type": "json_schema", "json_schema": {}},
    "chat_template": "{{ 1 }}",
    "chat_template_kwargs": {"enable_thinking": True},
    "modalities": ["audio"],
    "top_logprobs": 2,
    "continue_final_message": True,
    "add_generation_prompt": None,
    "documents": [{"text": "x"}],
    "reasoning_effort": "low",
    "include_reasoning": False,
    "return_token_ids": True,
    "max_completion_tokens": 0,
    "add_special_tokens": True,
    "echo": True,
}


def post(server, raw: bytes, route: str = "/v1/completions"):
    return server.http.post(route, content=raw, headers={"content-type": "application/json"})


def check_is_refused(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    return http_server.error_of(answer)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named(served, name):
    for value in BAD[name]:
        good = "" if name == "prompt" else '"prompt": "x", '
        error = check_is_refused(post(served, f'{{{good}"{name}": {value}}}'.encode()))
        assert error["param"].split(".")[0] == name and name in error["message"], value[:99]
        assert len(error["message"]) < 250


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object_is_refused(served, route):
    for body in BODIES:
        check_is_refused(post(served, body, route))


def test_bad_messages_and_unsupported_chat_fields_are_named(served):
    unsupported = ((CHAT | {name: value}, name) for name, value in UNSUPPORTED.items())
    for body, name in (*(({"messages": value}, "messages") for value in MESSAGES), *unsupported):
        answer = served.http.post("/v1/chat/completions", json=body)
        assert check_is_refused(answer)["param"].split(".")[0] == name, str(body)[:99]


def test_neutral_values_of_unsupported_fields_are_accepted(served):
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "stop": None}
    nothing |= {"n": None, "include_reasoning": True, "continue_final_message": False, "echo": False}
    nothing |= {"add_generation_prompt": True, "add_special_tokens": False, "user": "someone", "store": False}
    nothing |= {"max_tokens": 2}
    assert served.http.post("/v1/chat/completions", json=CHAT | nothing | {"new": [1]}).status_code == 200
    nothing = {"best_of": 1, "suffix": "", "prompt_logprobs": None, "use_beam_search": False, "max_tokens": 1}
    nothing |= {"spaces_between_special_tokens": True, "max_completion_tokens": None}
    for stop in ("a" * 1024, ["a"] * 32, []):
        answer = served.http.post("/v1/completions", json={"prompt": "x", "stop": stop} | nothing)
        assert answer.status_code == 200, answer.text


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
