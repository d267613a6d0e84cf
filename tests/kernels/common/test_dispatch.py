"""A named implementation runs or raises one line; no name is an answer by platform."""

import logging

import jax.numpy as jnp
import pytest

from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation, UnsupportedError
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.fused_kv_fill import pallas_tpu as fill
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.k_cache_attention import pallas_tpu
from swiftkv_jax.kernels.k_cache_attention.api import K_CACHE, X_CACHE
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE
from swiftkv_jax.kernels.paged_attention import cases as paged_cases
from swiftkv_jax.kernels.paged_attention import pallas_tpu as paged
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

TABLES = {
    "paged": PAGED_ATTENTION,
    "keys": K_CACHE,
    "inputs": X_CACHE,
    "fill": FUSED_KV_FILL,
    "write": PAGE_WRITE,
    "training": CAUSAL_ATTENTION,
}
TABLE = {
    "reference": Implementation(lambda x: ("reference", x)),
    "xla": Implementation(lambda x: ("xla", x), lambda x: "" if x < 3 else f"{x}: 0, 1, 2"),
    "pallas_tpu": Implementation(lambda x: ("pallas_tpu", x)),
}


def test_a_named_implementation_runs():
    assert dispatch.call("op", TABLE, "reference", (1,), {}) == ("reference", 1)


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("fast", 1, "op has no 'fast'; it has reference, xla, pallas_tpu"),
        ("pallas_tpu", 1, "op: pallas_tpu needs a tpu, this is cpu: reference, xla"),
        ("xla", 3, "op: xla does not support 3: 0, 1, 2"),
    ],
)
def test_an_unknown_or_unsupported_implementation_raises_one_line(name, argument, message):
    with pytest.raises(UnsupportedError) as raised:
        dispatch.call("op", TABLE, name, (argument,), {})
    assert str(raised.value) == message


@pytest.mark.parametrize(("platform", "first"), [("tpu", "xla"), ("gpu", "xla"), ("cpu", "xla")])
def test_the_default_depends_on_the_platform_and_is_logged_once(platform, first, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "device", lambda: (platform, "a chip", 1))
    caplog.set_level(logging.INFO, logger=dispatch.__name__)
    operation = f"op on {platform}"
    assert [dispatch.call(operation, TABLE, None, (1,), {})[0] for _ in range(2)] == [first] * 2
    assert [r.getMessage() for r in caplog.records] == [f"{operation} runs as {first} on {platform} (a chip)"]


def test_the_default_skips_implementations_that_do_not_support_the_call(monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("cpu", "a chip", 1))
    table = TABLE | {"native_cpu": Implementation(lambda x: None, lambda x: "this")}
    assert dispatch.call("op", table, None, (1,), {}) == ("xla", 1)


@pytest.mark.parametrize(
    ("pool", "slots", "message"),
    [
        (jnp.zeros((1, 1, 32, 128), jnp.float16), 4, "float16 rows: bfloat16"),
        (jnp.zeros((1, 1, 16, 128), jnp.int8), 4, "a page of 16 tokens of int8: a multiple of 32"),
        (jnp.zeros((1, 1, 32, 128), jnp.bfloat16), 1 << 18, "bytes of scalar memory"),
    ],
)
def test_the_tpu_kernels_say_what_they_support(pool, slots, message):
    q, table = jnp.zeros((2, 1, 1, 128), jnp.bfloat16), jnp.zeros((2, slots), jnp.int32)
    assert message in pallas_tpu.refuses(q, pool, jnp.zeros((1, 128, 128)), table, None, None)


def test_8_bit_pages_of_a_wrong_size_are_refused_on_a_tpu_with_the_sizes():
    """XLA would copy all scales at every call, were a page of them not whole lanes."""
    message = "a page of 32 tokens with scales: a multiple of 128"
    args, arrays = paged_cases.SMALL["int8"].shapes()
    assert paged.refuses(*args, **arrays, **paged_cases.SMALL["int8"].options) == message
    assert fill.refuses(*fill_cases.SMALL["int8"].shapes()[0]) == message


GPU_KERNELS = [(op, name) for op, table in TABLES.items() for name in table if name.startswith("pallas_gpu")]


@pytest.mark.parametrize(("operation", "name"), GPU_KERNELS)
@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H100 PCIe", True),
        ("NVIDIA H200", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", True),
        ("Tesla T4", False),
        ("Tesla V100-SXM2-16GB", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA A10G", False),
        ("NVIDIA L4", False),
        ("NVIDIA GeForce RTX 4090", False),
        ("NVIDIA RTX 6000 Ada Generation", False),
        ("NVIDIA B200", False),
        ("NVIDIA GB200", False),
    ],
)
def test_the_hopper_kernels_refuse_other_gpus_and_say_what_runs_there(
    operation, name, kind, runs, monkeypatch
):
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", kind, 1))
    if runs:
        return dispatch.check_name("op", TABLES[operation], name)
    with pytest.raises(UnsupportedError, match=f"Hopper.*{kind}: reference, xla") as raised:
        dispatch.call("op", TABLES[operation], name, (), {})
    assert "pallas" not in str(raised.value).partition(kind)[2]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("operation", TABLES)
def test_only_xla_is_the_default_on_gpus_and_tpus(platform, operation):
    """This holds for every operation, also those that are not checked: attention in training and scoring."""
    known = [name for name in dispatch.BY_PLATFORM[platform] if name in TABLES[operation]]
    assert known and set(known) <= {"xla", "xla_one_turn"}
