"""The reader of prompts under KV prediction: an auxiliary model, with a pool beside the base's
(predict.py)."""

from collections.abc import Callable
from functools import partial

import jax

from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.predict import Caches, Predicted, fill
from swiftkv_jax.core.shapes import Int, PyTree


@partial(jax.jit, static_argnames=("model",), donate_argnames=("caches",))
def read_ahead(
    model: Predicted,
    params: PyTree,
    caches: Caches,
    tokens: Int[jax.Array, " T"],
    positions: Int[jax.Array, " T"],
    query_starts: Int[jax.Array, " Q1"],
    table: Int[jax.Array, "Q slots"],
) -> Caches:
    """Cache a flat ragged batch of prompt tokens in both pools, as `predict.fill`: no logits, no sampling."""
    filled = fill(model, params, tokens, positions, query_starts, caches.seen_by(table))
    own, base = filled.auxiliary.seen_by(caches.auxiliary.table), filled.base.seen_by(caches.base.table)
    return Caches(base.pinned(), own.pinned())


class Reader:
    """An auxiliary model on its devices with its pool, which uses the same page ids as the base's.

    Attributes:
      cache: donated to every launch and replaced by its result.
    """

    def __init__(self, model: Predicted, params: PyTree, empty: Callable[[], Cache]):
        """`empty` makes its pool."""
        self._model, self._params, self._empty = model, params, empty
        self.cache = empty()

    def call(self, base: Cache, tokens, positions, query_starts, table) -> partial:
        """The program that reads a flat ragged batch of prompt tokens, with its arguments."""
        caches = Caches(base, self.cache)
        return partial(read_ahead, self._model, self._params, caches, tokens, positions, query_starts, table)

    def read(self, base: Cache, tokens, positions, query_starts, table) -> Cache:
        """Send a flat ragged batch of prompt tokens; return `base`, which is donated, with the predicted
        rows."""
        caches = self.call(base, tokens, positions, query_starts, table)()
        self.cache = caches.auxiliary
        return caches.base

    def restart(self) -> None:
        """Replace the pool by an empty one."""
        for array in jax.tree.leaves(self.cache):  # there may be no room for two
            array.delete()
        self.cache = self._empty()
