"""The papers' tables: of FLOPs against the printed figures, of cache dtypes on a tiny model."""

import jax
import numpy as np
import pytest
from tiny_models import PLAIN, tiny

from benchmarks.papers import cache_dtypes, flops
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.scan import forward
from swiftkv_jax.distill.data.loader import Batch

# Llama-3.1-70B, 128K tokens: operation -> its figures in the order of ROWS.
TABLE_1 = {
    "vocab": (4.3, 4.3, 4.3, 4.3),
    "kv": (2.6, 2.6, 2.6, 1.7),
    "qo": (22, 16, 11, 11),
    "mlp": (113, 85, 56, 56),
    "attention": (160, 120, 80, 80),
    "total": (302, 228, 154, 153),
    "relative": (100, 75.5, 51.0, 50.7),
}
BLOG_2 = {
    "vocab": (4.29, 4.29, 4.29),
    "q": (10.7, 8.05, 5.37),
    "k": (1.34, 1.34, 1.34),
    "v": (1.34, 1.34, 1.34),
    "o": (10.7, 8.05, 5.37),
    "mlp": (113, 84.6, 56.4),
    "attention": (160, 120, 80),
    "total": (301, 228, 154),
    "relative": (100, 75.5, 51.1),
}
ROWS = ["baseline", "25% SwiftKV", "50% SwiftKV", "50% SwiftKV, 4-way AcrossKV"]
LAST_DIGIT = {
    "kv": 0.1,
    "qo": 0.6,
    "mlp": 0.6,
    "total": 1.0,
    "relative": 0.12,
}  # the paper prints 2.68 as 2.6


def test_both_tables_of_flops_are_those_printed(capsys):
    assert flops.main(["configs/architectures/llama70b.json", "--printed"]) == 0
    for text, printed in zip(capsys.readouterr().out.split("\n\n"), (TABLE_1, BLOG_2), strict=True):
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
        found = {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}
        for operation, figures in printed.items():
            for row, figure in zip(ROWS, figures, strict=False):
                got = float(found[row][operation].removesuffix(" %"))
                assert got == pytest.approx(figure, abs=LAST_DIGIT.get(operation, 0.05)), (row, operation)


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
    for _, dtype, *quality, size, saved in rows[3:]:
        loose = 1e-3 if dtype == "bfloat16" else 0.1
        np.testing.assert_allclose(quality, exact, rtol=0, atol=loose)
        one = 2 * (2 * 12 if dtype == "bfloat16" else 12 + 4)  # bytes of keys or values of two heads of 12
        assert size == 3 * 2 * one, saved
    kls = [row[3] for row in rows[:3]]
    assert 0 <= kls[0] < kls[2] < kls[1]  # bfloat16, int8, float8
