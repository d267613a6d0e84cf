"""The scheduler under random traffic: every token runs once, in order, within the budget."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from swiftkv_jax.engine.request import Request, SamplingParams
from swiftkv_jax.engine.scheduler import Scheduler, launch_size
from swiftkv_jax.engine.sequence import Choice, Sequence


def sequence(prompt: int, output: int) -> Sequence:
    params = dataclasses.replace(SamplingParams(), max_tokens=output, seed=0)
    return Sequence(Request(prompt=None, token_ids=(5,) * prompt, params=params), 0, None, 0.0)


TRAFFIC = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 6)), min_size=1, max_size=20)


@hypothesis.given(TRAFFIC, st.integers(1, 5), st.integers(1, 200))
def test_everything_runs_once_in_order_and_within_bounds(traffic, lanes, budget):
    scheduler = Scheduler(lanes, budget)
    everyone = [sequence(*sizes) for sizes in traffic]
    for one in everyone:
        scheduler.add(one)
    admitted, launches = [], 0
    while scheduler.busy:
        admitted += scheduler.admit()
        assert len(scheduler.running) <= lanes
        assert all(one.lane == lane for lane, one in scheduler.running.items())
        assert len(scheduler.running) == lanes or not scheduler.waiting  # no lane idles while someone waits
        work, size = scheduler.plan()
        assert sum(item.count for item in work) <= size <= budget
        assert [item.sequence.lane for item in work] == sorted({item.sequence.lane for item in work})
        for item in work:
            assert 1 <= item.count <= item.sequence.pending
            completes = item.completes
            item.sequence.cached += item.count
            if completes:
                item.sequence.append(Choice(1), 0.0)
        if not work:
            for one in scheduler.running.values():
                assert one.pending == 1  # only decoding is left
                one.append(Choice(1), 0.0)
                one.cached += 1
        for one in [one for one in scheduler.running.values() if one.finish_reason]:
            scheduler.release(one)
        launches += 1
        assert launches < 10_000
    assert admitted == everyone  # first come, first served
    assert [len(one.output) for one in everyone] == [output for _, output in traffic]
    assert sorted(scheduler._free) == list(range(lanes))


@pytest.mark.parametrize("budget", [64, 100, 2048])
def test_launches_are_few_sizes_with_little_padding(budget):
    sizes = {launch_size(pending, budget) for pending in range(1, 5000)}
    assert len(sizes) <= 7
    for pending in range(129, budget + 1):
        taken = min(pending, launch_size(pending, budget))
        assert 4 * taken >= 3 * launch_size(pending, budget)
