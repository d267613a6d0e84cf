"""A new user's steps: a checkpoint that transformers saved, one's own chats, and two commands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import hf_models
import httpx
import pytest
from tokenizers_made import CHATML, make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SWIFTKV = (sys.executable, "-m", "swiftkv_jax")


def swiftkv(*words: object, cwd: Path) -> str:
    """Run a command that must succeed, and return what it prints."""
    done = subprocess.run([*SWIFTKV, *map(str, words)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_qwen2_checkpoint_and_chats_become_a_served_student(tmp_path):
    """docs: from a Qwen2 folder and a jsonl of chats to an answer over HTTP, by `distil` and `serve`."""
    folder = make_tokenizer(tmp_path / "qwen2", CHATML)
    hf_models.save(
        hf_models.build("qwen2", vocab_size=300, num_hidden_layers=4, max_position_embeddings=128), folder
    )
    asked = [{"role": "user", "content": f"where sat the cat {i}?"} for i in range(400)]
    chats = [[turn, {"role": "assistant", "content": "on the mat"}] for turn in asked]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    fewer = ["--length", 64, "--steps", 2, "--set", "plan.init_tokens=4096", "--set", "evaluation_batches=1"]
    said = swiftkv(
        "distil", "qwen2", "--data", "chats.jsonl", "--out", "run", "--split", 2, *fewer, cwd=tmp_path
    )
    assert "to serve it: swiftkv serve run/export --http" in said
    command = [*SWIFTKV, "serve", "run/export", "--http", "127.0.0.1:0", "--no-warm-up"]
    server = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        told = (re.search(r"listening (http://127\.0\.0\.1:\d+) ", line) for line in server.stderr or ())
        address = next(found[1] for found in told if found)
        body = {"model": "run", "messages": chats[0][:1], "max_tokens": 4}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600)
    finally:
        server.kill()
        server.communicate()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0, answer.text
