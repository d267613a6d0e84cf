"""Decoding on a TPU with the safe kernels: those of `--kernels xla`, and of a machine before its check."""

import re

import pytest
from kernel_targets import TPUS, mesh_of
from test_engine_programs import PLANS, copied_weights, on, programs, text_of

from swiftkv_jax.kernels.paged_attention.xla import ONE_TURN_BYTES

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("chip", TPUS)
def test_a_decode_step_with_the_safe_kernels_copies_no_weight_and_no_pool(chip):
    """Its temporary memory, 0.245 GiB, is the scores and pages of the seven sequences read together, as many
    as `ONE_TURN_BYTES` allows; `pallas_tpu` reads pages in place (test_engine_programs.py)."""
    made = programs("v5p", PLANS["swiftkv"], "bfloat16", attention="xla_one_turn")
    function, static, traced = made["decode"]
    mesh, (params, cache, *_) = mesh_of(TPUS[chip]), traced
    memory, hlo = text_of(function, static, on(mesh, traced), mesh)
    assert not re.search(r"%page_write\S* = .* custom-call\(", hlo), "XLA writes the rows, too"
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < ONE_TURN_BYTES
