"""Starting `serve.py --http`: a second start compiles nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import counted
import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 128 --http 127.0.0.1:0".split()


def start(cache: Path) -> int:
    """How many programs a server compiled that is ended as soon as it is warm."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", counted.PROGRAM.format(command="serve"), *SMALL]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith("all is compiled"):
                    process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            return counted.counts(process.stdout.read())[2]
        finally:
            process.kill()


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    assert start(tmp_path / "cache") > 20
    assert start(tmp_path / "cache") == 0
