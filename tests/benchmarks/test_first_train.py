"""`benchmarks.first_train`: a kernel that attends across documents is not right, and every line is told."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import first_train
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.causal_attention.reference import causal_attention
from swiftkv_jax.kernels.common.dispatch import Implementation

ROOT = Path(__file__).parents[2]


def across(q, k, v, segments, window, **options):
    """Without a look at where documents end."""
    return causal_attention(q, k, v, jnp.ones_like(segments), window, **options)


def measured(attention: str, documents: int) -> dict:
    parts = first_train.train("tiny", attention, documents, remat=False)
    return {key: value for part in parts for key, value in part.items()}


@pytest.mark.slow
def test_attention_across_documents_is_found(monkeypatch):
    monkeypatch.setitem(CAUSAL_ATTENTION, "across", Implementation(across))
    for documents, right in ((1, True), (8, False)):
        lines = {
            f"step: {name}, packed": measured(name, documents) for name in ("xla", "across", "reference")
        }
        assert first_train.is_right(lines, "step: reference, packed", "reference")
        assert first_train.is_right(lines, "step: across, packed", "across") == right
    assert first_train.is_right({}, "step: across, packed", "across") is None


@pytest.mark.slow
def test_the_command_prints_every_measurement_including_a_failed_kernel(tmp_path):
    command = [sys.executable, "-m", "benchmarks.first_train", "--shape", "tiny", "--minutes", "4"]
    command += ["--output", str(tmp_path), "--attention", "xla", "cudnn"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=400)
    lines = json.loads((tmp_path / "first_train_tiny.json").read_text())["lines"]
    steps = {name: line for name, line in lines.items() if name.startswith("step: ")}
    assert len(steps) == 8
    for name, line in steps.items():  # cuDNN's is not for a CPU
        assert line["status"] == ("done" if "xla" in name else "failed"), (name, line)
    text = (tmp_path / "first_train_tiny.md").read_text()
    assert text.count("| yes |") == 4 and all(name in text for name in steps)
