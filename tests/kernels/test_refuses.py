"""What a kernel refuses: calls that it would compute wrongly, or that do not fit the chip. Each differs in
one thing from a call that it takes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.kernels.common.dispatch import UnsupportedError
from swiftkv_jax.kernels.fused_kv_fill import cases as fill
from swiftkv_jax.kernels.fused_kv_fill import pallas_gpu as fill_gpu
from swiftkv_jax.kernels.fused_kv_fill import pallas_tpu as fill_tpu
from swiftkv_jax.kernels.k_cache_attention import cases as keys
from swiftkv_jax.kernels.k_cache_attention import pallas_gpu as keys_gpu
from swiftkv_jax.kernels.k_cache_attention import pallas_tpu as keys_tpu
from swiftkv_jax.kernels.page_write import cases as write
from swiftkv_jax.kernels.page_write import pallas_tpu as write_tpu
from swiftkv_jax.kernels.page_write.api import page_write
from swiftkv_jax.kernels.paged_attention import cases as paged
from swiftkv_jax.kernels.paged_attention import jax_nn, pallas_gpu, pallas_tpu

PAGED, FILL, KEYS = paged.REAL["llama_8b"], fill.REAL["llama_8b"], keys.REAL["llama2_7b"]
LANES = dataclasses.replace(FILL, dim=65536, heads=1, rows=(0,))
WRITE = write.Case(sequences=((0, 3),))
SHARED = {"kv_heads": 1}  # by all query heads

REFUSED = {  # what one kernel refuses of a call, by the fields that are changed
    "paged, Hopper": (
        pallas_gpu.refuses,
        PAGED,
        [
            {"stored": "float32"}, {"width": 72}, {"width": 80} | SHARED, {"page": 32},
            {"heads": 72} | SHARED, {"heads": 56, "stored": "int8"} | SHARED,
            {"heads": 40, "page": 128} | SHARED,
        ],
    ),
    "paged, cuDNN": (
        jax_nn.refuses_cudnn,
        PAGED,
        [{"computed": "float32"}, {"width": 260}, {"value": 64}, {"window": 4096}],
    ),
    "paged, TPU": (
        pallas_tpu.refuses, dataclasses.replace(PAGED, queries=160),  # fewer pages at a time
        [{"queries": 256}, {"stored": "int8", "page": 32}],
    ),
    "fill, Hopper": (
        fill_gpu.refuses,
        fill.Case(live=(64,), page=64, dim=128, stored="bfloat16", computed="bfloat16"),
        [
            {"computed": "float32"}, {"page": 48, "live": (48,)}, {"stored": "float32"}, {"dim": 96},
            {"width": 512},
        ],
    ),
    "fill, TPU": (fill_tpu.refuses, LANES, [{"dim": 65792}, {"stored": "int8"}]),
    "keys, Hopper": (
        keys_gpu.refuses, KEYS, [{"stored": "float16"}, {"page": 32}, {"width": 80}, {"heads": 96}],
    ),
    "keys, TPU": (
        keys_tpu.refuses, KEYS,
        [{"stored": "float16"}, {"stored": "int8", "page": 16}, {"slots": 1 << 15}],
    ),
    "write, TPU": (
        write_tpu.refuses,
        WRITE,
        [
            {"page": 24}, {"page": 64, "stored": "int8"}, {"stored": "float16"}, {"heads": 1},
            {"sequences": ((0, 70_000),)}, {"page": 1024, "heads": 64},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_kernel_refuses_what_it_does_not_compute(name):
    refuses, case, changes = REFUSED[name]

    def said(change=None):
        args, arrays = (changed := dataclasses.replace(case, **(change or {}))).shapes()
        return refuses(*args, **arrays, **changed.options)

    assert not said()
    assert not [change for change in changes if not said(change)]


@pytest.mark.parametrize("kernel", [fill_tpu, fill_gpu])
def test_keys_and_values_of_a_fill_have_one_dtype(kernel):
    x, makers, cos, sin, pools, *rest = FILL.shapes()[0]
    pools = pools._replace(v=jax.ShapeDtypeStruct(pools.v.shape, jnp.int8))
    assert kernel.refuses(x, makers, cos, sin, pools, *rest)


def test_no_kernel_passes_over_scales_or_the_dtype_of_values():
    """Rows that are not 8 bits wide may have scales, and values a dtype of their own: by XLA."""
    case = dataclasses.replace(PAGED, page=128)
    (q, k, v, *rest), arrays = case.shapes()
    scales = jax.ShapeDtypeStruct((*k.shape[:2], case.kv_heads, case.page), jnp.float32)
    for one in ({"k_scale": scales}, {"v_scale": scales}):
        assert "scales" in pallas_gpu.refuses(q, k, v, *rest, **case.options, **(arrays | one))
    half = jax.ShapeDtypeStruct(v.shape, jnp.float16)
    for kernel in (pallas_gpu, pallas_tpu):
        assert not kernel.refuses(q, k, v, *rest, **case.options, **arrays)
        assert "float16" in kernel.refuses(q, k, half, *rest, **case.options, **arrays)
    (q, x, *rest), _ = keys.INPUTS_SMALL["narrow"].make()
    for refuses in (keys_gpu.refuses_inputs, keys_tpu.refuses):
        assert refuses(q, x, *rest, x_scale=jnp.ones(1))


def test_arrays_whose_sizes_do_not_fit_are_refused_by_every_operation():
    args, arrays = paged.SMALL["lengths"].make()
    (q, k, *rest), more = keys.SMALL["lengths"].make()
    x, makers, cos, sin, pools, names, live = fill.SMALL["plain"].make()[0]
    pool, new, page, slot = (case := write.SMALL["decode"]).make()[0]
    filled = functools.partial(fill.call, rows=(1, 2), eps=1e-5)
    wrong = (
        lambda: paged.call(args[0], args[1][..., :100], *args[2:], **arrays),
        lambda: paged.call(*args[:-1], jnp.zeros((6, 2), jnp.int32), **arrays),
        lambda: paged.call(*args, **arrays | {"v_scale": jnp.zeros(3)}),
        lambda: keys.call(q, k[..., :128], *rest, **more),
        lambda: filled(x, makers, cos, sin, pools, names[:2], live),
        lambda: filled(x, makers._replace(b_v=jnp.zeros(1)), cos, sin, pools, names, live),
        lambda: filled(x, makers, cos, sin, pools._replace(k_scale=jnp.zeros(1)), names, live),
        lambda: page_write(pool, new, page, slot[:1], **case.options),
        lambda: page_write(pool, new[..., :10], page, slot, **case.options),
    )
    for call in wrong:
        with pytest.raises(UnsupportedError):
            call()
