"""`benchmarks.kernels`: its arithmetic by hand, a table of one case, and what is written without a device."""

import dataclasses

from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.paged_attention import cases as paged_cases

MIB = 2**20


def test_the_least_work_of_a_case_by_hand():
    """Llama-3.1-8B reads 64 x 8192 tokens of 2 x 1024 numbers; Llama-2-7B half a cache, and W_KV."""
    paged = paged_cases.REAL["llama_8b"]
    assert (paged.flops, paged.bytes) == (64 * 8192 * 32 * 4 * 128, 64 * 8192 * 2 * 1024 * 2)
    window = dataclasses.replace(paged, window=100, queries=3)
    assert window.flops == 64 * 300 * 32 * 4 * 128
    assert dataclasses.replace(paged, lengths=(5,), queries=3).flops == (3 + 4 + 5) * 32 * 4 * 128
    assert window.bytes == 64 * 102 * 2 * 1024 * 2
    scaled = dataclasses.replace(paged, stored="int8")
    assert scaled.bytes == 64 * 8192 * 8 * (2 * 128 + 8)
    assert k_cache_cases.REAL["llama2_7b"].bytes == 16 * 8192 * 4096 * 2 + 32 * MIB
    fill = fill_cases.REAL["llama_8b"]
    assert fill.flops == 2 * 8192 * 4096 * 16 * 2048
    assert fill.bytes == 2 * (8192 * 4096 + 16 * 2048 * 4096 + 8192 * 16 * 2048)
