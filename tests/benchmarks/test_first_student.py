"""`benchmarks.first_student`: what stands in its table, and that it goes on without the teacher's chats."""

import json
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from benchmarks import first_student, local_task

ROOT = Path(__file__).parents[2]


def test_a_student_trains_on_the_corpus_and_on_the_chats_if_there_are_any(tmp_path):
    path = tmp_path / "chats.jsonl"
    without = first_student.experiment("model", str(path), split=15, share=2, steps=7, rows=3)
    path.write_text("")
    with_chats = first_student.experiment("model", str(path), split=15, share=2, steps=7, rows=3)
    assert with_chats.data.sources == (*without.data.sources, str(path))
    assert (without.plan.split, without.plan.share, without.steps, without.data.batch_size) == (15, 2, 7, 3)


def test_a_student_that_was_not_finished_keeps_its_stages_and_says_why():
    costs = {"gap": 0.1, "kl": 0.2, "agreement": 0.3}
    line = {
        "status": "failed",
        "reason": "took more than 60 s",
        "rewired": costs,
        "least_squares_long": costs,
    }
    told = first_student.markdown({"command": "c", "date": "d", "lines": {"student: split 15": line}})
    assert "| split 15 | rewired | 512 | 0.100 | 0.200 | 0.300 |" in told
    assert "| split 15 | least squares | 2048 | 0.100 | 0.200 | 0.300 |" in told
    assert "| split 15 | took more than 60 s |" in told


def test_without_a_number_of_steps_the_clock_ends_a_student():
    """As a signal would, and only this: the handler is the old one afterwards."""
    endless = first_student.experiment("model", "nowhere", split=15, share=1, steps=None, rows=3)
    assert endless.optimizer.schedule == "constant" and endless.steps == first_student.ENDLESS
    assert round(endless.steps * endless.optimizer.warmup) == first_student.WARM_UP

    class Run:
        """Trains until a signal comes, as `loop.Run` does."""

        def go(self):
            came = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: came.set())
            while not came.wait(0.01):
                pass
            return types.SimpleNamespace(step=3)

    before = signal.getsignal(signal.SIGTERM)
    assert first_student._until(time.monotonic(), Run()) == 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_gguf_file_given_in_parts_is_joined(tmp_path):
    parts = [tmp_path / name for name in ("xaa", "xab")]
    for part, text in zip(parts, (b"GGUF", b"more"), strict=True):
        part.write_bytes(text)
    assert first_student.joined(parts, tmp_path).read_bytes() == b"GGUFmore"
    assert first_student.joined(parts[:1], tmp_path) == parts[0]


def test_lm_eval_s_task_is_made_of_held_out_texts(tmp_path):
    folder = Path(local_task.write(tmp_path / "tasks", 5))
    (task,) = (json.loads(path.read_text()) for path in folder.glob("*.yaml"))
    texts = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text()
    rows = [json.loads(line) for line in texts.splitlines()]
    assert 3 <= len(rows) <= 5 and all(row["context"] and " " not in row["word"] for row in rows)
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'swiftkv-jax[eval]'")
    assert 0 <= local_task.ask(str(ROOT / "demo" / "teacher"), str(folder))["acc"] <= 1


@pytest.mark.soak
def test_a_teacher_writes_chats_and_its_student_is_evaluated_at_every_stage(tmp_path):
    flags = "--model demo/teacher --splits 4 --cpu --steps 2 --rows 1 --chats 2 --minutes 10 --output"
    command = [sys.executable, "-m", "benchmarks.first_student", *flags.split(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = json.loads((tmp_path / "first_student.json").read_text())["lines"]
    assert lines["chats"]["chats"] == 2 and lines["chats"]["tokens"] > 2
    made = lines["student: split 4"]
    assert made["status"] == "done" and made["steps"] == 2
    assert made["least_squares"]["kl"] < made["rewired"]["kl"] and made["distilled_long"]["kl"] < 0.1
