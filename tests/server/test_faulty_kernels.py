"""`serve.py --http` comes up with the safe kernels, whatever the candidates of its check do."""

import json
import os
import sys
import time
from pathlib import Path

import faulty_kernels
import httpx
import pytest
from http_server import ROOT, started

from swiftkv_jax.kernels.check.decide import LIMITS

HERE = Path(__file__).parent
SMALL = "--max-num-seqs 2 --max-num-batched-tokens 64 --max-model-len 128 --no-warm-up".split()


@pytest.mark.slow
def test_a_server_answers_within_the_limit_of_the_check_whatever_candidates_do(tmp_path):
    """Each of them ran, and what was wrong with it was found."""
    command = [sys.executable, str(HERE / "faulty_served.py"), str(tmp_path), str(ROOT / "serve.py")]
    command += ["--http", "127.0.0.1:0", *SMALL]
    paths, start = os.pathsep.join((str(ROOT), str(Path(faulty_kernels.__file__).parent))), time.monotonic()
    body = {"prompt": "The function", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with (
        started(command, PYTHONPATH=paths) as (_, url, said),
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8, answer.text
        assert time.monotonic() - start < LIMITS.total + 10
        metrics = client.get("/metrics").text
    assert any(line.startswith("checking kernels on this a GPU, once") for line in said)
    assert 'decode="xla_one_turn"' in metrics and 'how="checked on a GPU in' in metrics
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert found["names"] == {"decode": "xla_one_turn", "chunk": "xla_one_turn"}
    lines = {name.removeprefix("decode: "): line for name, line in found["results"].items()}
    assert lines.keys() == {"xla_one_turn", *faulty_kernels.FAULTY} and lines["xla_one_turn"]["right"]
    assert all(not line.get("right") for name, line in lines.items() if name in faulty_kernels.FAULTY)
    assert lines["aborting"]["reason"].startswith("its process died: SIGABRT")
    assert lines["hanging"]["reason"].startswith("killed")
