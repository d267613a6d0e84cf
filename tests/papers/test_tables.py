"""The table of cache dtypes, on a tiny model."""

import jax
import numpy as np
import pytest
from tiny_models import PLAIN, tiny

from benchmarks.papers import cache_dtypes
from swiftkv_jax.checkpoint.adapter import from_pretrained
from swiftkv_jax.cli.convert import CORPUS
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.scan import forward
from swiftkv_jax.distill.data.loader import Batch, DataConfig, evaluation_batches
from swiftkv_jax.text.tokenizer import load_tokenizer


@pytest.mark.slow
def test_cache_dtypes_are_compared_with_the_teacher_over_rows_that_are_not_rounded():
    """Quality in float64 from whole logits; positions that do not count change nothing."""
    tokens = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (2, 20), np.int32)
    mask = (np.random.default_rng(1).random((2, 20)) < 0.6).astype(np.float32)
    places = np.broadcast_to(np.arange(20, dtype=np.int32), tokens.shape)
    batch = Batch(tokens, np.roll(tokens, -1, 1), places, np.ones_like(tokens), mask)
    plans = KVPlan.standard(4), KVPlan.swiftkv(4, 2, 2)
    teacher, student = (tiny(PLAIN, plan) for plan in plans)
    student[1].update({name: teacher[1][name] for name in ("norm", "lm_head")})  # heads are common
    rows = cache_dtypes.measure([teacher, student], [batch])
    assert [row[:2] for row in rows] == [[p.description, d] for p in plans for d in cache_dtypes.DTYPES]
    p, q = (
        np.asarray(jax.nn.log_softmax(logits(*each, forward(*each, jax.numpy.asarray(tokens)))), np.float64)
        for each in (teacher, student)
    )
    nats = -np.take_along_axis(q, batch.targets[..., None], 2)[..., 0]
    kl, same = (np.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
    exact = [(x * mask).sum() / mask.sum() for x in (nats, kl, same)]
    for _, dtype, *quality, size, saved, _ in rows[3:]:
        loose = 1e-3 if dtype == "bfloat16" else 0.1
        np.testing.assert_allclose(quality, exact, rtol=0, atol=loose)
        one = 2 * (2 * 12 if dtype == "bfloat16" else 12 + 4)  # bytes of keys or values of two heads of 12
        assert size == 3 * 2 * one, saved
    kls = [row[3] for row in rows[:3]]
    assert 0 <= kls[0] < kls[2] < kls[1]  # bfloat16, int8, float8


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
