"""`benchmarks.serving`: its arithmetic by hand, arrivals by statistics, and a real run on tiny servers."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.common import SYSTEMS
from benchmarks.serving import bench, report
from benchmarks.serving.__main__ import checked
from benchmarks.serving.timeline import Timeline, arrivals, summary
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
    want = {"completed": 2, "failed": 1, "total_input_tokens": 10, "total_output_tokens": 6}
    want |= {"request_throughput": 0.5, "output_throughput": 1.5, "total_token_throughput": 4.0}
    want |= {"request_goodput": 0.25}  # B alone: its one token counts as a TPOT of 0
    want |= {"mean_ttft_ms": 375.0, "median_ttft_ms": 375.0, "std_ttft_ms": 125.0}
    want |= {"mean_tpot_ms": 250.0}  # A alone
    want |= {"mean_itl_ms": 500.0, "p50_itl_ms": 500.0, "p99_itl_ms": 745.0}
    want |= {"mean_e2el_ms": 875.0, "p99_e2el_ms": 250 + 0.99 * 1250}
    want |= {"mean_client_queue_time_ms": 250.0, "mean_e2el_including_client_queue_ms": 1125.0}
    want |= {"max_output_tokens_per_s": 10 / 3}  # of the second from 11.25: two events of A's three, 5 tokens
    want |= {"max_concurrent_requests": 1}  # B ends as A begins
    assert {key: got[key] for key in want} == pytest.approx(want)
    assert got["errors"] == ["", "", "HTTP 503: busy"] and got["output_lens"] == [5, 1, 0]
    assert got["ttfts"][:2] == [0.5, 0.25] and got["start_times"] == [10.5, 10.25, 10.0]
    assert summary([dataclasses.replace(B, sent=10.2), A], 4.0)["max_concurrent_requests"] == 1
    assert summary([dataclasses.replace(A, sent=10.4), B], 4.0)["max_concurrent_requests"] == 2
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
    assert arrivals(3, math.inf) == [0.0] * 3
    assert arrivals(4, 2.0, math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def args(*flags: str):
    return checked(["--scale", "64", *flags])


CONFIG = ModelConfig(
    vocab_size=100, hidden_size=8, intermediate_size=8, num_layers=8, num_heads=2, num_kv_heads=1, head_dim=4,
    max_position_embeddings=2048,
)  # fmt: skip


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
            result = summary([A, B, C], 1.0, (99,)) | {"total_token_throughput": factor * speed}
            about = {"workload": "fixed", "point": "p", "system": name, "round": number, "num_prompts": 3}
            runs.append(result | about | {"compilations": number})
    row = report.aggregate(runs, 99, "a")["fixed"]["p"]["b"]
    without = report.aggregate(runs[1::2], 99, "a")["fixed"]["p"]["b"]
    assert without["gain"] is None and without["total_token_throughput"] == 110.0
    assert row["gains"] == [2.0, 2.0] and row["gain"] == 2.0 and row["total_token_throughput"] == 110.0
    assert row["requests"] == 6 and row["failed"] == 2 and row["compilations"] == 1
