"""The page at `/`: what it shows is what the API says, in a real browser; text stays text."""

import re
from pathlib import Path

import browser
import http_server
import httpx
import pytest
import tiny_engine as tiny
from http_server import Running, make_llm, wait_for

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.server import page

KEY = "a-key"
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


class Marked(tiny.Bytes):
    """Every token reads as markup that would rename the page."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return MARKUP * len(ids)

    def encode_chat(self, messages, add_generation_prompt: bool) -> list[int]:
        return super().encode_chat([{"role": m["role"], "content": m["content"][:3]} for m in messages], True)


def standard(**changes):
    model = tiny.make_model(KVPlan.standard(2), num_layers=2)
    return LLM.from_model(*model, Marked(), **(http_server.SIZES | changes))


@pytest.fixture(scope="module")
def both():
    """A standard model beside a SwiftKV one, behind a key."""
    llms = {"plain": standard(), "swift": make_llm(Marked())}
    others = {"swift": llms["swift"]}
    with Running(llms["plain"], others, "plain", warm_up=False, api_keys=(KEY,)) as server:
        yield server


def test_scripts_load_own_scripts_only_and_make_no_markup():
    for name, _ in page.FILES.values():
        text = (Path(page.__file__).parent / "static" / name).read_text(encoding="utf-8")
        if name.endswith(".js"):
            assert set(re.findall(r'from "([^"]+)"', text)) <= set(page.FILES), name
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert way not in text, (name, way)


def test_the_files_need_no_key_and_let_nothing_else_in(both):
    with httpx.Client(base_url=both.url, trust_env=False) as stranger:
        for route, (name, kind) in page.FILES.items():
            answer = stranger.get(route)
            assert answer.status_code == 200 and answer.headers["content-type"] == kind
            assert answer.content == (Path(page.__file__).parent / "static" / name).read_bytes()
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert stranger.post(route).status_code == 405
        assert stranger.get("/v1/models").status_code == 401
        assert stranger.get("/page.js/").status_code == stranger.get("/static/page.js").status_code == 401


def test_one_engine_that_is_stuck_makes_the_server_unhealthy(both, monkeypatch):
    second = both.api.models.by_name["swift"].service
    monkeypatch.setattr(type(second), "healthy", property(lambda self: self is not second))
    assert both.http.get("/health").status_code == both.http.get("/ready").status_code == 503


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    if browser.ABSENT:
        pytest.skip(browser.ABSENT)
    with browser.Browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def opened(both, window):
    """The page, connected by its key, which it asked for."""
    window.requested(), window.complaints()
    window.open(both.url)
    window.wait("!document.querySelector('#key-row').hidden")
    window.type("#key", "wrong")
    window.press("Enter")
    window.wait("document.querySelector('#error').textContent.includes('no such API key')")
    assert not window.run("return document.querySelectorAll('.card').length")
    window.complaints()  # the 401s
    window.type("#key", KEY)
    window.click("#connect")
    window.wait("document.querySelector('#status').textContent == 'ready'")
    window.type("#max-tokens", "5")
    window.type("#rounds", "1")
    yield window
    wait_for(both.idle)


def done(window) -> None:
    ended = "document.querySelector('#status').textContent == 'done' || "
    window.wait(ended + "document.querySelector('#error').textContent", 300)
    assert window.text("#status") == "done", window.text("#error")


@pytest.mark.slow
def test_an_answer_streams_as_text_with_what_it_cost(both, opened):
    """And nothing is asked of another host."""
    opened.type("#prompt", "The cache")
    opened.type("#max-tokens", "40")
    opened.click("#run")
    done(opened)
    cards = opened.run("return [...document.querySelectorAll('.card')].map(c => c.innerText)")
    for card, name in zip(cards, ("plain", "swift"), strict=True):
        size = both.api.models.by_name[name].llm.cache_bytes_per_token
        tokens = int(card.split("9 prompt tokens, ")[1].split()[0])
        shown = float(card.split("Cache\n")[1].split(" KiB")[0])
        assert card.startswith(name) and MARKUP in card
        assert shown == pytest.approx((9 + tokens) * size / 1024, rel=0.01)
    assert opened.run("return document.title") == "swiftkv-jax"
    assert opened.run("return document.querySelectorAll('.answer *').length") == 0
    own = ("data:", "chrome:")  # the icon that is none, and the empty tab a window begins with
    asked = [url for url in opened.requested() if not url.startswith(own)]
    assert f"{both.url}/v1/completions" in asked
    assert all(url.startswith(both.url + "/") for url in asked), asked
    opened.run("document.querySelector('input[value=lengths]').click()")
    opened.click("#run")
    done(opened)
    cells = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[0].textContent)"
    assert [*map(int, opened.run(f"return {cells}"))] == [4, 8, 16, 32, 57]
    assert not opened.complaints()
