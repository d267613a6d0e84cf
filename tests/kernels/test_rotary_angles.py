"""Rotary angles: C++ and XLA against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.kernels.rotary_angles import api, native_cpu

NEEDS_COMPILER = pytest.mark.skipif(bool(native_cpu.refuses()), reason="needs a C++ compiler")
BY = ["xla", pytest.param("native_cpu", marks=NEEDS_COMPILER)]
FREQUENCY = 500000.0 ** -(jnp.arange(12, dtype=jnp.float32) / 12)


def exact(position, factor):
    """In float64, of the same float32 products."""
    angle = np.float64(np.float32(position)[..., None] * np.asarray(FREQUENCY))
    return np.cos(angle) * factor, np.sin(angle) * factor


@pytest.mark.parametrize("implementation", BY)
@pytest.mark.parametrize("shape", [(), (1,), (57,), (3, 41)])
def test_angles_are_those_of_float64(implementation, shape):
    position = np.random.default_rng(0).integers(0, 131072, shape)
    run = functools.partial(api.rotary_angles, factor=1.25, implementation=implementation)
    for got, want in zip(jax.jit(run)(jnp.array(position), FREQUENCY), exact(position, 1.25), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(got), want, atol=3e-7)


@NEEDS_COMPILER
def test_under_vmap_and_beside_a_gradient():
    """Rows one by one, in a function of which something else is differentiated."""
    position = jnp.arange(12).reshape(3, 4)

    def loss(implementation, x):
        rows = jax.vmap(lambda p: api.rotary_angles(p, FREQUENCY, implementation=implementation)[0])(position)
        return (x * rows).sum()

    got, want = (jax.jit(jax.grad(functools.partial(loss, by)))(1.0) for by in ("native_cpu", "xla"))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@NEEDS_COMPILER
def test_no_angle_is_computed_twice():
    """In a compiled program of several rotations the cosines are one call."""

    def rotations(x, position):
        cos, sin = api.rotary_angles(position, FREQUENCY)
        for _ in range(3):
            x = (x * cos - x[:, ::-1] * sin) @ jnp.ones((12, 12))
        return x

    program = jax.jit(rotations).lower(jnp.ones((40, 12)), jnp.arange(40)).compile().as_text()
    assert program is not None and program.count('custom_call_target="swiftkv_rotary_angles"') == 1
    assert "cosine(" not in program
