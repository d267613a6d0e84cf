"""Whisper's counts are the paper's, to its printed digits."""

import pytest

from benchmarks.whisper import SIZES, counts

# Slim attention paper, section 6: option 1; reads of the baseline, options 1 and 2 at batch 1, then at 64.
PRINTED = {
    "tiny": (3.0, 34.2, 31.8, 30.0, 6.4, 3.4, 1.1),
    "base": (6.0, 60.5, 56.1, 53.1, 12.7, 6.8, 2.2),
    "small": (18.0, 174.8, 164.0, 157.2, 38.1, 20.2, 6.5),
    "medium": (47.9, 501.2, 478.5, 466.8, 102.1, 54.6, 18.1),
    "large": (79.8, 960.0, 932.6, 923.6, 172.1, 93.1, 32.5),
}


@pytest.mark.parametrize("name", SIZES)
def test_counts_without_the_encoders_output_are_the_papers(name):
    size = SIZES[name]
    kv, k, x = (counts(size, form) for form in ("kv", "k", "x"))
    stored = round(kv.stored, 1), round(k.stored, 1), round(x.own + x.cross, 1)
    assert stored == (size.baseline, PRINTED[name][0], size.option_2)
    reads = tuple(round(one.read(batch, size.layers, True), 1) for batch in (1, 64) for one in (kv, k, x))
    assert reads == PRINTED[name][1:]


@pytest.mark.parametrize("name, times", [("tiny", 4.73), ("large", 7.87)])
def test_the_encoders_output_counted_leaves_fewer_savings(name, times):
    kv, x = (counts(SIZES[name], form) for form in ("kv", "x"))
    assert kv.stored / x.stored == pytest.approx(times, abs=0.01)
