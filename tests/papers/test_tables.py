"""The table of cache dtypes, on a tiny model."""

import pytest

from benchmarks.papers import cache_dtypes
from swiftkv_jax.checkpoint.adapter import from_pretrained
from swiftkv_jax.cli.convert import CORPUS
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.distill.data.loader import DataConfig, evaluation_batches
from swiftkv_jax.text.tokenizer import load_tokenizer


@pytest.mark.slow
def test_weights_in_8_bits_cost_the_demos_teacher_little():
    """At most 0.002 nats a token in int8, and 0.01 in e4m3, on text that it was not trained on."""
    data = DataConfig(
        sources=(str(CORPUS),), seq_len=256, batch_size=4, long_documents="fill", split="held_out"
    )
    batches = evaluation_batches(data, load_tokenizer(DEMO / "teacher"), 2)
    ways = ("auto", "int8", "fp8")
    models = [from_pretrained(DEMO / "teacher", dtype="float32", quantization=how) for how in ways]
    rows = cache_dtypes.measure(models, batches)
    wide, int8, fp8 = (row[2] for row in rows if row[1] == "bfloat16")
    assert [row[-1] for row in rows[::3]] == ["float32", "int8", "float8_e4m3fn"]
    assert abs(int8 - wide) < 0.002 and abs(fp8 - wide) < 0.01, (wide, int8, fp8)
