"""KV prediction: laws of the definition and of serving, an auxiliary cut from the base, and bad input.

test_predict_oracle.py compares it with transformers.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import ODD, PLAIN, REPEATED, SIZED, tiny

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict, scan, surgery, weights
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Caches, Predicted
from swiftkv_jax.core.scan import forward

LAYERS, LENGTHS, PAGE, SLOTS, PAGES = 4, (13, 1, 6), 3, 5, 20
STANDARD = KVPlan.standard(LAYERS)
SHORT = dataclasses.replace(PLAIN, num_layers=2, windows=(), num_kv_heads=4, head_dim=8, hidden_size=32)
PAIRS = {
    "standard": (ODD, STANDARD, SHORT, KVPlan.standard(2), (0, 0, 1, 1)),
    "swiftkv_base": (PLAIN, KVPlan.swiftkv(LAYERS, 2), SHORT, KVPlan.standard(2), (0, 1, 1, 0)),
    "acrosskv_base": (ODD, KVPlan.swiftkv(LAYERS, 1, 2), SHORT, KVPlan.standard(2), (1, 0, 1)),
    "acrosskv_auxiliary": (PLAIN, STANDARD, ODD, KVPlan.swiftkv(LAYERS, 1, 2), (0, 2, 1, 1)),
    "not_the_deepest_row": (PLAIN, STANDARD, ODD, STANDARD, (0, 1, 1, 0)),
    "of_own_sizes": (SIZED, STANDARD, REPEATED, STANDARD, (0, 1, 3, 3)),
}
# Most of the time is compiling; the numbers are the same without LLVM's optimisations.
jit = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
run_step, run_fill, full = jit(step), jit(predict.fill), jit(forward)
run_forward = jax.jit(
    predict.forward, static_argnames=("model", "own"), compiler_options={"xla_backend_optimization_level": 0}
)


def pair(name: str, tail: int = 1) -> tuple[Predicted, dict]:
    base_config, base_plan, aux_config, aux_plan, reads = PAIRS[name]
    base, base_params = tiny(base_config, base_plan)
    auxiliary, aux_params = tiny(aux_config, aux_plan, seed=1)
    model = Predicted(base, auxiliary, Prediction(reads, tail))
    predictor = jax.tree.map(lambda x: 2 * x, predict.uniform(model, jax.random.key(2)))
    return model, {"base": base_params, "auxiliary": aux_params, "predictor": predictor}


def itself() -> tuple[Predicted, dict]:
    """A base that is its own auxiliary, with a predictor that changes nothing."""
    base, params = tiny(ODD, STANDARD)
    model = Predicted(base, base, Prediction(tuple(range(LAYERS))))
    return model, {"base": params, "auxiliary": params, "predictor": predict.identity(model)}


def prompts(seed: int = 1):
    shape = (len(LENGTHS), max(LENGTHS))
    return jnp.asarray(np.random.default_rng(seed).integers(0, PLAIN.vocab_size, shape, np.int32))


def empty(model: Predicted) -> Caches:
    """Pools full of NaN under a shuffled page table."""
    order = 1 + np.random.default_rng(3).permutation(PAGES)[: len(LENGTHS) * SLOTS]
    table = jnp.asarray(order.reshape(len(LENGTHS), SLOTS), jnp.int32)

    def pool(part: Transformer) -> Cache:
        cache = Cache.create(part.config, part.plan, table, 1 + PAGES, PAGE, jnp.float32)
        return dataclasses.replace(cache, stores=jax.tree.map(lambda x: x * jnp.nan, cache.stores))

    return Caches(*map(pool, predict.cached(model)))


def flat(tokens, done, counts, size: int = 16):
    """(tokens, positions, starts) of one padded flat batch: `counts[s]` tokens after the first `done[s]`."""
    where = [(s, done[s] + i) for s, count in enumerate(counts) for i in range(count)]
    ids, positions = np.full(size, 66, np.int32), np.zeros(size, np.int32)
    ids[: len(where)] = [tokens[s, p] for s, p in where]
    positions[: len(where)] = [p for _, p in where]
    return ids, positions, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def serve(model: Predicted, params, tokens, chunk: int) -> tuple[np.ndarray, Caches]:
    """Logits after each prompt: its head read by the auxiliary in chunks, its tail by the base."""
    caches, tail = empty(model), model.prediction.tail
    heads = [max(0, length - tail) for length in LENGTHS]
    done = [0] * len(LENGTHS)
    while done != heads:
        counts = [min(chunk, head - d) for head, d in zip(heads, done, strict=True)]
        caches = run_fill(model, params, *flat(tokens, done, counts), caches)
        done = [d + count for d, count in zip(done, counts, strict=True)]
    counts = [length - head for length, head in zip(LENGTHS, heads, strict=True)]
    out, base = run_step(
        model.base, params["base"], *flat(tokens, heads, counts), np.cumsum(counts) - 1, caches.base
    )
    return np.asarray(out), Caches(base, caches.auxiliary)


@pytest.mark.slow("acrosskv_auxiliary", "acrosskv_base", "swiftkv_base", "of_own_sizes")
@pytest.mark.parametrize("name", PAIRS)
def test_serving_equals_the_definition_for_any_pair_and_chunk(name):
    """Ragged prompts, one of a single token, over shuffled pages with NaN around them."""
    model, params = pair(name)
    tokens = np.asarray(prompts())
    x = run_forward(model, params, tokens)
    want = np.asarray(logits(model.base, params["base"], x))[np.arange(len(LENGTHS)), np.array(LENGTHS) - 1]
    alone = np.asarray(logits(model.base, params["base"], full(model.base, params["base"], tokens)))
    assert np.abs(alone[0, LENGTHS[0] - 1] - want[0]).max() > 0.1, "prediction must matter"
    for chunk in (5, 2):
        got, _ = serve(model, params, tokens, chunk)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_packed_rows_equal_their_sequences_run_separately():
    model, params = pair("acrosskv_base")
    a, b = np.random.default_rng(0).integers(0, 67, (2, 1, 9))
    positions, segments = jnp.tile(jnp.arange(9), 2)[None], jnp.repeat(jnp.array([1, 2]), 9)[None]
    for own in (True, False):
        both = run_forward(model, params, np.concatenate([a, b], 1), positions, segments, own=own)
        apart = np.concatenate([run_forward(model, params, x, own=own) for x in (a, b)], 1)
        np.testing.assert_allclose(both, apart, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_long_sequences_are_read_in_blocks(monkeypatch):
    model, params = pair("standard")
    tokens = prompts()
    want = run_forward(model, params, tokens)
    monkeypatch.setattr(scan, "_BLOCK", 5)
    got = jax.jit(functools.partial(predict.forward, model))(params, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_base_that_is_its_own_auxiliary_is_unchanged():
    """Identity map and predictor: `forward` both ways, and the bytes of both pools for equal chunks, but for
    the deepest row, which no layer of the auxiliary reads."""
    model, params = itself()
    tokens = prompts()
    want = full(model.base, params["base"], tokens)
    for own in (True, False):
        np.testing.assert_allclose(run_forward(model, params, tokens, own=own), want, rtol=0, atol=1e-5)
    caches = run_fill(model, params, *flat(tokens, (0, 0, 0), (7, 0, 5)), empty(model))
    stores = caches.base.stores, caches.auxiliary.stores
    for ours, theirs in zip(*map(jax.tree.leaves, stores), strict=True):
        np.testing.assert_array_equal(ours[:-1], theirs)


def test_linen_applies_and_initialises_the_same_parameters():
    model, params = pair("standard")
    tokens = prompts()

    def plain(params):
        return logits(model.base, params["base"], predict.forward(model, params, tokens))

    want = jax.jit(plain)(params)
    got = jax.jit(lambda params: model.apply({"params": params}, tokens))(params)
    np.testing.assert_array_equal(got, want)
    made = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(lambda w: w.shape, predict.described(model))
    cut = predict.split_layers(model, params)
    assert jax.tree.map(jnp.shape, cut) == jax.tree.map(lambda w: w.shape, predict.described(model, None))
    streams = (run_forward(model, each, tokens) for each in (cut, params))
    np.testing.assert_allclose(*streams, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", [STANDARD, KVPlan.swiftkv(LAYERS, 2), KVPlan.swiftkv(LAYERS, 1, 2)])
def test_an_auxiliary_of_all_layers_is_the_base(plan):
    base, params = tiny(ODD, plan)
    same, shared = surgery.layer_pruned(base, params, range(LAYERS))
    assert same.plan == plan and same.config == base.config
    assert jax.tree.map(id, shared) == jax.tree.map(id, params), "nothing is copied"


def test_a_pruned_auxiliary_runs_the_kept_layers_with_their_rows_and_windows():
    """The base with its other layers made to add nothing to the stream."""
    base, params = tiny(ODD, STANDARD)
    pruned, kept = surgery.layer_pruned(base, params, (0, 2))
    assert pruned.config.windows == (ODD.windows[0], ODD.windows[2])
    (stack,) = weights.recut(params["layers"], [range(LAYERS)])

    def silent(path, leaf):
        last = {"o_proj", "down_proj"} & set(weights.keys(path))
        return leaf.at[jnp.array([1, 3])].set(0) if last else leaf

    layers, _ = weights.partition(base.plan, base.config.kinds)
    stack = jax.tree_util.tree_map_with_path(silent, stack)
    want = full(base, params | {"layers": weights.recut([stack], layers)}, prompts())
    np.testing.assert_allclose(full(pruned, kept, prompts()), want, rtol=0, atol=1e-5)


def test_a_pruned_student_keeps_its_split_between_its_layers():
    """AcrossKV at 2 in pairs, layers 1, 3, 4 and 5 kept: row 3, whose maker went, is made by its reader."""
    plan = KVPlan.swiftkv(6, 2, 2)
    config = dataclasses.replace(PLAIN, num_layers=6, windows=())
    base, params = tiny(config, plan)
    pruned, kept = surgery.layer_pruned(base, params, (1, 3, 4, 5))
    assert pruned.plan == KVPlan.from_rows([0, 1, 2, 2], split=1)
    for new, old in enumerate((1, 2, 3)):
        jax.tree.map(np.testing.assert_array_equal, weights.row(kept, new), weights.row(params, old))


def test_an_auxiliary_loses_its_exit_head_as_the_refusal_says():
    plan = KVPlan.swiftkv(LAYERS, 2)
    student, params = tiny(HEADED, plan)
    same, kept = surgery.layer_pruned(student, params, range(LAYERS))
    assert "exit" in params and "exit" not in kept and same.config == PLAIN and same.plan == plan
    assert Predicted(student, same, Prediction(tuple(range(LAYERS)))).base.config.exit_head


TINY, _ = tiny(PLAIN, STANDARD)


HEADED = dataclasses.replace(PLAIN, exit_head=True)
SMALL, SMALL_PARAMS = tiny(SHORT, KVPlan.standard(2))


BAD = [
    lambda: Predicted(TINY, SMALL, Prediction((0, 1, 1))),
    lambda: Predicted(TINY, SMALL, Prediction((0, 1, 1, 2))),
    lambda: Predicted(TINY, SMALL, Prediction((0, 1, 1, 1), 2048)),
    lambda: Predicted(Transformer(PLAIN, KVPlan.merge_all(LAYERS)), SMALL, Prediction((0,))),
    lambda: Predicted(TINY, Transformer(HEADED, KVPlan.swiftkv(LAYERS, 2)), Prediction((0, 1, 2, 3))),
    lambda: predict.identity(Predicted(TINY, SMALL, Prediction((0, 0, 1, 1)))),
    *(lambda k=keep: surgery.layer_pruned(SMALL, SMALL_PARAMS, k) for keep in ((), (1, 0), (0, 2))),
    # A layer below the split, or one that makes a row which another reads, cannot go.
    lambda: surgery.layer_pruned(*tiny(PLAIN, KVPlan.swiftkv(LAYERS, 2)), (2, 3)),
    lambda: surgery.layer_pruned(*tiny(PLAIN, KVPlan.from_rows([0, 0, 1, 1])), (1, 2)),
]


@pytest.mark.parametrize("make", BAD)
def test_mismatched_pairs_and_predictions_are_refused(make):
    with pytest.raises(UsageError):
        make()
