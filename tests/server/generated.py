"""Requests of all kinds, good and bad, from one seed."""

import json
import random

ROUTES = (
    "/v1/completions /v1/chat/completions /tokenize /detokenize /v1/models /v1/models/tiny /tokenizer_info "
    "/v1/audio/transcriptions /v1/audio/translations /openapi.json /health /ready /metrics / /page.css "
    "/page.js /api.js /words.js /plot.js /nowhere"
).split()
_VALUES = (
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e-45, 1e308, 2**31, 2**63, -(2**63) - 1, 10**40, "", "x",
    "\x00", "é", "\ufffd", "</s>", "a" * 300, [], [1], ["a"], [[1, 2]], [[]], [None], {}, {"a": 1}, {"1": 1},
    [0] * 70,
)  # fmt: skip
_FIELDS = (
    "prompt messages model n max_tokens min_tokens temperature top_p top_k min_p presence_penalty stop seed "
    "frequency_penalty repetition_penalty stop_token_ids bad_words allowed_token_ids logit_bias ignore_eos "
    "include_stop_str_in_output skip_special_tokens stream stream_options cache_salt priority echo logprobs "
    "top_logprobs max_completion_tokens tokens add_special_tokens add_generation_prompt tools "
    "response_format best_of suffix user unheard_of"
).split()
GOOD = {
    "n": (1, 2), "temperature": (0, 0.7, 2), "top_p": (0.1, 1), "top_k": (-1, 0, 3), "min_p": (0.0, 0.2),
    "presence_penalty": (-2, 1.5), "frequency_penalty": (0, 2), "repetition_penalty": (0.5, 1.3),
    "seed": (0, -1, 5), "stop": ("e", ["a", "bc"], None), "stop_token_ids": ([], [65], [*range(60, 100)]),
    "bad_words": ([], ["ab"]), "allowed_token_ids": ([65, 66],), "logit_bias": ({"65": 5}, {}),
    "ignore_eos": (True, False), "stream": (True, False), "cache_salt": ("s1", "s2"), "min_tokens": (0, 2),
    "echo": (True, False), "priority": (0, 3), "stream_options": ({"include_usage": True},),
}  # fmt: skip


def request(random: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """(method, route, body, headers)."""
    route = random.choices(ROUTES, [12, 8] + [1] * (len(ROUTES) - 2))[0]
    body = {"max_tokens": random.randint(1, 4), "prompt": "x" * random.randint(1, 40)}
    if "chat" in route:
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": "y" * random.randint(0, 20)}]}
        body["logprobs"] = random.random() < 0.2
    elif random.random() < 0.2:
        body["logprobs"] = random.randint(0, 20)
    for name in random.sample(sorted(GOOD), random.randint(0, 5)):
        body[name] = random.choice(GOOD[name])
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        body[random.choice(_FIELDS)] = random.choice(_VALUES)
    raw = json.dumps(body).encode()
    if random.random() < 0.1:
        raw = _mangled(random, raw)
    headers = {"content-type": "application/json"}
    if random.random() < 0.05:
        headers["content-type"] = random.choice(
            ("text/plain", "", "application/json; charset=utf-8", "x" * 500)
        )
    if random.random() < 0.05:
        headers["x-request-id"] = random.choice(("1", "a" * 400, '"}{'))
    method = "POST" if route in ROUTES[:4] else "GET"
    if random.random() < 0.05:
        method = random.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "ODD"))
    return method, route, raw, headers


def _mangled(random: random.Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw))
    pieces = (b"", b"NaN", b"\xff", b"\x00", b'"\\ud800"', b"[" * 300, b"1e999", b"}", b'"')
    return raw[:at] + random.choice(pieces) + raw[at + random.randint(0, 3) :]
