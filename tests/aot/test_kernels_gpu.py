"""The Hopper kernels at real shapes, by the compiler for H100: no spilled register, no copy of a pool."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.fused_kv_fill import pallas_gpu as fill
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.k_cache_attention import pallas_gpu as k_cache
from swiftkv_jax.kernels.paged_attention import cases as paged_cases
from swiftkv_jax.kernels.paged_attention import pallas_gpu as paged

HERE = Path(__file__).parent
ATTENTION = {"paged_attention": (paged, paged_cases), "k_cache_attention": (k_cache, k_cache_cases)}
SUPPORTED = [
    (kernel, name)
    for kernel, (module, cases) in ATTENTION.items()
    for name, case in cases.REAL.items()
    if not module.refuses(*case.shapes()[0], **case.shapes()[1], **case.options)
]
SUPPORTED += [("fused_kv_fill", n) for n, c in fill_cases.REAL.items() if not fill.refuses(*c.shapes())]

pytestmark = pytest.mark.aot


def test_what_is_supported():
    paged_cases = "llama_8b", "llama_8b_few", "llama_8b_window", "llama_8b_mixed", "llama2_7b"
    assert {("paged_attention", name) for name in paged_cases} <= set(SUPPORTED)
    few = "llama2_7b", "llama2_7b_heads", "whisper_small"
    assert {("k_cache_attention", name) for name in few} <= set(SUPPORTED)
    assert {("fused_kv_fill", name) for name in fill_cases.REAL} <= set(SUPPORTED)


def size(tree) -> int:
    return sum(leaf.size * jax.numpy.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("kernel", "case"), SUPPORTED)
def test_compiles_for_hopper(kernel, case):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, str(HERE / "kernel_on_hopper.py"), kernel, case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    out = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", out)
    assert spills and set(spills) == {("0", "0")}
    assert "serialized" not in out
    memory = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    if kernel == "fused_kv_fill":
        pools = fill_cases.REAL[case].shapes()[4]
        assert memory["alias"] == size(pools)
        assert memory["temp"] < size(pools) // 1000  # 1 / rms and what is alive, a number a token
    else:
        assert memory["temp"] < size(ATTENTION[kernel][1].REAL[case].shapes()[0][1]) // 8
