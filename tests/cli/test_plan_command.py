"""`swiftkv plan`: its figures are those of analysis/flops.py and of `convert`, from config.json alone."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import made
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.analysis.flops import CHIPS, cache_bytes_per_token, flops_table
from swiftkv_jax.cli import plan, untrained
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.step import prepare
from swiftkv_jax.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "swiftkv_jax" / "configs" / "architectures" / "llama8b.json"
DEMO = str(ROOT / "demo" / "teacher")


def test_a_config_alone_gives_the_figures_of_the_table(tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(LLAMA.read_bytes())
    words = ["--split", "16", "--split", "20", "--share", "2", "--context", "4096"]
    assert plan.main([str(tmp_path), *words]) == 0
    said, error = capsys.readouterr()
    assert not error and "8.03 B parameters" in said
    config = skv.ModelConfig.from_hf(LLAMA)
    whole = cache_bytes_per_token(config)
    for split in (16, 20):
        tables = [flops_table(config, p, 4096) for p in (skv.KVPlan.swiftkv(32, split, 2), None)]
        flops, full = (sum(table[name] for name in ("kv", "qo", "mlp", "attention")) for table in tables)
        cache = cache_bytes_per_token(config, skv.KVPlan.swiftkv(32, split, 2)) / whole
        line = next(line for line in said.splitlines() if re.match(rf" +{split} ", line))
        assert line.split() == [str(split), f"{flops / full:.1%}", f"{cache:.0%}"]


def test_sequences_fit_in_the_memory_left_beside_the_weights():
    """The counts for Llama-3.1-8B follow by arithmetic that does not use the library."""
    config, chip = skv.ModelConfig.from_hf(LLAMA), CHIPS["NVIDIA H100 80GB HBM3"]
    lines = plan.fits(config, [16], (1, 4), 8192).splitlines()
    cells = next(line for line in lines if line.startswith("NVIDIA H100")).split()
    weights = 2 * 8_030_261_248  # bytes; the checkpoint's published size
    full = (0.9 * chip.memory - weights) // (2 * 2 * 8 * 128 * 32 * 8192)
    fewer = 2 * 12 * 2 * 4096 * 1024  # 4 rows' k and v in place of 16
    shared = (0.9 * chip.memory - weights + fewer) // (2 * 2 * 8 * 128 * (16 + 4) * 8192)
    assert cells[:6] == ["NVIDIA", "H100", "80GB", "HBM3", "79", "GiB"]
    assert [float(cell) for cell in cells[6:9]] == [full, full, shared]
    # The lower half runs once, the upper one in student and teacher, and backward for q, k and v alone.
    kv, qo, mlp, vocab, attention = 2 * 1024, 2 * 4096, 3 * 14336, 128256, 4 * 4096 * 8193 / 2
    layer = 2 * 4096 * (kv + qo + mlp) + attention
    backward = 16 * (layer + attention + 2 * 4096 * (kv + qo / 2)) + 2 * 4096 * vocab
    work = 48 * layer + 2 * 2 * 4096 * vocab + backward
    assert float(cells[-1]) == round(680e6 * work / (0.4 * chip.flops) / 3600) == 18
    small = next(line for line in lines if line.startswith("TPU v5 lite"))
    assert small.count("2 chips") == 3, "16 GiB are less than the weights and a tenth"


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_bytes_are_those_of_the_arrays(tmp_path, quantization):
    """Of weights as they are loaded; and of what `prepare` returns, for training."""
    folder = made.teacher(tmp_path)
    model, params = skv.from_pretrained(folder, dtype="bfloat16", quantization=quantization)
    config = dataclasses.replace(model.config, dtype="bfloat16")
    loaded = sum(x.nbytes for x in jax.tree.leaves(params))
    assert plan.weight_bytes(config, quantization=quantization) == loaded
    _, trained, frozen = prepare(model, params, skv.KVPlan.swiftkv(4, 2), "fold", "swiftkv")
    floats = sum(x.nbytes for x in jax.tree.leaves(trained))
    kept = {id(x): x.nbytes for x in jax.tree.leaves((frozen.student, frozen.teacher))}
    assert plan.training_bytes(model.config, 2, quantization) == 4 * floats + sum(kept.values())


def test_invalid_arguments_are_refused_in_a_line(tmp_path, capsys):
    raw = json.loads(LLAMA.read_text()) | {"model_type": "llama_swiftkv", "num_key_value_layers": 16}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for words, name in (
        (["nowhere"], "nowhere"),
        ([DEMO, "--split", "8"], "--split"),
        ([DEMO, "--share", "0"], "--share"),
        ([DEMO, "--context", "4096"], "--context"),
        ([DEMO, "--context", "0"], "--context"),
        ([DEMO, "--topology", "h100:1x1x1"], "--topology"),
        ([DEMO, "--splits", "4"], "--split"),
        ([DEMO, "--max-tokens", "3"], "--max-tokens"),
        ([str(tmp_path)], ""),
        ([], "MODEL"),
    ):
        assert plan.main(words) == 2
        out, error = capsys.readouterr()
        assert not out and error.count("\n") == 1 and name in error, words
    assert plan.main([str(LLAMA), "--text", str(ROOT / "README.md")]) == 2, "without weights"


def test_the_untrained_cost_is_that_of_the_student_itself(tmp_path):
    """The last split costs nothing; earlier costs follow from the converted student's logits in float64."""
    folder = made.teacher(tmp_path / "teacher")
    sources = (made.texts(tmp_path / "rows.jsonl"),)
    data = DataConfig(sources=sources, seq_len=512, batch_size=1, long_documents="fill")
    experiment = untrained.on_tokens(folder, *untrained.apart(data, tmp_path), 2048)
    with untrained.opened(experiment, load_tokenizer(folder), lambda line: None) as trial:
        trial = dataclasses.replace(trial, fit=[])  # too few tokens to fit on: "fold"
        figures = trial.by_split([2, 3], lambda line: None)
        teacher, params = trial.loaded[0]
        student = skv.to_swiftkv(teacher, params, skv.KVPlan.swiftkv(4, 2))
        wanted = [evaluated(*each, trial.held_out) for each in ((teacher, params), student)]
    (own, targets), (his, _) = wanted
    assert abs(figures[3]["gap"]) < 1e-6 and figures[3]["kl"] < 1e-6 and figures[3]["agreement"] == 1
    assert figures[2]["tokens"] == len(targets) > 100
    assert figures[2]["gap"] == pytest.approx((own - his)[np.arange(len(targets)), targets].mean(), abs=1e-5)
    assert figures[2]["kl"] == pytest.approx((np.exp(own) * (own - his)).sum(-1).mean(), rel=1e-4)
    assert figures[2]["agreement"] == pytest.approx((own.argmax(-1) == his.argmax(-1)).mean(), abs=1e-9)


def evaluated(model, params, batches) -> tuple[np.ndarray, np.ndarray]:
    """(log probabilities [n, V] float64, targets [n]) of every prediction that counts, segment by segment."""
    apply, sure, targets = jax.jit(model.apply), [], []
    for batch in batches:
        arrays = (np.asarray(x) for x in (batch.tokens, batch.segments, batch.targets))
        for tokens, segments, aims in zip(*arrays, strict=True):
            for number in range(1, segments.max() + 1):
                (at,) = np.nonzero(segments == number)
                padded = np.pad(tokens[at], (0, len(tokens) - len(at)))
                x = np.asarray(apply({"params": params}, jnp.asarray(padded[None])), np.float64)[0]
                sure.append(x[: len(at) - 1] - np.logaddexp.reduce(x[: len(at) - 1], axis=-1, keepdims=True))
                targets.append(aims[at[:-1]])
    return np.concatenate(sure), np.concatenate(targets)


def test_auto_takes_the_earliest_good_split_from_half_depth_on():
    assert untrained.chosen_split({3: 0.1, 4: 0.24, 5: 0.1, 7: 0.0}, 8) == 4
    assert untrained.chosen_split({4: 0.26, 5: 0.3, 6: 0.25}, 8) == 6
    assert untrained.chosen_split({4: 3.0, 6: 2.0}, 8) == 6, "none is good: the best"
    with pytest.raises(skv.UsageError, match="half depth"):
        untrained.chosen_split({3: 0.1}, 8)
    assert untrained.split_candidates(32) == [8, 12, 16, 20, 24, 28]
    assert untrained.split_candidates(2) == [1] and untrained.split_candidates(3) == [1, 2]
