"""Starting `train.py` again: what was compiled once is taken from the cache."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import counted
import pytest

ROOT = Path(__file__).parents[2]
# The demo's training and evaluation, with shorter rows and few steps: its programs, of smaller arrays.
FEW = (
    "steps=3 log_every=1 checkpoint_every=2 plan.init_tokens=2048 evaluation_batches=1 eval_lengths=(64,256) "
)
FEW += "answers=0 data.piece_lengths=(64,256) data.seq_len=256 evaluation.seq_len=256"


def start(cache: Path, out: Path, *flags: str) -> tuple[list[int], str]:
    """([programs that a run asked for, those in its user's cache, those compiled], what it said)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    config = str(ROOT / "configs" / "tiny.py")
    command = [sys.executable, "-c", counted.PROGRAM.format(command="train"), "--config", config, *flags]
    command += [word for field in FEW.split() for word in ("--set", field)]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return counted.counts(done.stdout), done.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, Path]:
    """The cache and the folder of a first run."""
    folder = tmp_path_factory.mktemp("first")
    (asked, found, compiled), _ = start(folder / "cache", folder / "run")
    assert asked == compiled > 20 and not found
    return folder / "cache", folder / "run"


@pytest.mark.slow
def test_a_resumed_run_compiles_nothing(first, tmp_path):
    """As if it had been killed after its second step."""
    cache, whole = first
    shutil.copytree(whole, tmp_path / "run", ignore=shutil.ignore_patterns("3", "export"))
    (asked, found, compiled), said = start(cache, tmp_path / "run", "--resume")
    assert "resumed from step 2" in said
    assert compiled == 0 and found == asked > 20, said
