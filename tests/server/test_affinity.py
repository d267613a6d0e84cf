"""Which replica a prompt goes to: its own when idle, another when too much waits there."""

import asyncio
import json
import random
import types

import pytest

from swiftkv_jax.server import affinity, ray, streams
from swiftkv_jax.server.affinity import CHARACTERS, PAGES, SLACK, Affinity, names

PAGE = 8
IDLE = {"a": 0, "b": 0, "c": 0}


def body(**fields) -> bytes:
    return json.dumps(fields).encode()


def test_a_pages_name_covers_all_text_before_it():
    text = "".join(random.Random(0).choices("abcdef", k=5 * CHARACTERS * PAGE + 3))
    named = names(body(prompt=text), b"", PAGE)
    assert len(named) == len(set(named)) == 5
    other = f"{text[: 2 * CHARACTERS * PAGE]}X{text[2 * CHARACTERS * PAGE + 1 :]}"
    again = names(body(prompt=other), b"", PAGE)
    assert [a == b for a, b in zip(named, again, strict=True)] == [True, True, False, False, False]
    assert not set(named) & set(names(body(prompt=text), b"Bearer other", PAGE)), "keys share no pages"


def test_token_ids_and_chats_are_named_too():
    assert len(names(body(prompt=[*range(PAGE * 3 + 7)]), b"", PAGE)) == 3
    system = {"role": "system", "content": "s" * 200}
    chats = [[system, {"role": "user", "content": each * 200}] for each in "ab"]
    first, second = (names(body(messages=chat), b"", PAGE) for chat in chats)
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert 200 // (CHARACTERS * PAGE) <= same < len(first)
    assert len(names(body(prompt="x" * 10**6), b"", PAGE)) == PAGES


def test_an_unparsable_body_has_no_prefix_to_route_by():
    raw = (b"", b"{", b"[]", b"3", b"{}", b"[" * 10**5, b'{"prompt": "\\ud800' + b"x" * 99 + b'"}')
    prompts = ("short", None, [2**40] * 99, ["x", 3], [1, "x"] * 99)
    for said in (*raw, *(body(prompt=prompt) for prompt in prompts)):
        assert names(said, b"\xff", PAGE) == [], said[:30]


def made(count: int, seed: int = 0) -> list[bytes]:
    return [random.Random(f"{seed} {i}").randbytes(32) for i in range(count)]


def test_a_prompt_goes_where_its_beginning_was_read_unless_8_more_wait_there():
    router, prompt = Affinity(), made(4)
    router.read(prompt, "b", IDLE)
    for waiting in range(SLACK):
        assert router.order([*prompt, *made(2, 1)], IDLE | {"b": waiting})[0] == "b"
    assert router.order(prompt, IDLE | {"b": SLACK})[0] != "b"
    assert router.order(prompt, {"a": 5, "b": 5 + SLACK - 1, "c": 20})[0] == "b"
    assert sorted(router.order(prompt, IDLE)) == ["a", "b", "c"], "the others are next"


def test_a_prefix_keeps_its_first_replica_unless_that_replica_is_gone():
    router, prompt = Affinity(), made(4)
    router.read(prompt, "a", IDLE)
    router.read([*prompt, *made(4, 1)], "b", IDLE)
    assert router.order(prompt, IDLE)[0] == "a"
    assert router.order([*prompt, *made(4, 1)], IDLE)[0] == "b", "the longest beginning counts"
    left = {"b": 1, "c": 0}
    assert router.order(prompt, left)[0] == "c"
    router.read(prompt, "c", left)
    assert router.order(prompt, left | {"c": 2})[0] == "c"


def test_a_short_prefix_that_all_share_does_not_choose_the_replica():
    router, system = Affinity(), made(3)
    router.read([*system, *made(9, 1)], "a", IDLE)
    assert router.order([*system, *made(9, 2)], IDLE | {"a": 1})[0] != "a"
    assert router.order([*system, *made(3, 2)], IDLE | {"a": 1})[0] == "a"


def test_new_prompts_are_spread_and_routers_agree_when_idle():
    firsts = [Affinity().order(made(2, seed), IDLE)[0] for seed in range(300)]
    assert firsts == [Affinity().order(made(2, seed), IDLE)[0] for seed in range(300)]
    assert all(70 < firsts.count(name) < 130 for name in IDLE)
    unnamed = [Affinity().order([], IDLE)[0] for _ in range(300)]
    assert all(60 < unnamed.count(name) < 140 for name in IDLE)
    assert Affinity().order([], {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]


def test_least_recently_used_prefixes_are_forgotten(monkeypatch):
    monkeypatch.setattr(affinity, "KNOWN", 6)
    router, kept, lost = Affinity(), made(3, 1), made(3, 2)
    for named in (kept, lost, kept, made(3, 3)):
        router.read(named, "b", IDLE)
    busy = {"a": 0, "b": 1}
    assert router.order(kept, busy)[0] == "b" and router.order(lost, busy)[0] == "a"


@pytest.mark.parametrize(("path", "most"), [("/v1/completions", 10), ("/v1/audio/transcriptions", 40)])
def test_the_router_accepts_audio_bodies_up_to_their_own_limit(path, most, monkeypatch):
    """And one piece more, which the replica refuses."""
    front = ray.Front(types.SimpleNamespace(options=lambda **_: None), PAGE, 10, 40)
    pieces, read = [b"x" * 8] * 9, []

    async def receive() -> dict:
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def relay(scope, body, send) -> None:
        read.append(body)

    monkeypatch.setattr(front, "_relay", relay)
    monkeypatch.setattr(streams, "until_disconnect", lambda receive, answer: answer)
    asyncio.run(front.call({"type": "http", "path": path}, receive, None))
    assert len(read[0]) == most // 8 * 8 + 8
