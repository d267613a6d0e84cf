"""A machine is recognised without JAX, by the files of its drivers and the installed packages."""

from pathlib import Path

import pytest

from swiftkv_jax.kernels.check import machine
from swiftkv_jax.kernels.check.machine import CPU, Machine, recognise


@pytest.fixture
def installed(monkeypatch):
    known = {"jax": "1", "libtpu": "1", "jax-cuda13-plugin": "1"}
    monkeypatch.setattr(machine, "versions", lambda: known)
    return known


def files(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


NVIDIA = {
    "proc__driver__nvidia__version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  "
    "Release Build\nGCC version:  gcc version 12.3.0\n",
    "proc__driver__nvidia__gpus__0000:19:00.0__information": "Model: \t\t NVIDIA H200\nIRQ: 1\n",
}
GOOGLE = {
    "sys__bus__pci__devices__0000:00:04.0__vendor": "0x1ae0\n",
    "sys__bus__pci__devices__0000:00:04.0__device": "0x0062\n",
}


def test_a_machine_is_recognised_by_its_files(tmp_path, installed):
    gpu = files(tmp_path / "gpu", **NVIDIA)
    assert recognise(gpu, {}, "") == Machine("gpu", "NVIDIA H200", "580.95.05")
    tpu = files(tmp_path / "tpu", **GOOGLE)
    assert recognise(tpu, {}, "") == Machine("tpu", "TPU v5p")
    named = {"TPU_ACCELERATOR_TYPE": "v5p-8"}
    assert recognise(tpu, named, "tpu,cpu") == Machine("tpu", "TPU v5p + v5p-8")
    container = files(tmp_path / "container", dev__accel0="")
    assert recognise(container, named, "") == Machine("tpu", "v5p-8")
    assert recognise(container, {}, "") == CPU  # some other accelerator
    assert recognise(files(tmp_path / "both", **NVIDIA, **GOOGLE), {}, "cuda").platform == "gpu"
    for platforms, environ in (("cpu", {}), ("rocm", {}), ("tpu", {}), ("", {"CUDA_VISIBLE_DEVICES": ""})):
        assert recognise(gpu, environ, platforms) == CPU
    del installed["jax-cuda13-plugin"], installed["libtpu"]
    assert recognise(gpu, {}, "") == recognise(tpu, {}, "") == CPU


def test_a_damaged_driver_file_does_not_count_as_a_gpu(tmp_path, installed):
    assert recognise(files(tmp_path, proc__driver__nvidia__version="\0"), {}, "") == CPU


def test_this_machine_is_jax_s_cpu():
    assert recognise() == CPU
