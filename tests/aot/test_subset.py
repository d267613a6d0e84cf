"""Compilation for absent chips, where their compilers are installed: a case of every kernel.

They install libtpu and the CUDA plugin where they can be had; `make test-aot` compiles every case.
"""

import importlib.util

import pytest
from kernel_targets import FILL, TPUS, compiled, compiled_on_hopper, pools, size

CASES = {
    "paged_attention": "llama_1b",
    "k_cache_attention": "whisper_small",
    "x_cache_attention": "whisper_small",
    FILL: "llama_8b_chunk",
}


def needs(module: str):
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"no {module}: `pip install -e '.[aot]'` brings it")


def in_place(kernel: str, alias: int, temp: int) -> bool:
    pool = size(pools(kernel, CASES[kernel]))
    return alias == (pool if kernel == FILL else 0) and temp < pool // 4


@pytest.mark.slow
@needs("libtpu")
@pytest.mark.filterwarnings("ignore")  # the compiler's own notes about machines that are not there
@pytest.mark.parametrize("kernel", CASES)
def test_a_case_compiles_for_a_tpu(kernel):
    memory = compiled(TPUS["v5e"], kernel, CASES[kernel], implementation="pallas_tpu").memory_analysis()
    assert in_place(kernel, memory.alias_size_in_bytes, memory.temp_size_in_bytes)


@pytest.mark.slow
@needs("jax_cuda13_plugin")
@pytest.mark.parametrize("kernel", CASES)
def test_a_case_compiles_for_hopper(kernel):
    memory, _ = compiled_on_hopper(kernel, CASES[kernel])
    assert in_place(kernel, memory["alias"], memory["temp"])
