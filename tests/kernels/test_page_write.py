"""Tokens written into pages: C++ stores what the definition stores, bit for bit, and in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv_jax.kernels import dispatch, native
from swiftkv_jax.kernels.page_write import api, native_cpu
from swiftkv_jax.kernels.paged_attention.api import paged_attention
from swiftkv_jax.kernels.pools import Pools

DTYPES = native.STORED


def pools_of(dtype, pages=7, page=5, heads=2, width=12, value=8, rows=3) -> Pools:
    """Pools full of 42."""
    scale = np.full((rows, pages, heads, page), 42, np.float32) if jnp.dtype(dtype).itemsize == 1 else None
    k, v = (np.full((rows, pages, page, heads * w), 42).astype(jnp.dtype(dtype)) for w in (width, value))
    return Pools(*(None if x is None else jnp.array(x) for x in (k, v, scale, scale)))


def bits(pools: Pools) -> dict:
    """Everything but page 0, as unsigned integers; all NaNs alike."""
    out = {}
    for name, x in pools._asdict().items():
        if x is not None:
            x = np.asarray(x)[:, 1:]
            nan = np.isnan(x.astype(np.float32))
            out[name] = np.where(nan, -1, x.view(f"u{x.dtype.itemsize}").astype(np.int64))
    return out


NEEDS_COMPILER = pytest.mark.skipif(
    bool(native_cpu.refuses(pools_of("float32"))), reason="needs a C++ compiler"
)


def check(pools: Pools, k, v, page, slot, rows):
    """C++ and the definition store the same bits."""
    write = functools.partial(api.page_write, rows=rows)
    got, want = (
        bits(jax.jit(functools.partial(write, implementation=by))(pools, k, v, page, slot))
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
    """By hand: float rows as they are; 8 bits times the scale within half a step of what was given."""
    k = jax.random.normal(jax.random.key(0), (3, 2, 2, 12))
    v = jax.random.normal(jax.random.key(1), (3, 2, 2, 8))
    page, slot = jnp.array([4, 1, 4]), jnp.array([0, 4, 3])
    for dtype in ("float32", "int8"):
        before = pools_of(dtype)
        after = api.page_write(before, k, v, page, slot, rows=(2, 0), implementation="xla")
        for new, old, pool, scale in (
            (k, before.k, after.k, after.k_scale),
            (v, before.v, after.v, after.v_scale),
        ):
            left = np.asarray(old).copy()
            for t in range(3):
                for i, row in enumerate((2, 0)):
                    stored = np.asarray(pool, np.float32)[row, page[t], slot[t]].reshape(2, -1)
                    step = 0
                    if scale is not None:
                        factor = np.asarray(scale)[row, page[t], :, slot[t]][:, None]
                        stored, step = stored * factor, factor / 2 * 1.001
                    assert (np.abs(stored - new[t, i]) <= step).all()
                    left[row, page[t], slot[t]] = np.asarray(pool)[row, page[t], slot[t]]
            np.testing.assert_array_equal(np.asarray(pool), left)  # nothing else changed


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_kind(dtype):
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
    k = np.stack([beside, some], 1)[:, None]  # T, F, K, H
    tokens = len(k)
    pools = pools_of(dtype, pages=tokens, page=2, value=12)
    check(pools, jnp.array(k), jnp.array(k[::-1]), *places(tokens, tokens, 2), rows=(1,))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_with_nan_reads_as_nan(dtype):
    """XLA's largest number of several, one of them NaN, depends on their order."""
    pools = pools_of(dtype)
    k = jnp.ones((1, 1, 2, 12)).at[0, 0, 1, 7].set(jnp.nan)
    one = jnp.ones(1, jnp.int32)
    got = api.page_write(pools, k, k[..., :8], one, one, rows=(2,), implementation="native_cpu")
    read = np.asarray(got.k[2, 1, 1], np.float32).reshape(2, 12)
    if got.k_scale is not None:
        read = read * np.asarray(got.k_scale[2, 1, :, 1])[:, None]
    np.testing.assert_allclose(read[0], 1, rtol=1e-6)
    assert np.isnan(read[1, 7])


@NEEDS_COMPILER
@settings(max_examples=6, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 70),
    page=st.integers(1, 9),
    heads=st.integers(1, 3),
    width=st.integers(1, 40),
    value=st.integers(1, 40),
    rows=st.permutations(range(4)).flatmap(lambda all: st.integers(1, 4).map(lambda n: tuple(all[:n]))),
    computed=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_shape(dtype, tokens, page, heads, width, value, rows, computed):
    pages = 2 + tokens // page
    pools = pools_of(dtype, pages, page, heads, width, value, rows=4)
    random = np.random.default_rng(tokens)
    k, v = (
        random.normal(size=(tokens, len(rows), heads, w)).astype(jnp.dtype(computed)) for w in (width, value)
    )
    check(pools, jnp.array(k), jnp.array(v), *places(tokens, pages, page, seed=tokens), rows=rows)


@NEEDS_COMPILER
@pytest.mark.slow
def test_narrower_vectors(narrow, monkeypatch):
    monkeypatch.setattr(native_cpu, "_TARGET", f"page_write_{narrow}")
    for dtype in DTYPES:
        k, v = (jax.random.normal(jax.random.key(w), (33, 2, 2, w)) for w in (12, 8))
        check(pools_of(dtype, pages=9), k, v, *places(33, 9, 5), rows=(2, 1))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_a_pool_of_a_gigabyte_is_written_in_place(dtype):
    """In a loop too, where attention reads the pool between two writes."""
    heads, width, table = 8, 128, jax.ShapeDtypeStruct((32, 64), jnp.int32)
    scale = jax.ShapeDtypeStruct((4, 4096, heads, 32), jnp.float32) if dtype != "float32" else None
    pool = jax.ShapeDtypeStruct((4, 4096, 32, heads * width), jnp.dtype(dtype))
    new = jax.ShapeDtypeStruct((32, 1, heads, width), jnp.float32)
    at = jax.ShapeDtypeStruct((32,), jnp.int32)

    def loop(pools, new, table, at):
        def turn(i, state):
            pools, new = state
            for row in range(4):
                where = at // 32 + i, at % 32
                pools = api.page_write(pools, new, new, *where, rows=(row,), implementation="native_cpu")
                scales = {"k_scale": pools.k_scale, "v_scale": pools.v_scale}
                block = jnp.arange(32), at[:, None]
                new = paged_attention(new, pools.k, pools.v, table, *block, row=row, **scales)
            return pools, new

        return jax.lax.fori_loop(0, 3, turn, (pools, new))

    pools = Pools(pool, pool, scale, scale)
    memory = jax.jit(loop, donate_argnums=0).lower(pools, new, table, at).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in pools if x is not None)
    assert memory.temp_size_in_bytes < 8 << 20


def test_bad_calls_are_named():
    pools, k, v = pools_of("float32"), jnp.zeros((3, 2, 2, 12)), jnp.zeros((3, 2, 2, 8))
    at = jnp.zeros(3, jnp.int32)
    with pytest.raises(dispatch.UnsupportedError, match=r"k has \(2,\) where rows has \(1,\)"):
        api.page_write(pools, k, v, at, at, rows=(1,))
    with pytest.raises(dispatch.UnsupportedError, match=r"k has \(3,\) where slot has \(2,\)"):
        api.page_write(pools, k, v, at, at[:2], rows=(0, 1))
    with pytest.raises(dispatch.UnsupportedError, match=r"k has \(20,\) where the_pool_of_k has \(24,\)"):
        api.page_write(pools, k[..., :10], v, at, at, rows=(0, 1))
    with pytest.raises(dispatch.UnsupportedError, match="float32 keys and bfloat16 values: both float32 or"):
        mixed = pools._replace(v=pools.v.astype(jnp.bfloat16))
        api.page_write(mixed, k, v, at, at, rows=(0, 1), implementation="native_cpu")
