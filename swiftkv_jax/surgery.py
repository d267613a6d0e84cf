"""A teacher's weights, rewired for a plan: which arrays a student starts from."""

import dataclasses

import jax
import jax.numpy as jnp

from swiftkv_jax import params as weights
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import PyTree

INITS = ("fold", "copy")


def to_swiftkv(
    model: Transformer, params: PyTree, plan: KVPlan, init: str = "fold", exit_head: bool = False
) -> tuple[Transformer, PyTree]:
    """An untrained student of `model` under `plan`; its frozen parameters are the teacher's values.

    Each maker starts as the mean of the teacher's k and v over the layers that will read its row.

    init:
      "fold": every layer's own input-norm gain is multiplied into its k and v first and `norm_swiftkv`
        starts as ones, so that a key sees the gain it was trained behind.
      "copy": the reference's start (ArcticTraining): `norm_swiftkv` copies layer `split`'s gain.
    exit_head: give the student an exit head too, which starts as the teacher's final norm and output head.

    Raises:
      UsageError: the plan has another number of layers, or no split for an exit head, or the model is not a
        standard one.
    """
    if init not in INITS:
        raise UsageError(f"init must be one of {', '.join(INITS)}, not {init!r}")
    if plan.num_layers != model.config.num_layers:
        raise UsageError(f"the plan has {plan.num_layers} layers, the model {model.config.num_layers}")
    if model.plan != KVPlan.standard(model.config.num_layers):
        raise UsageError(
            "to_swiftkv starts from a standard model; this one's rows are already shared or rewired"
        )
    student = Transformer(dataclasses.replace(model.config, exit_head=exit_head), plan, model.dtype)
    weights.weights(student.config, plan)  # refuses an exit head where there is no split
    layers, makers = standard_stacks(params)
    out = {name: value for name, value in params.items() if name in ("embed", "norm", "lm_head")}
    out["lower"] = jax.tree.map(lambda leaf: leaf[: plan.depth], layers)
    out["upper"] = jax.tree.map(lambda leaf: leaf[plan.depth :], layers)
    out["lower_rows"] = _merge(plan, plan.lower_makers, makers)
    gains = layers["input_norm"]
    fold = plan.is_swiftkv and init == "fold"
    out["fill"] = rows_last(_merge(plan, plan.upper_makers, _fold(makers, gains) if fold else makers))
    if plan.is_swiftkv:
        out["fill"]["norm_swiftkv"] = jnp.ones_like(gains[0]) if fold else gains[plan.split]
    if exit_head:
        kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
        out["exit"] = {"norm": params["norm"], "lm_head": kernel}
    return student, out


def rows_last(makers: PyTree) -> PyTree:
    """Stacked kernels [rows, D, E] as `fill` stores them, [D, rows, E]; its own inverse."""
    return makers | {
        n: makers[n] | {"kernel": jnp.swapaxes(makers[n]["kernel"], 0, 1)} for n in ("k_proj", "v_proj")
    }


def standard_stacks(params: PyTree) -> tuple[PyTree, PyTree]:
    """(layers, makers) of a standard model, each one stack of all layers."""

    def join(a: PyTree, b: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b)

    return join(params["lower"], params["upper"]), join(params["lower_rows"], rows_last(params["fill"]))


def _merge(plan: KVPlan, chosen: tuple[int, ...], makers: PyTree) -> PyTree:
    """For each chosen maker, the mean over the layers of its group."""

    def one(leaf):
        means = [leaf[jnp.array(plan.group(m))].astype(jnp.float32).mean(0) for m in chosen]
        return (jnp.stack(means) if means else leaf[:0]).astype(leaf.dtype)

    return jax.tree.map(one, makers)


def _fold(makers: PyTree, gains) -> PyTree:
    """Each layer's gain multiplied into the rows of its k and v kernels."""

    def kernel(p: PyTree) -> PyTree:
        folded = p["kernel"].astype(jnp.float32) * gains.astype(jnp.float32)[:, :, None]
        return p | {"kernel": folded.astype(p["kernel"].dtype)}

    return makers | {"k_proj": kernel(makers["k_proj"]), "v_proj": kernel(makers["v_proj"])}


def trainable_count(model: Transformer) -> int:
    """Parameters that distillation trains: norm_swiftkv, q of the upper layers, k and v of their makers, and
    an exit head."""
    tree = weights.weights(model.config, model.plan)
    queries = {name: tree["upper"][name] for name in ("q_proj", "q_norm") if name in tree["upper"]}
    return weights.count([tree["fill"], queries, tree.get("exit", {})])
