"""A bias by head and distance, and a soft cap of scores: numpy is the definition, and who does not take one
refuses it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION, causal_attention
from swiftkv_jax.kernels.common.dispatch import BIASED, UnsupportedError
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.k_cache_attention.api import k_cache_attention, x_cache_attention
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION, paged_attention

PAGE, SLOTS, WIDTH, HEADS = 4, 3, 8, 6
LENGTH = PAGE * SLOTS
TABLE = jnp.array([[3, 1, 5], [2, 4, 6]])
SEQUENCE = jnp.array([1, 0])
# Positions of blocks of one query and of three; -1 is no query.
POSITIONS = {1: [[9], [2]], 3: [[4, 5, 6], [11, -1, -1]]}


def softmax(scores: np.ndarray) -> np.ndarray:
    raw = np.exp(scores - scores.max(-1, keepdims=True))
    return raw / raw.sum(-1, keepdims=True)


def case(queries: int, kv_heads: int = HEADS):
    random = np.random.default_rng(queries)
    q = random.standard_normal((2, queries, HEADS, WIDTH))
    pools = [random.standard_normal((1, 7, PAGE, kv_heads * WIDTH)) for _ in range(2)]
    bias = 2 * random.standard_normal((HEADS, LENGTH - 3))  # the last one goes for what is further back
    return q, pools, bias, np.array(POSITIONS[queries])


def capped(scores: np.ndarray, cap: float | None) -> np.ndarray:
    return scores if cap is None else cap * np.tanh(scores / cap)


def want(q, keys, values, bias, position, cap: float | None = None) -> np.ndarray:
    """[b, C, N, W] of keys and values [Q, LENGTH, K, W], one number at a time."""
    out = np.zeros((*q.shape[:3], values.shape[-1]))
    for b, c, n in itertools.product(*map(range, q.shape[:3])):
        at, sequence = position[b, c], int(SEQUENCE[b])
        if at < 0:
            continue
        head = n // (HEADS // keys.shape[2])
        back = np.minimum(at - np.arange(at + 1), bias.shape[1] - 1)
        scores = capped(keys[sequence, : at + 1, head] @ q[b, c, n] * WIDTH**-0.5, cap) + bias[n, back]
        out[b, c, n] = softmax(scores) @ values[sequence, : at + 1, head if values.shape[2] > 1 else 0]
    return out


def flat(pool: np.ndarray, heads: int) -> np.ndarray:
    return pool[0][np.asarray(TABLE)].reshape(2, LENGTH, heads, -1)


def given(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("queries, kv_heads, cap", [(1, 6, 0.7), (3, 3, 0.7), (3, 1, None)])
@pytest.mark.parametrize("name", [*BIASED, None])
def test_over_pages(name, queries, kv_heads, cap):
    q, (k, v), bias, position = case(queries, kv_heads)
    wanted = want(q, flat(k, kv_heads), flat(v, kv_heads), bias, position, cap)
    q, k, v, bias = given(q, k, v, bias)
    place = TABLE, SEQUENCE, jnp.asarray(position)
    run = jax.jit(functools.partial(paged_attention, softcap=cap, implementation=name))
    got = run(q, (Pool(k), Pool(v)), *place, bias=bias)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("queries", POSITIONS)
@pytest.mark.parametrize("name", [*BIASED, None])
def test_over_pages_of_keys_or_inputs_alone(name, queries):
    q, (rows, _), bias, position = case(queries)
    random = np.random.default_rng(7)
    w_k, w_v = random.standard_normal((2, HEADS, HEADS * WIDTH, WIDTH)) * 0.2
    x = flat(rows, 1)
    made = [np.einsum("qsne,new->qsnw", np.repeat(x, HEADS, 2), w) for w in (w_k, w_v)]
    for_keys = want(q, flat(rows, HEADS), made[1], bias, position)
    for_inputs = want(q, *made, bias, position)
    q, rows, w_k, w_v, bias = given(q, rows, w_k, w_v, bias)
    place = TABLE, SEQUENCE, jnp.asarray(position)
    of_keys, of_inputs = (
        jax.jit(functools.partial(run, implementation=name)) for run in (k_cache_attention, x_cache_attention)
    )
    np.testing.assert_allclose(of_keys(q, (Pool(rows),), w_v, *place, bias=bias), for_keys, atol=2e-5)
    got = of_inputs(q, (Pool(rows),), w_k, w_v, *place, bias=bias)
    np.testing.assert_allclose(got, for_inputs, atol=2e-5)


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("name", ["reference", "xla", None])
def test_over_full_sequences(name, cap, monkeypatch):
    """Longer sequences are cut into blocks of queries."""
    monkeypatch.setattr("swiftkv_jax.kernels.causal_attention.xla._BLOCK", 4)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, LENGTH, n, WIDTH)) for n in (HEADS, 3, 3))
    bias = 2 * random.standard_normal((HEADS, LENGTH))
    wanted = np.zeros_like(q)
    for b, t, n in itertools.product(*map(range, q.shape[:3])):
        scores = capped(k[b, : t + 1, n // 2] @ q[b, t, n] * WIDTH**-0.5, cap)
        wanted[b, t, n] = softmax(scores + bias[n, t - np.arange(t + 1)]) @ v[b, : t + 1, n // 2]
    q, k, v, bias = given(q, k, v, bias)
    segments = jnp.ones((2, LENGTH), jnp.int32)
    run = jax.jit(functools.partial(causal_attention, softcap=cap, implementation=name))
    got = run(q, k, v, segments, 2**30, bias=bias)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("option", ["bias", "softcap"])
def test_kernels_without_a_bias_or_a_cap_refuse_it_in_one_line(option):
    q, (k, v), bias, position = case(1)
    q, k, v, bias = given(q, k, v, bias)
    place = TABLE, SEQUENCE, jnp.asarray(position)
    assert "native_cpu" in PAGED_ATTENTION and "native_cpu" in CAUSAL_ATTENTION
    what, asked = ("a bias by distance", bias) if option == "bias" else ("a soft cap of scores", 2.0)
    why, how = f"native_cpu does not support {what}: reference, xla", {option: asked}
    with pytest.raises(UnsupportedError, match=why):
        paged_attention(q, (Pool(k), Pool(v)), *place, **how, implementation="native_cpu")
    flat_q, segments = q.reshape(1, 2, HEADS, WIDTH), jnp.ones((1, 2), jnp.int32)
    with pytest.raises(UnsupportedError, match=why):
        causal_attention(flat_q, flat_q, flat_q, segments, 9, **how, implementation="native_cpu")
