"""The Hopper kernels at real shapes, by the compiler for H100: no spilled register with jax 0.10 and few with
jax 0.11, no copy of a pool."""

import re

import jax
import pytest
from kernel_targets import FILL, KERNELS, compiled, compiled_on_hopper, pools, shapes, size
from kernel_targets import HOPPER as CHIP

from swiftkv_jax.kernels.fused_kv_fill import pallas_gpu as fill
from swiftkv_jax.kernels.k_cache_attention import pallas_gpu as k_cache
from swiftkv_jax.kernels.paged_attention import pallas_gpu as paged

HOPPER = {
    "paged_attention": paged.refuses,
    "k_cache_attention": k_cache.refuses,
    "x_cache_attention": k_cache.refuses_inputs,
    FILL: fill.refuses,
}
# The real cases that each kernel does not refuse; by name, since asking takes two seconds.
CASES = {
    "paged_attention": "llama_8b llama_8b_int8 llama_8b_float8 llama_8b_few llama_8b_page128 llama_8b_window "
    "llama_8b_chunks llama_8b_mixed llama_8b_mixed_int8 llama2_7b llama_1b qwen_0.5b width80 width96 "
    "width256",
    "k_cache_attention": "llama2_7b llama2_7b_rotated llama2_7b_int8 llama2_7b_float8 "
    "llama2_7b_rotated_int8 llama2_7b_rotated_float8 llama2_7b_chunk whisper_small no_rope_int8 width256",
    "x_cache_attention": "whisper_small t5_3b",
    FILL: " ".join(KERNELS[FILL]),
}
SUPPORTED = [(kernel, case) for kernel, names in CASES.items() for case in names.split()]

# Bytes that a thread spills: with 8-bit rows, addresses that do not change from page to page.
SPILLED = {"k_cache_attention": 148 if jax.__version_info__ >= (0, 11) else 104}

pytestmark = pytest.mark.aot


def refused(kernel: str, case: str) -> str:
    args, arrays = shapes(kernel, case)
    return HOPPER[kernel](*args, **arrays, **KERNELS[kernel][case].options)


@pytest.mark.parametrize("kernel", CASES)
def test_hopper_kernels_support_these_cases_and_no_other(kernel):
    assert {case for case in KERNELS[kernel] if not refused(kernel, case)} == set(CASES[kernel].split())


@pytest.mark.parametrize(("kernel", "case"), SUPPORTED)
def test_compiles_for_hopper(kernel, case):
    memory, said = compiled_on_hopper(kernel, case)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and max(int(count) for pair in spills for count in pair) <= SPILLED.get(kernel, 0)
    assert "serialized" not in said
    pool = size(pools(kernel, case))
    assert memory["alias"] == (pool if kernel == FILL else 0)
    # Temporary memory: a fill keeps 1 / rms and what is alive, a number a token; attention, the sums of the
    # shares.
    assert memory["temp"] < pool // (1000 if kernel == FILL else 8)


@pytest.mark.parametrize("case", ["llama_8b", "llama_8b_int8", "llama_8b_few", "llama2_7b", "qwen_0.5b"])
@pytest.mark.filterwarnings("ignore")
def test_xla_reads_the_rows_of_single_queries_where_they_lie(case):
    """Scores in float32 and weights in bfloat16: no copy of keys or of values."""
    program = compiled(CHIP, "paged_attention", case, implementation="xla_one_turn")
    one = KERNELS["paged_attention"][case]
    scores = len(one.lengths) * one.heads * one.held * one.page
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * (4 + 2) * scores
