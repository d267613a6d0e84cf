"""The page at `/`: what it shows is what the API says, in a real browser; text stays text."""

import json
import re
import shutil
import subprocess
import time
import tomllib
from pathlib import Path

import browser
import http_server
import httpx
import pytest
import tiny_engine as tiny
from http_server import Running, make_llm, wait_for

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.server import page

ROOT = Path(__file__).parents[2]
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


def test_the_files_are_package_data():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["swiftkv_jax.server"]
    folder = Path(page.__file__).parent
    shipped = {path for pattern in globs for path in folder.glob(pattern)}
    assert {folder / "static" / name for name, _ in page.FILES.values()} == shipped


def test_scripts_load_own_scripts_only_and_make_no_markup():
    for route, (name, _) in page.FILES.items():
        text = (Path(page.__file__).parent / "static" / name).read_text(encoding="utf-8")
        if name.endswith(".js"):
            assert set(re.findall(r'from "([^"]+)"', text)) <= set(page.FILES), route
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert way not in text, (name, way)
        assert re.findall(r"https?://[^\s\"]+", text) in ([], ["http://www.w3.org/2000/svg"]), name


MEASURED = """
import { curl, faster, lengths, tick, verdict } from "WORDS";
const one = { name: "a", ttft: 210, speed: 50, bytes: 100 };
const two = { name: "b", ttft: 100, speed: 40, bytes: 62 };
const same = { name: "b", ttft: 205, speed: 51, bytes: 100 };
console.log(JSON.stringify([
  verdict([one, two]), verdict([two, one]), verdict([one, same]), verdict([one]),
  verdict([one, { ...two, speed: null }]),
  verdict([{ name: "a", ttft: 1200 }, { name: "b", ttft: 100 }], "At 9 prompt tokens"), faster(100, 107),
  lengths(2048), lengths(1), [tick(973, 5), tick(7, 4), tick(0.3, 5)],
  curl("http://h/v1/completions", { prompt: "it's" }, true),
]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_verdict_is_a_sentence_that_says_faster_or_slower(tmp_path):
    words = Path(page.__file__).parent / "static" / "words.js"
    shutil.copy(words, tmp_path / "words.mjs")
    script = tmp_path / "said.mjs"
    script.write_text(MEASURED.replace("WORDS", "./words.mjs"), encoding="utf-8")
    ran = subprocess.run(["node", script], capture_output=True, text=True, check=True)
    *said, command = json.loads(ran.stdout)
    first = "to the first token"
    assert said == [
        f"b is 2.1 times faster {first} than a (100 ms against 210 ms), generates 1.3 times slower and takes "
        "62 % of the cache.",
        f"a is 2.1 times slower {first} than b (210 ms against 100 ms), generates 1.3 times faster and takes "
        "161 % of the cache.",
        f"b is as fast {first} as a (205 ms against 210 ms), generates as fast and takes as much cache.",
        "a gives the first token after 210 ms, then 50.0 tokens per second.",
        f"b is 2.1 times faster {first} than a (100 ms against 210 ms) and takes 62 % of the cache.",
        f"At 9 prompt tokens, b is 12 times faster {first} than a (100 ms against 1.20 s).",
        "1.07 times faster",
        [128, 256, 512, 1024, 1843],
        [1, 1, 1, 1, 1],
        [200, 2, 0.1],
    ]
    assert "$SWIFTKV_API_KEY" in command and """'{"prompt":"it'\\''s"}'""" in command


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
    window.type("#rounds", "1")
    yield window
    wait_for(both.idle)


def done(window) -> None:
    ended = "document.querySelector('#status').textContent == 'done' || "
    window.wait(ended + "document.querySelector('#error').textContent", 300)
    assert window.text("#status") == "done", window.text("#error")


@pytest.mark.slow
def test_the_page_asks_for_a_key_when_one_is_required(both, window):
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
    assert re.match(r"swift is .+ to the first token (than|as) plain \(.+\.$", opened.text("#verdict"))
    assert opened.run("return document.title") == "swiftkv-jax"
    assert opened.run("return document.querySelectorAll('.answer *').length") == 0
    assert not opened.complaints()


@pytest.mark.slow
def test_the_page_makes_no_request_to_another_host(both, opened):
    opened.type("#prompt", "x")
    opened.click("#run")
    done(opened)
    own = ("data:", "chrome:")  # the icon that is none, and the empty tab a window begins with
    asked = [url for url in opened.requested() if not url.startswith(own)]
    assert f"{both.url}/v1/completions" in asked
    assert all(url.startswith(both.url + "/") for url in asked), asked


@pytest.mark.slow
def test_the_page_can_be_used_by_keyboard_alone(both, opened):
    opened.run("document.querySelector('#prompt').focus()")
    opened.press("h", "i", *["Tab"] * 7, "Enter")  # samples, numbers, Run
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
def test_errors_are_one_line(both, opened):
    opened.type("#prompt", "x" * 60)
    opened.type("#max-tokens", "9999")
    opened.click("#run")
    opened.wait("!document.querySelector('#error').hidden")
    assert "max_tokens 9999 would pass the context of 64" in opened.text("#error")
    box = opened.run("return document.querySelector('#error').getBoundingClientRect().height")
    assert box < 40
    opened.type("#max-tokens", "5")
    opened.type("#prompt", "hello")
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
def test_compile_time_is_not_counted(both, opened, monkeypatch):
    """The page waits while the server compiles, and asks each model once more than it counts."""
    kind = type(both.api.models)
    warm = kind.warm
    monkeypatch.setattr(kind, "warm", property(lambda self: False))
    opened.requested()
    opened.type("#prompt", "The cache")
    opened.click("#run")
    opened.wait("document.querySelector('#status').textContent.startsWith('waiting until the server')")
    assert f"{both.url}/v1/completions" not in opened.requested()
    monkeypatch.setattr(kind, "warm", warm)
    done(opened)
    assert opened.requested().count(f"{both.url}/v1/completions") == 2 * (1 + 1)
    assert opened.run("return document.querySelector('.count').textContent").endswith("answered")


def choose(window, mode: str) -> None:
    window.run(f"document.querySelector('input[value={mode}]').click()")


@pytest.mark.slow
def test_prompt_lengths_are_plotted_and_listed(both, opened):
    choose(opened, "lengths")
    opened.click("#run")
    done(opened)
    cells = (
        "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    rows = opened.run(f"return {cells}")
    assert [int(row[0]) for row in rows] == [4, 8, 16, 32, 57]
    assert all(re.fullmatch(r"[\d.]+ (ms|s)", cell) for row in rows for cell in row[1:3])
    assert all(re.fullmatch(r"as fast|[\d.]+ times (faster|slower)", row[3]) for row in rows)
    points = (
        "[...document.querySelectorAll('#plot polyline')].map(line => line.getAttribute('points').split(' '))"
    )
    assert [len(line) for line in opened.run(f"return {points}")] == [5, 5]
    assert opened.text("#verdict").startswith("At 57 prompt tokens, swift is ")
    assert not opened.complaints()


@pytest.mark.slow
def test_a_chat_sends_its_history_and_can_be_reset(both, opened, monkeypatch):
    read = []
    encode = Marked.encode_chat
    monkeypatch.setattr(
        Marked, "encode_chat", lambda self, said, *rest: read.append(said) or encode(self, said, *rest)
    )
    choose(opened, "chat")
    opened.type("#max-tokens", "2")
    for message in ("one", "two"):
        opened.type("#message", message)
        opened.press("Enter")
        opened.wait("document.querySelector('#run').disabled")
        done(opened)
    for said in read[2:]:  # of each model
        assert [(m["role"], m["content"][:3]) for m in said] == [
            ("user", "one"),
            ("assistant", MARKUP[:3]),
            ("user", "two"),
        ]
    assert [len(said) for said in read] == [1, 1, 3, 3]
    assert opened.run("return document.querySelectorAll('.turn').length") == 2 * 4
    assert opened.run("return document.querySelectorAll('.turn *').length") == 0
    opened.click("#anew")
    assert opened.run("return document.querySelectorAll('.turn').length") == 0
    assert not opened.complaints()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("mode", ["prompt", "chat"])
def test_the_curl_command_runs(both, opened, mode):
    choose(opened, mode)
    opened.type("#prompt" if mode == "prompt" else "#message", 'it\'s "so"')
    command = opened.text("#command")
    assert KEY not in command
    ran = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env={"SWIFTKV_API_KEY": KEY, "PATH": "/usr/bin:/bin", "NO_PROXY": "127.0.0.1"},
    )
    assert json.loads(ran.stdout)["model"] == "plain", ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_the_page_fits_a_phone_and_is_readable(both, opened, width, scheme):
    """Nothing is cut off at the side, and every text stands out from what is behind it (WCAG AA: 4.5)."""
    opened.size(width, 800, mobile=width < 500)
    opened.scheme(scheme)
    try:
        places = "[...document.querySelectorAll('.card')].map(card => card.getBoundingClientRect().x)"
        assert len(set(opened.run(f"return {places}"))) == (1 if width < 500 else 2)
        for mode in ("prompt", "chat", "lengths"):
            choose(opened, mode)
            if mode == "chat":
                opened.type("#message", "hi")
            if mode != "prompt":
                opened.click("#run")
                done(opened)
            assert opened.run("return document.documentElement.scrollWidth") <= width
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
