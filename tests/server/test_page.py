"""The page at `/`: what it shows is what the API says, in a real browser; text stays text."""

import time
import tomllib
from pathlib import Path

import browser
import http_server
import httpx
import pytest
import tiny_engine as tiny
from http_server import Running, make_llm, wait_for

from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.server import page

ROOT = Path(__file__).parents[2]
KEY = "a-key"
MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


class Marked(tiny.Bytes):
    """Every token reads as markup that would rename the page."""

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return MARKUP * len(ids)


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


def test_the_files_are_package_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["swiftkv_jax.server"]
    folder = Path(page.__file__).parent
    shipped = {path for pattern in globs for path in folder.glob(pattern)}
    assert {folder / "static" / name for name, _ in page.FILES.values()} == shipped


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


def test_both_models_answer_by_name(both):
    """Each as its own LLM does, with its own engine, and metrics told apart by name."""
    cards = {card["id"]: card for card in both.http.get("/v1/models").json()["data"]}
    assert list(cards) == ["plain", "swift"]
    assert [(c["layers"], c["split"], c["share"]) for c in cards.values()] == [(2, None, None), (2, 1, 1)]
    ids = list(b"The cache")
    body = {"temperature": 0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    for name, llm in {"plain": standard(), "swift": make_llm(Marked())}.items():
        assert cards[name]["cache_bytes_per_token"] == llm.cache_bytes_per_token
        assert both.http.get(f"/v1/models/{name}").json() == cards[name]
        params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
        (want,) = llm.generate([ids], params, use_tqdm=False)
        found = both.complete(ids, model=name, **body)
        assert found["model"] == name
        chosen = [next(iter(entry.values())).logprob for entry in want.outputs[0].logprobs]
        got = found["choices"][0]["logprobs"]["token_logprobs"]
        assert got == pytest.approx(chosen, abs=1e-5)
    unnamed = both.complete(ids, **body)
    assert unnamed["model"] == "plain"
    refused = both.http.post("/v1/completions", json={"prompt": ids, "model": "third"})
    assert refused.status_code == 404 and "'plain' and 'swift'" in refused.json()["error"]["message"]
    lines = both.http.get("/metrics").text.splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "each metric is described once"
    for name in cards:
        label = f'swiftkv_generation_tokens_total{{engine="0",model_name="{name}"}}'
        assert float(next(line for line in lines if line.startswith(label)).split()[-1]) >= 12


def test_one_engine_that_is_stuck_makes_the_server_unhealthy(both, monkeypatch):
    second = both.api.models.by_name["swift"].service
    monkeypatch.setattr(type(second), "healthy", property(lambda self: self is not second))
    assert both.http.get("/health").status_code == both.http.get("/ready").status_code == 503


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    if browser.ABSENT:
        pytest.skip(browser.ABSENT)
    with browser.Browser(tmp_path_factory.mktemp("profile")) as window:
        window.size(1100, 900)
        yield window


@pytest.fixture
def opened(both, window):
    """The page, connected by its key."""
    window.requested(), window.complaints()
    window.open(both.url)
    window.wait("!document.querySelector('#key-row').hidden")
    window.complaints()  # the 401 that made it ask
    window.type("#key", KEY)
    window.click("#connect")
    window.wait("document.querySelector('#status').textContent == 'ready'")
    window.type("#max-tokens", "5")
    yield window
    wait_for(both.idle)


def done(window) -> None:
    ended = "document.querySelector('#status').textContent == 'done' || "
    window.wait(ended + "document.querySelector('#error').textContent", 300)
    assert window.text("#status") == "done", window.text("#error")


@pytest.mark.slow
def test_it_asks_for_a_key_where_one_is_wanted(both, window):
    window.open(both.url)
    window.wait("!document.querySelector('#error').hidden")
    assert "asks for an API key" in window.text("#error")
    window.type("#key", "wrong")
    window.press("Enter")
    window.wait("document.querySelector('#error').textContent.includes('no such API key')")
    assert not window.run("return document.querySelectorAll('.card').length")


@pytest.mark.slow
def test_an_answer_streams_as_text_with_what_it_cost(both, opened):
    opened.type("#prompt", "The cache")
    opened.type("#max-tokens", "40")
    opened.click("#run")
    done(opened)
    cards = opened.run("return [...document.querySelectorAll('.card')].map(c => c.innerText)")
    for card, name in zip(cards, ("plain", "swift"), strict=True):
        llm = both.api.models.by_name[name].llm
        assert card.startswith(name) and "9 prompt tokens, " in card
        tokens = int(card.split("9 prompt tokens, ")[1].split()[0])
        kib = 9 * llm.cache_bytes_per_token / 1024 + tokens * llm.cache_bytes_per_token / 1024
        shown = float(card.split("Cache\n")[1].split(" KiB")[0])
        assert shown == pytest.approx(kib, rel=0.01)
        assert " ms" in card or " s\n" in card
        assert MARKUP in card
    assert "swift against plain" in opened.text("#verdict")
    assert opened.run("return document.title") == "swiftkv-jax"
    assert opened.run("return document.querySelectorAll('.answer *').length") == 0
    assert not opened.complaints()


@pytest.mark.slow
def test_nothing_is_asked_of_anybody_else(both, opened):
    opened.type("#prompt", "x")
    opened.click("#run")
    done(opened)
    own = ("data:", "chrome:")  # the icon that is none, and the empty tab a window begins with
    asked = [url for url in opened.requested() if not url.startswith(own)]
    assert f"{both.url}/v1/completions" in asked
    assert all(url.startswith(both.url + "/") for url in asked), asked


@pytest.mark.slow
def test_it_is_used_by_keys_alone(both, opened):
    opened.run("document.querySelector('#prompt').focus()")
    opened.press("h", "i", *["Tab"] * 8, "Enter")  # samples, numbers, chat, Run
    assert opened.run("return document.activeElement.id") in ("run", "")
    done(opened)
    opened.run("document.querySelector('#prompt').focus()")
    opened.press("!", "Control", "Enter")
    done(opened)
    assert "3 prompt tokens" in opened.text(".card .count")


@pytest.mark.slow
def test_an_answer_can_be_stopped(both, opened, monkeypatch):
    engine = both.api.models.by_name["plain"].llm.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.1) or step())
    opened.type("#prompt", "The cache")
    opened.type("#max-tokens", "50")
    for stop in (lambda: opened.click("#stop"), lambda: opened.press("Escape")):
        opened.click("#run")
        opened.wait("document.querySelector('.answer').textContent.length > 0")
        stop()
        opened.wait("document.querySelector('#status').textContent == 'stopped'")
        wait_for(both.idle)
        assert opened.run("return !document.querySelector('#run').disabled")


@pytest.mark.slow
def test_errors_are_told_in_one_line(both, opened):
    opened.type("#prompt", "x" * 60)
    opened.type("#max-tokens", "9999")
    opened.click("#run")
    opened.wait("!document.querySelector('#error').hidden")
    assert "max_tokens 9999 would pass the context of 64" in opened.text("#error")
    box = opened.run("return document.querySelector('#error').getBoundingClientRect().height")
    assert box < 40
    opened.click("#chat")
    opened.type("#prompt", "hello")
    opened.type("#max-tokens", "5")
    opened.click("#run")
    done(opened)
    assert opened.run("return document.querySelector('#error').hidden")


@pytest.mark.slow
def test_samples_fit_the_context(both, opened, monkeypatch):
    """A passage has as many tokens as the server says; here it is made to say 7."""
    opened.click(".sample[data-share='0']")
    opened.click("#run")
    done(opened)
    size = "document.querySelector('#prompt').value.split('\\n\\n').length - 1"
    monkeypatch.setattr(tiny.Bytes, "encode", lambda self, text, add_special_tokens=True: [1] * 7)
    for share, passages in (("0.5", 4), ("0.9", 7)):  # of 64 tokens, less as large a part of 5
        opened.click(f".sample[data-share='{share}']")
        opened.wait(f"{size} == {passages}")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_it_fits_a_phone_and_is_readable(both, opened, width, scheme):
    """Nothing is cut off at the side, and every text stands out from what is behind it (WCAG AA: 4.5)."""
    opened.size(width, 800, mobile=width < 500)
    opened.scheme(scheme)
    try:
        assert opened.run("return document.documentElement.scrollWidth") <= width
        places = "[...document.querySelectorAll('.card')].map(card => card.getBoundingClientRect().x)"
        assert len(set(opened.run(f"return {places}"))) == (1 if width < 500 else 2)
        assert opened.run(CONTRAST) >= 4.5
    finally:
        opened.size(1100, 900)
        opened.scheme("light")


CONTRAST = """
const light = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (node) => {
  const color = getComputedStyle(node).backgroundColor;
  return color === "rgba(0, 0, 0, 0)" ? behind(node.parentElement) : color;
};
const written = (n) => [...n.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
const texts = [...document.querySelectorAll("body *")].filter(
  (n) => n.checkVisibility() && !n.disabled && written(n));
return Math.min(...texts.map((n) => {
  const [a, b] = [light(getComputedStyle(n).color), light(behind(n))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}));
"""
