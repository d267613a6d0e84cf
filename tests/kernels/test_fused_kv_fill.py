"""The fused fill: every implementation equals its definition, and the definition equals the model's fill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core import layers
from swiftkv_jax.kernels.common.case import TOLERANCE
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill import api, cases, pallas_gpu, pallas_tpu, reference
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools

QUICK = ("plain", "k_norm", "one_token", "nowhere", "int8")  # by default; the others are slow
SLOW = [name for name in cases.SMALL if name not in QUICK]


def exact(case: cases.Case, args) -> Pools:
    """The definition in float64, of the same rounded inputs, stored in float64 or in the same 8 bits."""
    with jax.enable_x64(True):
        x, makers, cos, sin, pools, names, live = args
        x, makers, cos, sin = jax.tree.map(lambda a: a.astype(jnp.float64), (x, makers, cos, sin))
        if pools.k_scale is None:
            pools = jax.tree.map(lambda a: a.astype(jnp.float64), pools)
        run = jax.jit(functools.partial(reference.fused_kv_fill, **case.options))
        return jax.tree.map(np.asarray, run(x, makers, cos, sin, pools, names, live))


def values(pool, scale, heads: int) -> np.ndarray:
    """The values of a pool in float64, scales applied."""
    pool = np.asarray(pool, np.float32).astype(np.float64)
    if scale is None:
        return pool
    split = pool.reshape(*pool.shape[:3], heads, -1)
    return (split * np.swapaxes(np.asarray(scale, np.float64), 2, 3)[..., None]).reshape(pool.shape)


def by_xla(case: cases.Case):
    """Through the door, by name."""
    return functools.partial(cases.call, **case.options, implementation="xla")


def interpreted(case: cases.Case, pieces: int = 1, cores: int = 1):
    """The TPU kernel on this CPU: tiles of two pages, the stream in two parts."""
    blocks = pallas_tpu.Blocks(2 * case.page, pieces, case.dim // 2, cores)
    return functools.partial(pallas_tpu.fused_kv_fill, **case.options, blocks=blocks, interpret=True)


def agree(case: cases.Case, run):
    args, _ = case.make()
    want, got, pools = exact(case, args), jax.jit(run)(*args), args[4]
    names = np.asarray(args[5])
    for name in ("k", "v"):
        scale = f"{name}_scale"
        a, b, old = (values(getattr(p, name), getattr(p, scale), case.heads) for p in (want, got, pools))
        written = np.zeros(a.shape[:2], bool)
        written[np.ix_(case.rows, names[names < case.pages])] = True
        np.testing.assert_array_equal(b[~written], old[~written])  # nothing else is touched
        error = np.abs(a - b)[written].max()
        assert error <= TOLERANCE[case.stored] * np.abs(a[written]).max(), error
        for page, count in zip(names, case.live, strict=True):
            assert page == case.pages or (b[list(case.rows), page, count:] == 0).all()


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("name", [name for name in cases.SMALL if not name.startswith("width")])
def test_xla_agrees_with_the_definition(name):
    agree(cases.SMALL[name], by_xla(cases.SMALL[name]))


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("name", cases.SMALL)
def test_tpu_kernel_agrees_with_the_definition(name):
    agree(cases.SMALL[name], interpreted(cases.SMALL[name]))


HOPPER = {
    "boundaries": cases.Case(live=(64, 1, 0), bias=True, k_norm=True),
    "nowhere": cases.Case(live=(64, 0, 0, 9)),
    "page128": cases.Case(live=(128, 70), page=128, width=128),
    "page16": cases.Case(live=(16, 3, 0, 16, 9), page=16, heads=1),
    "int8": cases.Case(live=(64, 7), stored="int8", heads=4),
    "float8": cases.Case(live=(64, 7), stored="float8_e4m3fn", heads=4, k_norm=True),
    "width256": cases.Case(live=(64, 7), width=256, heads=1, value=128),
}


@pytest.mark.slow  # needs more threads than quick tests have: see conftest.py
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_kernel_agrees_with_the_definition(name):
    """All but the layouts in registers and shared memory, which the interpreter does not know."""
    case = dataclasses.replace(HOPPER[name], dim=128, computed="bfloat16")
    case = dataclasses.replace(case, page=case.page if case.page != 32 else 64)
    case = dataclasses.replace(case, stored="bfloat16" if case.stored == "float32" else case.stored)
    assert not pallas_gpu.refuses(*case.shapes()[0])
    options = case.options | {"interpret": InterpretGPUParams()}
    agree(case, functools.partial(pallas_gpu.fused_kv_fill, **options))


def test_pieces_of_a_row_and_two_cores_agree_with_the_definition():
    case = cases.SMALL["width128"]
    agree(case, interpreted(case, pieces=2, cores=2))


@pytest.mark.slow
def test_the_gain_may_be_folded_into_the_weights():
    """RMS norm with gain, projection, norm of keys and rotation by the layers, against the fill."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    x, gain = jax.random.normal(next(keys), (16, 32)) * 3, 1 + jax.random.normal(next(keys), (32,))
    w_k, w_v = (jax.random.normal(next(keys), (2, 32, 24)) for _ in range(2))
    k_norm = jax.random.normal(next(keys), (2, 8))
    angle = jnp.arange(16)[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001])
    at = layers.Rotary((jnp.cos(angle),), (jnp.sin(angle),), (None,), ropes=(RopeConfig(),))
    h = layers.rms_norm(x, gain, 1e-5)
    want_k = [
        layers.rotate(layers.rms_norm((h @ w_k[i]).reshape(16, 3, 8), k_norm[i], 1e-5), at) for i in (0, 1)
    ]
    makers = Makers(*(reference.fold_gain(gain, w) for w in (w_k, w_v)), k_norm=k_norm)
    empty = Pool(jnp.zeros((2, 2, 8, 24)))
    k, v = api.fused_kv_fill(
        x,
        makers,
        at.cos[0],
        at.sin[0],
        (empty, empty),
        jnp.array([1, 0]),
        jnp.array([8, 8]),
        rows=(0, 1),
        eps=1e-5,
        implementation="reference",
    )
    np.testing.assert_allclose(k.data[:, ::-1].reshape(2, 16, 3, 8), jnp.stack(want_k), atol=1e-4)
    want_v = jnp.einsum("td,fde->fte", h, w_v)
    np.testing.assert_allclose(v.data[:, ::-1].reshape(2, 16, 24), want_v, atol=1e-3)
