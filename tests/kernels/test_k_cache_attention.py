"""Attention without values: every implementation equals its definition, which equals ordinary attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from k_cache_checks import agree, exact, in_blocks

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.case import TOLERANCE
from swiftkv_jax.kernels.common.mask import visible, weights_of
from swiftkv_jax.kernels.common.pools import Pool, encode
from swiftkv_jax.kernels.k_cache_attention import api, cases, pallas_gpu, pallas_tpu, reference, xla

QUICK = ("lengths", "rotated", "chunk", "int8")  # by default; the others are slow
SLOW = [name for name in cases.SMALL if name not in QUICK]
OF_XLA = [name for name in cases.SMALL if not name.startswith("width")]  # which treats all widths alike


def interpreted(case: cases.Case, pages: int = 2):
    """The TPU kernel on this CPU."""
    return functools.partial(pallas_tpu.k_cache_attention, **case.options, pages=pages, interpret=True)


def by_xla(case: cases.Case):
    """Through the door, by name."""
    return functools.partial(cases.call, **case.options, implementation="xla")


@pytest.mark.slow(*(f"{name}-{how}" for name in SLOW for how in ("xla", "xla_one_turn")))
@pytest.mark.parametrize("how", ["xla", "xla_one_turn"])
@pytest.mark.parametrize("name", OF_XLA)
def test_xla_agrees_with_the_definition(name, how):
    case = cases.SMALL[name]
    args, arrays = case.make()
    run = functools.partial(cases.call, **case.options, implementation=how)
    agree(case, jax.jit(run)(*args, **arrays), exact(case, args, arrays))


@pytest.mark.parametrize("name, values_first", [("chunk", True), ("rotated", True), ("int8", False)])
def test_xla_gives_the_same_in_both_orders(name, values_first):
    case = cases.SMALL[name]
    args, arrays = case.make()
    run = functools.partial(xla.k_cache_attention, **case.options, values_first=values_first)
    agree(case, jax.jit(run)(*args, **arrays), exact(case, args, arrays))


@pytest.mark.slow("float32-False-xla")
@pytest.mark.parametrize(
    "stored, rope, how", [("float32", True, "xla"), ("int8", True, "xla_one_turn"), ("float32", False, "xla")]
)
def test_blocks_of_a_sequence_read_what_was_made_for_all_of_them(how, stored, rope):
    case = cases.Case(lengths=(100, 40, 0, 128), queries=24, width=16, window=30, stored=stored, rope=rope)
    args, arrays = case.make()
    want = exact(case, args, arrays)
    for size in (3, 24):
        (*args, sequence, position), arrays, back = in_blocks(case, size)
        assert xla._values_pay(args[0], args[-1])
        run = jax.jit(functools.partial(cases.call, **case.options, implementation=how))
        agree(case, back(run(*args, sequence, position, **arrays)), want)


@pytest.mark.parametrize("prompts, inputs", [(1, 512), (2, 0)])
def test_values_of_a_prompt_are_made_once_whatever_its_blocks(prompts, inputs):
    """Prompts of 256 tokens of a model with wide heads, read in blocks of 16 or of 128."""
    case = cases.Case(
        lengths=(256,) * prompts, queries=256, heads=4, width=128, page=64, inputs=inputs, rope=not inputs
    )

    def flops(size: int) -> float:
        (*args, sequence, position), arrays, _ = in_blocks(case, size)
        run = jax.jit(case.by("xla_one_turn"))
        return run.lower(*args, sequence, position, **arrays).compile().cost_analysis()["flops"]

    row, keys = case.heads * case.width, 256
    ordinary = 2 * 2 * prompts * case.queries * keys * row  # scores and weighted sums
    made = 2 * prompts * keys * row * row * (2 if inputs else 1)  # of inputs keys too
    assert made < flops(16) < 1.2 * (ordinary + made)
    assert flops(128) < 1.2 * (ordinary + made)


@pytest.mark.parametrize("name", ["k", "x"])
def test_a_nan_in_one_sequence_reaches_no_blocks_of_others(name):
    case = cases.Case(lengths=(33, 70), queries=32, width=16, inputs=48 if name == "x" else 0)
    (q, pool, *weights, table, sequence, position), arrays, back = in_blocks(case, 4)
    pool = pool.at[case.options["row"], table[1, 0], 0].set(jnp.nan)
    run = jax.jit(case.by("xla"))
    got = back(run(q, pool, *weights, table, sequence, position, **arrays))
    assert np.isnan(got[1]).all() and np.isfinite(got[0]).all()


def test_one_turn_has_no_loop_of_unknown_length(monkeypatch):
    """In a `while` whose length only the device knows, a GPU asks the host at every turn."""
    monkeypatch.setattr(xla, "ONE_TURN_KEYS", 1)
    case = cases.SMALL["lengths"]
    args, arrays = case.shapes()

    def loops(name):
        run = jax.jit(functools.partial(cases.call, **case.options, implementation=name))
        text = run.lower(*args, **arrays).compile().as_text()
        return ["known_trip_count" in line for line in text.splitlines() if " while(" in line]

    assert not all(loops("xla")) and loops("xla_one_turn") and all(loops("xla_one_turn"))
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "a GPU", 1))
    assert loops("xla") and all(loops("xla"))


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("name", cases.SMALL)
def test_tpu_kernel_agrees_with_the_definition(name):
    case = cases.SMALL[name]
    args, arrays = case.make()
    agree(case, jax.jit(interpreted(case))(*args, **arrays), exact(case, args, arrays))


HOPPER = {
    "lengths": cases.Case(lengths=(0, 1, 64, 129), slots=3, heads=1, width=128),
    "chunk_window": cases.Case(lengths=(70, 190), slots=3, queries=2, window=50),
    "split": cases.Case(lengths=(700,), slots=12, heads=2, width=128),  # in three shares
    "width256": cases.Case(lengths=(70,), slots=2, heads=2, width=256),  # two of them
    "rotated": cases.Case(lengths=(1, 100, 190), slots=3, heads=2, width=128, rotated=True),
    "int8": cases.Case(lengths=(0, 64, 130), slots=3, heads=2, width=128, stored="int8"),
    "float8": cases.Case(
        lengths=(150,), slots=3, queries=2, heads=4, width=128, window=70, stored="float8_e4m3fn"
    ),
    "rotated_float8": cases.Case(lengths=(1, 190), slots=3, heads=4, rotated=True, stored="float8_e4m3fn"),
    "no_rope_int8": cases.Case(lengths=(70,), slots=3, rope=False, stored="int8"),
    "halves_of_32": cases.Case(lengths=(100,), slots=2, heads=2),
    "long_block": cases.Case(lengths=(40, 100), slots=2, queries=35, heads=2, width=128),  # in two
}


@pytest.mark.slow  # needs more threads than quick tests have: see conftest.py
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernel_agrees_with_the_definition(name):
    """With one CTA in a cluster, this covers all but the exchange of scores, the matmuls and the layouts."""
    stored = HOPPER[name].stored if HOPPER[name].scaled else "bfloat16"
    case = dataclasses.replace(HOPPER[name], page=64, stored=stored, computed="bfloat16")
    args, arrays = case.make()
    assert not pallas_gpu.refuses(*args, **arrays, **case.options)
    run = functools.partial(pallas_gpu.k_cache_attention, **case.options, interpret=InterpretGPUParams())
    agree(case, jax.jit(run)(*args, **arrays), exact(case, args, arrays))


def test_the_scores_of_a_cluster_of_ctas_add_up_to_those_of_all_heads():
    """The queries' layout for a cluster, without the chip: every CTA's scores, put where it sends them."""
    q = jax.random.normal(jax.random.key(0), (1, 1, 8, 128))
    keys = jax.random.normal(jax.random.key(1), (64, 8 * 128))
    position = jnp.full((1, 1), 39)
    cut = pallas_gpu.cut_keys(q, keys.astype(jnp.bfloat16), 64, 1)
    parts, columns, *_ = cut
    assert (parts, columns, cut.own) == (2, 512, 4)
    spread, every = pallas_gpu.queries_of_keys(q, position, cut)
    buffers = np.zeros((cut.layers, 64, cut.rows))
    for part in range(parts):
        mine = keys[:, part * columns : (part + 1) * columns] @ spread[0, part].T
        start = part // cut.layers * cut.wide
        buffers[part % cut.layers, :, start : start + cut.wide] += mine
    want = jnp.einsum("nh,snh->sn", q[0, 0], keys.reshape(64, 8, 128))
    np.testing.assert_allclose(buffers.sum(0), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(every, np.full((1, 8), 39))


def test_the_parts_of_a_score_of_inputs_add_up():
    """The same for cached inputs: every CTA has some of the columns, and the scores of all heads add up."""
    q, w_k = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(1, 2, 3, 8), (3, 1024, 8)]))
    inputs = jax.random.normal(jax.random.key(2), (64, 1024))
    cut = pallas_gpu.cut_inputs(6, 1024)
    assert cut[:6] == (2, 512, 8, 8, 8, 64)
    spread, every = pallas_gpu.queries_of_inputs(q, w_k, jnp.array([[38, 39]]), cut)
    buffers = np.zeros((cut.layers, 64, cut.rows))
    for part in range(cut.parts):
        assert part // cut.layers == 0  # they share the tile of scores
        buffers[part % cut.layers] += inputs[:, part * 512 : (part + 1) * 512] @ spread[0, part].T
    want = jnp.einsum("cnh,neh,se->snc", q[0], w_k, inputs)
    np.testing.assert_allclose(buffers.sum(0)[:, :6].reshape(64, 3, 2), want, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(every, [[38, 39, 38, 39, 38, 39, -1, -1]])


@pytest.mark.slow
def test_hopper_kernel_agrees_with_the_definition_of_cached_inputs():
    """A cluster has one CTA here; keys that no query sees are NaN."""
    case = dataclasses.replace(
        cases.INPUTS_SMALL["narrow"],
        lengths=(0, 33, 100),
        queries=2,
        heads=3,
        width=32,
        inputs=256,
        page=64,
    )
    (args, _), options = case.make(), case.options
    assert not pallas_gpu.refuses_inputs(*args)
    run = functools.partial(pallas_gpu.x_cache_attention, **options, interpret=InterpretGPUParams())
    wide = [a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
    want = np.asarray(reference.x_cache_attention(*wide, **options))
    got = np.asarray(jax.jit(run)(*args), np.float32)
    assert np.abs(got - want).max() <= TOLERANCE["bfloat16"] * np.abs(want).max()
    assert (got[0] == 0).all()


def test_k_cache_attention_equals_ordinary_attention():
    """softmax(q K^T) K W_KV = softmax(q K^T) V where V = X W_V, K = X W_K and W_KV = W_K^-1 W_V."""
    with jax.enable_x64(True):
        tokens, heads, width = 45, 4, 8
        size, random = heads * width, np.random.default_rng(0)
        x, w_k, w_v = (random.standard_normal((n, size)) for n in (tokens, size, size))
        q = random.standard_normal((1, 1, heads, width))
        frequencies = 1e4 ** (-np.arange(0, width, 2) / width)
        angle = jnp.asarray(np.arange(tokens)[:, None] * frequencies)
        k = (x @ w_k).reshape(tokens, heads, width)
        v = (x @ w_v).reshape(tokens, heads, width)
        turned = np.asarray(jax.jit(reference.rotate)(jnp.asarray(k), angle))
        raw = np.exp(np.einsum("bcnh,snh->bncs", q, turned) * width**-0.5)
        want = np.einsum("bncs,snh->bcnh", raw / raw.sum(-1, keepdims=True), v)

        w_kv = jnp.asarray(np.linalg.solve(w_k, w_v).reshape(size, heads, width).transpose(1, 0, 2))
        pool = np.full((1, 48, size), np.nan)
        pool[0, :tokens] = k.reshape(tokens, size)
        pool = jnp.asarray(pool.reshape(1, 3, 16, size))
        place = (jnp.arange(3)[None], jnp.zeros(1, int), jnp.full((1, 1), tokens - 1))
        options = {"frequencies": jnp.asarray(frequencies), "implementation": "reference"}
        attend = jax.jit(functools.partial(api.k_cache_attention, **options))
        np.testing.assert_allclose(attend(jnp.asarray(q), (Pool(pool),), w_kv, *place), want, atol=1e-9)


@pytest.mark.slow("0.01")
@pytest.mark.parametrize("threshold", [0.01, 0.2])
def test_skipped_keys_weigh_less_than_the_threshold(threshold):
    case = cases.Case(lengths=(128,), rotated=True, threshold=threshold)
    args, arrays = case.make()
    got = jax.jit(interpreted(case, pages=1))(*args, **arrays)
    want = exact(case, args, arrays)
    rows = np.nanmax(np.abs(np.asarray(args[1][1]))) * 2**0.5
    bound = threshold * case.lengths[0] * rows * np.abs(np.asarray(args[2])).sum(1).max()
    assert 0 < np.abs(got - want).max() <= bound


@pytest.mark.slow("reference-1", "xla-3")
@pytest.mark.parametrize("name, queries", [("reference", 1), ("xla", 3), ("pallas_tpu", 1)])
def test_cached_inputs_give_ordinary_attention(name, queries):
    """Keys and values made from X, 40 columns wide, against the forms that never make them."""
    case = cases.Case(lengths=(0, 1, 33, 60), queries=queries)
    (q, _, _, table, sequence, position), _ = case.make()
    keys = iter(jax.random.split(jax.random.key(1), 3))
    x = jax.random.normal(next(keys), (2, 16, 32, 40))
    w_k, w_v = (jax.random.normal(next(keys), (4, 40, 64)) * 40**-0.5 for _ in range(2))
    seen = visible(position, 128, None).any(1).reshape(4, 4, 32)
    x = jnp.where(jnp.zeros((16, 32), bool).at[table].set(seen)[..., None], x, jnp.nan)
    rows = jnp.where(seen.reshape(4, 128)[..., None], x[1, table].reshape(4, 128, 40), 0)
    k, v = (jnp.einsum("bse,neh->bsnh", rows, w) for w in (w_k, w_v))
    scores = jnp.einsum("bcnh,bsnh->bncs", q, k) / 8
    weights = weights_of(scores, visible(position, 128, None)[:, None])
    want = jnp.einsum("bncs,bsnh->bcnh", weights, v)
    args = (q, x, w_k, w_v, table, sequence, position)
    if name == "pallas_tpu":
        got = pallas_tpu.x_cache_attention(*args, row=1, scale=1 / 8, window=None, pages=2, interpret=True)
    else:
        got = cases.call_inputs(*args, row=1, implementation=name)
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_scaled_inputs_are_read_as_what_they_stand_for(name):
    (q, x, *rest), _ = cases.INPUTS_SMALL["narrow"].make()
    data, scale = encode(x, jnp.int8)
    meant = data.astype(jnp.float32) * scale[..., None]
    want = cases.call_inputs(q.astype(jnp.float32), meant, *rest, implementation="reference")
    pools = (Pool(data, scale[:, :, None]),)
    got = api.x_cache_attention(q.astype(jnp.float32), pools, *rest, implementation=name)
    np.testing.assert_allclose(got, want, atol=2e-5)
