"""A closed-form start for KV prediction: the predictor fitted to the base's rows, without a gradient step.

Each map from an auxiliary's row to one head of a row of the base is a linear least-squares problem with an
intercept, in which a token counts by the attention that the base's layer gives it (distill/least_squares.py).
The normal equations are summed in float32, one of the base's layers at a time, and solved in float64.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.form import Raw
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, described, read, row_widths
from swiftkv_jax.core.rows import PLAIN
from swiftkv_jax.core.scan import of_rows
from swiftkv_jax.core.shapes import Array, Hidden, PyTree
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.distill.least_squares import Problem, halves, one_layer, products, solve, taught


@partial(jax.jit, static_argnums=0)
def given(model: Predicted, params: PyTree, batch: Batch) -> tuple[Hidden, Raw, Array]:
    """(the base's embeddings, the auxiliary's rows that are read, [J, B, T, E] each, the number of real
    tokens) of one batch."""
    used, where = sorted(set(model.prediction.reads)), (batch.tokens, batch.positions, batch.segments)
    rows = of_rows(read(model.auxiliary, params["auxiliary"], *where, used).raw, used)
    return embed(model.base, params["base"], *where[:2]), rows, (batch.segments > 0).sum()


def sums(regressors: Raw, targets: Sequence[Array], weight: Array) -> tuple[tuple[Array, Array], ...]:
    """The `products` of an auxiliary's keys [B, T, E] with the base's, and those of values; a 1 is added."""
    pairs = zip(regressors, targets, strict=True)
    return tuple(
        products(jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1).astype(jnp.float32), weight, y)
        for x, y in pairs
    )


@partial(jax.jit, static_argnums=0)
def step(
    model: Transformer, params: PyTree, x: Hidden, regressors: Raw, batch: Batch
) -> tuple[Hidden, tuple[tuple[Array, Array], ...]]:
    """(hidden states leaving a layer of a standard base, the `sums` of its row) of one batch."""
    x, targets, weight = taught(model, params, x, batch)
    return x, sums(regressors, targets, weight)


@partial(jax.jit, static_argnums=(0, 1))
def unweighted(model: Transformer, row: int, params: PyTree, regressors: Raw, batch: Batch):
    """The `sums` of a row of any base as if it had one head, over real tokens, which count alike."""
    where = (batch.tokens, batch.positions, batch.segments)
    targets = [y[0, :, :, None] for y in of_rows(read(model, params, *where, [row]).raw, [row])]
    return sums(regressors, targets, (batch.segments > 0)[..., None].astype(jnp.float32))


def fit(model: Predicted, params: PyTree, batches: Iterable[Batch], ridge: float = 1e-3) -> PyTree:
    """A predictor in float32 that minimises |X W - Y|^2 + ridge * s * |W|^2, the intercept not shrunk.

    X is the auxiliary's row and Y one head of the base's, with keys before norm and rotation, over all real
    tokens of `batches`; s is the mean of the diagonal of X^T X. Tokens are weighted as in `taught`; where
    layers of the base share rows or read another layer's (it is a student itself), they count alike.
    params: {"base", "auxiliary"}; a predictor is ignored.

    The devices hold the base's stream and the auxiliary's rows that are read, of all batches.

    Raises:
      UsageError: there are no more tokens than numbers in an auxiliary's row.
    """
    base, reads, width = model.base, model.prediction.reads, model.auxiliary.config.kv_width
    params = {name: params[name] for name in ("base", "auxiliary")}
    kept, streams, rows, tokens = [], [], [], 0
    for batch in batches:
        x, found, count = given(model, params, batch)
        kept, streams, rows, tokens = [*kept, batch], [*streams, x], [*rows, found], tokens + int(count)
    if tokens <= width:
        stated = f"{width + 1} unknowns an output and {tokens} tokens to find them by"
        raise UsageError(f"a least-squares predictor has {stated}: raise init_tokens, or --tokens")
    place = {row: i for i, row in enumerate(sorted(set(reads)))}

    def of_batches(row: int) -> Iterator[tuple[tuple[Array, Array], ...]]:
        standard = base.plan == KVPlan.standard(base.plan.num_layers)
        one, own = one_layer(base, params["base"], row) if standard else (base, params["base"])
        for i, batch in enumerate(kept):
            regressors = tuple(x[place[reads[row]]] for x in rows[i])
            if standard:
                streams[i], found = step(one, own, streams[i], regressors, batch)
            else:
                found = unweighted(base, row, own, regressors, batch)
            yield found

    def solved(row: int, gram: np.ndarray, cross: np.ndarray) -> PyTree:
        inside, _ = row_widths(model)[row]
        own = [*range(inside), -1]  # without the zeros of a narrower row, with the 1
        heads = [
            solve(Problem(g[np.ix_(own, own)][None], c[own][None, :, None], np.ones(())), ridge, inside)[:, 0]
            for g, c in zip(gram, cross, strict=True)
        ]
        found = np.concatenate(heads, axis=-1)
        return {"kernel": found[None, :inside], "bias": found[None, inside]}

    alone = []
    for row in range(len(reads)):
        parts = jax.tree.map(lambda *x: sum(y.astype(np.float64) for y in x), *halves(of_batches(row)))
        alone.append({name: solved(row, *part) for name, part in zip(PLAIN.projections, parts, strict=True)})
    held = weights.ranges(described(model)["predictor"]["rows"])
    stacks = [
        jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x), jnp.float32), *alone[r.start : r.stop])
        for r in held
    ]
    return {"rows": stacks}
