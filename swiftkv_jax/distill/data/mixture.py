"""Mixtures of sources: which samples an epoch has, as a function of sizes, weights and its number."""

from collections.abc import Callable, Sequence

import numpy as np

from swiftkv_jax.common.errors import UsageError


def counts(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in an epoch: its size times its weight, rounded, but at least one."""
    empty = [i for i, size in enumerate(sizes) if not size]
    if empty:
        number = empty[0] + 1
        raise UsageError(f"data.weights: source number {number} has no samples left; raise data.limit")
    return tuple(max(1, round(size * weight)) for size, weight in zip(sizes, weights, strict=True))


def members(
    sizes: Sequence[int],
    counts: Sequence[int],
    epoch: int,
    order: Callable[[int, int], np.ndarray],
) -> np.ndarray:
    """The samples of an epoch, source by source; samples are numbered through all sources.

    A source's samples are taken in passes, each with its own order, and an epoch continues where the last one
    stopped. So after any number of epochs, how often two samples of a source were taken differs by at most
    one.

    Args:
      order: (source, number of the pass) -> the order [size] of that pass.
    """
    out, start = [], 0
    for source, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        places = np.arange(epoch * count, (epoch + 1) * count)
        for number in range(int(places[0]) // size, int(places[-1]) // size + 1):
            out.append(start + order(source, number)[places[places // size == number] % size])
        start += size
    return np.concatenate(out)
