"""The model card that a run leaves, and its metrics."""

import dataclasses
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from huggingface_hub.utils import validate_repo_id
from samples_made import texts, write
from tiny_models import sized, tiny
from tokenizers_made import make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.distill import loop, report
from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig

CONFIG = sized(300, 16, 24, 4, 2, 1, 8)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Experiment:
    folder = tmp_path_factory.mktemp("teacher")
    skv.save_pretrained(make_tokenizer(folder), *tiny(CONFIG, skv.KVPlan.standard(4)))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# A teacher\n")
    data = DataConfig(sources=(write(folder, texts(60)),), seq_len=24, batch_size=2)
    return Experiment(
        name="small",
        model=str(folder),
        plan=PlanConfig(split=2, share=2, init="least_squares", init_tokens=400),
        data=data,
        evaluation=data,
        evaluation_batches=2,
        eval_lengths=(8, 24),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        dtype="float32",
        steps=4,
        remat=False,
        evaluate_every=2,
    )


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "small"
    with loop.opened(experiment, out, say=lambda line: None) as opened:
        opened.go()
    return out


def test_a_step_done_again_after_a_kill_counts_once(tmp_path):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval/kl": 1.0}]
    lines += [{"step": 2, "loss": 1.5}, {"step": 3, "loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "lo')
    found = report.metrics_of(tmp_path)
    assert [row["loss"] for row in found if "loss" in row] == [3.0, 1.5, 1.0]
    assert [row["step"] for row in found if "eval/kl" in row] == [2]


@pytest.mark.slow
def test_the_card_is_one_that_the_hub_reads(run, experiment):
    """The card passes huggingface_hub's offline rules; the service of `ModelCard.validate` is not asked."""
    out = run
    card = ModelCard.load(out / "export" / "README.md")
    assert ModelCardData(**metadata_load(out / "export" / "README.md")).to_dict() == card.data.to_dict()
    assert card.data.library_name == "swiftkv-jax" and card.data.license == "apache-2.0", "as the teacher's"
    assert card.data.base_model is None, "a folder here is no model of the hub"
    assert card.data.pipeline_tag == "text-generation"
    assert "75% of the teacher's" in card.text
    student, _ = skv.from_pretrained(out / "export")
    sources = ("hf://some/set:hard[test]@v1", *experiment.data.sources)
    data = dataclasses.replace(experiment.data, sources=sources)
    named = dataclasses.replace(experiment, model="acme/tiny", data=data)
    card = ModelCard(report.card(report.Outcome(named, student, {"kl": 0.5}), None))
    assert card.data.base_model == "acme/tiny" and card.data.datasets == ["some/set"]
    for name in (card.data.base_model, *card.data.datasets):
        validate_repo_id(name)
    assert "license" not in card.data.to_dict() and "| 0.5000 |" in card.text


def test_a_teachers_card_in_any_state_is_no_harm(tmp_path):
    for text in ("", "---\n: [\n---\n", "\x00", "---\nlicense: 3\n---\n"):
        (tmp_path / "README.md").write_text(text)
        assert report.license_of(tmp_path) is None
    assert report.license_of(None) is None and report.license_of(tmp_path / "x.gguf") is None
