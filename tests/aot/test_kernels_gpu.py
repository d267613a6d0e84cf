"""The Hopper kernels at real shapes, by the compiler for H100: no spilled register, no copy of a pool."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from swiftkv_jax.kernels.paged_attention import cases, pallas_gpu

HERE = Path(__file__).parent
SUPPORTED = [
    name
    for name, case in cases.REAL.items()
    if not pallas_gpu.refuses(*case.shapes()[0], **case.shapes()[1], **case.options)
]

pytestmark = pytest.mark.aot


def test_what_is_supported():
    assert {"llama_8b", "llama_8b_few", "llama_8b_window", "llama_8b_mixed", "llama2_7b"} <= set(SUPPORTED)


@pytest.mark.parametrize("case", SUPPORTED)
def test_paged_attention_compiles_for_hopper(case):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    command = [sys.executable, str(HERE / "kernel_on_hopper.py"), case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    out = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", out)
    assert spills and set(spills) == {("0", "0")}
    assert "serialized" not in out
    memory = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    pool = cases.REAL[case].shapes()[0][1]
    assert memory["temp"] < jax.numpy.dtype(pool.dtype).itemsize * pool.size // 8
