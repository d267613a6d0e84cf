"""The fused fill: every implementation equals its definition, and the definition equals the model's fill."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from swiftkv_jax.core import layers
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.case import TOLERANCE
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill import api, cases, pallas_gpu, pallas_tpu, reference
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools

QUICK = ("plain", "k_norm", "one_token", "nowhere", "int8")  # by default; the others are slow
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in cases.SMALL]


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


@pytest.mark.parametrize("name", NAMES)
def test_xla_agrees_with_the_definition(name):
    agree(cases.SMALL[name], by_xla(cases.SMALL[name]))


@pytest.mark.parametrize("name", NAMES)
def test_tpu_kernel_agrees_with_the_definition(name):
    agree(cases.SMALL[name], interpreted(cases.SMALL[name]))


HOPPER = {
    "one_page": cases.Case(live=(7,), rows=(1,), heads=1),
    "boundaries": cases.Case(live=(64, 1, 0), bias=True, k_norm=True),
    "nowhere": cases.Case(live=(64, 0, 0, 0, 0, 9)),
    "page128": cases.Case(live=(128, 70, 0), page=128, width=128),
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"computed": "float32"}, "a float32 stream and float32 weights: both bfloat16"),
        ({"page": 48, "live": (48,)}, "a page of 48 tokens: 16, 32, or a multiple of 64"),
        ({"stored": "float32"}, "float32 keys and float32 values: both bfloat16 or int8 or float8_e4m3fn"),
        ({"dim": 96}, "a stream 96 wide: a multiple of 64"),
        ({"width": 512}, "heads 512 wide, for 296992 bytes of shared memory: at most 232448"),
    ],
)
def test_the_hopper_kernel_says_what_it_supports(change, message):
    case = cases.Case(live=(64,), page=64, dim=128, stored="bfloat16", computed="bfloat16")
    assert pallas_gpu.refuses(*dataclasses.replace(case, **change).shapes()[0]) == message


def test_the_tpu_kernel_says_how_many_bytes_its_smallest_blocks_take():
    case = dataclasses.replace(cases.REAL["llama_8b"], dim=65792, heads=1, rows=(0,))  # 514 whole lanes
    message = "rows 128 and 128 wide, for 101777408 bytes of VMEM in the smallest blocks: at most 14260633"
    assert pallas_tpu.refuses(*case.shapes()[0]) == message
    assert not pallas_tpu.refuses(*dataclasses.replace(case, dim=65536).shapes()[0])


@pytest.mark.parametrize("kernel", [pallas_tpu, pallas_gpu])
def test_keys_and_values_have_one_dtype(kernel):
    x, makers, cos, sin, pools, *rest = cases.REAL["llama_8b"].shapes()[0]
    assert not kernel.refuses(x, makers, cos, sin, pools, *rest)
    pools = pools._replace(v=jax.ShapeDtypeStruct(pools.v.shape, jnp.int8))
    assert "bfloat16 keys and int8 values: both" in kernel.refuses(x, makers, cos, sin, pools, *rest)


def test_pieces_of_a_row_and_two_cores_agree_with_the_definition():
    case = cases.SMALL["width128"]
    agree(case, interpreted(case, pieces=2, cores=2))


@pytest.mark.slow
@settings(max_examples=4)
@given(
    live=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    heads=st.integers(1, 3),
    bias=st.booleans(),
    k_norm=st.booleans(),
    implementation=st.sampled_from([by_xla, interpreted]),
)
def test_any_shape_agrees_with_the_definition(live, heads, bias, k_norm, implementation):
    live = (8, *live)
    case = cases.Case(live=live, heads=heads, width=16, bias=bias, k_norm=k_norm, page=8, dim=32)
    agree(case, implementation(case))


@pytest.mark.slow
def test_the_gain_may_be_folded_into_the_weights():
    """RMS norm with gain, projection, norm of keys and rotation by the layers, against the fill."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    x, gain = jax.random.normal(next(keys), (16, 32)) * 3, 1 + jax.random.normal(next(keys), (32,))
    w_k, w_v = (jax.random.normal(next(keys), (2, 32, 24)) for _ in range(2))
    k_norm = jax.random.normal(next(keys), (2, 8))
    angle = jnp.arange(16)[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001])
    at = layers.Rotary(jnp.cos(angle), jnp.sin(angle))
    h = layers.rms_norm(x, gain, 1e-5)
    want_k = [
        layers.rotate(layers.rms_norm((h @ w_k[i]).reshape(16, 3, 8), k_norm[i], 1e-5), at) for i in (0, 1)
    ]
    makers = Makers(*(reference.fold_gain(gain, w) for w in (w_k, w_v)), k_norm=k_norm)
    empty = Pool(jnp.zeros((2, 2, 8, 24)))
    k, v = api.fused_kv_fill(
        x,
        makers,
        at.cos,
        at.sin,
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


def test_bad_calls_are_named():
    x, makers, cos, sin, pools, names, live = cases.SMALL["plain"].make()[0]
    call = functools.partial(cases.call, rows=(1, 2), eps=1e-5)
    with pytest.raises(dispatch.UnsupportedError, match=r"names has \(2,\) where pages_of_x has \(3,\)"):
        call(x, makers, cos, sin, pools, names[:2], live)
    for wrong in ({"k_scale": jnp.zeros(1)}, {"v": pools.v.astype(jnp.int8)}):
        with pytest.raises(dispatch.UnsupportedError, match="8-bit rows have scales"):
            call(x, makers, cos, sin, pools._replace(**wrong), names, live)
    wrong = {
        "b_v": "b_v has (1,) where rows_v has (2, 128)",
        "k_norm": "k_norm has (1,) where rows_cos has (2, 64)",
    }
    for name, message in wrong.items():
        with pytest.raises(dispatch.UnsupportedError, match=re.escape(message)):
            call(x, makers._replace(**{name: jnp.zeros(1)}), cos, sin, pools, names, live)
    *_, pools, names, live = args = cases.SMALL["int8"].make()[0]
    with pytest.raises(
        dispatch.UnsupportedError, match=r"k has \(3, 8, 8, 32\) where k_scale has \(3, 8, 32\)"
    ):
        call(*args[:4], pools._replace(k_scale=pools.k_scale[:, :, 0]), names, live)
