"""The step that trains KV prediction: against a float64 NumPy definition, `predict.forward`, and itself."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import packed_batch
from tiny_models import ODD, PLAIN, SIZED, tiny

from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict, weights
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.scan import forward
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import OptimizerConfig, PredictionLossConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.distill.predict_step import PREDICT, batch_loss, evaluate_batch, passes, split

STANDARD = KVPlan.standard(4)
NORMED = dataclasses.replace(ODD, windows=())  # biases, per-head norms, tied
SHORT = dataclasses.replace(PLAIN, num_layers=2, windows=(), num_kv_heads=4, head_dim=8, hidden_size=32)
PAIRS = {
    "standard": (NORMED, STANDARD, SHORT, KVPlan.standard(2), (0, 0, 1, 1)),
    "swiftkv_base": (PLAIN, KVPlan.swiftkv(4, 2), SHORT, KVPlan.standard(2), (0, 1, 1, 0)),
    "acrosskv_auxiliary": (ODD, STANDARD, PLAIN, KVPlan.swiftkv(4, 1, 2), (0, 2, 1, 1)),
    "not_the_deepest_row": (PLAIN, STANDARD, ODD, STANDARD, (0, 1, 1, 2)),
    "of_own_sizes": (SIZED, STANDARD, NORMED, STANDARD, (0, 1, 1, 2)),
}
ALL = PredictionLossConfig(kl_weight=0.5, aux_weight=0.7, rows_weight=0.3, z_loss=1e-2, chunk_mib=0.01)


def pair(name: str) -> tuple[Predicted, dict]:
    base_config, base_plan, aux_config, aux_plan, reads = PAIRS[name]
    base, base_params = tiny(base_config, base_plan)
    auxiliary, aux_params = tiny(aux_config, aux_plan, seed=1)
    model = Predicted(base, auxiliary, Prediction(reads))
    predictor = jax.tree.map(lambda x: 2 * x, predict.uniform(model, jax.random.key(2)))
    return model, {"base": base_params, "auxiliary": aux_params, "predictor": predictor}


def recipe_of(model: Predicted, loss=ALL, remat=True, **changes) -> steps.Recipe:
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup=0.0, schedule="constant", **changes)
    return steps.Recipe(model, loss, optimizer, 20, "predictor", remat, method=PREDICT)


def terms(recipe: steps.Recipe, params, batch: Batch):
    """(loss, terms, gradients by what trains)."""
    totals = (batch.mask.sum(), (batch.segments > 0).sum())
    trained, frozen = split(params)
    run = jax.value_and_grad(lambda t: batch_loss(recipe, t, frozen, batch, totals), has_aux=True)
    (value, found), grads = jax.jit(run)(trained)
    return float(value), {name: float(x) for name, x in found.items()}, grads


# ---- the definition, in float64 -----------------------------------------------------------------------


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def norm64(x, gain, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def turned64(config, x, positions):
    """[T, heads, H] rotated by the published convention."""
    angle = positions[:, None] / config.rope.rope_theta ** (
        np.arange(0, config.head_dim, 2) / config.head_dim
    )
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def linear64(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def keys64(config, maker, flat):
    """Keys by head, normed where the model norms them, and not rotated."""
    k = flat.reshape(len(flat), -1, config.head_dim)
    return norm64(k, maker["k_norm"], config.rms_norm_eps) if "k_norm" in maker else k


def model64(config, params, tokens, positions, segments, given=None):
    """One packed row [T] through a standard model: (logits, its projected rows).

    given: rows that it reads in place of its own.
    """
    eps, x, rows = config.rms_norm_eps, params["embed"][tokens], []
    seen = np.tril(segments[:, None] == segments[None])
    for layer in range(config.num_layers):
        p, maker = weights.layer(params, layer), weights.row(params, layer)
        attention, mlp = p["attentions"][0], p["mlp"]
        h = norm64(x, attention["norm"], eps)
        rows.append((linear64(h, maker["k_proj"]), linear64(h, maker["v_proj"])))
        flat_k, flat_v = rows[-1] if given is None else given[layer]
        k = turned64(config, keys64(config, maker, flat_k), positions)
        v = flat_v.reshape(k.shape)
        q = linear64(h, attention["q_proj"]).reshape(len(x), -1, config.head_dim)
        q = turned64(config, norm64(q, attention["q_norm"], eps) if "q_norm" in attention else q, positions)
        k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(config.head_dim)
        shares = np.exp(
            np.where(seen, scores - scores.max(-1, keepdims=True, where=seen, initial=-1e9), -np.inf)
        )
        shares /= shares.sum(-1, keepdims=True)
        x = x + linear64(np.einsum("nts,snh->tnh", shares, v).reshape(len(x), -1), attention["o_proj"])
        h = norm64(x, mlp["norm"], eps)
        gate = linear64(h, mlp["gate_proj"])
        x = x + linear64(gate / (1 + np.exp(-gate)) * linear64(h, mlp["up_proj"]), mlp["down_proj"])
    head = params["lm_head"] if "lm_head" in params else params["embed"].T
    return norm64(x, params["norm"], eps) @ head, rows


def log_softmax64(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def terms64(model: Predicted, params, batch: Batch, temperature: float) -> dict[str, float]:
    """Every term of the loss, summed up from packed rows one by one."""
    base, auxiliary, reads = model.base.config, model.auxiliary.config, model.prediction.reads
    params, found = as_float64(params), dict.fromkeys(("lm", "lm_z", "aux", "aux_z", "kl", "rows"), 0.0)
    arrays = (
        np.asarray(x) for x in (batch.tokens, batch.positions, batch.segments, batch.targets, batch.mask)
    )
    for tokens, positions, segments, targets, mask in zip(*arrays, strict=True):
        where, real = (tokens, positions, segments), segments > 0
        own, wanted = model64(base, params["base"], *where)
        small, given = model64(auxiliary, params["auxiliary"], *where)
        maps = [weights.row(params["predictor"], row) for row in range(len(reads))]
        rows = [
            (linear64(given[read][0], p["k_proj"]), linear64(given[read][1], p["v_proj"]))
            for read, p in zip(reads, maps, strict=True)
        ]
        got, _ = model64(base, params["base"], *where, given=rows)
        for name, scores in (("lm", got), ("aux", small)):
            each = -np.take_along_axis(log_softmax64(scores), targets[:, None], 1)[:, 0]
            found[name] += (each * mask).sum()
            found[f"{name}_z"] += (np.log(np.exp(scores).sum(-1)) ** 2 * mask).sum()
        a, b = log_softmax64(own / temperature), log_softmax64(got / temperature)
        found["kl"] += temperature**2 * ((np.exp(a) * (a - b)).sum(-1) * mask).sum()
        for row, (mine, theirs) in enumerate(zip(rows, wanted, strict=True)):
            maker = weights.row(params["base"], row)
            k, other = (keys64(base, maker, x[0])[real] for x in (mine, theirs))
            width = mine[1].shape[-1]
            found["rows"] += (np.abs(k - other).sum() + np.abs(mine[1] - theirs[1])[real].sum()) / width
    counted, real = float(batch.mask.sum()), float((batch.segments > 0).sum())
    return {name: x / (real if name == "rows" else counted) for name, x in found.items()}


@pytest.mark.slow
def test_terms_are_those_of_a_definition_in_float64():
    model, params = pair("standard")
    batch = packed_batch()
    totals = (batch.mask.sum(), (batch.segments > 0).sum())
    value, got = jax.jit(partial(batch_loss, recipe_of(model)))(*split(params), batch, totals)
    want = terms64(model, params, batch, ALL.temperature)
    assert got.keys() == want.keys()
    np.testing.assert_allclose([got[name] for name in want], list(want.values()), rtol=2e-5)
    weighed = want["lm"] + 1e-2 * want["lm_z"] + 0.7 * (want["aux"] + 1e-2 * want["aux_z"])
    np.testing.assert_allclose(value, weighed + 0.5 * want["kl"] + 0.3 * want["rows"], rtol=2e-5)


def test_the_defaults_are_the_papers():
    """Section 4.3: both cross-entropies count 1, and the sum over rows 1 / rows; there is no KL."""
    loss = PredictionLossConfig()
    assert (loss.lm_weight, loss.kl_weight, loss.aux_weight, loss.z_loss) == (1, 0, 1, 0)
    assert loss.of_rows(28) == 1 / 28 and ALL.of_rows(28) == 0.3


# ---- the passes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swiftkv_base", "acrosskv_auxiliary", "of_own_sizes"])
def test_passes_are_the_definition_for_any_pair(name):
    """Streams and gradients of scans that keep rows, against one layer after the other."""
    model, params = pair(name)
    batch = packed_batch()
    where, real = (batch.tokens, batch.positions, batch.segments), (batch.segments > 0)[..., None]
    recipe = recipe_of(model)
    own, small, x, _ = jax.jit(lambda p: passes(recipe, p, batch))(params)
    base, auxiliary = (model.base, params["base"]), (model.auxiliary, params["auxiliary"])
    want = predict.forward(model, params, *where, own=False)
    np.testing.assert_allclose(x * real, want * real, rtol=0, atol=5e-5)
    for kept, part in ((own, base), (small, auxiliary)):
        np.testing.assert_allclose(kept.x * real, forward(*part, *where) * real, rtol=0, atol=5e-5)

    def slow(trained):
        merged = steps.merge(trained, split(params)[1].student)
        scores = logits(*base, predict.forward(model, merged, *where, own=False))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), batch.targets[..., None], -1)[..., 0]
        return -(chosen * batch.mask).sum() / batch.mask.sum()

    loss = PredictionLossConfig(aux_weight=0.0, rows_weight=0.0)
    value, _, grads = terms(recipe_of(model, loss), params, batch)
    expected, slopes = jax.jit(jax.value_and_grad(slow))(split(params)[0])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-5), grads, slopes)


@pytest.mark.slow
def test_evaluation_is_of_the_base_on_predicted_rows():
    model, params = pair("standard")
    batch = packed_batch()
    where, mask = (batch.tokens, batch.positions, batch.segments), np.asarray(batch.mask)
    trained, frozen = split(params)
    got = jax.jit(partial(evaluate_batch, recipe_of(model)))(frozen, trained, batch)
    streams = {
        "student": (model.base, params["base"], predict.forward(model, params, *where, own=False)),
        "teacher": (model.base, params["base"], forward(model.base, params["base"], *where)),
        "auxiliary": (
            model.auxiliary,
            params["auxiliary"],
            forward(model.auxiliary, params["auxiliary"], *where),
        ),
    }
    scores = {name: log_softmax64(np.asarray(logits(*x), np.float64)) for name, x in streams.items()}
    for name, found in scores.items():
        each = -np.take_along_axis(found, np.asarray(batch.targets)[..., None], -1)[..., 0]
        np.testing.assert_allclose(got[name], (each * mask).sum(1), rtol=1e-4)
    a, b = scores["teacher"], scores["student"]
    np.testing.assert_allclose(got["kl"], ((np.exp(a) * (a - b)).sum(-1) * mask).sum(1), rtol=1e-3)
    np.testing.assert_allclose(got["agree"], ((a.argmax(-1) == b.argmax(-1)) * mask).sum(1))


# ---- laws --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_move_the_auxiliary_and_the_predictor_and_nothing_of_the_base():
    """20 steps; the base byte for byte, and less loss."""
    model, params = pair("standard")
    trained, frozen = split(params)
    before = [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(frozen.student))]
    assert len(before) == len(jax.tree.leaves(params["base"]))
    recipe, batch = recipe_of(model), packed_batch()
    state, losses = steps.init_state(recipe, steps.masters(trained)), []
    step = jax.jit(partial(steps.train_step, recipe))
    for _ in range(20):
        state, metrics = step(frozen, state, batch)
        losses.append(float(metrics["loss"]))
    assert [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(frozen.student))] == before
    assert not jax.tree.leaves(state.trainable["base"])
    still = [
        jax.tree_util.keystr(path)
        for path, (a, b) in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(lambda a, b: (a, b), state.trainable, trained),
            is_leaf=lambda x: isinstance(x, tuple),
        )
        if np.array_equal(a, b)
    ]
    assert not still and losses[-1] < 0.9 * losses[0], (still, losses)
