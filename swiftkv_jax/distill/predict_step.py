"""The training step of KV prediction: an auxiliary and a predictor are trained for a frozen base."""

from collections.abc import Iterable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.analysis import flops
from swiftkv_jax.core import predict
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.form import Raw
from swiftkv_jax.core.layers import norm
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.scan import STREAM, Passed, angles_and_segments, of_rows, through
from swiftkv_jax.core.shapes import Array, Float, Hidden, PyTree
from swiftkv_jax.core.sharding import constrain
from swiftkv_jax.distill import loss as losses
from swiftkv_jax.distill.config import PredictionLossConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.distill.fit_predictor import fit as least_squares
from swiftkv_jax.distill.least_squares import like
from swiftkv_jax.distill.step import (
    Frozen,
    Method,
    Recipe,
    attention_of,
    chunk_of,
    compared,
    merge,
    whole_head,
)


def parts(recipe: Recipe) -> tuple[Predicted, PredictionLossConfig]:
    """The recipe's model and loss, which are those of KV prediction (see `Experiment`)."""
    return cast(Predicted, recipe.student), cast(PredictionLossConfig, recipe.loss)


def split(tree: PyTree) -> tuple[PyTree, Frozen]:
    """(trained, frozen) of a tree of parameters, or of its `Weight`s: all but the base trains."""
    nothing = jax.tree.map(lambda _: None, tree)
    return tree | {"base": nothing["base"]}, Frozen(nothing | {"base": tree["base"]}, None)


def weight_trees(model: Predicted, trainable: str, made=None) -> tuple[PyTree, Frozen]:
    """(trained, frozen) as trees of `Weight`s; none is in 8 bits, whatever is `made`."""
    return split(predict.described(model))


def passes(
    recipe: Recipe, params: PyTree, batch: Batch, whole: tuple[bool, bool] = (True, True)
) -> tuple[Passed, Passed, Hidden, Raw]:
    """(base's own pass, auxiliary's, hidden states of the base on predicted rows, those rows as projections
    would leave them).

    whole: of the first two, as in `predict.read`. No gradient reaches the base's own pass.
    """
    model, attention = parts(recipe)[0], attention_of(recipe)
    where, reads = (batch.tokens, batch.positions, batch.segments), model.prediction.reads
    base, every = model.base, range(model.base.plan.num_rows)
    frozen = jax.lax.stop_gradient(params["base"])
    base_pass = predict.read(base, frozen, *where, every, whole[0], attention=attention)
    auxiliary_pass = predict.read(
        model.auxiliary, params["auxiliary"], *where, reads, whole[1], recipe.remat, attention
    )
    raw = predict.predict_rows(model, params, of_rows(auxiliary_pass.raw, reads))
    angles, segments = angles_and_segments(base.config, *where)
    x = constrain(embed(base, params["base"], batch.tokens, batch.positions), STREAM)
    rows = predict.finished(base, params["base"], raw, angles)
    x = through(
        base, params["base"], x, angles, segments, rows=rows, remat=recipe.remat, attention=attention
    ).x
    return base_pass, auxiliary_pass, x, raw


def final(model: Transformer, params: PyTree, x: Hidden) -> Hidden:
    """Hidden states as the output head takes them."""
    return norm(model.config, params, x)


def batch_loss(recipe: Recipe, trained: PyTree, frozen: Frozen, batch: Batch, totals) -> tuple[Array, dict]:
    """The loss of one (micro-)batch, already divided by the whole batch's token counts `totals`.

    The dict holds its terms before the weights of `PredictionLossConfig`; "lm_z" and "aux_z" belong to
    z_loss.
    """
    model, config = parts(recipe)
    params = merge(trained, frozen.student)
    whole = bool(config.kl_weight), bool(config.aux_weight)
    base_pass, auxiliary_pass, x, raw = passes(recipe, params, batch, whole)
    base, auxiliary = (model.base, params["base"]), (model.auxiliary, params["auxiliary"])
    counted, real = totals
    chunk = chunk_of(recipe, batch)
    terms: dict[str, tuple[float, Array]] = {}  # name -> weight, value
    entropies = (("lm", config.lm_weight, base, x), ("aux", config.aux_weight, auxiliary, auxiliary_pass.x))
    for name, weight, owner, stream in entropies:
        if not weight:
            continue
        to_logits, h = whole_head(*owner), final(*owner, stream)
        weights = {name: weight} | ({f"{name}_z": weight * config.z_loss} if config.z_loss else {})
        sums = losses.cross_entropy_sums(to_logits, h, batch.targets, batch.mask, chunk, len(weights) > 1)
        terms |= {term: (weights[term], x / counted) for term, x in zip(weights, sums, strict=True)}
    if config.kl_weight:
        to_logits = whole_head(*base)
        streams = final(*base, x), final(*base, base_pass.x)
        kl = losses.kl_sum(to_logits, to_logits, *streams, batch.mask, config.temperature, chunk)
        terms["kl"] = config.kl_weight, kl / counted
    every = range(model.base.plan.num_rows)
    if weight := config.of_rows(len(every)):
        rows = predict.heads(*base, raw), predict.heads(*base, of_rows(base_pass.raw, every))
        terms["rows"] = weight, differences(*rows, (batch.segments > 0).astype(jnp.float32)) / real
    total = sum((weight * value for weight, value in terms.values()), jnp.zeros(()))
    return total, {name: value for name, (_, value) in terms.items()}


def differences(got: PyTree, want: PyTree, real: Float[Array, "B T"]) -> Float[Array, ""]:
    """Sum over rows, real tokens, and keys and values, of the mean absolute difference over heads and widths,
    in float32."""

    def distance(a, b):
        gap = a.astype(jnp.float32) - b.astype(jnp.float32)
        gap *= jax.lax.stop_gradient(jnp.sign(gap))  # jnp.abs has a slope of 1 at 0; equal rows have none
        return jnp.sum(jnp.mean(gap, axis=(-2, -1)) * real)

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return sum((distance(a, b) for a, b in pairs), jnp.zeros(()))


def evaluate_batch(
    recipe: Recipe, frozen: Frozen, trained: PyTree, batch: Batch, served: bool = False
) -> dict:
    """As `step.evaluate_batch`: "student" is the base on predicted rows throughout (the paper's training and
    multiple-choice mode), "teacher" the base itself. Adds the auxiliary's cross-entropy.

    served: "student" is the base as it is served with a tail of one token, at every position.
    """
    model, _ = parts(recipe)
    params = merge(trained, frozen.student)
    base_pass, auxiliary_pass, x, _ = passes(recipe, params, batch)
    if served:
        x = predict.forward(model, params, batch.tokens, batch.positions, batch.segments)
    base, auxiliary = (model.base, params["base"]), (model.auxiliary, params["auxiliary"])
    to_logits, others = whole_head(*base), whole_head(*auxiliary)

    def per_chunk(h, want, alone, targets, mask):
        sums = compared(to_logits(h), to_logits(want), targets)
        sums["auxiliary"] = losses.cross_entropy(others(alone), targets)
        sums = {name: jnp.sum(x * mask, axis=1) for name, x in sums.items()}
        return sums | {"tokens": jnp.sum(mask, axis=1)}, ()

    streams = final(*base, x), final(*base, base_pass.x), final(*auxiliary, auxiliary_pass.x)
    return losses.over_chunks(per_chunk, chunk_of(recipe, batch), *streams, batch.targets, batch.mask)[0]


def fit(recipe: Recipe, trained: PyTree, frozen: Frozen, batches: Iterable[Batch]) -> PyTree:
    """`trained` with the predictor fitted by least squares (distill/fit_predictor.py)."""
    model, _ = parts(recipe)
    solved = least_squares(model, merge(trained, frozen.student), batches)
    placed = jax.tree.map(lambda old, new: like(old, np.asarray(new)), trained["predictor"], solved)
    return trained | {"predictor": placed}


def flops_per_token(recipe: Recipe, seq_len: int) -> tuple[float, float]:
    """As `step.flops_per_token`."""
    model, config = parts(recipe)
    base, auxiliary = ((part.config, part.plan) for part in (model.base, model.auxiliary))
    kl, alone = bool(config.kl_weight), bool(config.aux_weight)
    sizes = base, auxiliary, model.prediction, seq_len
    again = flops.prediction_recomputed_flops_per_token(*sizes, alone) if recipe.remat else 0.0
    return flops.prediction_training_flops_per_token(*sizes, kl, alone), again


PREDICT = Method(weight_trees, batch_loss, evaluate_batch, fit, flops_per_token)
