"""Attention without values by C++, in both orders: equal to its definition, alone and in company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from k_cache_checks import agree, exact, in_blocks

from swiftkv_jax.kernels.common.mask import visible
from swiftkv_jax.kernels.common.pools import encode
from swiftkv_jax.kernels.k_cache_attention import cases, native_cpu, reference

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


@pytest.mark.slow("half", "width80", "no_rope", "bfloat16")
@NEEDS_COMPILER
@pytest.mark.parametrize("name", NATIVE)
def test_native_agrees_with_the_definition_in_both_orders(name):
    args, arrays = NATIVE[name].make()
    want = exact(NATIVE[name], args, arrays)
    for values_first in (False, True):
        agree(NATIVE[name], jax.jit(by_native(NATIVE[name], values_first))(*args, **arrays), want)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("narrow", ["x86-64"], indirect=True)
def test_native_agrees_on_narrower_vectors(narrow, monkeypatch):
    monkeypatch.setattr(native_cpu, "TARGET", f"row_attention_{narrow}")
    for case in (NATIVE[name] for name in ("gap", "half", "width20", "int8", "float8", "long")):
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
    args, arrays = case.make()
    want = exact(case, args, arrays)
    for size in (1, 6, 32):
        args, arrays, back = in_blocks(case, size)
        agree(case, back(jax.jit(by_native(case))(*args, **arrays)), want)


@NEEDS_COMPILER
@pytest.mark.parametrize("stored, values_first", [("float32", True), ("int8", False)])
def test_positions_may_leave_gaps_natively(stored, values_first):
    """A block's queries at any positions; what lies between and no query sees may hold anything."""
    case = cases.Case(lengths=(200,), queries=5, window=6, slots=8, stored=stored)
    (q, k, w, table, sequence, _), arrays = case.make()
    position = jnp.array([[3, 40, -1, 150, 201]], jnp.int32)  # two in a tile of 64 keys
    seen = visible(position, 256, 6).any(1).reshape(8, 32)
    seen = jnp.zeros(k.shape[1:3], bool).at[table[0]].set(seen)
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
@pytest.mark.parametrize(
    ("queries", "inputs", "stored", "values_first"), [(1, 40, "float32", True), (7, 64, "int8", False)]
)
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
    want = np.asarray(jax.jit(functools.partial(reference.x_cache_attention, **options))(*args))
    run = functools.partial(native_cpu.x_cache_attention, **options, values_first=values_first)
    np.testing.assert_allclose(jax.jit(run)(*args), want, atol=1e-5 * np.abs(want).max())
