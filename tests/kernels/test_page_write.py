"""Tokens written into pages: C++ stores what the definition stores, bit for bit, and in place."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv_jax.kernels.common import native
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.page_write import api, native_cpu
from swiftkv_jax.kernels.paged_attention.api import paged_attention

DTYPES = native.STORED


def pool_of(dtype, pages=7, page=5, heads=2, width=12, rows=3) -> Pool:
    """A pool full of 42."""
    scale = np.full((rows, pages, heads, page), 42, np.float32) if jnp.dtype(dtype).itemsize == 1 else None
    data = np.full((rows, pages, page, heads * width), 42).astype(jnp.dtype(dtype))
    return Pool(jnp.array(data), None if scale is None else jnp.array(scale))


def bits(pool: Pool) -> dict:
    """Everything but page 0, as unsigned integers; all NaNs alike."""
    out = {}
    for name, x in pool._asdict().items():
        if x is not None:
            x = np.asarray(x)[:, 1:]
            nan = np.isnan(x.astype(np.float32))
            out[name] = np.where(nan, -1, x.view(f"u{x.dtype.itemsize}").astype(np.int64))
    return out


NEEDS_COMPILER = pytest.mark.skipif(
    bool(native_cpu.refuses(pool_of("float32"))), reason="needs a C++ compiler"
)


def check(pool: Pool, new, page, slot, rows):
    """C++ and the definition store the same bits."""
    write = functools.partial(api.page_write, rows=rows)
    got, want = (
        bits(jax.jit(functools.partial(write, implementation=by))(pool, new, page, slot))
        for by in ("native_cpu", "xla")
    )
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def places(tokens: int, pages: int, page: int, seed=0):
    """A place for each token, none twice; every fifth is padding in scratch."""
    at = np.random.default_rng(seed).permutation(np.arange(page, pages * page))[:tokens]
    at = np.where(np.arange(tokens) % 5 == 4, 0, at)
    return jnp.array(at // page, jnp.int32), jnp.array(at % page, jnp.int32)


def test_the_definition_puts_each_token_in_its_place():
    """By hand: float rows are unchanged; 8 bits times the scale are within half a step of the input."""
    page, slot = jnp.array([4, 1, 4]), jnp.array([0, 4, 3])
    for dtype, width in itertools.product(("float32", "int8"), (12, 8)):
        new = jax.random.normal(jax.random.key(width), (3, 2, 2, width))
        before = pool_of(dtype, width=width)
        data, scale = api.page_write(before, new, page, slot, rows=(2, 0), implementation="xla")
        left = np.asarray(before.data).copy()
        for t in range(3):
            for i, row in enumerate((2, 0)):
                stored = np.asarray(data, np.float32)[row, page[t], slot[t]].reshape(2, -1)
                step = 0
                if scale is not None:
                    factor = np.asarray(scale)[row, page[t], :, slot[t]][:, None]
                    stored, step = stored * factor, factor / 2 * 1.001
                assert (np.abs(stored - new[t, i]) <= step).all()
                left[row, page[t], slot[t]] = np.asarray(data)[row, page[t], slot[t]]
        np.testing.assert_array_equal(np.asarray(data), left)  # nothing else changed


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_written_as_the_reference_writes_it(dtype):
    """Every float8 and the places between them, ties, the largest, infinities, zeros of both signs."""
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    between = (finite[1:] + finite[:-1]) / 2
    more = np.array([0.0, -0.0, np.inf, -np.inf, 464, 465, 449, 1e-3, 1e38, 65504, 65520, 0.5, 1.5])
    numbers = np.concatenate([finite, between, np.nextafter(between, 9e9), np.nextafter(between, -9e9), more])
    numbers = np.concatenate([numbers, np.random.default_rng(0).normal(size=512) * 3]).astype(np.float32)
    # Each beside 448, which makes the factor of 8-bit floats one; then eleven of them, whatever they are.
    beside = np.stack([numbers, np.full_like(numbers, 448)], 1).repeat(6, 1)
    some = np.resize(numbers, (len(numbers), 12))
    new = np.stack([beside, some], 1)[:, None]  # T, F, K, H
    for order in (new, new[::-1]):
        tokens = len(order)
        pool = pool_of(dtype, pages=tokens, page=2)
        check(pool, jnp.array(order), *places(tokens, tokens, 2), rows=(1,))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_with_nan_is_stored_as_nan_and_others_are_not(dtype):
    """XLA's largest number of several, one of them NaN, depends on their order."""
    new = jnp.ones((1, 1, 2, 12)).at[0, 0, 1, 7].set(jnp.nan)
    one = jnp.ones(1, jnp.int32)
    got = api.page_write(pool_of(dtype), new, one, one, rows=(2,), implementation="native_cpu")
    read = np.asarray(got.data[2, 1, 1], np.float32).reshape(2, 12)
    if got.scale is not None:
        read = read * np.asarray(got.scale[2, 1, :, 1])[:, None]
    np.testing.assert_allclose(read[0], 1, rtol=1e-6)
    assert np.isnan(read[1, 7])


@NEEDS_COMPILER
@settings(max_examples=12, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 70),
    page=st.integers(1, 9),
    heads=st.integers(1, 3),
    width=st.integers(1, 40),
    rows=st.permutations(range(4)).flatmap(lambda all: st.integers(1, 4).map(lambda n: tuple(all[:n]))),
    computed=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_shape(dtype, tokens, page, heads, width, rows, computed):
    pages = 2 + tokens // page
    pool = pool_of(dtype, pages, page, heads, width, rows=4)
    new = np.random.default_rng(tokens).normal(size=(tokens, len(rows), heads, width))
    new = jnp.array(new.astype(jnp.dtype(computed)))
    check(pool, new, *places(tokens, pages, page, seed=tokens), rows=rows)


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["x86-64"], indirect=True)
def test_narrower_vectors(narrow, monkeypatch):
    monkeypatch.setattr(native_cpu, "TARGET", f"page_write_{narrow}")
    for dtype in DTYPES:
        for width in (12, 8):
            new = jax.random.normal(jax.random.key(width), (33, 2, 2, width))
            check(pool_of(dtype, pages=9, width=width), new, *places(33, 9, 5), rows=(2, 1))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_pool_of_a_gigabyte_is_written_in_place(dtype):
    """This holds in a loop too, where attention reads the pool between two writes."""
    heads, width, table = 8, 128, jax.ShapeDtypeStruct((32, 64), jnp.int32)
    scale = jax.ShapeDtypeStruct((4, 4096, heads, 32), jnp.float32) if dtype != "float32" else None
    data = jax.ShapeDtypeStruct((4, 4096, 32, heads * width), jnp.dtype(dtype))
    new = jax.ShapeDtypeStruct((32, 1, heads, width), jnp.float32)
    at = jax.ShapeDtypeStruct((32,), jnp.int32)

    def loop(pools, new, table, at):
        def turn(i, state):
            pools, new = state
            for row in range(4):
                place = at // 32 + i, at % 32
                options = {"rows": (row,), "implementation": "native_cpu"}
                pools = tuple(api.page_write(pool, new, *place, **options) for pool in pools)
                block = jnp.arange(32), at[:, None]
                new = paged_attention(new, pools, table, *block, row=row)
            return pools, new

        return jax.lax.fori_loop(0, 3, turn, (pools, new))

    pools = (Pool(data, scale),) * 2
    memory = jax.jit(loop, donate_argnums=0).lower(pools, new, table, at).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
    assert memory.temp_size_in_bytes < 8 << 20
