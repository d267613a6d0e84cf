"""Weights of sources: how often each sample is taken, and that nothing else of the order changes."""

import collections
import itertools

import numpy as np
import pytest
from samples_made import config, take, texts, tokenizer, write

from swiftkv_jax.distill.data import loader
from swiftkv_jax.distill.data.loader import DataLoader, evaluation_batches


def order(source: int, number: int) -> np.ndarray:
    return np.random.default_rng((source, number)).permutation((7, 12, 1)[source])


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (2.0, 0.25, 3.0), (0.4, 1.5, 0.1), (0.15, 0.3, 1.0)])
def test_any_number_of_epochs_takes_the_samples_of_a_source_equally_often(weights):
    sizes = (7, 12, 1)
    counts = loader.counts(sizes, weights)
    assert counts == tuple(max(1, round(n * w)) for n, w in zip(sizes, weights, strict=True))
    taken = np.zeros(20, int)
    for epoch in range(9):
        members = loader.members(sizes, counts, epoch, order)
        assert len(members) == sum(counts)
        np.add.at(taken, members, 1)
        for start, size, count in zip((0, 7, 19), sizes, counts, strict=True):
            mine = taken[start : start + size]
            assert mine.sum() == (epoch + 1) * count and mine.max() - mine.min() <= 1


def sources(tmp_path, *counts: int) -> tuple[str, ...]:
    rows = texts(sum(counts), longest=6)
    starts = np.cumsum((0, *counts))
    return tuple(write(tmp_path, rows[a:b], f"{a}.jsonl") for a, b in itertools.pairwise(starts))


def test_a_loader_takes_sources_as_often_as_their_weights_say(tmp_path):
    both = sources(tmp_path, 8, 8)
    settings = config(both[0], sources=both, weights=(2.0, 0.5), batch_size=4, pack=False, seed=3)
    loader = DataLoader(settings, tokenizer())
    assert loader.steps_per_epoch() == 5, "16 + 4 samples, one a row, 4 rows a step"
    epochs = [[name for _, ids in take(loader, 5) for row in ids for name in row] for _ in range(4)]
    for epoch in epochs:
        counts = collections.Counter(epoch)
        assert [counts[f"d{i}"] for i in range(8)] == [2] * 8
        assert sum(counts[f"d{i}"] for i in range(8, 16)) == 4
    assert set(epochs[0]) ^ set(epochs[1]) == {f"d{i}" for i in range(8, 16)}, "the other half"
    assert epochs[0] != epochs[2]


def test_an_evaluation_takes_each_sample_once(tmp_path):
    both = sources(tmp_path, 5, 6)
    plain, weighted = (config(both[0], sources=both, weights=w) for w in ((), (3.0, 0.2)))
    for a, b in zip(*(evaluation_batches(c, tokenizer()) for c in (plain, weighted)), strict=True):
        assert (a.tokens == b.tokens).all() and (a.segments == b.segments).all()
