"""Every kernel x real shape x TPU generation, by the real compiler: it fits, and no pool is copied.

A block that does not fit VMEM fails here, and the compiler's message has the number of bytes.
"""

import jax
import pytest
from kernel_targets import TPUS, attention, compiled, fill

from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.paged_attention import cases as paged_cases

pytestmark = [
    pytest.mark.aot,
    # The compiler's own notes about machines that are not there, and about programs it cannot print.
    pytest.mark.filterwarnings("ignore"),
]
ATTENTION = [("paged_attention", name) for name in paged_cases.REAL]
ATTENTION += [("k_cache_attention", name) for name in k_cache_cases.REAL]
ATTENTION += [("x_cache_attention", name) for name in k_cache_cases.INPUTS_REAL]


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("kernel", "case"), ATTENTION)
@pytest.mark.parametrize("chip", TPUS)
def test_attention_compiles_and_copies_no_pool(chip, kernel, case):
    call, args, arrays = attention(kernel, case, "pallas_tpu")
    memory = compiled(TPUS[chip], call, args, arrays).memory_analysis()
    # Queries and sums spread over the heads that share a matmul take some; a copy of a pool would take more.
    assert memory.temp_size_in_bytes < size(args[1]) // 4


@pytest.mark.parametrize("case", fill_cases.REAL)
@pytest.mark.parametrize("chip", TPUS)
def test_the_fill_compiles_in_place(chip, case):
    call, args, arrays = fill(case, "pallas_tpu")
    memory = compiled(TPUS[chip], call, args, arrays, donate=(4,)).memory_analysis()
    assert memory.alias_size_in_bytes == size(args[4])
    # For v5p alone XLA copies the angles into whole lanes; the stream, the weights and the pools nowhere.
    angles = 2 * 4 * 128 * args[2].shape[0] + (1 << 16) if chip == "v5p" else 0
    assert memory.temp_size_in_bytes <= angles


def test_a_pool_that_is_not_donated_is_copied():
    """What the law above would miss if it looked at nothing: without donation there is no alias."""
    call, args, arrays = fill("llama_1b", "pallas_tpu")
    memory = compiled(TPUS["v5e"], call, args, arrays).memory_analysis()
    assert memory.alias_size_in_bytes == 0
