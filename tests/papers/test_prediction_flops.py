"""Every FLOPs figure of the KV prediction paper, to the printed digits; and what is really run, by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.prediction_flops import (
    OPENELM,
    PRINTED,
    Sizes,
    baselines,
    lazy_as_run,
    pairs,
    prediction_table,
    pruned,
    pruning_as_run,
    published,
)
from swiftkv_jax.analysis import flops
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import Prediction

CONFIGS = Path(__file__).parent.parent / "published_configs"
ARCHITECTURES = Path(__file__).parents[2] / "configs" / "architectures"


def test_openelm_has_the_parameters_that_were_published():
    """The counts are those of the checkpoints: a vocabulary of 32000, and the tied embedding once."""
    counts = {"270M": 271527168, "450M": 457179136, "1.1B": 1079891456, "3B": 3036647424}
    assert {name: sizes.parameters for name, sizes in OPENELM.items()} == counts


def test_the_librarys_flops_are_those_of_each_layers_size():
    sizes, config = OPENELM["1.1B"], ModelConfig.from_hf(ARCHITECTURES / "openelm_1_1b.json")
    want = sizes.read(sizes.layers, sizes.layers, (2048 + 1) / 2) / 1e9
    assert flops.prompt_gflop(config, None, 2048) == pytest.approx(want, rel=1e-12)


def test_every_reduction_is_the_papers():
    """Every model and baseline of Tables 3 and 5 to 8, to the printed digits."""
    got = {name: published(base, auxiliary) for name, base, auxiliary, _ in pairs()}
    for large in ("1.1B", "3B"):
        got |= {f"{large}-{name}": value for name, value, _ in baselines(OPENELM[large])}
    assert {name: round(value, 2) for name, value in got.items()} == PRINTED and len(PRINTED) == 11 + 2 * 16


def test_a_layer_pruned_model_keeps_the_papers_layers():
    """Table 4."""
    _, keep = pruned(OPENELM["1.1B"], 0.75)
    assert keep == (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25, 26)
    assert pruned(OPENELM["3B"], 0.25)[1] == (0, 4, 8, 12, 16, 20, 24, 28, 32)


@pytest.mark.parametrize("tail", [1, 3])
def test_the_table_counts_what_every_token_runs(tail):
    """Added up token by token and layer by layer: the auxiliary's rows are read up to row 1 of 3."""
    base = Sizes(width=8, head_dim=2, heads=(4, 2, 4), kv_heads=(2, 1, 1), ffn=(12, 16, 20), extra=0)
    small = Sizes(width=6, head_dim=4, heads=(2, 1, 2), kv_heads=(1, 1, 2), ffn=(8, 10, 12), extra=0)
    context, total, full, step = 7, 0, 0, 0
    q_and_o = [2 * 2 * 8 * n * 2 for n in base.heads]
    kv, mlp = [2 * 2 * 8 * n * 2 for n in base.kv_heads], [3 * 2 * 8 * n for n in base.ffn]
    for token in range(context):
        layers = [
            q + k + m + 4 * (token + 1) * n * 2
            for q, k, m, n in zip(q_and_o, kv, mlp, base.heads, strict=True)
        ]
        full += sum(layers)
        step += sum(layers) if token == context - 1 else sum(layers[:2]) + kv[2]
        if token >= context - tail:
            total += sum(layers)
        else:  # one layer of the auxiliary, the keys and values of two, three maps of keys and of values
            total += 2 * 2 * 6 * 2 * 4 + 3 * 2 * 6 * 8 + 4 * (token + 1) * 2 * 4
            total += 2 * (2 * 2 * 6 * 4)
            total += sum(2 * 2 * 4 * width for width in (4, 2, 2))
    got = prediction_table(base, small, Prediction((0, 1, 1), tail), context)
    want = np.array([total, full, step]) / context / 1e9
    np.testing.assert_allclose([got["total"], got["full_depth"], got["step"]], want, rtol=1e-12)


def test_full_depth_is_the_flops_table_of_a_standard_model():
    config = ModelConfig.from_hf(CONFIGS / "meta-llama--Llama-3.1-8B-Instruct.json")
    sizes = Sizes.of(config)
    got = prediction_table(sizes, sizes, Prediction(tuple(range(32))), 1024)
    table = flops.flops_table(config, context=1024)
    assert got["full_depth"] == pytest.approx(table["total"] - table["vocab"], rel=1e-12)


@pytest.mark.parametrize("probe", [0, 1])
def test_pruning_as_it_is_run_is_counted_token_by_token(probe):
    """ceil(0.5 * 7) = 4 of 7 tokens stay; a probe reads all of them in the first layer."""
    base = Sizes(width=8, head_dim=2, heads=(4, 2), kv_heads=(2, 1), ffn=(12, 16), extra=0)
    dense = [
        2 * 8 * (2 * heads * 2 + 2 * rows * 2 + 3 * ffn) for heads, rows, ffn in ((4, 2, 12), (2, 1, 16))
    ]

    def cost(tokens, layers):
        seen = sum(range(1, tokens + 1))
        return sum(tokens * dense[i] + 4 * seen * base.heads[i] * 2 for i in range(layers))

    want = cost(7, 2) / (cost(4, 2) + cost(7, probe))
    assert pruning_as_run(base, 0.5, 7, probe) == pytest.approx(want, rel=1e-12)
    assert pruning_as_run(base, 1.0, 7) == 1.0


def test_lazy_llm_as_it_is_run_is_counted_token_by_token():
    """Of 7 tokens all run the first two of 5 layers, then ceil(7 x 0.7), ceil(7 x 0.5) and ceil(7 x 0.3)."""
    base = Sizes(
        width=8, head_dim=2, heads=(4, 2, 4, 2, 3), kv_heads=(2, 1, 2, 1, 1), ffn=(12, 16, 20, 8, 4), extra=0
    )

    def cost(left):
        out = 0
        for layer, tokens in enumerate(left):
            heads, rows, ffn = base.heads[layer], base.kv_heads[layer], base.ffn[layer]
            for token in range(tokens):
                out += 2 * 8 * (2 * heads * 2 + 2 * rows * 2 + 3 * ffn) + 4 * (token + 1) * heads * 2
        return out

    start, end = 0.8, 0.2  # at depths 0, 0.2, 0.4, 0.6, 0.8
    left = [7, 7] + [
        math.ceil(7 * (start + (end - start) * (depth - 0.3) / 0.6)) for depth in (0.4, 0.6, 0.8)
    ]
    assert left == [7, 7, 5, 4, 3]
    want = cost([7] * 5) / cost(left)
    assert lazy_as_run(base, start, end, 7) == pytest.approx(want, rel=1e-12)
    assert lazy_as_run(base, 1.0, 1.0, 7) == 1.0
