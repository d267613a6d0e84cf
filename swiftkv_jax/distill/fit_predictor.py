"""A closed-form start for KV prediction: the predictor fitted to the base's rows, without a gradient step.

Each map from an auxiliary's row to one of the base's is a linear least-squares problem with an intercept. One
pass over some of the training data gives the normal equations; they are summed and solved in float64.
"""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.distill.least_squares import Moments, solve
from swiftkv_jax.distill.packing import Batch
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer, angles_and_segments
from swiftkv_jax.predict import Predicted, Raw, projected_rows
from swiftkv_jax.shapes import Array, PyTree
from swiftkv_jax.sharding import constrain

_einsum = partial(jnp.einsum, precision="highest")


def batch_moments(model: Predicted, params: PyTree, batch: Batch) -> tuple[Array, Array, Array]:
    """(gram [J, 2, A + 1, A + 1], cross [R, 2, A + 1, E], tokens) of one batch; padding is left out.

    Regressors: the A projected keys, or values, of each of the J auxiliary rows that are read, and a 1.
    Targets: the E projected keys, or values, of each of the base's R rows.
    """
    real = (batch.segments > 0).astype(jnp.float32)[..., None]
    reads = model.prediction.reads
    used = sorted(set(reads))

    def rows(part: Transformer, p: PyTree, wanted: Iterable[int]) -> dict[int, Raw]:
        at, segments = angles_and_segments(part.config, batch.tokens, batch.positions, batch.segments)
        return projected_rows(part, p, batch.tokens, at, segments, wanted, positions=batch.positions)

    given = rows(model.auxiliary, params["auxiliary"], used)
    wanted = rows(model.base, params["base"], range(len(reads)))
    regressors = {
        row: [jnp.concatenate([x.astype(jnp.float32), jnp.ones_like(real)], axis=-1) * real for x in pair]
        for row, pair in given.items()
    }
    gram = jnp.stack([jnp.stack([_einsum("bti,btj->ij", x, x) for x in regressors[row]]) for row in used])
    cross = jnp.stack(
        [
            jnp.stack([_einsum("bti,bte->ie", x, y.astype(jnp.float32)) for x, y in zip(*pairs, strict=True)])
            for pairs in ((regressors[read], wanted[row]) for row, read in enumerate(reads))
        ]
    )
    return constrain(gram, ". . . ."), constrain(cross, ". . . ."), real.sum()


def fit(model: Predicted, params: PyTree, batches: Iterable[Batch], ridge: float = 1e-3) -> PyTree:
    """A predictor in float32 that minimises |X W - Y|^2 + ridge * s * |W|^2, the intercept not shrunk.

    X is the auxiliary's row and Y the base's, with keys before norm and rotation, over all real tokens of
    `batches`; s is the mean of the diagonal of X^T X. params: {"base", "auxiliary"}; a predictor is ignored.

    Raises:
      UsageError: fewer tokens than the width of the auxiliary's rows plus one.
    """
    run = jax.jit(lambda params, batch: batch_moments(model, params, batch))
    params = {name: params[name] for name in ("base", "auxiliary")}
    gram, cross, tokens = np.zeros(()), np.zeros(()), 0
    for batch in batches:
        g, c, count = (np.asarray(x, np.float64) for x in run(params, batch))
        gram, cross, tokens = gram + g, cross + c, tokens + int(count)
    width, reads = model.auxiliary.config.kv_width, model.prediction.reads
    if tokens <= width:
        raise UsageError(
            f"a least-squares predictor has {width + 1} unknowns an output and {tokens} tokens to find them "
            "by: raise init_tokens, or --tokens"
        )
    place = {row: i for i, row in enumerate(sorted(set(reads)))}

    def solved(which: int) -> PyTree:
        sums = [
            Moments(gram[place[read], which], cross[row, which][None, :, None], tokens)
            for row, read in enumerate(reads)
        ]
        maps = np.stack([solve(each, ridge, width)[0, :, 0] for each in sums]).astype(np.float32)
        return {"kernel": jnp.asarray(maps[:, :width]), "bias": jnp.asarray(maps[:, width])}

    return {"rows": [{"k_proj": solved(0), "v_proj": solved(1)}]}
