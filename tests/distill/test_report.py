"""A run's progress lines, and the plot, page and model card that it leaves."""

import contextlib
import dataclasses
import io
import json
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from huggingface_hub.utils import validate_repo_id
from samples_made import texts, write
from tiny_models import tiny
from tokenizers_made import make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.analysis.flops import cache_bytes_per_token
from swiftkv_jax.common import progress
from swiftkv_jax.distill import loop, report
from swiftkv_jax.distill.config import Experiment, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.progress import Progress

CONFIG = skv.ModelConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
PHASES = (
    "reading the tokenizer of",
    "reading the data in",
    "reading the weights",
    "making the student",
    "fitting keys and values by least squares on",
    "compiling the step",
    "compiling and evaluating held-out rows",
    "exporting to",
)


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


class Run(NamedTuple):
    out: Path
    said: list[str]
    printed: str
    result: loop.Result


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory) -> Run:
    out, said = tmp_path_factory.mktemp("run") / "small", []
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        result = loop.train(experiment, out, say=said.append)
    return Run(out, said, printed.getvalue(), result)


def test_every_phase_is_announced_before_it_begins(run):
    out, said = run.out, run.said
    places = [next(i for i, line in enumerate(said) if line.startswith(phase)) for phase in PHASES]
    assert places == sorted(places)
    assert said[places[-1]] == f"exporting to {out / 'export'} ..."


def test_a_custom_say_receives_every_progress_line(run):
    """The progress line too; nothing is printed."""
    assert run.printed == "" and any(line.startswith("step 4/4  loss ") for line in run.said)
    assert any(line.startswith("eval 4  at") for line in run.said)


def test_a_long_task_is_reported_repeatedly_until_it_is_done(monkeypatch):
    monkeypatch.setattr(progress, "_LOGGED", 0.001)
    said, enough = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if sum(each.startswith("loading: 0 of 2, ") for each in said) > 1:
            enough.set()

    with progress.working(say, "loading") as doing:
        assert said[0] == "loading ..."
        assert [each for each in doing.counted("ab") if enough.wait(60)] == ["a", "b"]
    count = len(said)
    assert all(line.endswith(" s so far") for line in said[1:])
    assert threading.active_count() < 50 and not any(t.name == "working" for t in threading.enumerate())
    assert len(said) == count


class Terminal(io.StringIO):
    """A stdout that says it is a terminal, and what stands on it line by line."""

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return [line.rpartition("\x1b[K")[2] for line in self.getvalue().split("\n")]


STEP = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 8.0}


def test_on_a_terminal_lines_that_pass_replace_each_other_and_others_stay(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert progress.pause(progress.show, 99.0) < 2 == progress.pause(print, 9.0) < progress.pause(print, 99.0)
    with progress.working(progress.show, "loading") as doing:
        assert terminal.lines == ["loading ..."] and list(doing.counted("ab")) == ["a", "b"]
    assert terminal.lines == ["loading: 0.0 s", ""]
    told = Progress(tmp_path, 4, 1, 1.0, None)
    for step in (1, 2):
        told.record(step, STEP, 1.0)
    progress.show("saved")
    assert terminal.lines[1:] == ["saved", ""] and "step 1/4" in terminal.getvalue()
    told.close()


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()], ids=["on a terminal", "in a log"])
def test_a_long_step_is_counted_in_seconds(terminal, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdout", terminal)
    for name in ("LIVE", "_LOGGED"):
        monkeypatch.setattr(progress, name, 0.001)
    told, shown = Progress(tmp_path, 4, 10, 1.0, None), threading.Event()
    usual = told.say
    monkeypatch.setattr(told, "say", lambda line: (usual(line), shown.set()))
    with told.waiting(3):
        assert shown.wait(60)
    assert "step 3/4: 0 s so far" in terminal.getvalue()
    told.close()


def test_slow_training_steps_are_reported_more_often_than_every_ten(monkeypatch, tmp_path):
    said, clock = [], [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    told = Progress(tmp_path, 40, 10, 1.0, None, say=said.append)
    for step, seconds in enumerate([0.1] * 20 + [39.0] * 3 + [0.1] * 3, 1):
        clock[0] += seconds
        told.record(step, STEP, seconds)
    assert [line.split("/")[0] for line in said] == [f"step {n}" for n in (10, 20, 21, 22, 23)]
    told.close()


def test_the_report_says_what_was_trained_and_how_good_it_is(run, experiment):
    out, result = run.out, run.result
    page = (out / "report.md").read_text()
    cache = cache_bytes_per_token(CONFIG, skv.KVPlan.swiftkv(4, 2, 2)) / cache_bytes_per_token(CONFIG)
    assert cache == 0.75 and "| cache bytes per token | 75% of the teacher's |" in page
    assert (
        "| prompt tokens run | 2 of 4 layers |" in page
        and "| AcrossKV | up to 2 layers share a row |" in page
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert f"| loss | {steps[0]['loss']:.4f} at first, {steps[-1]['loss']:.4f} at last |" in page
    assert f"| tokens that counted | {sum(row['tokens'] for row in steps):,.0f} |" in page
    for length in (8, 24):
        figures = [
            f"{value:.4f}" for name, value in result.evaluation.items() if name.startswith(f"{length}/")
        ]
        assert f"| {length} | {' | '.join(figures)} |" in page
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG") and "](loss.png)" in page


def test_a_step_done_again_after_a_kill_counts_once(tmp_path):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval/kl": 1.0}]
    lines += [{"step": 2, "loss": 1.5}, {"step": 3, "loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "lo')
    found = report.metrics_of(tmp_path)
    assert [row["loss"] for row in found if "loss" in row] == [3.0, 1.5, 1.0]
    assert [row["step"] for row in found if "eval/kl" in row] == [2]


def test_the_card_is_one_that_the_hub_reads(run, experiment):
    """The card passes huggingface_hub's offline rules; the service of `ModelCard.validate` is not asked."""
    out = run.out
    card = ModelCard.load(out / "export" / "README.md")
    assert ModelCardData(**metadata_load(out / "export" / "README.md")).to_dict() == card.data.to_dict()
    assert card.data.library_name == "swiftkv-jax" and card.data.license == "apache-2.0", "as the teacher's"
    assert card.data.base_model is None, "a folder here is no model of the hub"
    assert card.data.pipeline_tag == "text-generation" and set(card.data.tags) == {
        "swiftkv",
        "jax",
        "distillation",
    }
    assert "75% of the teacher's" in card.text and "swiftkv serve" in card.text
    student, _ = skv.from_pretrained(out / "export")
    named = dataclasses.replace(
        experiment,
        model="acme/tiny",
        data=dataclasses.replace(
            experiment.data, sources=("hf://some/set:hard[test]@v1", *experiment.data.sources)
        ),
    )
    card = ModelCard(report.card(named, student, {"kl": 0.5}, None))
    assert card.data.base_model == "acme/tiny" and card.data.datasets == ["some/set"]
    for name in (card.data.base_model, *card.data.datasets):
        validate_repo_id(name)
    assert "license" not in card.data.to_dict() and "| 0.5000 |" in card.text


def test_a_teachers_card_in_any_state_is_no_harm(tmp_path):
    for text in ("", "---\n: [\n---\n", "\x00", "---\nlicense: 3\n---\n"):
        (tmp_path / "README.md").write_text(text)
        assert report.license_of(tmp_path) is None
    assert report.license_of(None) is None and report.license_of(tmp_path / "x.gguf") is None
