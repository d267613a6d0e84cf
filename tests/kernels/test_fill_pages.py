"""Filling whole pages leaves what writing token by token leaves, and touches nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swiftkv_jax.core.cache import Cache, make_batch
from swiftkv_jax.core.layers import rotary
from swiftkv_jax.core.loop import make_rows
from swiftkv_jax.core.surgery import fold_shared_norm
from swiftkv_jax.kernels.fused_kv_fill.pages import Tokens, begun_here, pages_of

PAGE, SLOTS, TOKENS = 4, 5, 24
FAMILIES = {
    "biases": {},
    "norm of keys": {"qkv_bias": False, "qk_norm": True, "num_kv_heads": 2, "head_dim": 8},
}


@functools.cache
def model(plan: str, family: str):
    return tiny.make_model(tiny.PLANS[plan], **FAMILIES[family])


@functools.partial(jax.jit, static_argnames=("net", "fill", "dtype"))
def filled(net, params, fill, dtype, x, position, starts):
    """(the pool before, the pool after) of a batch of the stream `x`, both as float32 of what is stored."""
    table = 1 + jnp.arange(3 * SLOTS, dtype=jnp.int32).reshape(3, SLOTS)[:, ::-1]
    cache = Cache.create(net.config, net.plan, table, 1 + 3 * SLOTS, PAGE, jnp.dtype(dtype))
    noise = iter(jax.random.split(jax.random.key(1), 5))

    def random(pool):
        return (9 * jax.random.normal(next(noise), pool.shape)).astype(pool.dtype)

    cache = dataclasses.replace(cache, stores=jax.tree.map(random, cache.stores), fill=fill)
    if fill:
        params = fold_shared_norm(net, params)
    at, batch = rotary(net.config, position, cache.capacity), make_batch(starts, position)
    depth = net.plan.depth
    after, _ = make_rows(net, params, net.plan.made_at(depth), depth, x, at, batch, cache)

    def values(cache):
        k, v = cache.stores["kv"]
        pools = {"k": k.data, "v": v.data, "k_scale": k.scale, "v_scale": v.scale}
        return {name: pool.astype(jnp.float32) for name, pool in pools.items() if pool is not None}

    return values(cache), values(after)


def agree(plan: str, family: str, fill: str, dtype: str, spans) -> None:
    """`spans` are (first position, tokens) of three sequences."""
    net, params = model(plan, family)
    position = np.zeros(TOKENS, np.int32)
    starts = np.cumsum([0, *(count for _, count in spans)]).astype(np.int32)
    tails = np.zeros((1 + 3 * SLOTS, PAGE), bool)  # of pages that begin here, what comes after the last token
    for i, (first, count) in enumerate(spans):
        position[starts[i] : starts[i + 1]] = range(first, first + count)
        if count and (first + count) % PAGE and (first + count - 1) // PAGE * PAGE >= first:
            number = (first + count - 1) // PAGE
            tails[1 + i * SLOTS + SLOTS - 1 - number, (first + count) % PAGE :] = True
    x = jax.random.normal(jax.random.key(2), (TOKENS, net.config.hidden_size))
    x = x.at[starts[-1] :].set(jnp.nan)  # padding
    want, got = (filled(net, params, f, dtype, x, position, starts) for f in (None, fill))
    for name in want[1]:
        a, b = (np.array(pools[1][name])[:, 1:] for pools in (want, got))  # page 0 is scratch
        is_scale = name.endswith("scale")
        tail = np.broadcast_to(tails[1:, None] if is_scale else tails[1:, :, None], a.shape[1:])
        filled_in_pages = np.array([row.shared_norm for row in net.plan.rows])
        a = np.where(tail & filled_in_pages[:, None, None, None], 0, a)
        step = {"int8": 1.01, "float8_e4m3fn": 32.1}.get(dtype, 0) * (not is_scale)  # one rounding, a tie
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=step or 1e-5, err_msg=name)
        assert (a != b).mean() < 0.01 or not step


def test_the_pages_of_a_batch():
    """Pages that begin in the batch and tokens that continue an earlier page, worked out by hand."""
    starts = jnp.array([0, 3, 10, 11])
    position = jnp.array([2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 8, 0])  # the last is padding
    batch = make_batch(starts, position)
    none = jnp.zeros((len(position), 0))
    tokens = Tokens(none, none, none, batch.sequence, batch.position, batch.valid)
    begun = begun_here(tokens, PAGE)
    assert begun.tolist() == [False, False, *[True] * 9, False]
    table = 10 * jnp.arange(1, 4)[:, None] + jnp.arange(SLOTS)
    pages = pages_of(tokens, begun, 50, PAGE, table)
    assert pages.first.tolist()[:4] == [2, 3, 7, 10]
    assert pages.live.tolist() == [1, 4, 3, 1, 0]
    assert pages.page.tolist() == [11, 20, 21, 32, 50]


@pytest.mark.parametrize(
    ("plan", "family", "fill"),
    [
        ("standard", "biases", "xla"),
        ("swiftkv", "norm of keys", "xla"),
        ("acrosskv", "norm of keys", "reference"),
    ],
)
def test_pages_hold_what_tokens_written_one_by_one_leave(plan, family, fill):
    agree(plan, family, fill, "float32", [(0, 7), (3, 1), (6, 9)])


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_fill_of_8_bit_pages_agrees_with_the_reference(dtype):
    agree("acrosskv", "norm of keys", "xla", dtype, [(0, 7), (3, 1), (6, 9)])


span = st.tuples(st.integers(0, 12), st.integers(0, 8))


@settings(max_examples=15)
@given(st.tuples(span, span, span))
@example(((0, 8), (1, 8), (2, 8)))  # no padding, and tokens to append in more than one turn
@example(((4, 8), (8, 8), (0, 8)))  # nothing to append
@example(((0, 0), (0, 0), (0, 0)))
def test_any_batch(spans):
    agree("acrosskv", "biases", "xla", "float32", spans)
