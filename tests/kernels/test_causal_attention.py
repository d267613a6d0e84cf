"""Causal attention of packed sequences and its gradients: every implementation equals the definition."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv_jax.kernels.causal_attention import api, cudnn, native_cpu, splash, stand_in
from swiftkv_jax.kernels.causal_attention.shards import Shards
from swiftkv_jax.kernels.common import chips, dispatch

ALL = 1 << 30
NEEDS_COMPILER = pytest.mark.skipif(bool(native_cpu.refuses()), reason="needs a C++ compiler")
BY = ["xla", pytest.param("native_cpu", marks=NEEDS_COMPILER)]


def arrays(batch=2, tokens=9, heads=4, kv_heads=2, width=16, value=16, parts=1, dtype="float32"):
    """q, k, v, the gradient of the output, and segments: runs of about equal length, numbered anyhow."""
    random = np.random.default_rng(tokens)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value), (heads, value)]
    made = [jnp.asarray(random.standard_normal((batch, tokens, *s), np.float32), dtype) for s in shapes]
    segments = np.tile((np.arange(tokens) * parts // tokens) % 3, (batch, 1)).astype(np.int32)
    segments[0] = 7
    return *made, jnp.asarray(segments)


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
    run = functools.partial(api.causal_attention, implementation=implementation)
    compare(run, window, tolerance, **shape)


def compare(run, window, tolerance=1e-5, **shape):
    """The same of any function with the arguments of `api.causal_attention`."""
    *given, segments = arrays(**shape)
    got = jax.jit(functools.partial(both, run, segments, window))(*given)
    for one, want in zip(got, exact(window, **shape), strict=True):
        largest = max(np.abs(want).max(), 1)  # queries that see one key each have no gradient but rounding
        assert np.abs(np.asarray(one, np.float64) - want).max() <= tolerance * largest


def both(attend, segments, window, q, k, v, slope):
    """The output, and the gradients of q, k and v."""
    out, back = jax.vjp(lambda *x: attend(*x, segments, window), q, k, v)
    return out, *back(slope)


@functools.cache
def exact(window, **shape) -> list[np.ndarray]:
    """By `dense` in float64."""
    *rounded, segments = arrays(**shape)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in rounded]
        return jax.device_get(jax.jit(functools.partial(both, dense, segments, window))(*wide))


SHAPES = {
    "one token": {"tokens": 1},
    "a tile and one": {"tokens": 65, "batch": 1},
    "packed": {"tokens": 150, "parts": 7},
    "odd widths": {"tokens": 70, "width": 20, "value": 24, "heads": 3, "kv_heads": 1},
    "one head each": {"tokens": 40, "kv_heads": 4},
    "wide": {"tokens": 33, "width": 128, "value": 80, "heads": 8},
    "blocks": {"tokens": 700, "batch": 1, "parts": 3, "width": 8, "value": 8},
}


CASES = [*((shape, 13) for shape in SHAPES), ("packed", ALL), ("blocks", ALL), ("one head each", ALL)]


@pytest.mark.slow(*(f"reference-{shape}-{window}" for shape, window in CASES))
@pytest.mark.parametrize("shape, window", CASES)
@pytest.mark.parametrize("implementation", ["reference", *BY])
def test_outputs_and_gradients_are_the_definitions(implementation, shape, window):
    check(implementation, window, **SHAPES[shape])


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("narrow", ["haswell"], indirect=True)
def test_narrower_vectors(narrow, monkeypatch):
    for name in ("_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(native_cpu, name, f"causal_attention_{name}_{narrow}")
    for shape in SHAPES.values():
        check("native_cpu", 13, **shape)


@pytest.mark.parametrize("implementation", BY)
def test_bfloat16_within_its_error(implementation):
    check(implementation, ALL, tolerance=2e-2, tokens=100, dtype="bfloat16")


@pytest.mark.slow
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
    heads = {"heads": kv_heads * each, "kv_heads": kv_heads, "width": width}
    check("native_cpu", window, tokens=tokens, parts=parts, **heads)


@pytest.mark.parametrize("implementation", BY)
def test_a_traced_window_size_gives_the_same_result(implementation):
    q, k, v, _, segments = arrays(tokens=50)
    windows = jnp.array([1, 7, ALL])
    run = functools.partial(api.causal_attention, q, k, v, segments, implementation=implementation)
    got = jax.jit(lambda: jax.lax.map(run, windows))()
    for one, window in zip(got, (1, 7, ALL), strict=True):
        np.testing.assert_allclose(one, dense(q, k, v, segments, window), atol=1e-5)


@NEEDS_COMPILER
def test_causal_attention_supports_vmap():
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


SPLASH = {
    "packed": {"tokens": 384, "parts": 5, "batch": 2},
    "one head each": {"tokens": 256, "kv_heads": 4, "batch": 1},
    "one kv head": {"tokens": 256, "heads": 3, "kv_heads": 1, "width": 32, "value": 24, "batch": 1},
}


@pytest.mark.slow(f"one head each-{ALL}-False", "one kv head-130-True")
@pytest.mark.parametrize(
    "shape, window, fused",
    [
        ("packed", 130, True),
        ("packed", ALL, False),
        ("one head each", ALL, False),
        ("one kv head", 130, True),
    ],
)
def test_splash_interpreted(shape, window, fused, monkeypatch):
    """Several blocks in each direction, of which some are whole, some are cut and some are passed over."""
    for name in ("_QUERIES", "_KEYS_AT_ONCE"):
        monkeypatch.setattr(splash, name, 128)
    small = dataclasses.replace(chips.current(), keys=128)
    monkeypatch.setattr(chips, "current", lambda: small)
    monkeypatch.setattr(splash, "_FUSED", 8 if fused else 0)
    run = functools.partial(splash.causal_attention, scale=None, shards=Shards(), interpret=True)

    def scaled(q, *rest):
        return run(q, *rest, scale=q.shape[-1] ** -0.5)

    compare(scaled, window, **SPLASH[shape])


@pytest.mark.parametrize("kernel", [splash, functools.partial(cudnn.refuses, capable=True)])
def test_splash_and_cudnn_refuse_what_they_do_not_compute(kernel, monkeypatch):
    by_cudnn, refuses = kernel is not splash, getattr(kernel, "refuses", kernel)

    def refused(window=ALL, keys=128, **change) -> str:
        how = {"tokens": 256, "width": 128, "value": 128, "dtype": "bfloat16"} | change
        q, k, v, _, segments = arrays(**how)
        return refuses(q, k, v[..., :keys], segments, window, scale=1.0, shards=Shards())

    assert not refused()
    if by_cudnn:
        assert refused(window=100) and refused(dtype="float32") and refused(keys=64)
    else:
        assert refused(tokens=200) and refused(width=64) and refused(window=jnp.int32(5))
    monkeypatch.setattr(cudnn if by_cudnn else splash, "_MODULE", "jax.nowhere.to_be_found")
    assert refused() == "this JAX: it has no jax.nowhere.to_be_found"


def runs(row) -> list[tuple[int, int]]:
    """(start, length) of each run of equal numbers."""
    edges = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 2), min_size=12, max_size=12), min_size=1, max_size=4))
def test_cudnns_lengths_and_offsets_are_those_of_the_runs(rows):
    lengths, offsets = cudnn.packed(jnp.array(rows), 12)
    for row, length, offset in zip(rows, lengths.tolist(), offsets.tolist(), strict=True):
        found, absent = runs(row), 12 - len(runs(row))
        assert length == [n for _, n in found] + [-1] * absent
        assert offset == [start for start, _ in found] + [-1] * (absent + 1)


@pytest.fixture
def cudnn_as_documented(monkeypatch):
    """JAX's door to cuDNN by its documentation: segments [offset, offset + length), causal inside each.

    A token of no segment gets NaN, as memory that nothing writes may hold.
    """
    from jax._src.cudnn import fused_attention_stablehlo as door

    def attend(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, qkv_layout):
        assert mask_type is door.MaskType.PADDING_CAUSAL and qkv_layout == "BTNH"
        assert q.shape == k.shape == v.shape and q.dtype == jnp.bfloat16
        assert q_seqlen.dtype == q_offsets.dtype == jnp.int32
        assert q_offsets.shape == (q.shape[0], q_seqlen.shape[1] + 1)
        at = jnp.arange(q.shape[1])

        def inside(offsets, lengths):
            start = offsets[:, :-1, None]
            return (start >= 0) & (at >= start) & (at < start + lengths[..., None])

        mine, theirs = inside(q_offsets, q_seqlen), inside(kv_offsets, kv_seqlen)
        mask = jnp.einsum("bmt,bms->bts", mine.astype(int), theirs.astype(int)) * (at[:, None] >= at)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) * scale
        weights = jax.nn.softmax(jnp.where(mask[:, None] > 0, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bnts,bsnu->btnu", weights, v.astype(jnp.float32))
        return out.astype(q.dtype)

    monkeypatch.setattr(door, "dot_product_attention", attend)


def by_cudnn(q, k, v, segments, window):
    return cudnn.causal_attention(q, k, v, segments, window, scale=q.shape[-1] ** -0.5, shards=Shards())


@pytest.mark.usefixtures("cudnn_as_documented")
@pytest.mark.parametrize("shape", ["packed", "one head each"])
def test_cudnn_is_asked_for_the_definition(shape):
    compare(by_cudnn, ALL, tolerance=2e-2, dtype="bfloat16", **SHAPES[shape])


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn_as_documented")
def test_cudnn_gives_nan_to_a_row_with_more_segments_than_it_was_told_of():
    q, k, v, _, _ = arrays(tokens=66, dtype="bfloat16")
    segments = jnp.stack([jnp.arange(66) // 2, jnp.arange(66) // 3])  # 33 and 22 segments; 32 are room
    out = np.asarray(by_cudnn(q, k, v, segments, ALL), np.float32)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@pytest.mark.slow("1073741824")
@pytest.mark.parametrize("window", [ALL, 7])
def test_cudnn_is_asked_for_the_definition_of_rows_that_are_one_segment(window, monkeypatch):
    """Its arguments are passed to the implementation of jax.nn that runs here."""
    asked, attend = [], jax.nn.dot_product_attention

    def by_xla(*args, implementation, **options):
        asked.append(implementation)
        return attend(*args, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v, _, segments = arrays(tokens=48, dtype="bfloat16")
    assert not cudnn.refuses(q, k, v, None, window, scale=1.0, shards=Shards())
    got, want = by_cudnn(q, k, v, None, window), dense(*map(jnp.float32, (q, k, v)), segments, window)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)
    assert asked == ["cudnn"]
    others = [
        api.causal_attention(q, k, v, given, window, implementation="xla") for given in (None, segments)
    ]
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in others))


def test_cudnn_needs_a_gpu_from_hopper_on():
    q, k, v, _, segments = arrays(tokens=256, width=128, value=128, dtype="bfloat16")
    for more in ({}, {"capable": False}):
        assert "Hopper" in cudnn.refuses(q, k, v, segments, ALL, scale=1.0, shards=Shards(), **more)


def test_the_cudnn_stand_in_keeps_shapes_and_is_gone_afterwards(monkeypatch):
    """It takes and gives what cuDNN does, forward and backward; and it is gone afterwards."""
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "a GPU", 1))
    q, k, v, _, segments = arrays(tokens=128, width=64, value=64, dtype="bfloat16")

    def step():
        def total(q, k, v):  # a new one each time: JAX keeps what it has traced
            out = api.causal_attention(q, k, v, segments, ALL, implementation="cudnn")
            return out.astype("float32").sum()

        return jax.eval_shape(jax.grad(total, (0, 1, 2)), q, k, v)

    with stand_in.for_cudnn():
        assert [(x.shape, x.dtype) for x in step()] == [(x.shape, x.dtype) for x in (q, k, v)]
    with pytest.raises(dispatch.UnsupportedError, match="needs a GPU from Hopper on"):
        step()
