"""What `make test` compiles for chips that are not here, where their compilers are: a case of each kernel.

The `test` extra brings neither libtpu nor the CUDA plugin; `make test-aot` installs both and compiles all.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from kernel_targets import TPUS, attention, compiled, fill

HERE = Path(__file__).parent
CASES = {
    "paged_attention": "llama_1b",
    "k_cache_attention": "whisper_small",
    "x_cache_attention": "whisper_small",
    "fused_kv_fill": "llama_8b_chunk",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no libtpu: `make test-aot` installs it"
)
needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no CUDA plugin: `make test-aot` installs it",
)


@needs_libtpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own notes about machines that are not there
@pytest.mark.parametrize("kernel", CASES)
def test_a_case_compiles_for_a_tpu(kernel):
    filling = kernel == "fused_kv_fill"
    call = fill(CASES[kernel], "pallas_tpu") if filling else attention(kernel, CASES[kernel], "pallas_tpu")
    memory = compiled(TPUS["v5e"], *call, donate=(4,) if filling else ()).memory_analysis()
    pools = call[1][4] if filling else call[1][1]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    assert memory.alias_size_in_bytes == (size if filling else 0)
    assert memory.temp_size_in_bytes < size // 4


@needs_plugin
@pytest.mark.parametrize("kernel", ["paged_attention", "k_cache_attention", "fused_kv_fill"])
def test_a_case_compiles_for_hopper(kernel):
    command = [sys.executable, str(HERE / "kernel_on_hopper.py"), kernel, CASES[kernel]]
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["arguments"] > 0
