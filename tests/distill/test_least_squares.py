"""The closed-form start against numpy.linalg.lstsq in float64, on streams and attention probabilities that
this file makes itself."""

import dataclasses
from typing import NamedTuple

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
from swiftkv_jax.kernels.causal_attention.reference import causal_attention

SPLIT, LAYERS, WIDTH, HEAD = 2, 5, 24, 8
FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma": {"windows": (64, 5, 64, 5, 64), "attention_softcap": 2.0},
}


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


def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Heads [..., T, n, H] after rotary embedding."""
    width = x.shape[-1]
    angle = positions[..., None, None] / 10000 ** (np.arange(0, width, 2) / width)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def squared_attention(config, layer: int, p, keys: np.ndarray, h: np.ndarray, batch: Batch) -> np.ndarray:
    """[B, T, K]: the sum over the queries of each kv head of squared probabilities, all of them formed."""
    q = h @ np.asarray(p["q_proj"]["kernel"], np.float64) + np.asarray(p["q_proj"].get("bias", 0.0))
    q, k = (y.reshape(*y.shape[:2], -1, config.head_dim) for y in (q, keys))
    if config.qk_norm:
        q, k = unit(q) * np.asarray(p["q_norm"]), unit(k) * np.asarray(p["k_norm"])
    q, k = (turned(y, np.asarray(batch.positions)) for y in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bqnh,btnh->bnqt", q, k) / np.sqrt(config.head_dim)
    if config.attention_softcap:
        scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
    segment, at = np.asarray(batch.segments), np.arange(q.shape[1])
    seen = (segment[:, :, None] == segment[:, None]) & (at <= at[:, None])
    seen &= at > at[:, None] - config.windows[layer]
    shares = np.exp(scores) * seen[:, None]
    shares /= shares.sum(-1, keepdims=True)
    heads = keys.shape[-1] // config.head_dim
    return (shares**2).sum(2).reshape(len(q), heads, -1, q.shape[1]).sum(2).swapaxes(1, 2)


class Layer(NamedTuple):
    """What the student's maps have to give for one layer, of all real tokens in float64: keys and values
    [tokens, E], and the square root of the weight of each token for each kv head [tokens, K]."""

    k_proj: np.ndarray
    v_proj: np.ndarray
    root: np.ndarray


def problem(model, params, data) -> tuple[np.ndarray, list[Layer]]:
    """(regressors [tokens, A], each upper layer's targets)."""

    @jax.jit
    def entering(batch: Batch):
        at, segments = angles_and_segments(model.config, batch.tokens, batch.positions, batch.segments)
        streams = [embed(model, params, batch.tokens, batch.positions)]
        for j in range(LAYERS - 1):
            streams.append(through(model, params, streams[-1], at, segments, range(j, j + 1)).x)
        return streams

    every = [[np.asarray(x, np.float64) for x in entering(batch)] for batch in data]

    def real(arrays) -> np.ndarray:
        return np.concatenate([y[np.asarray(b.segments) > 0] for y, b in zip(arrays, data, strict=True)])

    def targets(layer: int) -> Layer:
        attention = weights.layer(params, layer)["attentions"][0]
        p = jax.tree.map(np.asarray, attention | weights.row(params, layer))
        found = []
        for streams, batch in zip(every, data, strict=True):
            h = unit(streams[layer]) * p["norm"].astype(np.float64)
            keys, values = (
                h @ p[name]["kernel"].astype(np.float64) + p[name].get("bias", 0.0)
                for name in ("k_proj", "v_proj")
            )
            found.append((keys, values, np.sqrt(squared_attention(model.config, layer, p, keys, h, batch))))
        return Layer(*(real(each) for each in zip(*found, strict=True)))

    n = unit(real([streams[SPLIT] for streams in every]))
    n = np.concatenate([n, np.ones((len(n), 1))], 1) if model.config.qkv_bias else n
    return n, [targets(j) for j in range(SPLIT, LAYERS)]


def of_head(y: np.ndarray, head: int) -> np.ndarray:
    return y[..., head * HEAD : (head + 1) * HEAD]


def rows_of(fitted, name: str) -> list[np.ndarray]:
    """The solved maps [A, E], intercepts last."""
    numbers = range(SPLIT, weights.ranges(fitted["rows"])[-1].stop)
    maps = [weights.row(fitted, number)[name] for number in numbers]
    return [np.concatenate([p["kernel"], p["bias"][None]]) if "bias" in p else p["kernel"] for p in maps]


@pytest.mark.slow("llama", "qwen3", "gemma")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_numpys_least_squares_of_the_teachers_keys_and_values(family):
    """Each token as often as the attention that it receives, squared and summed over a kv head's queries."""
    model, params = teacher_of(**FAMILIES[family])
    data = batches()
    *_, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT), data, 1e-9)
    n, layers = problem(model, params, data)
    for name in ("k_proj", "v_proj"):
        for number, (row, layer) in enumerate(zip(rows_of(solved, name), layers, strict=True)):
            for head in range(2):
                got, y, root = of_head(row, head), of_head(getattr(layer, name), head), layer.root[:, [head]]
                want = np.linalg.lstsq(root * n, root * y, rcond=None)[0]
                assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)
                alike = np.linalg.lstsq(n, y, rcond=None)[0]
                weighs = np.linalg.norm(alike - want) > 0.05 * np.linalg.norm(want)
                assert weighs == (number > 0), "the first of them is fitted exactly, with any weights"
    assert (np.asarray(solved["shared_norm"]) == 1).all()


def test_a_ridge_is_lstsq_with_its_rows_added_and_has_no_unit():
    model, params = teacher_of()
    data = batches()
    *_, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT), data, 0.1)
    n, (layer, *_) = problem(model, params, data)
    x = layer.root[:, :1] * n
    more = np.sqrt(0.1 * (x * x).sum() / WIDTH) * np.eye(WIDTH)
    y = np.concatenate([layer.root[:, :1] * of_head(layer.k_proj, 0), np.zeros((WIDTH, HEAD))])
    want = np.linalg.lstsq(np.concatenate([x, more]), y, rcond=None)[0]
    np.testing.assert_allclose(of_head(rows_of(solved, "k_proj")[0], 0), want, atol=1e-4)


@pytest.mark.parametrize("block", [1, 7, 40, 128])
def test_blocks_of_any_size_give_the_same_weights(block, monkeypatch):
    q, k = (jax.random.normal(jax.random.key(i), (2, 40, heads, HEAD)) for i, heads in enumerate((6, 2)))
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 2, 3]], [13, 20, 7], axis=1))
    monkeypatch.setattr(least_squares, "_BLOCK", block)
    got = least_squares.received(3 * q, k, segments, 9)
    eye = jnp.broadcast_to(jnp.eye(40)[:, None], (2, 40, 2, 40))
    shares = causal_attention(3 * q, k, eye, segments, 9, scale=HEAD**-0.5)
    want = (shares**2).reshape(2, 40, 2, 3, 40).sum((1, 3))
    np.testing.assert_allclose(got, want.swapaxes(1, 2), rtol=1e-4, atol=1e-6)


def test_a_ridge_is_chosen_by_what_it_costs_on_other_tokens():
    """Few noisy tokens: the ridge that is found is the best on held-out ones, for keys and values apart."""
    rng = np.random.default_rng(0)
    true, cost = rng.normal(size=(20, 2, 3)), np.broadcast_to(np.eye(3), (2, 1, 3, 3))

    def sums(tokens: int):
        x = rng.normal(size=(tokens, 20))
        y = np.einsum("ta,ase->tse", x, true) + rng.normal(size=(tokens, 2, 3)) * np.array([[0.01], [9.0]])
        return x, y, least_squares.Problem((x.T @ x)[None], np.einsum("ta,tse->ase", x, y)[None], cost)

    (_, _, solved), (x, y, held) = sums(30), sums(400)
    maps, ridges = least_squares.searched(solved, held, 20)

    def error(which: int, ridge: float) -> float:
        guess = least_squares.solve(solved, ridge, 20)[:, which]
        return float(((x @ guess - y[:, which]) ** 2).sum())

    best = [min(least_squares.RIDGES, key=lambda ridge: error(which, ridge)) for which in (0, 1)]
    assert ridges.tolist() == best and best[0] < best[1], "noise asks for more"
    for which in (0, 1):
        want = least_squares.solve(solved + held, best[which], 20)[:, which]
        np.testing.assert_array_equal(maps[:, which], want)
    zero = least_squares.residuals(held, maps)[0] + (y[:, 0] ** 2).sum()
    assert zero == pytest.approx(((x @ maps[:, 0] - y[:, 0]) ** 2).sum())


def test_few_batches_have_a_fixed_ridge_and_all_tokens_are_solved_on():
    model, params = teacher_of()
    plan, data = KVPlan.swiftkv(LAYERS, SPLIT), batches(3)
    found, fixed = (fitted(model, params, plan, data, ridge)[2] for ridge in (None, least_squares.RIDGE))
    jax.tree.map(np.testing.assert_array_equal, found, fixed)


def test_a_shared_row_has_the_least_error_over_all_layers_that_read_it():
    """Values after each layer's output projection, by one large lstsq; keys as they are. Its tokens count
    alike, those of a row of one layer by attention."""
    model, params = teacher_of()
    data = batches(2)
    student, _, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT, 2), data, 1e-9)
    assert student.plan.reads[SPLIT:] == (2, 2, 3)  # layers 2 and 3 share a row, 4 has its own
    n, layers = problem(model, params, data)
    layers[:2] = [layer._replace(root=np.ones_like(layer.root)) for layer in layers[:2]]
    o = np.stack([weights.layer(params, j)["attentions"][0]["o_proj"]["kernel"] for j in range(LAYERS)])
    o = o.astype(np.float64).reshape(LAYERS, 2, 2, HEAD, WIDTH)
    for head in range(2):
        xs = [layer.root[:, head, None] * n for layer in layers]
        keys, values = (
            [layer.root[:, head, None] * of_head(getattr(layer, name), head) for layer in layers]
            for name in ("k_proj", "v_proj")
        )
        want = np.linalg.lstsq(np.concatenate(xs[:2]), np.concatenate(keys[:2]), rcond=None)[0]
        got = of_head(rows_of(solved, "k_proj")[0], head)
        np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())
        readers = [(u, o[SPLIT + u, head, query]) for u in (0, 1) for query in (0, 1)]
        unknowns = np.concatenate([np.kron(xs[u], out.T) for u, out in readers])
        known = np.concatenate([(values[u] @ out).reshape(-1) for u, out in readers])
        want = np.linalg.lstsq(unknowns, known, rcond=None)[0].reshape(WIDTH, HEAD)
        got = of_head(rows_of(solved, "v_proj")[0], head)
        np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())
        alone = np.linalg.lstsq(xs[2], values[2], rcond=None)[0]
        got = of_head(rows_of(solved, "v_proj")[1], head)
        np.testing.assert_allclose(got, alone, atol=5e-3 * np.abs(alone).max())


def group(layers: int = 3, seed: int = 0) -> least_squares.Problem:
    """A row of 4 numbers, made from 12, that several layers read, each with its own tokens and costs."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(layers, 50, 12)) * np.geomspace(1, 30, 12), rng.normal(size=(layers, 50, 2, 4))
    roots = rng.normal(size=(2, layers, 4, 4)) * np.geomspace(1, 10, layers)[:, None, None]
    gram, cross = np.einsum("uta,utc->uac", x, x), np.einsum("uta,utsh->uash", x, y)
    return least_squares.Problem(gram, cross, roots @ roots.swapaxes(-1, -2))


def test_a_shared_row_solves_its_normal_equations():
    """Written out as one linear system of all its numbers, for three layers that cost differently."""
    gram, cross, cost = problem = group()
    shrink = 1e-6 * np.einsum("uaa->u", gram)[:, None, None] / 12 * np.eye(12)
    got = least_squares.solve(problem, 1e-6, 12)
    for kind in (0, 1):
        left = sum(np.kron(gram[u] + shrink[u], cost[kind, u]) for u in range(3))
        right = sum(cross[u, :, kind] @ cost[kind, u] for u in range(3))
        want = np.linalg.solve(left, right.reshape(-1)).reshape(12, 4)
        np.testing.assert_allclose(got[:, kind], want, atol=1e-7 * np.abs(want).max())


def test_a_pruned_head_counts_no_layer_more_than_another():
    """Costs of 0 have no inverse. Where one layer's are 0, the row is the other's."""
    problem = group(2)
    problem.cost[0] = 0
    alike = problem._replace(cost=np.stack([np.stack([np.eye(4)] * 2), problem.cost[1]]))
    got, want = (least_squares.solve(p, 1e-6, 12) for p in (problem, alike))
    np.testing.assert_allclose(got, want, atol=1e-7 * np.abs(want).max())
    problem.cost[0, 1] = np.eye(4)
    own = least_squares.Problem(problem.gram[1:], problem.cross[1:], problem.cost[:, 1:])
    got, want = (least_squares.solve(p, 1e-6, 12)[:, 0] for p in (problem, own))
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow("1", "3")
@pytest.mark.parametrize("share", [1, 3])
def test_the_fitted_start_is_nearer_the_teacher_than_the_folded_one_on_other_tokens(share):
    model, params = teacher_of(qkv_bias=True)
    student, whole, solved = fitted(model, params, KVPlan.swiftkv(LAYERS, SPLIT, share), batches(8), None)
    tokens = jax.random.randint(jax.random.key(5), (8, 40), 0, 61)
    want = jax.nn.log_softmax(jax.jit(model.apply)({"params": params}, tokens))

    def kl(tree) -> float:
        got = jax.nn.log_softmax(jax.jit(student.apply)({"params": tree}, tokens))
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
