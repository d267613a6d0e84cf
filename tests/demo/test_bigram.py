"""The bigram floor: a probability, computed by hand once, and better than counting single tokens."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo import bigram

DOCUMENTS = st.lists(st.lists(st.integers(0, 6), max_size=12).map(np.array), min_size=1, max_size=5)


def probability(model, head: int, tail: int, discount: float, strength: float) -> float:
    return math.exp(-model.nats([np.array([head, tail])], discount, strength)[0])


@given(DOCUMENTS, st.sampled_from(bigram.DISCOUNTS), st.sampled_from(bigram.STRENGTHS))
def test_probabilities_after_every_token_sum_to_one(documents, discount, strength):
    if all(len(tokens) < 2 for tokens in documents):
        return
    model = bigram.Bigram(documents, 7)
    for head in range(7):  # seen or not
        total = sum(probability(model, head, tail, discount, strength) for tail in range(7))
        assert total == pytest.approx(1, abs=1e-9)


def test_a_hand_computed_bigram_example_agrees():
    """a b a b c b over {a, b, c, d}: ab twice; ba, bc, cb once; discount 1/2, strength 1.

    Lower order: b follows 2 kinds, a and c 1, d none; 3 tokens seen, so b has (2 + 3/4) / (4 + 3).
    After a (2 counts, 1 follower): b has (2 - 1/2 + (1/2 + 1) lower(b)) / (2 + 1). After d: the lower order.
    """
    model = bigram.Bigram([np.array([0, 1, 0, 1, 2, 1])], 4)
    lower = [1.75 / 7, 2.75 / 7, 1.75 / 7, 0.75 / 7]
    after_a = [1.5 * lower[0] / 3, (1.5 + 1.5 * lower[1]) / 3, 1.5 * lower[2] / 3, 1.5 * lower[3] / 3]
    after_b = [(0.5 + 1.5 * 2 * p) / 4 for p in lower[:1]]
    assert [probability(model, 0, tail, 0.5, 1.0) for tail in range(4)] == pytest.approx(after_a)
    assert [probability(model, 3, tail, 0.5, 1.0) for tail in range(4)] == pytest.approx(lower)
    nats, count = model.nats([np.array([0, 1, 0]), np.array([2]), np.array([3, 3])], 0.5, 1.0)
    assert (nats, count) == (pytest.approx(-math.log(after_a[1] * after_b[0] * lower[3])), 3)
