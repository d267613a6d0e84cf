"""Causal attention of packed sequences and its gradients: every implementation equals the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.causal_attention import api, native_cpu

ALL = 1 << 30
NEEDS_COMPILER = pytest.mark.skipif(bool(native_cpu.refuses()), reason="needs a C++ compiler")
BY = ["xla", pytest.param("native_cpu", marks=NEEDS_COMPILER)]


def arrays(batch=2, tokens=9, heads=4, kv_heads=2, width=16, value=16, parts=1, dtype="float32"):
    """q, k, v, the gradient of the output, and segments: runs of about equal length, numbered anyhow."""
    keys = jax.random.split(jax.random.key(tokens), 4)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value), (heads, value)]
    made = [
        jax.random.normal(key, (batch, tokens, *s)).astype(dtype) for key, s in zip(keys, shapes, strict=True)
    ]
    run = (jnp.arange(tokens) * parts // tokens) % 3
    return *made, jnp.broadcast_to(run, (batch, tokens)).at[0].set(7)


def dense(q, k, v, segments, window):
    """Softmax over a mask, written out; equal segments are equal runs, as `arrays` makes them in a row."""
    tokens, group = q.shape[1], q.shape[2] // k.shape[2]
    at = np.arange(tokens)
    run = np.cumsum(np.diff(np.asarray(segments), axis=1, prepend=-1) != 0, axis=1)
    mask = (at[:, None] >= at) & (at[:, None] - at < window) & (run[:, :, None] == run[:, None])
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(scores - scores.max(-1, keepdims=True)) * mask[:, None]
    return jnp.einsum("bnts,bsnu->btnu", weights / weights.sum(-1, keepdims=True), v)


def check(implementation, window, tolerance=1e-5, **shape):
    """Outputs and gradients against those of `dense` in float64, relative to the largest."""
    q, k, v, slope, segments = arrays(**shape)
    run = functools.partial(api.causal_attention, implementation=implementation)

    def both(attend, q, k, v, slope):
        out, back = jax.vjp(lambda *x: attend(*x, segments, window), q, k, v)
        return out, *back(slope)

    got = jax.jit(functools.partial(both, run))(q, k, v, slope)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (q, k, v, slope)]
        want = jax.jit(functools.partial(both, dense))(*wide)
    for one, exact in zip(got, want, strict=True):
        exact = np.asarray(exact)
        largest = max(np.abs(exact).max(), 1)  # queries that see one key each have no gradient but rounding
        assert np.abs(np.asarray(one, np.float64) - exact).max() <= tolerance * largest


SHAPES = {
    "one token": {"tokens": 1},
    "a tile and one": {"tokens": 65, "batch": 1},
    "packed": {"tokens": 150, "parts": 7},
    "odd widths": {"tokens": 70, "width": 20, "value": 24, "heads": 3, "kv_heads": 1},
    "one head each": {"tokens": 40, "kv_heads": 4},
    "wide": {"tokens": 33, "width": 128, "value": 80, "heads": 8},
    "blocks": {"tokens": 700, "batch": 1, "parts": 3, "width": 8, "value": 8},
}


@pytest.mark.parametrize("window", [ALL, 13])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("implementation", ["reference", *BY])
def test_outputs_and_gradients_are_the_definitions(implementation, shape, window):
    check(implementation, window, **SHAPES[shape])


@pytest.mark.slow
@NEEDS_COMPILER
def test_narrower_vectors(narrow, monkeypatch):
    for name in ("_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(native_cpu, name, f"causal_attention_{name}_{narrow}")
    for shape in SHAPES.values():
        check("native_cpu", 13, **shape)


@pytest.mark.parametrize("implementation", BY)
def test_bfloat16_within_its_error(implementation):
    check(implementation, ALL, tolerance=2e-2, tokens=100, dtype="bfloat16")


@NEEDS_COMPILER
@settings(max_examples=5)
@given(
    tokens=st.integers(1, 200),
    parts=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    each=st.integers(1, 4),
    width=st.integers(1, 40),
    window=st.integers(1, 220),
)
def test_any_shape(tokens, parts, kv_heads, each, width, window):
    check(
        "native_cpu",
        window,
        tokens=tokens,
        parts=parts,
        heads=kv_heads * each,
        kv_heads=kv_heads,
        width=width,
    )


@pytest.mark.parametrize("implementation", BY)
def test_a_window_that_only_the_loop_knows(implementation):
    q, k, v, _, segments = arrays(tokens=50)
    windows = jnp.array([1, 7, ALL])
    run = functools.partial(api.causal_attention, q, k, v, segments, implementation=implementation)
    got = jax.jit(lambda: jax.lax.map(run, windows))()
    for one, window in zip(got, (1, 7, ALL), strict=True):
        np.testing.assert_allclose(one, dense(q, k, v, segments, window), atol=1e-5)


@NEEDS_COMPILER
def test_under_vmap():
    """Gradients of each of several rows, as a user may ask for them."""
    q, k, v, slope, segments = arrays(batch=3, tokens=20)

    def one(implementation, q, k, v, slope, segments):
        parts = (x[None] for x in (q, k, v))
        run = functools.partial(api.causal_attention, implementation=implementation)
        return jax.vjp(lambda *x: run(*x, segments[None], ALL), *parts)[1](slope[None])

    got, want = (
        jax.jit(jax.vmap(functools.partial(one, i)))(q, k, v, slope, segments) for i in ("native_cpu", "xla")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_bad_shapes_are_named():
    q, k, v, _, segments = arrays()
    with pytest.raises(dispatch.UnsupportedError, match=r"q has \(2, 9\) where segments has \(2, 8\)"):
        api.causal_attention(q, k, v, segments[:, :8], ALL)
    with pytest.raises(dispatch.UnsupportedError, match="3 query heads do not share 2 kv heads evenly"):
        api.causal_attention(q[:, :, :3], k, v, segments, ALL)
