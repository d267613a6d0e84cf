"""Metrics go to the trackers that are named, and no other is imported."""

import importlib.util
import sys
import time
from types import ModuleType

import pytest

from swiftkv_jax.distill import progress as progress_module
from swiftkv_jax.distill import trackers
from swiftkv_jax.distill.progress import Progress
from swiftkv_jax.distill.report import metrics_of


class FakeRun:
    """A run of wandb or trackio, and what it was told."""

    def __init__(self, about: dict):
        self.about, self.logged, self.finished = about, [], False

    def log(self, metrics: dict, step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


class FakeModule(ModuleType):
    """wandb or trackio, as far as it is used."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)
        self.runs: list[FakeRun] = []

    def init(self, **about) -> FakeRun:
        self.runs.append(FakeRun(about))
        return self.runs[-1]


def faked(name: str, monkeypatch) -> FakeModule:
    module = FakeModule(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_figure_of_a_run_goes_to_the_tracker_that_is_named(name, tmp_path, monkeypatch):
    module, other = faked(name, monkeypatch), {"wandb": "trackio", "trackio": "wandb"}[name]
    monkeypatch.setitem(sys.modules, other, None)  # which importing it would trip over
    trackers.check((name,))
    told = trackers.start((name,), "mine", tmp_path, {"steps": 2})
    progress = Progress(tmp_path, 2, 1, 1.0, None, told, say=lambda _line: None)
    progress.record(1, {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 8.0}, 4.0)
    progress.evaluation(1, {"kl": 0.5})
    progress.close()
    (run,) = module.runs
    about = {"project": "swiftkv-jax", "name": "mine", "config": {"steps": 2}}
    assert run.about == about | ({"dir": str(tmp_path)} if name == "wandb" else {})
    (first, step), (second, evaluated) = run.logged
    assert (first, second) == (1, 1) and evaluated == {"eval/kl": 0.5}
    assert step["loss"] == 2.0 and step["tokens_per_second"] == 2.0 and "step" not in step
    assert run.finished


def test_a_resumed_run_begins_a_new_line_after_one_that_a_kill_cut_short(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for before, kept in (("", []), ('{"step": 1}\n', [{"step": 1}]), ('{"step": 1}\n{"st', [{"step": 1}])):
        file.write_text(before)
        progress = Progress(tmp_path, 2, 1, 1.0, None, say=lambda _line: None)
        progress.evaluation(2, {"kl": 0.5})
        progress.close()
        assert "\n\n" not in file.read_text()
        assert metrics_of(tmp_path) == [*kept, {"step": 2, "eval/kl": 0.5}]


def test_a_log_tells_a_figure_of_slow_steps_every_ten_seconds(tmp_path, monkeypatch):
    """Steps of 5 s, each counted while it is waited for; the first begins after 45 s."""
    lines, clock = [], [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    progress = Progress(tmp_path, 1000, 1000, 1.0, None, say=lines.append)
    clock[0] = 45.0
    for step in range(1, 101):
        clock[0] += 4.0
        progress.say(f"step {step}/1000: 4 s so far")
        clock[0] += 1.0
        progress.record(step, {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 8.0}, 5.0)
    progress.close()
    figures = [int(line.split("/")[0].split()[1]) for line in lines if "loss 2.0000" in line]
    assert figures == [1, *range(2, 101, 2)]
    assert lines[-1].endswith("eta 75:00")


def test_a_step_is_counted_when_it_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "LATER", 0.3)
    monkeypatch.setattr(progress_module, "pause", lambda say, seconds: 0.01)
    lines = []
    progress = Progress(tmp_path, 10, 1, 1.0, None, say=lines.append)
    with progress.waiting(1):
        time.sleep(0.1)
    assert not lines
    with progress.waiting(2):
        time.sleep(0.6)
    assert len(lines) > 1
    progress.close()
