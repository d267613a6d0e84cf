"""Rows that can be read but not rendered: named by their place, skipped when asked, and never at the cost of
what was trained."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from processes_made import finish, start
from samples_made import config, same, take, write
from tokenizers_made import CHATML, make_tokenizer

from swiftkv_jax.checkpoint.hf import save_pretrained
from swiftkv_jax.cli.train import main
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import progress
from swiftkv_jax.distill.data import loader as data
from swiftkv_jax.distill.data.loader import DataLoader, evaluation_batches
from swiftkv_jax.distill.data.samples import Samples
from swiftkv_jax.text.tokenizer import load_tokenizer

REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)
BAD = 77
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), REFUSING)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def turns(*pairs: str) -> list[dict]:
    return [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]


def chats(count: int = 120) -> list[dict]:
    """Line 77 has a system turn in the middle."""
    rows = [
        {"id": f"c{i}", "messages": turns("user", "a" * (i % 5 + 1), "assistant", "b" * (i % 7 + 1))}
        for i in range(1, count + 1)
    ]
    rows[BAD - 1]["messages"] = turns("user", "a", "system", "b", "assistant", "c")
    return rows


def test_a_chat_that_the_template_refuses_is_named_before_the_first_step(tmp_path, tokenizer):
    source = write(tmp_path, chats(), "chats.jsonl")
    loader = DataLoader(config(source), tokenizer)
    with pytest.raises(UsageError, match=r"chats\.jsonl:77: .*roles must alternate.*skip_bad_lines"):
        loader.check()
    loader.close()
    with pytest.raises(UsageError, match=r"chats\.jsonl:77: "):
        evaluation_batches(config(source, mask="assistant"), tokenizer)


def test_only_the_samples_that_are_met_first_are_looked_at(tmp_path, tokenizer, monkeypatch):
    """A corpus may be large: the others are named when they are met, and so are rows on disk."""
    monkeypatch.setattr(data, "_TRIED", 40)
    monkeypatch.setattr("swiftkv_jax.distill.data.sources.IN_MEMORY", 1000)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    loader = DataLoader(config(write(tmp_path, chats(), "chats.jsonl")), tokenizer)
    loader.check()
    assert len(loader.samples._cache) == 40  # they are not tokenised again
    before = dict(loader.samples._cache)
    with pytest.raises(UsageError, match=r"chats.jsonl:77"):
        while loader.epoch < 1:
            next(loader)
    assert all(loader.samples._cache[index] is sample for index, sample in before.items())
    loader.close()


def test_a_row_that_is_skipped_changes_nothing_for_the_others(tmp_path, tokenizer):
    """The batches are those of an empty text in its place, at any moment and after a resumption."""
    bad = write(tmp_path, chats(), "bad.jsonl")
    empty = [row if i != BAD - 1 else {"id": row["id"], "text": ""} for i, row in enumerate(chats())]
    want = take(DataLoader(config(write(tmp_path, empty, "empty.jsonl")), tokenizer), 200)
    loader = DataLoader(config(bad, skip_bad_lines=True), tokenizer)
    loader.check()
    assert len(loader.skipped) == 1 and "bad.jsonl:77: " in loader.skipped[0]
    got = take(loader, 25)
    state = loader.state()
    resumed = DataLoader(config(bad, skip_bad_lines=True), tokenizer)  # looks at nothing before
    resumed.restore(state)
    got += take(resumed, 175)
    assert loader.epoch == 0 < resumed.epoch and len(resumed.skipped) == 1
    for (batch, ids), (other, names) in zip(got, want, strict=True):
        assert same(batch, other) and ids == names


def test_all_rows_broken_is_an_error_that_says_why(tmp_path, tokenizer):
    rows = [{"messages": turns("user", "a", "system", "b")}] * 3
    with pytest.raises(UsageError, match=r"every sample of .* broken .*rows\.jsonl:1: .*must alternate"):
        Samples(config(write(tmp_path, rows), skip_bad_lines=True), tokenizer)


CONFIG = """
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig

config = Experiment(
    name="small", model={model!r}, plan=PlanConfig(split=1, init="fold"),
    data=DataConfig(sources=({source!r},), seq_len=32, batch_size=2),
    dtype="float32", export_dtype="float32", steps={steps}, remat=False, checkpoint_every=1000,
)
"""
STEPS = 100


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory) -> Path:
    """A config for two layers, and chats of which one is refused, not among the first steps' samples."""
    place = tmp_path_factory.mktemp("run")
    tokenizer = load_tokenizer(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    architecture = ModelConfig(vocab_size=tokenizer.vocab_size, num_layers=2, **sizes)
    model = Transformer(architecture, KVPlan.standard(2))
    save_pretrained(place / "model", model, weights.init(architecture, model.plan, jax.random.key(0)))
    for path in folder.iterdir():
        shutil.copy(path, place / "model")
    source = write(place, chats(), "chats.jsonl")
    text = CONFIG.format(model=str(place / "model"), source=source, steps=STEPS)
    (place / "small.py").write_text(text)
    return place / "small.py"


def run(file: Path, out: Path, *more: str) -> int:
    return main(["--config", str(file), "--out", str(out), *more])


def saved(out: Path) -> list[int]:
    return sorted(int(path.name) for path in (out / "checkpoints").glob("[0-9]*"))


def exported(out: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(out / "export" / "model.safetensors")


def test_a_run_that_meets_a_broken_row_saves_its_steps_and_goes_on_without_it(
    file, tmp_path, monkeypatch, capsys
):
    """Bit for bit the run that skips such rows from the start."""
    skip = ("--set", "data.skip_bad_lines=True")
    assert run(file, tmp_path / "found") == 2 and not (tmp_path / "found" / "checkpoints").exists()
    assert "chats.jsonl:77: " in capsys.readouterr().err
    monkeypatch.setattr(data, "_TRIED", 0)
    assert run(file, tmp_path / "out") == 2
    said = capsys.readouterr()
    (step,) = saved(tmp_path / "out")
    assert 0 < step < STEPS and "chats.jsonl:77: " in said.err and f"saved step {step}" in said.out + said.err
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    assert run(file, tmp_path / "out", "--resume", *skip) == 0
    said = capsys.readouterr()
    assert f"resumed from step {step}" in said.out + said.err and "skipped 1 rows" in said.out + said.err
    assert run(file, tmp_path / "whole", *skip) == 0
    got, want = exported(tmp_path / "out"), exported(tmp_path / "whole")
    assert got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("kind", ["disk", "device", "loss"])
def test_other_errors_save_too_unless_the_state_is_lost(kind, file, tmp_path, monkeypatch, capsys):
    """A full disk under the metrics; the device; and broken data after a step that gave NaN, unread yet."""
    real, following = progress.Progress.record, DataLoader.__next__

    def third(self):
        if self._step == 2:
            raise UsageError("the third batch")
        return following(self)

    def record(self, step, values, seconds):
        if step == 7 and kind != "loss":
            raise OSError(28, "No space left") if kind == "disk" else jax.errors.JaxRuntimeError("INTERNAL")
        real(self, step, values, seconds)

    monkeypatch.setattr(progress.Progress, "record", record)
    skip = ["--set", "data.skip_bad_lines=True"]
    if kind == "loss":
        monkeypatch.setattr(DataLoader, "__next__", third)
        skip += ["--set", "optimizer.learning_rate=1e30", "--set", "optimizer.warmup=0"]
    assert run(file, tmp_path / "out", *skip) in (1, 2)
    assert saved(tmp_path / "out") == ([8] if kind == "disk" else [])
    said = capsys.readouterr()
    assert ("saved step 8" in said.out + said.err) == (kind == "disk")
    if kind == "loss":
        assert "step 2: loss" in said.out + said.err and "the third batch" in said.err


# `train.py` in a process that looks at no samples before the first step; later process 0 cannot write.
PROCESS = """
import sys
from swiftkv_jax.cli import commands
from swiftkv_jax.common import processes
from swiftkv_jax.distill import progress
from swiftkv_jax.distill.data import loader as data
data._TRIED = 0
record = progress.Progress.record
def full(self, step, *more):
    if {disk} and step == 7 and processes.is_first():
        raise OSError(28, "No space left")
    record(self, step, *more)
progress.Progress.record = full
sys.exit(commands.train())
"""


def run_two(file: Path, out: Path, *more: str, disk: bool = False):
    words = [sys.executable, "-c", PROCESS.format(disk=disk), "--config", str(file), "--out", str(out), *more]
    return finish(start([words, words], PYTHONPATH=str(ROOT)))


@pytest.mark.slow
def test_two_processes_stop_after_one_step_when_one_of_them_meets_a_broken_row(file, tmp_path, monkeypatch):
    """After the step before the row's, as one process does. How a saved run goes on is tested above, and from
    two processes to one in test_loop.py."""
    monkeypatch.setattr(data, "_TRIED", 0)
    assert run(file, tmp_path / "alone") == 2
    done = run_two(file, tmp_path / "out")
    assert [process.returncode for process in done] == [2, 2], done
    assert all("chats.jsonl:77: " in process.stderr for process in done)
    (step,) = saved(tmp_path / "out")
    assert [step] == saved(tmp_path / "alone") and f"saved step {step}" in done[0].stdout


@pytest.mark.slow
def test_two_processes_save_when_one_of_them_cannot_write_its_metrics(file, tmp_path):
    zero, one = run_two(file, tmp_path / "out", "--set", "data.skip_bad_lines=True", disk=True)
    assert (zero.returncode, one.returncode) == (1, 1) and saved(tmp_path / "out") == [10]
    assert "No space left" in zero.stderr and "process 0: " in one.stderr and "saved step 10" in zero.stdout
