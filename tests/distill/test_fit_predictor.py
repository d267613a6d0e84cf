"""The closed-form predictor against numpy.linalg.lstsq in float64, and what it must recover exactly."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_least_squares import squared_attention, unit
from tiny_models import ODD, PLAIN, SIZED, tiny

from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict, weights
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.scan import angles_and_segments, of_rows, through
from swiftkv_jax.distill.data.packing import Batch, Sample, assemble
from swiftkv_jax.distill.fit_predictor import fit

SHORT = dataclasses.replace(PLAIN, num_layers=2, windows=(), num_kv_heads=2, head_dim=8, hidden_size=32)
READS = (0, 1, 0, 1)


def batches(count: int = 3) -> list[Batch]:
    """Rows of 40 tokens: two segments of unequal length, then padding."""
    rng = np.random.default_rng(0)

    def row():
        sizes = rng.integers(10, 19, 2)
        return [Sample("s", rng.integers(0, 61, n).astype(np.int32), np.ones(n, bool)) for n in sizes]

    rows = [assemble([row() for _ in range(3)], [False] * 3, 40) for _ in range(count)]
    return [jax.tree.map(jnp.asarray, batch) for batch in rows]


def streams(model, params, batch: Batch) -> list[np.ndarray]:
    """[B, T, D] float64: what enters each layer."""
    at, segments = angles_and_segments(model.config, batch.tokens, batch.positions, batch.segments)
    x, out = embed(model, params, batch.tokens, None), []
    for layer in range(model.config.num_layers):
        out.append(np.asarray(x, np.float64))
        x = through(model, params, x, at, segments, range(layer, layer + 1)).x
    return out


def rows_of(model, params, data) -> list[dict[str, np.ndarray]]:
    """Projected keys and values of each row of a standard model, before norm and rotation, and the square
    root of the weight of each real token for each kv head, in float64."""
    entering, out = [streams(model, params, batch) for batch in data], []
    for layer in range(model.config.num_layers):
        p = weights.layer(params, layer)["attentions"][0] | weights.row(params, layer)
        p, found = jax.tree.map(lambda w: np.asarray(w, np.float64), p), []
        for each, batch in zip(entering, data, strict=True):
            h = unit(each[layer]) * p["norm"]
            row = {n: h @ p[n]["kernel"] + p[n].get("bias", 0) for n in ("k_proj", "v_proj")}
            seen = squared_attention(model.config, layer, p, row["k_proj"], h, batch)
            real = np.asarray(batch.segments) > 0
            found.append({name: y[real] for name, y in (row | {"root": np.sqrt(seen)}).items()})
        out.append({name: np.concatenate([one[name] for one in found]) for name in found[0]})
    return out


SHORTER = dataclasses.replace(SIZED, num_layers=2, windows=(), sizes=SIZED.sizes[:2])


@pytest.mark.slow
@pytest.mark.parametrize("of_base, of_auxiliary", [(ODD, SHORT), (SIZED, SHORTER)], ids=["", "of_own_sizes"])
def test_maps_are_those_of_lstsq_with_a_ridge_on_all_but_the_intercept(of_base, of_auxiliary):
    base, base_params = tiny(of_base, KVPlan.standard(4))
    auxiliary, aux_params = tiny(of_auxiliary, KVPlan.standard(2), seed=1)
    model, data, ridge = Predicted(base, auxiliary, Prediction(READS)), batches(), 1e-2
    got = fit(model, {"base": base_params, "auxiliary": aux_params}, data, ridge)
    given, wanted = rows_of(auxiliary, aux_params, data), rows_of(base, base_params, data)
    for row, read in enumerate(READS):
        for name, head in itertools.product(("k_proj", "v_proj"), range(wanted[row]["root"].shape[1])):
            part = slice(head * of_base.head_dim, (head + 1) * of_base.head_dim)
            root, x, y = wanted[row]["root"][:, [head]], given[read][name], wanted[row][name][:, part]
            width, x = x.shape[1], root * np.concatenate([x, np.ones((len(x), 1))], 1)
            shrink = np.sqrt(ridge * (x[:, :-1] ** 2).sum() / width) * np.eye(width, width + 1)
            left, right = (
                np.concatenate([x, shrink]),
                np.concatenate([root * y, np.zeros((width, y.shape[1]))]),
            )
            want = np.linalg.lstsq(left, right, rcond=None)[0]
            p = weights.row(got, row)[name]
            np.testing.assert_allclose(p["kernel"][:, part], want[:width], rtol=0, atol=2e-4)
            np.testing.assert_allclose(p["bias"][part], want[width], rtol=0, atol=2e-4)


def test_a_base_that_is_a_student_has_all_tokens_alike():
    base, base_params = tiny(PLAIN, KVPlan.swiftkv(4, 2))
    auxiliary, aux_params = tiny(SHORT, KVPlan.standard(2), seed=1)
    model, data = Predicted(base, auxiliary, Prediction(READS)), batches()
    got = fit(model, {"base": base_params, "auxiliary": aux_params}, data, 0.0)
    real = np.concatenate([np.asarray(batch.segments) > 0 for batch in data])

    @functools.partial(jax.jit, static_argnums=0)
    def keys(model, params, b):
        rows = range(model.config.num_layers)
        raw = predict.read(model, params, b.tokens, b.positions, b.segments, rows).raw
        return [of_rows(raw, [row])[0][0] for row in rows]

    given, wanted = (
        [np.concatenate(parts)[real] for parts in zip(*(keys(*whole, b) for b in data), strict=True)]
        for whole in ((auxiliary, aux_params), (base, base_params))
    )
    for row, read in enumerate(READS):
        x, y = given[read], wanted[row]
        x = np.concatenate([x, np.ones((len(x), 1))], 1)
        want = x @ np.linalg.lstsq(x, y, rcond=None)[0]
        p = weights.row(got, row)["k_proj"]
        np.testing.assert_allclose(x @ np.concatenate([p["kernel"], p["bias"][None]]), want, atol=2e-3)


def test_least_squares_gives_the_identity_if_the_base_is_its_own_auxiliary():
    """Without a ridge the solution is the identity, and prediction changes nothing."""
    base, params = tiny(PLAIN, KVPlan.standard(4))
    model = Predicted(base, base, Prediction((0, 1, 2, 3)))
    both = {"base": params, "auxiliary": params}
    got = fit(model, both, batches(), ridge=0.0)
    want = predict.identity(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-3), got, want)
