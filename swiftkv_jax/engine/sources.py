"""An encoder in the engine: each request's source is read once, into pages that its completions share."""

from functools import partial
from typing import Any

import jax
import numpy as np

from swiftkv_jax.core.cache import Cache, Sources
from swiftkv_jax.core.encoder import fill
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.engine.scheduler import power_of_two
from swiftkv_jax.engine.sequence import Sequence

_SMALLEST = 32  # positions: below these a source costs about the same whatever its length


@partial(jax.jit, static_argnames=("model",), donate_argnames=("cache",))
def read_source(
    model: Transformer, params: PyTree, cache: Cache, source: jax.Array, sources: Sources
) -> Cache:
    """Write the rows of some sources to the cache; the pages that each sequence reads stay the same."""
    return fill(model, params, source, cache, sources).reading(cache.sources).pinned()


class SourceReader:
    """Sizes and arrays of sources. A launch has one source, so that its result depends on no other.

    Attributes:
      sizes: positions of a launch's array, ascending; an audio window always has all positions.
    """

    def __init__(self, model: Transformer, cache: Cache):
        assert model.config.encoder is not None and cache.cross is not None
        self._mels, most = model.config.encoder.mels, cache.cross.capacity
        self._slots = -(-most // cache.cross.page)
        every = {min(most, max(_SMALLEST, power_of_two(n))) for n in range(1, most + 1)}
        self.sizes = [most] if self._mels else sorted(every)

    def arrays(self, source: Any, length: int, size: int, pages: list[int]) -> tuple[np.ndarray, Sources]:
        """Return (the source in an array of `size` positions, the pages of its rows)."""
        if self._mels:
            padded = np.zeros((1, 2 * size, self._mels), np.float32)
        else:
            padded = np.zeros((1, size), np.int32)
        padded[0, : len(source)] = source
        table = np.zeros((1, self._slots), np.int32)
        table[0, : len(pages)] = pages
        return padded, Sources(table, np.array([length], np.int32))

    def nothing(self, size: int) -> tuple[np.ndarray, Sources]:
        """An empty source in an array of `size` positions."""
        return self.arrays((), 0, size, [])

    def every(self) -> list[tuple[int, tuple[np.ndarray, Sources]]]:
        """(size, empty source) for each size."""
        return [(size, self.nothing(size)) for size in self.sizes]

    def read_by(self, rows: list[Sequence], count: int) -> Sources:
        """The sources that `count` rows read; these sequences are the first rows."""
        table, lengths = np.zeros((count, self._slots), np.int32), np.zeros(count, np.int32)
        for row, sequence in enumerate(rows):
            if sequence.source is not None:
                table[row, : len(sequence.source.pages)] = sequence.source.pages
                lengths[row] = sequence.request.source_length
        return Sources(table, lengths)
