"""`benchmarks.serving`: its arithmetic by hand, arrivals by statistics, and a real run on tiny servers."""

import dataclasses
import json
import math

import numpy as np
import pytest

from benchmarks.common import SYSTEMS
from benchmarks.serving import bench, report, workloads
from benchmarks.serving.__main__ import checked
from benchmarks.serving.timeline import DETAILS, METRICS, Timeline, arrivals, summary
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig

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
