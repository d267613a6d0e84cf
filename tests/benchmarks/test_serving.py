"""`benchmarks.serving`: its arithmetic by hand, arrivals by statistics, and a real run on tiny servers."""

import contextlib
import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from benchmarks.common import SYSTEMS
from benchmarks.serving import bench, report, workloads
from benchmarks.serving.__main__ import checked, main, parser
from benchmarks.serving.client import Target
from benchmarks.serving.servers import Server
from benchmarks.serving.timeline import DETAILS, METRICS, Timeline, arrivals, summary
from swiftkv_jax.analysis.flops import prompt_gflop
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer

KEYS = (  # of vLLM's result file
    "date backend endpoint_type label model_id tokenizer_id num_prompts request_rate burstiness "
    "max_concurrency duration completed failed total_input_tokens total_output_tokens request_throughput "
    "request_goodput output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests"
).split()

# Two that answer, by hand: A in three events of 1, 2 and 2 tokens; B one token only; C was refused.
A = Timeline(due=10.0, sent=10.5, events=(11.0, 11.25, 12.0), prompt_tokens=7, output_tokens=5)
B = Timeline(due=10.25, sent=10.25, events=(10.5,), prompt_tokens=3, output_tokens=1)
C = Timeline(due=10.0, sent=10.0, events=(10.1,), prompt_tokens=9, output_tokens=4, error="HTTP 503: busy")


def test_a_timelines_metrics_follow_their_definitions():
    assert (A.ttft, A.itl, A.latency, A.queued) == (0.5, [0.25, 0.75], 1.5, 0.5)
    assert A.tpot == (1.5 - 0.5) / 4  # by tokens, not by events
    assert (B.ttft, B.itl, B.latency, B.tpot) == (0.25, [], 0.25, 0.0)


def test_latency_statistics_equal_hand_computed_ones():
    got = summary([A, B, C], 4.0, (50, 99), {"ttft": 400, "tpot": 300})
    want = {
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 10,
        "total_output_tokens": 6,
        "request_throughput": 0.5,
        "output_throughput": 1.5,
        "total_token_throughput": 4.0,
        "request_goodput": 0.25,  # B alone: its one token counts as a TPOT of 0
        "mean_ttft_ms": 375.0,
        "median_ttft_ms": 375.0,
        "std_ttft_ms": 125.0,
        "mean_tpot_ms": 250.0,  # A alone
        "mean_itl_ms": 500.0,
        "p50_itl_ms": 500.0,
        "p99_itl_ms": 745.0,
        "mean_e2el_ms": 875.0,
        "p99_e2el_ms": 250 + 0.99 * 1250,
        "mean_client_queue_time_ms": 250.0,
        "mean_e2el_including_client_queue_ms": 1125.0,
        "max_output_tokens_per_s": 10
        / 3,  # of the second from 11.25: two of A's three events, 5 tokens in all
        "max_concurrent_requests": 1,  # B ends as A begins
    }
    assert {key: got[key] for key in want} == pytest.approx(want)
    assert got["errors"] == ["", "", "HTTP 503: busy"] and got["output_lens"] == [5, 1, 0]
    assert got["ttfts"][:2] == [0.5, 0.25] and got["start_times"] == [10.5, 10.25, 10.0]
    assert summary([dataclasses.replace(B, sent=10.2), A], 4.0)["max_concurrent_requests"] == 1
    assert summary([dataclasses.replace(A, sent=10.4), B], 4.0)["max_concurrent_requests"] == 2


def random_timelines(count: int, seed: int = 0) -> list[Timeline]:
    random = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        due = random.uniform(0, 5)
        sent = due + random.uniform(0, 1)
        events = tuple((sent + np.cumsum(random.exponential(0.1, random.integers(1, 9)))).tolist())
        error = "broken" if random.random() < 0.2 else ""
        sizes = {"prompt_tokens": int(random.integers(1, 99)), "output_tokens": int(random.integers(1, 40))}
        out.append(Timeline(due=due, sent=sent, events=events, error=error, **sizes))
    return out


def test_every_statistic_equals_numpys():
    timelines = random_timelines(60)
    done = [t for t in timelines if not t.error]
    assert 30 < len(done) < 60
    raw = {
        "ttft": [t.events[0] - t.sent for t in done],
        "tpot": [(t.events[-1] - t.events[0]) / (t.output_tokens - 1) for t in done if t.output_tokens > 1],
        "itl": [b - a for t in done for a, b in zip(t.events, t.events[1:], strict=False)],
        "e2el": [t.events[-1] - t.sent for t in done],
    }
    assert tuple(raw) == METRICS
    got = summary(timelines, 7.0, (1, 50, 90, 99.9))
    for name, values in raw.items():
        ms = [1000 * value for value in values]
        want = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
        want |= {f"p{p}": np.percentile(ms, p) for p in (1, 50, 90, 99.9)}
        assert {key: got[f"{key}_{name}_ms"] for key in want} == pytest.approx(want), name
    assert got["request_goodput"] is None


def test_goodput_falls_with_each_goal_and_counts_only_what_was_answered():
    timelines = random_timelines(200, 1)
    answered = summary(timelines, 1.0)["completed"]
    assert summary(timelines, 1.0, goals={"ttft": 1e9})["request_goodput"] == answered
    for name, raw in {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}.items():
        for most in (50.0, 100.0, 300.0):
            want = sum(not t.error and 1e3 * getattr(t, raw) <= most for t in timelines)
            assert summary(timelines, 1.0, goals={name: most})["request_goodput"] == want
    both = summary(timelines, 1.0, goals={"ttft": 100, "e2el": 300})["request_goodput"]
    want = sum(not t.error and t.ttft <= 0.1 and t.latency <= 0.3 for t in timelines)
    assert both == want > 0


def test_failed_requests_are_in_no_latency():
    """The events of a failed request change nothing but the count."""
    timelines = random_timelines(40)
    failed = [
        dataclasses.replace(t, events=tuple(x + 1e6 for x in t.events), output_tokens=10**6) if t.error else t
        for t in timelines
    ]
    drop = {*DETAILS}
    one, other = (summary(some, 3.0, goals={"e2el": 1e3}) for some in (timelines, failed))
    assert {k: v for k, v in one.items() if k not in drop} == {
        k: v for k, v in other.items() if k not in drop
    }
    nothing = summary([C, C], 1.0)
    assert (nothing["completed"], nothing["failed"], nothing["mean_ttft_ms"]) == (0, 2, 0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    """The last one comes at count / rate exactly; gaps vary by 1 / sqrt(burstiness) of their mean."""
    moments = np.asarray(arrivals(20_000, 5.0, burstiness, seed=3))
    gaps = np.diff(moments, prepend=0.0)
    assert moments[-1] == pytest.approx(4000.0) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrivals(50, 5.0, burstiness, seed=3) == arrivals(50, 5.0, burstiness, seed=3)
    assert arrivals(50, 5.0, burstiness, seed=3) != arrivals(50, 5.0, burstiness, seed=4)
    if burstiness == 1.0:  # Poisson: as many arrivals as their variance, second by second
        counts = np.bincount(moments.astype(int))[:4000]
        assert counts.mean() == pytest.approx(5, rel=0.02) and counts.var() == pytest.approx(5, rel=0.1)


def test_arrivals_at_the_ends():
    assert arrivals(3, math.inf) == [0.0] * 3
    assert arrivals(4, 2.0, math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("ratio", [0.0, 1.0, 10.0, 100.0])
def test_lengths_like_sharegpts(ratio):
    lengths = np.asarray(workloads.like_sharegpt(400, ratio, 4096, seed=1))
    assert lengths.shape == (400, 2) and lengths.min() >= 4 and lengths.sum(1).max() <= 4096
    assert (lengths[:, 0] >= ratio * lengths[:, 1]).all()
    assert lengths.tolist() == np.asarray(workloads.like_sharegpt(400, ratio, 4096, seed=1)).tolist()
    if not ratio:  # nothing but the ends is cut off, so the means are near the source's
        many = np.asarray(workloads.like_sharegpt(50_000, 0, 10**6, seed=2))
        assert many.mean(0) == pytest.approx(workloads.SHAREGPT["means"], rel=0.1)


def test_an_unreachable_token_ratio_is_refused(tmp_path):
    with pytest.raises(UsageError, match="have 1000 tokens in per token out"):
        workloads.like_sharegpt(10, 1000, 64, seed=0)


def test_a_sharegpt_file_is_filtered_as_its_shape_is(tmp_path):
    class Words:
        def encode(self, text, add_special_tokens=True):
            return [7] * add_special_tokens + [len(word) for word in text.split()]

    rows = [(4, 9), (30, 5), (30, 300), (2, 9), (9, 1), (300, 30)]
    talks = [
        {"conversations": [{"from": "human", "value": "w " * n}, {"from": "gpt", "value": "w " * m}]}
        for n, m in rows
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*talks, {"conversations": [{"from": "gpt", "value": "alone"}]}]))

    def found(ratio, context=400):
        asks = workloads.from_file(path, Words(), ratio, context, seed=0)
        return sorted((len(ask.prompt), ask.outputs) for ask in asks)

    assert found(0.0) == [(5, 9), (31, 5), (31, 300), (301, 30)]  # BOS counts, and those below 4 are out
    assert found(1.0) == [(31, 5), (301, 30)] and found(10.0) == [(301, 30)]
    assert found(0.0, 100) == [(5, 9), (31, 5)]
    path.write_text('{"not": "a list"}')
    with pytest.raises(UsageError, match="is no ShareGPT file"):
        found(0.0)


def args(*flags: str):
    return checked(["--scale", "64", *flags])


CONFIG = ModelConfig(
    vocab_size=100, hidden_size=8, intermediate_size=8, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=4,
    max_position_embeddings=2048,
)  # fmt: skip


def test_fixed_lengths_are_the_papers_divided():
    points, context = bench.fixed(args("--num-prompts", "3"), CONFIG)
    assert [point.name for point in points] == ["31:4", "125:4", "500:4", "2000:4"] and context == 2004
    one, other = points[1].asks(0), points[1].asks(1)
    assert [(len(ask.prompt), ask.outputs) for ask in one] == [(125, 4)] * 3
    assert one == points[1].asks(0) and one != other  # the same for every system, another for every round
    assert len({ask.prompt[:8] for ask in one + other}) == 6
    assert workloads.default_scale(2048) == 64 and workloads.default_scale(131072) == 1
    with pytest.raises(UsageError, match="raise --scale"):
        bench.fixed(checked(["--scale", "1", "--lengths", "8000"]), CONFIG)


def test_rates_are_shares_of_what_the_first_system_takes():
    point, _ = bench.load(args(), CONFIG)
    points = bench.rates(point, args("--rates", "0.5x", "3", "inf").wanted, 8.0)
    assert [(p.name, p.rate) for p in points] == [("4", 4.0), ("3", 3.0), ("inf", math.inf)]


def test_budgets_are_shares_of_a_full_batch():
    """8 rows of 2 x 4 floats a token in the standard model; 6 with AcrossKV; 1 merged; fp8 has scales."""
    full = args("--max-num-seqs", "4", "--page-size", "16")
    pages = {name: bench.budget_pages(full, CONFIG, 129, 1.0, name) for name in SYSTEMS}
    tokens = 4 * 144  # in whole pages
    assert pages == {
        "standard": tokens // 16,
        "merge-all": 8 * tokens // 16,
        "swiftkv": tokens // 16,
        "acrosskv": 8 * tokens // 6 // 16,
        "fp8": 8 * 32 * tokens // (6 * 2 * (4 + 4)) // 16,
    }
    assert bench.budget_pages(full, CONFIG, 129, 0.2, "standard") == 0  # not one sequence
    one = args("--max-num-seqs", "1", "--page-size", "16")
    assert bench.budget_pages(one, CONFIG, 129, 1.0, "standard") == 9, "all of it is enough for all of it"
    assert bench.budget_pages(full, CONFIG, 129, 0.2, "merge-all") > 0


@pytest.mark.parametrize("alone", [False, True])
def test_every_server_that_ran_is_described(alone, monkeypatch):
    """This holds also if one server ends before the next begins."""
    running: list[str] = []

    @contextlib.contextmanager
    def started(name, flags, say):
        running.append(name)
        yield Server(name, Target("http://x", name), {"flags": flags})
        running.remove(name)

    monkeypatch.setattr(bench, "started", started)
    given = args("--num-warmups", "0", *(["--alone"] if alone else []))
    point = bench.Point("p", lambda seed: [])
    with bench.Fleet(given, {"a": ["1"], "b": ["2"]}, lambda text: None) as fleet:
        for name in ("a", "b", "b", "a"):
            assert fleet.ready(name, point).name == name
            assert running == ([name] if alone else ["a", "b"][: len(running)])
        assert fleet.told == {"a": {"flags": ["1"]}, "b": {"flags": ["2"]}}
    assert not running


def test_gains_are_of_the_same_round():
    """The second system is twice as fast in both rounds, though slower in one than the first in the other."""
    runs = []
    for number, speed in enumerate((100.0, 10.0)):
        for name, factor in (("a", 1), ("b", 2)):
            result = summary(random_timelines(9), 1.0, (99,)) | {"total_token_throughput": factor * speed}
            about = {"workload": "fixed", "point": "p", "system": name, "round": number, "num_prompts": 9}
            runs.append(result | about | {"compilations": number})
    row = report.aggregate(runs, 99, "a")["fixed"]["p"]["b"]
    without = report.aggregate(runs[1::2], 99, "a")["fixed"]["p"]["b"]
    assert without["gain"] is None and without["total_token_throughput"] == 110.0
    assert row["gains"] == [2.0, 2.0] and row["gain"] == 2.0 and row["total_token_throughput"] == 110.0
    assert row["requests"] == 18 and row["failed"] == 2 * runs[0]["failed"] and row["compilations"] == 1


@pytest.mark.parametrize(
    "flags, said",
    [
        (["fixd"], "no workload 'fixd'; did you mean 'fixed'?"),
        (["--systems", "swift"], "did you mean 'swiftkv'?"),
        (["--goodput", "latency:5"], "--goodput must be such as ttft:500"),
        (["--goodput", "ttft:x"], "--goodput: 'x' is not a number"),
        (["--rates", "fastx"], "--rates: 'fast' is not a number"),
        (["--rates", "0"], "--rates must be above 0"),
        (["--metric-percentiles", "101"], "must be in [0, 100], not 101"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--rounds", "x"], "argument --rounds: invalid int value: 'x'"),
        (["--burstiness", "0"], "--burstiness must be above 0"),
        (["--base-url", "http://x"], "--base-url must be NAME=VALUE"),
        (["--base-url", "a=http://127.0.0.1:9"], "no server of OpenAI's API at http://127.0.0.1:9"),
        (["budgets", "--base-url", "a=http://127.0.0.1:9"], "no budgets"),
        (["--model", "/nowhere"], "is not a model's folder"),
        (["--num-prompt", "3"], "did you mean '--num-prompts'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_a_one_line_error(flags, said, capsys):
    assert main(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


def test_help_fits_a_screen():
    lines = parser().format_help().splitlines()
    assert len(lines) <= 44 and max(map(len, lines)) <= 110
    assert all(action.help for action in parser()._actions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model so small that its servers compile in seconds, with a tokenizer."""
    config = ModelConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    plan = KVPlan.standard(2)
    described, tree = jax.tree.flatten(weights.weights(config, plan))
    keys = jax.random.split(jax.random.key(0), len(described))
    leaves = [jax.random.normal(k, w.shape) for k, w in zip(keys, described, strict=True)]
    path = tmp_path_factory.mktemp("model") / "tiny"
    model = Transformer(config, plan)
    source = bench.Path(__file__).parents[2] / "demo" / "teacher"
    skv.save_pretrained(path, model, jax.tree.unflatten(tree, leaves), source=source)
    return path


@pytest.mark.slow
def test_a_run_side_by_side(folder, tmp_path, capsys, monkeypatch):
    """Two servers in processes of their own, two rounds: exact counts, all keys, and the files."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(jax.config.jax_compilation_cache_dir))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    flags = ["fixed", "--model", str(folder), "--systems", "standard", "swiftkv", "--lengths", "20", "9"]
    flags += ["--scale", "1", "--output-len", "6", "--num-prompts", "3", "--rounds", "2", "--no-warm-up"]
    flags += ["--max-num-seqs", "2", "--page-size", "16", "--goodput", "e2el:1e9", "--metadata", "note=x"]
    flags += ["--save-detailed", "--output", str(tmp_path), "--num-warmups", "0"]
    assert main(flags) == 0
    saved = json.loads((tmp_path / "serving.json").read_text())
    runs = saved["runs"]
    assert [(r["point"], r["round"], r["system"]) for r in runs] == [
        ("20:6", 0, "standard"), ("20:6", 0, "swiftkv"), ("9:6", 0, "standard"), ("9:6", 0, "swiftkv"),
        ("20:6", 1, "swiftkv"), ("20:6", 1, "standard"), ("9:6", 1, "swiftkv"), ("9:6", 1, "standard"),
    ]  # fmt: skip
    statistics = [f"{s}_{m}_ms" for s in ("mean", "median", "std", "p90", "p99") for m in METRICS]
    for found in runs:
        assert not {*KEYS, *statistics, *DETAILS} - set(found) and found["note"] == "x"
        size = 20 if found["point"] == "20:6" else 9
        assert (found["completed"], found["failed"]) == (3, 0), found["errors"]
        assert found["input_lens"] == [size] * 3 and found["output_lens"] == [6] * 3
        assert found["total_input_tokens"] == 3 * size and found["total_output_tokens"] == 18
        total = found["total_token_throughput"] * found["duration"]
        assert total == pytest.approx(3 * (size + 6)) and found["request_rate"] == "inf"
        needed = prompt_gflop(ModelConfig.from_hf(folder), None, size) * total / found["duration"] / 1e3
        assert found["normalised_tflops"] == pytest.approx(needed)
        assert found["request_goodput"] == pytest.approx(3 / found["duration"])
        assert 0 < found["mean_ttft_ms"] <= found["mean_e2el_ms"] <= 1e3 * found["duration"]
    assert sum(found["compilations"] for found in runs) > 0  # nothing was warmed up, and the report says so
    told = saved["about"]["servers"]
    assert told["swiftkv"]["cache_bytes_per_token"] == told["standard"]["cache_bytes_per_token"] == 2 * 2 * 32
    text = (tmp_path / "serving.md").read_text()
    assert text in capsys.readouterr().out and "| swiftkv | " in text and "0 of 6" in text
    assert (tmp_path / "serving_fixed.png").stat().st_size > 5000


def test_a_budget_too_small_for_every_system_is_reported(folder, tmp_path, capsys):
    flags = ["budgets", "--model", str(folder), "--scale", "1", "--load", "20", "--output-len", "6"]
    assert main([*flags, "--budgets", "0.01", "--output", str(tmp_path)]) == 1  # no request was answered
    assert "1%: too small for every system" in (tmp_path / "serving.md").read_text()
