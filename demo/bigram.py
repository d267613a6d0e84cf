"""An interpolated bigram model: the floor a demo teacher must beat."""

from collections.abc import Sequence
from itertools import product

import numpy as np

DISCOUNTS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
STRENGTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
TUNING_STRIDE = 10


def _pairs(documents: Sequence[np.ndarray], vocab: int) -> np.ndarray:
    """Every pair of neighbouring tokens of every document, each encoded as one number."""
    parts = [np.asarray(tokens, np.int64) for tokens in documents]
    if any(tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab for tokens in parts):
        raise ValueError(f"a token lies outside the vocabulary of {vocab}")
    return np.concatenate([np.empty(0, np.int64), *(tokens[:-1] * vocab + tokens[1:] for tokens in parts)])


class Bigram:
    """Bigram counts, interpolated with the number of different tokens that a token follows, and with uniform.

    `discount` is taken off every count, as in Kneser-Ney smoothing; `strength` adds that weight per
    different follower to the lower order, as in Witten-Bell smoothing (discount 0 and strength 1).
    """

    def __init__(self, documents: Sequence[np.ndarray], vocab: int) -> None:
        self.vocab = vocab
        self.keys, self.counts = np.unique(_pairs(documents, vocab), return_counts=True)
        if not self.keys.size:
            raise ValueError("no two neighbouring tokens to count")
        heads, tails = np.divmod(self.keys, vocab)
        self.totals = np.bincount(heads, self.counts, minlength=vocab)
        self.followers = np.bincount(heads, minlength=vocab)
        kinds = np.bincount(tails, minlength=vocab)
        seen = np.count_nonzero(kinds)
        self.lower = (kinds + seen / vocab) / (kinds.sum() + seen)

    def nats(self, documents: Sequence[np.ndarray], discount: float, strength: float) -> tuple[float, int]:
        """Total nats and the number of predicted tokens: all but the first of each document."""
        pairs = _pairs(documents, self.vocab)
        heads, tails = np.divmod(pairs, self.vocab)
        places = np.minimum(np.searchsorted(self.keys, pairs), len(self.keys) - 1)
        counts = np.where(self.keys[places] == pairs, self.counts[places], 0)
        followers = self.followers[heads]
        total = self.totals[heads] + strength * followers
        mass = np.maximum(counts - discount, 0) + (discount + strength) * followers * self.lower[tails]
        # A token never followed by another has no counts to interpolate with.
        chance = np.where(followers > 0, mass / np.maximum(total, 1), self.lower[tails])
        return float(-np.log(chance).sum()), len(pairs)


def held_out_nats(train: list[np.ndarray], test: list[np.ndarray], vocab: int) -> float:
    """Mean nats per predicted token of `test`, with the smoothing that is best on every tenth sequence of
    `train`."""
    tuning = train[::TUNING_STRIDE]
    trial = Bigram([tokens for index, tokens in enumerate(train) if index % TUNING_STRIDE], vocab)
    choices = product(DISCOUNTS, STRENGTHS)
    discount, strength = min(choices, key=lambda choice: trial.nats(tuning, *choice)[0])
    nats, count = Bigram(train, vocab).nats(test, discount, strength)
    if not count:
        raise ValueError("no token to predict")
    return nats / count
