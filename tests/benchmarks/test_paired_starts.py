"""Two starts are compared on the same prompts: differences in pairs, errors over rows of text."""

import numpy as np
import pytest

from benchmarks.least_squares import paired


def test_differences_are_paired_and_their_errors_are_over_rows():
    """The part of a prompt's loss that both starts share cancels, however hard the prompt is."""
    own = np.array([[1.0, 5.0], [2.0, 9.0], [3.0, 4.0]])
    fold, fitted = own + 0.5, own + np.array([[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]])
    got = paired(3, fold, fitted, own)
    assert (got.split, got.fold, got.fitted) == (3, pytest.approx(0.5), pytest.approx(0.2))
    assert got.lower_by == pytest.approx(0.3) and got.error == pytest.approx(0.1 / 3**0.5)
    assert got.errors_apart == pytest.approx(3 * 3**0.5)
