"""The closed-form start against numpy.linalg.lstsq in float64, on streams that this file makes itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import sized

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.distill import least_squares
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.distill.data.packing import Sample, assemble

SPLIT, LAYERS, WIDTH, HEAD = 2, 5, 24, 8
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


def teacher_of(**fields):
    config = sized(61, WIDTH, 40, LAYERS, 4, 2, HEAD, **fields)
    model = Transformer(config, KVPlan.standard(LAYERS))
    params = weights.init(config, model.plan, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    return model, jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape), params)


def batches(count: int = 3, seed: int = 0) -> list[Batch]:
    """Rows of 40 tokens: two segments of unequal length, then padding."""
    rng = np.random.default_rng(seed)

    def row():
        sizes = rng.integers(10, 19, 2)
        return [Sample("s", rng.integers(0, 61, n).astype(np.int32), np.ones(n, bool)) for n in sizes]

    return [
        jax.tree.map(jnp.asarray, assemble([row() for _ in range(3)], [False] * 3, 40)) for _ in range(count)
    ]


def fitted(model, params, plan, data, ridge):
    student, trained, frozen = steps.prepare(model, params, plan, "fold", "swiftkv")
    whole = steps.merge(trained, frozen.student)
    teacher = steps.teacher_of(student, whole, frozen)
    return student, whole, least_squares.fit(student, whole, *teacher, data, ridge)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def problem(model, params, data) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """(regressors, the upper layers' keys, their values) of all real tokens, [tokens, ...] in float64."""

    @jax.jit
    def entering(batch: Batch):
        at, segments = angles_and_segments(model.config, batch.tokens, batch.positions, batch.segments)
        streams = [embed(model, params, batch.tokens, batch.positions)]
        for j in range(LAYERS - 1):
            streams.append(through(model, params, streams[-1], at, segments, range(j, j + 1)).x)
        return streams

    every = [entering(batch) for batch in data]

    def stream(layer: int) -> np.ndarray:
        pairs = zip(every, data, strict=True)
        return np.concatenate([np.asarray(s[layer], np.float64)[b.segments > 0] for s, b in pairs])

    def targets(layer: int, name: str) -> np.ndarray:
        p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights.row(params, layer)[name])
        gain = weights.layer(params, layer)["attentions"][0]["norm"]
        h = unit(stream(layer)) * np.asarray(gain, np.float64)
        return h @ p["kernel"] + p.get("bias", 0.0)

    n = unit(stream(SPLIT))
    n = np.concatenate([n, np.ones((len(n), 1))], 1) if model.config.qkv_bias else n
    upper = range(SPLIT, LAYERS)
    return n, [targets(j, "k_proj") for j in upper], [targets(j, "v_proj") for j in upper]


def rows_of(fitted, name: str) -> np.ndarray:
    """The solved maps [rows, A, E], intercepts last."""
    maps = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), fitted["rows"][-1][name])
    if "bias" not in maps:
        return maps["kernel"]
    return np.concatenate([maps["kernel"], maps["bias"][:, None]], axis=1)


@pytest.mark.slow("llama", "qwen3")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_numpys_least_squares_of_the_teachers_keys_and_values(family):
    model, params = teacher_of(**FAMILIES[family])
    data = batches()
    *_, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT), data, 1e-9)
    n, keys, values = problem(model, params, data)
    for name, targets in (("k_proj", keys), ("v_proj", values)):
        for got, y in zip(rows_of(solved, name), targets, strict=True):
            want = np.linalg.lstsq(n, y, rcond=None)[0]
            np.testing.assert_allclose(n @ got, n @ want, atol=2e-3 * np.abs(y).max())
            assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)
    assert (np.asarray(solved["shared_norm"]) == 1).all()


def test_a_ridge_is_lstsq_with_its_rows_added_and_has_no_unit():
    model, params = teacher_of()
    data = batches()
    *_, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT), data, 0.1)
    n, keys, _ = problem(model, params, data)
    more = np.sqrt(0.1 * (n * n).sum() / WIDTH) * np.eye(WIDTH)
    want = np.linalg.lstsq(
        np.concatenate([n, more]), np.concatenate([keys[0], np.zeros((WIDTH, 16))]), rcond=None
    )
    np.testing.assert_allclose(rows_of(solved, "k_proj")[0], want[0], atol=1e-4)


def test_a_ridge_is_chosen_by_what_it_costs_on_other_tokens():
    """Few noisy tokens: the ridge that is found is the best on held-out ones, for keys and values apart."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=(1, 20, 2, 3))

    def sums(tokens: int):
        x = rng.normal(size=(tokens, 20))
        noise = rng.normal(size=(1, tokens, 2, 3)) * np.array([0.01, 9.0])[:, None]
        y = np.einsum("ta,uase->utse", x, true) + noise
        return x, y, least_squares.Moments(x.T @ x, np.einsum("ta,utse->uase", x, y), tokens)

    (_, _, solved), (x, y, held) = sums(30), sums(400)
    maps, ridges = least_squares.searched(solved, held, 20)

    def error(which: int, ridge: float) -> float:
        guess = least_squares.solve(solved, ridge, 20)[0, :, which]
        return float(((x @ guess - y[0, :, which]) ** 2).sum())

    best = [min(least_squares.RIDGES, key=lambda ridge: error(which, ridge)) for which in (0, 1)]
    assert ridges.tolist() == [best] and best[0] < best[1], "noise asks for more"
    for which in (0, 1):
        want = least_squares.solve(solved + held, best[which], 20)[0, :, which]
        np.testing.assert_array_equal(maps[0, :, which], want)
    zero = least_squares.residuals(held, maps)[0, 0] + (y[0, :, 0] ** 2).sum()
    assert zero == pytest.approx(((x @ maps[0, :, 0] - y[0, :, 0]) ** 2).sum())


def test_few_batches_have_a_fixed_ridge_and_all_tokens_are_solved_on():
    model, params = teacher_of()
    plan, data = KVPlan.swiftkv(LAYERS, SPLIT), batches(3)
    found, fixed = (fitted(model, params, plan, data, ridge)[2] for ridge in (None, least_squares.RIDGE))
    jax.tree.map(np.testing.assert_array_equal, found, fixed)


def test_a_shared_row_has_the_least_error_over_all_layers_that_read_it():
    """Values after each layer's output projection, by one large lstsq; keys as they are."""
    model, params = teacher_of()
    data = batches(2)
    student, _, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT, 2), data, 1e-9)
    assert student.plan.reads[SPLIT:] == (2, 2, 3)  # layers 2 and 3 share a row, 4 has its own
    n, keys, values = problem(model, params, data)
    pair = np.concatenate([n, n])
    want = np.linalg.lstsq(pair, np.concatenate(keys[:2]), rcond=None)[0]
    np.testing.assert_allclose(rows_of(solved, "k_proj")[0], want, atol=5e-3 * np.abs(want).max())
    o = np.stack([weights.layer(params, j)["attentions"][0]["o_proj"]["kernel"] for j in range(LAYERS)])
    o = o.astype(np.float64).reshape(LAYERS, 2, 2, HEAD, WIDTH)
    for head in range(2):
        part = slice(head * HEAD, (head + 1) * HEAD)
        readers = [(u, o[SPLIT + u, head, query]) for u in (0, 1) for query in (0, 1)]
        unknowns = np.concatenate([np.kron(n, out.T) for _, out in readers])
        known = np.concatenate([(values[u][:, part] @ out).reshape(-1) for u, out in readers])
        want = np.linalg.lstsq(unknowns, known, rcond=None)[0].reshape(WIDTH, HEAD)
        got = rows_of(solved, "v_proj")[0][:, part]
        np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())
    alone = np.linalg.lstsq(n, values[2], rcond=None)[0]
    np.testing.assert_allclose(rows_of(solved, "v_proj")[1], alone, atol=5e-3 * np.abs(alone).max())


def test_a_pruned_head_counts_no_layer_more_than_another():
    """Weights of 0 have no inverse. One layer's map is not shrunk; other heads stay as they are."""
    rng = np.random.default_rng(0)
    maps, roots = rng.normal(size=(2, 5, 6)), rng.normal(size=(2, 2, 3, 4))
    weights = roots @ roots.swapaxes(-1, -2)
    full = least_squares.share(maps, weights)
    weights[:, 0] = 0
    np.testing.assert_array_equal(least_squares.share(maps[:1], weights[:1]), maps[0])
    both = least_squares.share(maps, weights)
    np.testing.assert_allclose(both[:, :3], maps[:, :, :3].mean(0), rtol=1e-12)
    np.testing.assert_array_equal(both[:, 3:], full[:, 3:])
    weights[0, 1] = 0
    np.testing.assert_allclose(least_squares.share(maps, weights)[:, 3:], maps[1, :, 3:], atol=1e-4)


@pytest.mark.slow("1", "3")
@pytest.mark.parametrize("share", [1, 3])
def test_the_fitted_start_is_nearer_the_teacher_than_the_folded_one_on_other_tokens(share):
    model, params = teacher_of(qkv_bias=True)
    student, whole, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT, share), batches(8), None)
    tokens = jax.random.randint(jax.random.key(5), (8, 40), 0, 61)
    want = jax.nn.log_softmax(model.apply({"params": params}, tokens))

    def kl(tree) -> float:
        got = jax.nn.log_softmax(student.apply({"params": tree}, tokens))
        return float(jnp.mean(jnp.sum(jnp.exp(want) * (want - got), -1)))

    assert kl(solved) < 0.9 * kl(whole)


@pytest.mark.slow
def test_at_the_last_layer_the_fitted_student_is_the_teacher():
    """Its own input is the stream at the split: the fit is exact."""
    model, params = teacher_of(qkv_bias=True)
    student, _, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, LAYERS - 1), batches(), 1e-9)
    tokens = jax.random.randint(jax.random.key(5), (2, 30), 0, 61)
    got = student.apply({"params": solved}, tokens)
    np.testing.assert_allclose(got, model.apply({"params": params}, tokens), atol=2e-3)


def test_padding_is_left_out():
    model, params = teacher_of(qkv_bias=True)
    plan, data = KVPlan.swiftkv(LAYERS, SPLIT), batches()
    other = [dataclasses.replace(b, tokens=jnp.where(b.segments > 0, b.tokens, 7)) for b in data]
    assert not all((a.tokens == b.tokens).all() for a, b in zip(data, other, strict=True))
    once, again = (fitted(model, params, plan, d, 1e-4)[2] for d in (data, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), once, again)
