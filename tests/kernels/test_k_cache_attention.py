"""Attention without values: every implementation equals its definition, which equals ordinary attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.mask import visible, weights_of
from swiftkv_jax.kernels.common.pools import Pool, encode
from swiftkv_jax.kernels.k_cache_attention import (
    api,
    cases,
    native_cpu,
    pallas_gpu,
    pallas_tpu,
    reference,
    xla,
)

QUICK = (
    "lengths",
    "halves",
    "rotated",
    "chunk",
    "int8",
    "float8_scores",
    "float8_scores_rotated",
)  # by default; the others are slow


def exact(case: cases.Case, args, arrays) -> np.ndarray:
    """The definition in float64, of the same rounded inputs."""
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
        if case.stored == "int8":
            wide[1] = args[1].astype(jnp.float64)
        arrays = {k: None if a is None else a.astype(jnp.float64) for k, a in arrays.items()}
        run = jax.jit(lambda *a, **k: reference.k_cache_attention(*a, **k, **case.options))
        return np.asarray(run(*wide, **arrays))


def interpreted(case: cases.Case, pages: int = 2):
    """The TPU kernel on this CPU."""
    return functools.partial(pallas_tpu.k_cache_attention, **case.options, pages=pages, interpret=True)


def by_xla(case: cases.Case):
    """Through the door, by name."""
    return functools.partial(cases.call, **case.options, implementation="xla")


def agree(case: cases.Case, got, want):
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= cases.TOLERANCE[case.computed] * max(np.abs(want).max(), 1e-30), error
    assert (np.asarray(got)[np.array(case.lengths) == 0] == 0).all()


def slow_unless_quick(names):
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("how", ["xla", "xla_one_turn"])
@pytest.mark.parametrize("name", slow_unless_quick(cases.SMALL))
def test_xla_agrees_with_the_definition(name, how):
    case = cases.SMALL[name]
    args, arrays = case.make()
    run = functools.partial(cases.call, **case.options, implementation=how)
    agree(case, jax.jit(run)(*args, **arrays), exact(case, args, arrays))


@pytest.mark.parametrize("values_first", [True, False])
@pytest.mark.parametrize("name", ["chunk", "rotated", "int8"])
def test_xla_gives_the_same_in_both_orders(name, values_first):
    case = cases.SMALL[name]
    args, arrays = case.make()
    run = functools.partial(xla.k_cache_attention, **case.options, values_first=values_first)
    agree(case, jax.jit(run)(*args, **arrays), exact(case, args, arrays))


NATIVE = {
    "lengths": cases.SMALL["lengths"],
    "gap": cases.Case(lengths=(0, 200, 70), queries=3, window=40, page=20, slots=10),
    "no_rope": cases.Case(lengths=(1, 130), page=64, rope=False),
    "half": cases.Case(lengths=(1, 70, 128), queries=6, stored="float16", heads=8),
    "width20": cases.Case(lengths=(33, 100), width=20, heads=3),
    "width80": cases.Case(lengths=(33, 0, 100), width=80, queries=2, stored="bfloat16"),
    "int8": cases.Case(lengths=(1, 40, 100), stored="int8"),
    "float8": cases.Case(lengths=(40, 100), stored="float8_e4m3fn", width=12, queries=20),
    "long": cases.Case(lengths=(90, 128, 0, 3), queries=80, heads=2, window=50, width=32),
    "long_int8": cases.Case(lengths=(128, 100), queries=70, width=16, stored="int8"),
    "bfloat16": cases.SMALL["bfloat16"],
    "crowd": cases.Case(
        lengths=tuple(range(20, 32)), width=20, heads=3, slots=1, queries=2
    ),  # 24 queries > 20
}
NEEDS_COMPILER = pytest.mark.skipif(
    bool(native_cpu.refuses(*cases.SMALL["lengths"].shapes()[0])), reason="needs a C++ compiler"
)


def by_native(case: cases.Case, values_first: bool | None = None):
    """The C++ in one order, or in the one that it picks."""
    return functools.partial(native_cpu.k_cache_attention, **case.options, values_first=values_first)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", NATIVE)
def test_native_agrees_with_the_definition_in_both_orders(name):
    args, arrays = NATIVE[name].make()
    want = exact(NATIVE[name], args, arrays)
    for values_first in (None, False, True):
        agree(NATIVE[name], jax.jit(by_native(NATIVE[name], values_first))(*args, **arrays), want)


@pytest.mark.slow
@NEEDS_COMPILER
def test_native_agrees_on_narrower_vectors(narrow, monkeypatch):
    monkeypatch.setattr(native_cpu, "TARGET", f"row_attention_{narrow}")
    for case in NATIVE.values():
        args, arrays = case.make()
        assert not native_cpu.refuses(*args)
        for values_first in (False, True):
            got = jax.jit(by_native(case, values_first))(*args, **arrays)
            agree(case, got, exact(case, args, arrays))


@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["lengths", "gap", "crowd", "long", "long_int8"])
def test_native_results_do_not_depend_on_other_sequences(name):
    """Bit for bit: alone, and beside others; so no batch changes a greedy token."""
    (q, k, w, table, sequence, position), arrays = NATIVE[name].make()
    run = jax.jit(by_native(NATIVE[name]))
    whole = np.asarray(run(q, k, w, table, sequence, position, **arrays))
    for b in range(len(sequence)):
        alone = run(q[b : b + 1], k, w, table, sequence[b : b + 1], position[b : b + 1], **arrays)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[b])


@NEEDS_COMPILER
def test_a_prompt_in_blocks_of_any_size_is_read_the_same_but_for_rounding():
    """Blocks of one sequence are one run, which picks its order by all their queries."""
    case = cases.Case(lengths=(100,), queries=96, width=16)
    (q, *pools, table, sequence, position), arrays = case.make()
    want = exact(case, (q, *pools, table, sequence, position), arrays)
    for size in (1, 6, 32):
        cut = (q.reshape(-1, size, *q.shape[2:]), *pools, table, jnp.zeros(96 // size, jnp.int32))
        got = jax.jit(by_native(case))(*cut, position.reshape(-1, size), **arrays)
        agree(case, np.asarray(got).reshape(want.shape), want)


@NEEDS_COMPILER
@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_positions_may_leave_gaps_natively(stored, values_first):
    """A block's queries at any positions; what lies between and no query sees may hold anything."""
    case = cases.Case(lengths=(200,), queries=5, window=6, slots=8, stored=stored)
    (q, k, w, table, sequence, _), arrays = case.make()
    position = jnp.array([[3, 40, -1, 150, 201]], jnp.int32)  # two in a tile of 64 keys
    seen = visible(position, 256, 6).any(1).reshape(8, 32)
    seen = jnp.zeros((8, 32), bool).at[table[0]].set(seen)
    k, scale = encode(jax.random.normal(jax.random.key(1), k.shape), stored)
    if scale is None:
        k = jnp.where(seen[..., None], k, jnp.nan)
    else:
        arrays |= {"k_scale": jnp.where(seen, scale, jnp.nan)[:, :, None]}
    args = (q, k, w, table, sequence, position)
    want = exact(case, args, arrays)
    assert np.isfinite(want).all()
    got = jax.jit(by_native(case, values_first))(*args, **arrays)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@NEEDS_COMPILER
def test_a_nan_in_one_sequence_reaches_no_other_natively():
    """A key that is not a number, seen by one sequence, reaches no other."""
    case = cases.Case(lengths=(33, 70, 20), queries=2)
    (q, k, w, table, sequence, position), arrays = case.make()
    k = k.at[case.options["row"], table[1, 0], 0].set(jnp.nan)
    got = np.asarray(jax.jit(by_native(case))(q, k, w, table, sequence, position, **arrays))
    assert np.isnan(got[1]).all() and np.isfinite(got[[0, 2]]).all()


@NEEDS_COMPILER
@pytest.mark.parametrize("values_first", [False, True])
@pytest.mark.parametrize(("queries", "inputs", "stored"), [(1, 40, "float32"), (7, 64, "int8")])
def test_native_agrees_with_the_definition_of_cached_inputs(queries, inputs, stored, values_first):
    (q, x, *weights, table, sequence, position), _ = cases.Case(
        lengths=(0, 33, 64), heads=3, width=20, inputs=inputs, page=32, slots=2, computed="float32"
    ).make()
    q = jnp.tile(q, (1, queries, 1, 1))
    position = jnp.maximum(position - queries + 1 + jnp.arange(queries), -1)
    x, scale = encode(x, stored)
    args = (q, x, *weights, table, sequence, position)
    options = {"row": 1, "scale": 20**-0.5, "window": 30}
    options["x_scale"] = None if scale is None else scale[:, :, None]
    want = np.asarray(reference.x_cache_attention(*args, **options))
    run = functools.partial(native_cpu.x_cache_attention, **options, values_first=values_first)
    np.testing.assert_allclose(jax.jit(run)(*args), want, atol=1e-5 * np.abs(want).max())


@NEEDS_COMPILER
def test_native_says_what_it_supports_and_is_the_default_where_it_can():
    def chosen(case):
        return dispatch.preferred(api.K_CACHE, case.shapes()[0], case.options | case.shapes()[1])

    assert chosen(cases.SMALL["lengths"]) == "native_cpu"
    assert {chosen(cases.SMALL[name]) for name in ("halves", "int8_rotated", "float8_scores")} == {"xla"}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        assert chosen(cases.SMALL["lengths"]) == "xla"
    assert dispatch.preferred(api.X_CACHE, cases.INPUTS_SMALL["narrow"].shapes()[0], {}) == "native_cpu"
    with pytest.raises(dispatch.UnsupportedError, match="native_cpu does not support heads stored in groups"):
        case = cases.SMALL["halves"]
        args, arrays = case.make()
        cases.call(*args, **arrays, **case.options, implementation="native_cpu")


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


@pytest.mark.parametrize(
    "name", slow_unless_quick(n for n in cases.SMALL if not cases.SMALL[n].float8_scores)
)
def test_tpu_kernel_agrees_with_the_definition(name):
    case = cases.SMALL[name]
    args, arrays = case.make()
    agree(case, jax.jit(interpreted(case))(*args, **arrays), exact(case, args, arrays))


HOPPER = {
    "two_pages": cases.Case(lengths=(100,), slots=2, heads=1, width=128),
    "lengths": cases.Case(lengths=(0, 1, 64, 129), slots=3, heads=1, width=128),
    "chunk_window": cases.Case(lengths=(70, 190), slots=3, queries=2, window=50, group=2),
    "no_rope": cases.Case(lengths=(70,), slots=3, rope=False),
    "split": cases.Case(lengths=(700,), slots=12, heads=2, width=128, group=2),  # in three shares
    "width96": cases.Case(lengths=(100,), slots=3, heads=4, width=96, group=4),  # three sets of angles
    "width256": cases.Case(lengths=(70,), slots=2, heads=2, width=256),  # two of them
    "rotated": cases.Case(lengths=(1, 100, 190), slots=3, heads=2, width=128, rotated=True),
    "width80": cases.Case(lengths=(0, 100), slots=3, heads=4, width=80, group=4),  # 160 columns a sum
    "int8": cases.Case(lengths=(0, 1, 64, 190), slots=3, heads=2, width=128, group=2, stored="int8"),
    "float8": cases.Case(
        lengths=(150,), slots=3, queries=2, heads=4, width=80, group=4, window=70, stored="float8_e4m3fn"
    ),
    "rotated_float8": cases.Case(
        lengths=(1, 190), slots=3, heads=4, group=2, rotated=True, stored="float8_e4m3fn"
    ),
    "rotated_int8": cases.Case(
        lengths=(70,), slots=2, heads=4, width=128, group=4, rotated=True, stored="int8"
    ),
    "no_rope_int8": cases.Case(lengths=(70,), slots=3, rope=False, stored="int8"),
    "halves_of_32": cases.Case(lengths=(100,), slots=2, heads=2),
    "float8_scores": cases.Case(
        lengths=(0, 1, 190), slots=3, heads=2, width=128, group=2, stored="float8_e4m3fn", float8_scores=True
    ),
    "rotated_float8_scores": cases.Case(
        lengths=(150,),
        slots=3,
        queries=2,
        heads=4,
        width=80,
        group=4,
        window=70,
        rotated=True,
        stored="float8_e4m3fn",
        float8_scores=True,
    ),
    "no_rope_float8_scores": cases.Case(
        lengths=(70,), slots=3, rope=False, stored="float8_e4m3fn", float8_scores=True
    ),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stored": "float16"}, "bfloat16 queries of float16 rows: bfloat16 queries, rows bfloat16 or int8"),
        ({"page": 32}, "a page of 32 tokens: 64"),
        ({"width": 112}, "heads 112 wide with rotary embedding: 64, 80, 96, 128, 256"),
        ({"width": 80, "group": 1}, "128 to 512 columns, multiples of 64 in whole groups, whose halves are"),
        ({"width": 96, "group": 8}, "128 to 512 columns, multiples of 64 in whole groups, whose halves are"),
        ({"queries": 2}, "2 queries a block, for 240704 bytes of shared memory: at most 232448"),
        ({"queries": 4}, "4 queries of 32 heads 128 wide in groups of 4: at most 64 query rows"),
    ],
)
def test_the_hopper_kernel_says_what_it_supports(change, message):
    args, arrays = dataclasses.replace(cases.REAL["llama2_7b"], **change).shapes()
    options = dataclasses.replace(cases.REAL["llama2_7b"], **change).options
    assert message in pallas_gpu.refuses(*args, **arrays, **options)


def test_the_scores_of_a_cluster_of_ctas_add_up_to_those_of_all_heads():
    """The queries' layout for a cluster, without the chip: every CTA's scores, put where it sends them."""
    case = dataclasses.replace(cases.REAL["llama2_7b"], lengths=(40,), slots=1, queries=1, heads=8, group=1)
    q = jax.random.normal(jax.random.key(0), (1, 1, 8, 128))
    keys = jax.random.normal(jax.random.key(1), (64, 8 * 128))
    position = jnp.full((1, 1), 39)
    cut = pallas_gpu.cut_keys(q, keys.astype(jnp.bfloat16), 1, 64)
    parts, columns, *_ = cut
    assert (parts, columns, cut.own) == (2, 512, 4)
    form = cut.form()
    spread, every = pallas_gpu.queries_of_keys(q, position, cut, case.group)
    buffers = np.zeros((form.layers, 64, form.rows))
    for part in range(parts):
        mine = keys[:, part * columns : (part + 1) * columns] @ spread[0, part].T
        start = part // form.layers * form.wide
        buffers[part % form.layers, :, start : start + form.wide] += mine
    want = jnp.einsum("nh,snh->sn", q[0, 0], keys.reshape(64, 8, 128))
    np.testing.assert_allclose(buffers.sum(0), want, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(every, np.full((1, 8), 39))


def test_the_parts_of_a_score_of_inputs_add_up():
    """The same for cached inputs: every CTA has some of the columns, and the scores of all heads add up."""
    q, w_k = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(1, 2, 3, 8), (3, 1024, 8)]))
    inputs = jax.random.normal(jax.random.key(2), (64, 1024))
    cut = pallas_gpu.cut_inputs(6, 1024)
    assert cut == (2, 512, 8, 8, 8, 64)
    form = cut.form()
    spread, every = pallas_gpu.queries_of_inputs(q, w_k, jnp.array([[38, 39]]), cut)
    buffers = np.zeros((form.layers, 64, form.rows))
    for part in range(cut.parts):
        assert part // form.layers == 0  # they share the tile of scores
        buffers[part % form.layers] += inputs[:, part * 512 : (part + 1) * 512] @ spread[0, part].T
    want = jnp.einsum("cnh,neh,se->snc", q[0], w_k, inputs)
    np.testing.assert_allclose(buffers.sum(0)[:, :6].reshape(64, 3, 2), want, rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(every, [[38, 39, 38, 39, 38, 39, -1, -1]])


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 2])
def test_hopper_kernel_agrees_with_the_definition_of_cached_inputs(queries):
    """A cluster has one CTA here; keys that no query sees are NaN."""
    case = dataclasses.replace(
        cases.INPUTS_SMALL["narrow"],
        lengths=(0, 33, 100),
        queries=queries,
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
    assert np.abs(got - want).max() <= cases.TOLERANCE["bfloat16"] * np.abs(want).max()
    assert (got[0] == 0).all()


def test_values_never_stored_are_those_of_ordinary_attention():
    """softmax(q K^T) K W_KV = softmax(q K^T) V where V = X W_V, K = X W_K and W_KV = W_K^-1 W_V."""
    with jax.enable_x64(True):
        tokens, heads, width, group = 45, 4, 8, 2
        size = heads * width
        keys = iter(jax.random.split(jax.random.key(0), 4))
        x = jax.random.normal(next(keys), (tokens, size), jnp.float64)
        w_k, w_v = (jax.random.normal(next(keys), (size, size), jnp.float64) for _ in range(2))
        q = jax.random.normal(next(keys), (1, 1, heads, width), jnp.float64)
        frequencies = 1e4 ** (-jnp.arange(0, width, 2) / width)
        angle = jnp.arange(tokens)[:, None] * frequencies
        k = (x @ w_k).reshape(tokens, heads, width)
        v = (x @ w_v).reshape(tokens, heads, width)
        scores = jnp.einsum("bcnh,snh->bncs", q, reference.rotate(k, angle)) * width**-0.5
        want = jnp.einsum("bncs,snh->bcnh", jax.nn.softmax(scores), v)

        w_kv = jnp.linalg.solve(w_k, w_v).reshape(size, heads, width).transpose(1, 0, 2)
        order = reference.to_rows(jnp.arange(size).reshape(heads, width), group)
        pool = jnp.full((1, 3, 16, size), jnp.nan).reshape(1, 48, size)
        pool = pool.at[0, :tokens].set(reference.to_rows(k, group)).reshape(1, 3, 16, size)
        place = (jnp.arange(3)[None], jnp.zeros(1, int), jnp.full((1, 1), tokens - 1))
        options = {"frequencies": frequencies, "group": group, "implementation": "reference"}
        got = api.k_cache_attention(q, (Pool(pool),), w_kv[:, order], *place, **options)
        np.testing.assert_allclose(got, want, atol=1e-9)


@pytest.mark.parametrize("threshold", [0.01, 0.2])
def test_skipped_keys_weigh_less_than_the_threshold(threshold):
    case = cases.Case(lengths=(128,), rotated=True, threshold=threshold)
    args, arrays = case.make()
    got = jax.jit(interpreted(case, pages=1))(*args, **arrays)
    want = exact(case, args, arrays)
    rows = np.abs(np.asarray(args[1][1])).max() * 2**0.5
    bound = threshold * case.lengths[0] * rows * np.abs(np.asarray(args[2])).sum(1).max()
    assert 0 < np.abs(got - want).max() <= bound


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", ["reference", "xla", "pallas_tpu"])
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


@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(0, 96), min_size=1, max_size=4),
    queries=st.integers(1, 3),
    rotated=st.booleans(),
    window=st.sampled_from([None, 1, 33]),
    implementation=st.sampled_from(["xla", "pallas_tpu"]),
)
def test_any_shape_agrees_with_the_definition(lengths, queries, rotated, window, implementation):
    case = cases.Case(
        lengths=tuple(lengths), queries=queries, rotated=rotated, window=window, heads=2, width=16, slots=3
    )
    args, arrays = case.make()
    run = {"xla": by_xla, "pallas_tpu": interpreted}[implementation](case)
    got = jax.jit(run)(*args, **arrays)
    agree(case, got, exact(case, args, arrays))


def test_storing_in_groups_is_a_permutation():
    heads = jnp.arange(2 * 8 * 6).reshape(2, 8, 6)
    for group in (1, 2, 8):
        np.testing.assert_array_equal(reference.to_heads(reference.to_rows(heads, group), 8, group), heads)
    np.testing.assert_array_equal(reference.to_rows(heads, 1), heads.reshape(2, 48))


def test_bad_shapes_are_named():
    args, arrays = cases.SMALL["lengths"].make()
    with pytest.raises(dispatch.UnsupportedError, match=r"q has \(256,\) where k has \(128,\)"):
        cases.call(args[0], args[1][..., :128], *args[2:], **arrays)
    with pytest.raises(dispatch.UnsupportedError, match="groups of 3"):
        cases.call(*args, **arrays, group=3)


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_scaled_inputs_are_read_as_what_they_stand_for(name):
    (q, x, *rest), _ = cases.INPUTS_SMALL["narrow"].make()
    data, scale = encode(x, jnp.int8)
    meant = data.astype(jnp.float32) * scale[..., None]
    want = cases.call_inputs(q.astype(jnp.float32), meant, *rest, implementation="reference")
    pools = (Pool(data, scale[:, :, None]),)
    got = api.x_cache_attention(q.astype(jnp.float32), pools, *rest, implementation=name)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_scales_of_inputs_are_refused_where_they_would_be_passed_over():
    (q, x, *rest), _ = cases.INPUTS_SMALL["narrow"].make()
    assert "rows with scales" in pallas_tpu.refuses_inputs(q, x, *rest, x_scale=jnp.ones(1))
    assert pallas_gpu.refuses_inputs(q, x, *rest, x_scale=jnp.ones(1))


@pytest.mark.parametrize(("rotated", "least", "most"), [(False, 0.025, 0.045), (True, 0.015, 0.03)])
def test_float8_scores_lose_as_much_as_the_door_says(rotated, least, most):
    """Queries are rounded, and keys that are turned again; in bfloat16 neither is felt."""
    case = cases.Case(lengths=(1024,), slots=32, heads=8, width=128, stored="float8_e4m3fn", rotated=rotated)
    args, arrays = case.make()
    want = exact(case, args, arrays)

    def lost(case):
        error = exact(case, args, arrays) - want
        return np.sqrt(np.mean(error**2) / np.mean(want**2))

    assert least < lost(dataclasses.replace(case, float8_scores=True)) < most
    args = (args[0].astype(jnp.bfloat16), *args[1:])
    assert lost(case) < 0.003


def test_float8_scores_are_of_float8_rows_and_not_on_a_tpu():
    case = dataclasses.replace(cases.SMALL["int8"], float8_scores=True)
    args, arrays = case.make()
    with pytest.raises(dispatch.UnsupportedError, match="float8_scores of int8 rows: rows must be float8"):
        by_xla(case)(*args, **arrays)
    case = cases.SMALL["float8_scores"]
    assert "float8_scores=False" in pallas_tpu.refuses_keys(*args, **arrays, **case.options)
