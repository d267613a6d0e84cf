"""dtype "auto": the checkpoint's, or what the machine computes in; the choice is told."""

import dataclasses
import types

import jax
import pytest

from swiftkv_jax.common.errors import UsageWarning
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.engine import kernels, validate
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.validate import capability, dtype_here, usual_dtype
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.kernels.check.machine import Machine

GREEDY = {"max_num_seqs": 1, "max_model_len": 64, "kernels": "xla"}
V100, T4, A100, H100 = (7, 0), (7, 5), (8, 0), (9, 0)
B, H, F = "bfloat16", "float16", "float32"


@pytest.mark.parametrize(
    ("stored", "platform", "least", "wide", "want"),
    [
        *((stored, "cpu", None, wide, F) for stored in (B, H, F) for wide in (False, True)),
        *((stored, "gpu", least, True, stored) for stored in (B, H, F) for least in (A100, H100, None)),
        *((B, "gpu", least, False, H) for least in (V100, T4)),
        *((B, "gpu", least, True, F) for least in (V100, T4)),
        *((stored, "gpu", T4, wide, stored) for stored in (H, F) for wide in (False, True)),
        *((stored, "tpu", None, True, want) for stored, want in ((B, B), (H, B), (F, F))),
    ],
)
def test_auto_is_the_checkpoints_dtype_if_the_machine_has_it(stored, platform, least, wide, want):
    taken, why = usual_dtype(stored, platform, least, wide)
    assert (taken, bool(why)) == (want, want != stored and platform != "cpu")
    if platform == "cpu":
        assert usual_dtype(stored, platform, fits=False) == (stored, "")


def test_a_cpu_computes_in_float32_unless_its_memory_is_too_small(monkeypatch):
    llm = LLM(DEMO / "teacher", **GREEDY)
    assert llm.model.dtype == F and llm.params["embed"].dtype == F and llm.model.config.dtype == B
    size = 4 * 2 * weights.count(llm.params) // 4096
    for pages, want in ((size + 1, F), (size // 2, B)):
        monkeypatch.setattr(validate.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}.get)
        assert dtype_here(llm.model.config, llm.model.plan)[0] == want


@pytest.fixture
def t4(monkeypatch):
    monkeypatch.setattr(kernels, "this_machine", lambda: Machine("gpu", "Tesla T4", "550.54.15"))
    monkeypatch.setattr(validate, "capability", lambda: T4)


def test_kernels_are_chosen_for_that_dtype(t4, monkeypatch):
    """And an LLM takes it, in float16, which a T4 computes in, or as it is named."""
    asked = []

    def choose(config, plan, dtype, *sizes):
        asked.append(dtype)
        return kernels.choose(config, plan, dtype, *sizes, machine=machines.CPU)

    with pytest.warns(UsageWarning, match=r"float16.* 7\.5"):
        assert LLM(DEMO / "teacher", **GREEDY).params["embed"].dtype == H
    assert LLM(DEMO / "teacher", dtype=B, **GREEDY).model.dtype == B
    monkeypatch.setattr(validate, "choose", choose)
    validate.choose_kernels(DEMO / "teacher")
    validate.choose_kernels(DEMO / "teacher", B)
    assert asked == [H, B]


@pytest.mark.parametrize(("family", "want"), [("gemma", F), ("t5", F), ("llama", H), ("qwen2", H)])
def test_families_of_large_activations_take_float32_on_a_t4(t4, family, want):
    config = dataclasses.replace(ModelConfig.from_hf(DEMO / "teacher"), family=family)
    assert config.dtype == B and dtype_here(config, KVPlan.standard(config.num_layers))[0] == want


@pytest.mark.parametrize(
    ("said", "want"), [("9.0\n7.5\n", T4), ("10.0\n", (10, 0)), ("[N/A]\n", None), ("", None), (None, None)]
)
def test_the_capability_is_the_least_that_nvidia_smi_names(said, want, tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "taken", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if said is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{said}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert capability() == want


@pytest.mark.parametrize(("said", "want"), [(["7.5", "8.0"], T4), (["gfx942"], None), ([None], None)])
def test_the_capability_is_jaxs_once_it_has_its_devices(said, want, monkeypatch):
    devices = [types.SimpleNamespace(compute_capability=each) for each in said]
    monkeypatch.setattr(machines, "taken", lambda: True)
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert capability() == want
