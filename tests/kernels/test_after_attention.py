"""What a layer does after its attention: C++ and XLA against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.after_attention import api, native_cpu

EPS = 1e-5
JOINT = "gate_up_proj"
SHAPES = {  # N, D, F
    "the_demo": (192, 192, 512),
    "odd_heads_and_half_a_strip": (37, 96, 160),
    "one_vector": (16, 16, 16),
    "deeper_than_a_block": (520, 64, 784),
}


def layer(shape, bias=False, joint=True, seed=0):
    """Random parameters of a layer."""
    n, d, f = shape
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.array(rng.standard_normal(shape) / shape[0] ** 0.5, jnp.float32)

    def weight(*shape):
        return {"kernel": normal(*shape)} | ({"bias": normal(*shape[1:])} if bias else {})

    p = {"o_proj": weight(n, d), "post_norm": 1 + normal(d), "down_proj": weight(f, d)}
    return p | ({JOINT: weight(d, 2, f)} if joint else {"gate_proj": weight(d, f), "up_proj": weight(d, f)})


def streams(tokens, shape, seed=1):
    """x and mixed, some gates large enough to saturate."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.array(rng.standard_normal((tokens, width)) * 3, jnp.float32) for width in shape[1::-1])


def exact(x, mixed, p):
    """In float64, by the formulas."""
    x, mixed, p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, mixed, p))

    def linear(h, p):
        return np.tensordot(h, p["kernel"], 1) + p.get("bias", 0)

    x = x + linear(mixed, p["o_proj"])
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * p["post_norm"]
    gate, up = (
        np.moveaxis(linear(h, p[JOINT]), -2, 0)
        if JOINT in p
        else (linear(h, p[n]) for n in ("gate_proj", "up_proj"))
    )
    with np.errstate(over="ignore"):  # 1 / inf is right
        return x + linear(gate / (1 + np.exp(-gate)) * up, p["down_proj"])


def run(implementation, *args):
    return np.asarray(
        jax.jit(functools.partial(api.after_attention, eps=EPS, implementation=implementation))(*args)
    )


NEEDS_COMPILER = pytest.mark.skipif(
    bool(native_cpu.refuses(*streams(64, SHAPES["the_demo"]), layer(SHAPES["the_demo"]))),
    reason="needs a C++ compiler",
)
BY = ["xla", pytest.param("native_cpu", marks=NEEDS_COMPILER)]


@pytest.mark.parametrize("implementation", BY)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [48, 64, 101, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_float64s(shape, tokens, bias, implementation):
    p, (x, mixed) = layer(shape, bias), streams(tokens, shape)
    want = exact(x, mixed, p)
    np.testing.assert_allclose(run(implementation, x, mixed, p), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("implementation", BY)
def test_streams_so_small_that_the_norms_epsilon_counts(implementation):
    shape = SHAPES["the_demo"]
    p, (x, mixed) = layer(shape), (1e-3 * a for a in streams(64, shape))
    want = exact(x, mixed, p)
    np.testing.assert_allclose(run(implementation, x, mixed, p), want, atol=1e-5 * np.abs(want).max())


@NEEDS_COMPILER
@pytest.mark.slow
def test_narrower_vectors(narrow, monkeypatch):
    monkeypatch.setattr(native_cpu, "_TARGET", f"after_attention_{narrow}")
    for shape in SHAPES.values():
        p, (x, mixed) = layer(shape, bias=True), streams(101, shape)
        want = exact(x, mixed, p)
        np.testing.assert_allclose(run("native_cpu", x, mixed, p), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("shape", [(5,), (2, 7), (64,), ()])
def test_any_batch_and_projections_apart(shape):
    """Where C++ refuses, the definition runs: prompts, training, one token."""
    p, (x, mixed) = layer((12, 10, 6), joint=False), streams(64, (12, 10, 6))
    count = int(np.prod(shape))
    x, mixed = (a[:count].reshape(*shape, -1) for a in (x, mixed))
    want = exact(x, mixed, p)
    np.testing.assert_allclose(run(None, x, mixed, p), want, atol=1e-5 * np.abs(want).max())


@NEEDS_COMPILER
def test_a_token_does_not_depend_on_the_others():
    """Bit by bit, wherever it stands and however many there are; a NaN stays with its token."""
    shape = SHAPES["odd_heads_and_half_a_strip"]
    p, (x, mixed) = layer(shape, bias=True), streams(128, shape)
    want = run("native_cpu", x, mixed, p)
    for first, count in ((0, 48), (3, 61), (31, 97), (60, 64)):
        part = run("native_cpu", x[first : first + count], mixed[first : first + count], p)
        np.testing.assert_array_equal(part, want[first : first + count])
    for broken in ((x.at[50, 7].set(jnp.nan), mixed), (x, mixed.at[50, 36].set(jnp.nan))):
        got = run("native_cpu", *broken, p)
        assert np.isnan(got[50]).all()
        np.testing.assert_array_equal(np.delete(got, 50, 0), np.delete(want, 50, 0))


@NEEDS_COMPILER
def test_gates_far_from_zero():
    """silu neither overflows nor loses its sign: gates of 1e-30 to 1e4, of both signs."""
    n, d, f = SHAPES["the_demo"]
    p, (x, mixed) = layer((n, d, f)), streams(64, (n, d, f))
    size = jnp.logspace(-30, 4, f) * jnp.where(jnp.arange(f) % 2, 1, -1)
    p[JOINT]["kernel"] = p[JOINT]["kernel"].at[:, 0].multiply(size)
    got, want = run("native_cpu", x, mixed, p), exact(x, mixed, p)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@NEEDS_COMPILER
def test_what_cpp_refuses_is_said():
    shape = SHAPES["the_demo"]
    p, (x, mixed) = layer(shape), streams(129, shape)
    narrow = layer((16, 16, 24))
    for args, said in [
        ((x[:47], mixed[:47], p), "from 48 to 128"),
        ((x, mixed, p), "from 48 to 128"),
        ((x[None, :64], mixed[None, :64], p), r"\[T, D\]"),
        ((x[:64].astype(jnp.bfloat16), mixed[:64], p), "bfloat16: float32"),
        ((x[:64], mixed[:64], layer(shape, joint=False)), "gate_proj and up_proj apart"),
        ((*streams(64, (16, 16, 24)), narrow), r"\(24, 16\): multiples of 16"),
    ]:
        with pytest.raises(dispatch.UnsupportedError, match=said):
            api.after_attention(*args, eps=EPS, implementation="native_cpu")


def test_shapes_that_disagree_are_named():
    shape = SHAPES["the_demo"]
    p, (x, mixed) = layer(shape), streams(64, shape)
    with pytest.raises(dispatch.UnsupportedError, match=r"o_proj has \(192, 192\) where .* has \(191, 192\)"):
        api.after_attention(x, mixed[:, 1:], p, eps=EPS)
    with pytest.raises(dispatch.UnsupportedError, match=r"x has .* where mixed has"):
        api.after_attention(x, mixed[1:], p, eps=EPS)
