"""The engine's safe programs, those of `--kernels xla`, for GPUs that have no kernel of their own,
compiled: no weight is copied or converted, no pool either."""

import pytest
from kernel_targets import mesh_of
from test_engine_programs import (
    CONFIG,
    CONTEXT,
    DECODE_BYTES,
    LANES,
    PLANS,
    copied_weights,
    executed,
    on,
    programs,
    text_of,
)

from swiftkv_jax.kernels.paged_attention.xla import ONE_TURN_BYTES

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]

COMPUTED = {"t4": "float16", "a100": "bfloat16", "l4": "bfloat16", "b200": "bfloat16"}
WIDE = 2 * LANES * CONTEXT * CONFIG.num_kv_heads * CONFIG.head_dim  # bytes of a layer's keys in float16
HEAD = 4 * CONFIG.vocab_size * CONFIG.hidden_size  # bytes of the output head in float32


def compiled(chip: str, program: str, dtype: str, rows: str):
    """(memory analysis, text of the optimised program, parameters, cache)."""
    made = programs("h100", PLANS["swiftkv"], rows, attention="xla_one_turn", dtype=dtype)
    function, static, traced = made[program]
    mesh = mesh_of(f"{chip}:1x1x1")
    return *text_of(function, static, on(mesh, traced), mesh), *traced[:2]


@pytest.mark.parametrize("rows", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("program", ["decode", "run_any"])
@pytest.mark.parametrize("chip", COMPUTED)
def test_a_safe_program_copies_no_weight_and_has_no_loop_of_unknown_length(chip, program, rows):
    """Decoding takes up to 0.16 GiB on a B200, and less elsewhere. For a T4 alone XLA widens 8-bit keys, or
    values, of a whole layer before it multiplies them."""
    dtype = COMPUTED[chip]
    memory, hlo, params, cache = compiled(chip, program, dtype, rows or dtype)
    assert not copied_weights(hlo, params) and not copied_weights(hlo, cache.stores)
    assert memory.alias_size_in_bytes >= cache.nbytes
    most = 2 * DECODE_BYTES if program == "decode" else 1.2 * ONE_TURN_BYTES
    assert memory.temp_size_in_bytes < most + (WIDE if chip == "t4" and rows else 0)
    *_, loops = executed(hlo)
    assert loops == [program != "decode"]  # its steps, or the turns over the blocks


def test_a_t4_converts_bfloat16_weights_to_float32():
    """It multiplies no bfloat16: hence float16 above."""
    memory, *_ = compiled("t4", "decode", "bfloat16", "bfloat16")
    assert memory.temp_size_in_bytes > 0.9 * HEAD
