"""Errors of predicted rows: by row and position, and the distribution of the differences.

KV prediction paper, figures 6 and 7. Keys are normed, where the model norms them, and not rotated.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers.compare.evaluation import ROWS
from swiftkv_jax.core.predict import Predicted, heads, predict_rows, read
from swiftkv_jax.core.scan import of_rows
from swiftkv_jax.core.shapes import Float, Int, PyTree

BINS = 100
_SEEN = 0.999  # share of the differences within the histograms' range
_MOST = 64  # rows of text


class RowErrors(NamedTuple):
    """Errors of the R rows of a base, for keys and for values.

    Attributes:
      l1: [2, R, T] mean absolute differences at each position of a text.
      edges: [2, BINS + 1] of the histograms. counts: [2, R, BINS] differences in each bin; outliers are
        left out.
    """

    l1: Float[np.ndarray, "2 R T"]
    edges: Float[np.ndarray, "2 n1"]
    counts: Int[np.ndarray, "2 R n"]


@partial(jax.jit, static_argnames="model")
def deltas(model: Predicted, params: PyTree, tokens: Int[jax.Array, "B T"]) -> Float[jax.Array, "2 R B T E"]:
    """Predicted minus own keys and values, of full rows of text."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    where = (tokens, at, jnp.ones_like(tokens))
    reads, base = model.prediction.reads, model.base
    every = range(base.plan.num_rows)
    small = of_rows(read(model.auxiliary, params["auxiliary"], *where, reads).raw, reads)
    own = of_rows(read(base, params["base"], *where, every).raw, every)
    stacks = (heads(base, params["base"], raw) for raw in (predict_rows(model, params, small), own))
    got, want = ([jnp.concatenate(parts) for parts in zip(*each, strict=True)] for each in stacks)
    apart = jnp.stack([a.astype(jnp.float32) - b.astype(jnp.float32) for a, b in zip(got, want, strict=True)])
    return apart.reshape(*apart.shape[:4], -1)


def row_errors(model: Predicted, params: PyTree, tokens: Int[np.ndarray, "N T"]) -> RowErrors:
    """The errors over the first rows of text: some hundred thousand numbers of each of the base's rows."""
    total, counts, edges, seen = np.zeros(()), np.zeros((), np.int64), np.zeros(()), 0
    for start in range(0, min(len(tokens), _MOST), ROWS):
        some = np.asarray(deltas(model, params, jnp.asarray(tokens[start : start + ROWS])))
        if not start:
            widest = np.quantile(np.abs(some).reshape(2, -1), _SEEN, axis=1)
            edges = widest[:, None] * np.linspace(-1, 1, BINS + 1)
        total = total + np.abs(some).mean(-1).sum(2)
        counts = counts + np.stack(
            [[np.histogram(row, bins)[0] for row in part] for part, bins in zip(some, edges, strict=True)]
        )
        seen += some.shape[2]
    return RowErrors(total / seen, edges, counts)
