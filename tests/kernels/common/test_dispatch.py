"""A named implementation runs or raises one line; no name is an answer by platform."""

import pytest

from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation, UnsupportedError
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.k_cache_attention.api import K_CACHE, X_CACHE
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE
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


def test_the_default_skips_implementations_that_do_not_support_the_call(monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: ("cpu", "a chip", 1))
    table = TABLE | {"native_cpu": Implementation(lambda x: None, lambda x: "this")}
    assert dispatch.call("op", table, None, (1,), {}) == ("xla", 1)


GPU_KERNELS = [(op, name) for op, table in TABLES.items() for name in table if name.startswith("pallas_gpu")]


HOPPER = ("H100 80GB HBM3", "H100 PCIe", "H200", "GH200 480GB", "H100 80GB HBM3 MIG 1g.10gb")
OTHER_GPUS = ["Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A10G", "NVIDIA L4"]
OTHER_GPUS += ["NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation", "NVIDIA B200", "NVIDIA GB200"]


@pytest.mark.parametrize(("operation", "name"), GPU_KERNELS)
@pytest.mark.parametrize(
    ("kind", "runs"), [(f"NVIDIA {name}", True) for name in HOPPER] + [(name, False) for name in OTHER_GPUS]
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
