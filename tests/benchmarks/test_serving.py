"""`benchmarks.serving`: its arithmetic by hand, and arrivals by statistics."""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.serving.timeline import Timeline, arrivals, summary

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
