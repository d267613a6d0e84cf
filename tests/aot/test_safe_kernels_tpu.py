"""Decoding on a v5p with the safe kernels: those of `--kernels xla`, and of a machine before its check."""

import re

import pytest
from test_engine_programs import compiled, copied_weights

from swiftkv_jax.kernels.paged_attention.xla import ONE_TURN_BYTES

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


def test_a_decode_step_with_the_safe_kernels_on_a_v5p_copies_no_weight_and_no_pool():
    """Its temporary memory, 0.245 GiB, is the scores and pages of the seven sequences read together, as many
    as `ONE_TURN_BYTES` allows; `pallas_tpu` reads pages in place (test_engine_programs.py)."""
    memory, hlo, params, cache = compiled("v5p", "swiftkv", "bfloat16", "decode", "xla_one_turn")
    assert not re.search(r"%page_write\S* = .* custom-call\(", hlo), "XLA writes the rows, too"
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < ONE_TURN_BYTES
