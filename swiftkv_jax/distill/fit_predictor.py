"""A closed-form start for KV prediction: the predictor fitted to the base's rows, without a gradient step.

Each map from an auxiliary's row to one of the base's is a linear least-squares problem with an intercept. One
pass over some of the training data gives the normal equations; they are summed and solved in float64.
"""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core import weights
from swiftkv_jax.core.predict import Predicted, described, read, row_widths
from swiftkv_jax.core.rows import PLAIN
from swiftkv_jax.core.scan import of_rows
from swiftkv_jax.core.shapes import Array, PyTree
from swiftkv_jax.core.sharding import constrain
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.distill.least_squares import Problem, solve

_einsum = partial(jnp.einsum, precision="highest")


def batch_moments(model: Predicted, params: PyTree, batch: Batch) -> tuple[Array, Array, Array]:
    """(gram [J, 2, A + 1, A + 1], cross [R, 2, A + 1, E], tokens) of one batch; padding is left out.

    Regressors: the A projected keys, or values, of each of the J auxiliary rows that are read, and a 1.
    Targets: the E projected keys, or values, of each of the base's R rows.
    """
    real = (batch.segments > 0).astype(jnp.float32)[..., None]
    reads = model.prediction.reads
    used = sorted(set(reads))

    where = (batch.tokens, batch.positions, batch.segments)
    given = of_rows(read(model.auxiliary, params["auxiliary"], *where, used).raw, used)
    wanted = of_rows(read(model.base, params["base"], *where, range(len(reads))).raw, range(len(reads)))
    regressors = [
        jnp.concatenate([x.astype(jnp.float32), jnp.broadcast_to(real > 0, (*x.shape[:-1], 1))], axis=-1)
        * real
        for x in given
    ]
    place = jnp.array([used.index(read) for read in reads])

    def products(x, y):
        return _einsum("bti,bte->ie", x, y.astype(jnp.float32))

    gram = [jax.lax.map(lambda x: products(x, x), x) for x in regressors]
    cross = [
        jax.lax.map(lambda row, x=x: products(x[row[0]], row[1]), (place, y))
        for x, y in zip(regressors, wanted, strict=True)
    ]
    gram, cross = jnp.stack(gram, axis=1), jnp.stack(cross, axis=1)
    return constrain(gram, ". . . ."), constrain(cross, ". . . ."), real.sum()


def fit(model: Predicted, params: PyTree, batches: Iterable[Batch], ridge: float = 1e-3) -> PyTree:
    """A predictor in float32 that minimises |X W - Y|^2 + ridge * s * |W|^2, the intercept not shrunk.

    X is the auxiliary's row and Y the base's, with keys before norm and rotation, over all real tokens of
    `batches`; s is the mean of the diagonal of X^T X. params: {"base", "auxiliary"}; a predictor is ignored.
    """
    run = jax.jit(lambda params, batch: batch_moments(model, params, batch))
    params = {name: params[name] for name in ("base", "auxiliary")}
    gram, cross, tokens = np.zeros(()), np.zeros(()), 0
    for batch in batches:
        g, c, count = (np.asarray(x, np.float64) for x in run(params, batch))
        gram, cross, tokens = gram + g, cross + c, tokens + int(count)
    width, reads = model.auxiliary.config.kv_width, model.prediction.reads
    if tokens <= width:
        given = f"{width + 1} unknowns an output and {tokens} tokens to find them by"
        raise UsageError(f"a least-squares predictor has {given}: raise init_tokens, or --tokens")
    place = {row: i for i, row in enumerate(sorted(set(reads)))}

    def solved(row: int, which: int) -> PyTree:
        inside, outside = row_widths(model)[row]
        own = [*range(inside), width]  # without the zeros of a narrower row, with the 1
        sums = gram[place[reads[row]], which][np.ix_(own, own)], cross[row, which][own, :outside]
        found = solve(Problem(sums[0][None], sums[1][None, :, None], np.ones(())), ridge, inside)[:, 0]
        return {"kernel": found[None, :inside], "bias": found[None, inside]}

    alone = [
        {name: solved(row, which) for which, name in enumerate(PLAIN.projections)}
        for row in range(len(reads))
    ]
    held = weights.ranges(described(model)["predictor"]["rows"])
    stacks = [
        jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x), jnp.float32), *alone[r.start : r.stop])
        for r in held
    ]
    return {"rows": stacks}
