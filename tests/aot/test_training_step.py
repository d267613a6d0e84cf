"""The distillation step compiled for v5p: attention's scores stay on the chip, and a context fits its chips.

Llama-3.1-8B's widths, of which 2 layers where bytes are counted; a batch of configs/llama8b.py over 16 chips.
"""

import dataclasses
import functools

import pytest
from kernel_targets import TPUS

from swiftkv_jax.analysis import flops, hlo
from swiftkv_jax.distill.compile_only import compile_step, topology
from swiftkv_jax.distill.config import PlanConfig, load_experiment

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("ignore")]


@functools.cache
def two_layers(attention: str | None, where: str = TPUS["v5p"]):
    """(compiled step, its text) of 2 layers with one below the split, 4 rows of 8192 tokens on 4 chips."""
    whole = load_experiment("llama8b")
    experiment = dataclasses.replace(
        whole,
        architecture=dataclasses.replace(whole.architecture, num_layers=2, windows=()),
        plan=PlanConfig(split=1),
        data=dataclasses.replace(whole.data, batch_size=4),
        attention=attention,
    )
    made, text, _, _ = compile_step(experiment, topology(where)[1])
    return made, text


def test_splash_moves_at_most_half_the_bytes():
    """The bytes are XLA's count, which is too low: it takes the inside of xla.py's loops over blocks once."""
    ours, plain = (two_layers(name)[0].cost_analysis()["bytes accessed"] for name in ("splash", None))
    assert ours <= plain / 2, (ours, plain)


def test_splash_is_what_runs_and_no_scores_reach_memory():
    _, text = two_layers("splash")
    for kernel in ("splash_mqa_fwd", "splash_mqa_dkv"):
        assert kernel in text
    assert "8192,8192]" not in text and ",512,8192]" not in text
    assert ",512,8192]" in two_layers(None)[1], "what the line above would miss if it looked at nothing"


def test_no_chunk_of_logits_gathers_the_output_head():
    """Nor the slopes of all devices: with both in each of 16 chunks, this step moved 86.3 GB, now 53.5."""
    made, text = two_layers("splash")
    assert made.cost_analysis()["bytes accessed"] < hlo.bytes_moved(text) < 60e9


def test_no_product_of_the_output_head_reads_it_in_float32():
    """JAX's own gradient of float32 logits does: on an H100 at half the speed, and 118 GB a step for 114."""
    _, text = two_layers("cudnn", "h100:1x1x4")
    assert " bf16[4096,128256]" in text and " f32[4096,128256]" not in text


def test_a_context_of_131072_tokens_fits():
    experiment = dataclasses.replace(load_experiment("llama8b_128k"), attention="splash")
    made, text, _, mesh = compile_step(experiment, topology("v5p:4x4x4")[1])
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "context": 16, "tensor": 1}
    memory = made.memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert used - memory.alias_size_in_bytes < flops.CHIPS["TPU v5"].memory
    assert "splash_mqa_fwd" in text and "131072,131072]" not in text


def test_with_cudnn_no_scores_are_counted_on_hopper():
    """The stand-in for cuDNN moves whole arrays, at least once forward and once backward in each layer."""
    with_cudnn, without = (hlo.bytes_moved(two_layers(name, "h100:1x1x4")[1]) for name in ("cudnn", None))
    row = 8192 * 32 * 128 * 2
    assert 2 * (4 + 9) * row < with_cudnn < without - 4 * 32 * 8192 * 8192
