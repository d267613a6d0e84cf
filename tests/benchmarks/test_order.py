"""The order in which benchmarks take their contenders: what a run finds in the caches is the same for all."""

import collections
import itertools

import pytest

from benchmarks.common import in_turn


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_places_and_repeats_are_shared_equally_among_systems(count):
    names = "abcde"[:count]
    rounds = [in_turn(names, number) for number in range(4 * count)]
    assert all(sorted(order) == list(names) for order in rounds)
    for place in range(count):
        assert set(collections.Counter(order[place] for order in rounds).values()) == {4}
    flat = [name for order in rounds for name in order]
    repeats = collections.Counter(a for a, b in itertools.pairwise(flat) if a == b)
    assert max(repeats[name] for name in names) - min(repeats[name] for name in names) <= 1
