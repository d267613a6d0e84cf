"""serve.py as two processes or on two devices that share one model: answers, and how processes end."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import processes_made
import pytest
from tiny_models import tiny
from tokenizers_made import make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.config.model import ModelConfig

SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "head_dim": 8}
FLAGS = ["--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--page-size", "8"]
KEPT = ("token_ids", "logprobs")
SHARED = ["--tensor-parallel-size", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A SwiftKV model of 2 kv heads, with a tokenizer."""
    config = ModelConfig(**SHAPE, num_heads=4, num_kv_heads=2, max_position_embeddings=64)
    model, params = tiny(config, skv.KVPlan.swiftkv(3, 1), seed=3)
    out = tmp_path_factory.mktemp("model") / "tiny"
    skv.save_pretrained(out, model, params, tokenizer=make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return out


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """20 of ragged lengths: greedy, sampled, with penalties, biases and log probabilities, their own too."""
    draw, kinds = np.random.default_rng(0), [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "logit_bias": {"7": 3.0}, "n": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]  # fmt: skip
    lines = [
        {"prompt_token_ids": draw.integers(5, 250, n + 1).tolist(), "max_tokens": 2 + n % 7} | kinds[n % 5]
        for n in range(20)
    ]
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "serve.py", "--model", str(folder), "--dtype", "float32", *FLAGS, *flags]


def started(folder: Path, *flags: str, count: int = 2, **more: str) -> list[subprocess.Popen]:
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # of their programs, which run for a moment
    return processes_made.start([command(folder, *flags)] * count, **quick, **more)


def rows(path: Path) -> dict[int, list]:
    """Tokens and log probabilities of the answers, by number."""
    read = map(json.loads, path.read_text().splitlines())
    return {
        row["index"]: [{k: c.get(k) for k in KEPT} for c in row.get("completions", [row])] for row in read
    }


def chosen(completion: dict) -> list[float]:
    """The log probabilities of its tokens, if they were asked for."""
    pairs = zip(completion["logprobs"] or (), completion["token_ids"], strict=False)
    return [entries[str(token)]["logprob"] for entries, token in pairs]


def agree(two: dict[int, list], one: dict[int, list]) -> None:
    """Answers of two processes or devices, and of one: equal tokens, and log probabilities within 1e-4."""
    assert len(two) == 20 and two.keys() == one.keys()
    for index, row in one.items():
        for ours, other in zip(two[index], row, strict=True):
            assert ours["token_ids"] == other["token_ids"], index
            np.testing.assert_allclose(chosen(ours), chosen(other), atol=1e-4)


@pytest.mark.slow
def test_two_processes_answer_as_one_does(folder, prompts, tmp_path):
    outputs = [tmp_path / "two.jsonl", tmp_path / "one.jsonl"]
    batch = ["--input", str(prompts), "--output"]
    both = started(folder, *SHARED, *batch, str(outputs[0]))
    alone = started(folder, "--no-distributed", *batch, str(outputs[1]), count=1)
    for done in processes_made.finish([*both, *alone]):
        assert done.returncode == 0, done.stderr[-2000:]
    agree(*map(rows, outputs))


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[list[subprocess.Popen], str, list[list[str]]]]:
    """Two processes that are ready, the address of the first, and the lines that each says on stderr."""
    pair = started(folder, *SHARED, "--http", "127.0.0.1:0", "--no-warm-up", *flags)
    lines: list[str] = []
    readers: list[threading.Thread] = []
    try:
        for line in pair[0].stderr:
            lines.append(line)
            if found := re.search(r"listening (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        said: list[list[str]] = [[], []]
        for own, process in zip(said, pair, strict=True):
            readers.append(threading.Thread(target=own.extend, args=(process.stderr,), daemon=True))
            readers[-1].start()
        for _ in range(200):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[1]}/ready") as answer:
                if answer.status == 200:
                    break
            time.sleep(0.1)
        yield pair, found[1], said
    finally:
        for process in pair:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join(10)
        for process in pair:
            process.stdout.close()
            process.stderr.close()


def ask(address: str, n: int, tokens: int = 8) -> str:
    body = {"prompt": list(range(5, 5 + n)), "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


@pytest.mark.slow
def test_a_server_of_two_processes_answers_and_ends_on_a_signal_to_the_first(folder):
    with serving(folder) as (pair, address, _):
        with ThreadPoolExecutor(6) as callers:
            first = list(callers.map(partial(ask, address), range(1, 13)))
        assert first == [ask(address, n) for n in range(1, 13)]
        pair[0].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in pair] == [0, 0]


@pytest.mark.slow
def test_when_one_is_killed_the_other_ends_within_a_minute_and_says_why(folder):
    with serving(folder) as (pair, address, (said, _)):
        ask(address, 3)
        pair[1].kill()
        with pytest.raises(OSError):
            ask(address, 5)
            ask(address, 6)
        assert pair[0].wait(60) != 0
        time.sleep(0.5)  # for who reads its stderr
        assert re.search(processes_made.LOST, "".join(said), re.M), said
