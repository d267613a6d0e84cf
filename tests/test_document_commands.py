"""The commands of README and docs that make students run, on a tiny teacher and with little data."""

import importlib
import importlib.util
import json
import lzma
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import Code, code
from tiny_models import tiny
from tokenizers_made import CHATML, make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax import convert
from swiftkv_jax.cli import distil, plan
from swiftkv_jax.distill import main as training
from swiftkv_jax.distill import pair
from swiftkv_jax.distill.config import load_experiment

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += [ROOT / "demo" / "README.md", ROOT / "launch" / "README.md"]
SETTINGS = (
    "eval_lengths=() evaluation_batches=1 evaluate_every=0 steps=1 dtype=float32 optimizer.accumulate=1 "
    "data.batch_size=1 data.piece_lengths=() data.seq_len=24 data.sources=('text.jsonl',) data.mask=all "
    "evaluation.batch_size=1 evaluation.piece_lengths=() evaluation.seq_len=24 "
    "evaluation.sources=('text.jsonl',) evaluation.mask=all"
)
# Arguments appended to each command; of a repeated flag the last one counts.
SMALLER = {
    "swiftkv plan": "--max-tokens 600",
    "swiftkv distil": "--split 2 --length 24 --steps 1 --set plan.init_tokens=400 --set evaluation_batches=1",
    "swiftkv convert": "--split 2 --tokens 400 --length 24 --text text.jsonl",
    "swiftkv_jax.distill.pair": "--tokens 400 --length 24",
    "swiftkv_jax.slim": "--text text.jsonl",
    "swiftkv_jax.compare": "--text text.jsonl --prompts 4 --length 24 --rounds 0 --few",
}
RUNS: dict[str, Callable[[list[str]], int]] = {
    "swiftkv plan": plan.main,
    "swiftkv distil": distil.main,
    "swiftkv train": training.main,
    "swiftkv convert": convert.main,
    "swiftkv_jax.distill.pair": pair.main,
    "swiftkv_jax.slim": lambda words: importlib.import_module("swiftkv_jax.slim.__main__").main(words),
    "swiftkv_jax.compare": lambda words: importlib.import_module("swiftkv_jax.compare.__main__").main(words),
}
NAMES = {"train.py": "swiftkv train", "swiftkv_jax.convert": "swiftkv convert"}
# Words of the documents for what is tiny here.
WORDS = {
    "MODEL": "demo/teacher",
    "DIR": "demo/teacher",
    "FILE": "text.jsonl",
    "data/*.jsonl": "more.jsonl",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "demo/teacher",
    "meta-llama/Llama-2-7b-hf": "multi_head",
    "runs/mha_teacher/export": "multi_head",
    "self://prompts.jsonl?max_tokens=512": "self://prompts.jsonl?max_tokens=4",
}
VALUES = {"--keep": "0,2", "--train": "1", "--auxiliary": "small"}


def named(command: Code) -> tuple[str, list[str]] | None:
    """(which of `RUNS`, its words) of a command that makes a student or plans one here and now; sound is for
    tests/slim/test_slim_encoders.py."""
    program, *words = shlex.split(command.text)
    if {"--compile-only", "--audio"} & {*words} or program not in ("swiftkv", "python") or not words:
        return None
    if program == "swiftkv":
        name, given = f"swiftkv {words[0]}", words[1:]
    else:
        name, *given = words[1:] if words[0] == "-m" else words
    name = NAMES.get(name, name)
    return (name, given) if name in RUNS and given and given != ["--fields"] else None


FOUND = [
    each
    for path in DOCUMENTS
    for each in code(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    if each.kind == "shell" and named(each)
]


def smaller(name: str, words: list[str]) -> list[str]:
    """The words of a command, with tiny models and little data."""
    words = [WORDS.get(word, word) for word in words]
    for flag, value in VALUES.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if name != "swiftkv train":
        return [*words, *SMALLER[name].split()]
    e, settings = load_experiment(words[words.index("--config") + 1]), SETTINGS.split()
    settings += ["model=demo/teacher"] if e.model else []
    settings += ["plan.split=2", "plan.init_tokens=400"] if e.plan.split else []
    if e.predict is not None:
        settings += ["predict.keep=(0,2)" if e.predict.keep else "predict.auxiliary=small"]
        settings += ["predict.init_tokens=400"]
    return [*words, *(word for setting in settings for word in ("--set", setting))]


def save(folder: Path, layers: int = 4, kv_heads: int = 1) -> None:
    config = skv.ModelConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=128,
    )
    skv.save_pretrained(make_tokenizer(folder, CHATML), *tiny(config, skv.KVPlan.standard(layers)))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The models and data that the documents speak of."""
    here = tmp_path_factory.mktemp("place")
    save(here / "demo" / "teacher")
    save(here / "small", layers=2)
    save(here / "multi_head", kv_heads=2)
    rows = [
        {"text": f"the cat {i} sat on the mat and the dog sat on log {i * 7 % 11}. " * 4} for i in range(800)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (here / "text.jsonl").write_text("".join(lines[:400]))
    (here / "more.jsonl").write_text("".join(lines[400:]))
    prompts = [{"prompt": f"the cat {i}"} for i in range(400)]
    (here / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (here / "demo" / "corpus.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode()))
    (here / "configs").symlink_to(ROOT / "configs")
    return here


def test_every_kind_of_command_stands_in_the_documents():
    assert {found[0] for each in FOUND if (found := named(each))} >= set(RUNS) - {
        "swiftkv convert",
        "swiftkv train",
    }


@pytest.mark.parametrize("command", FOUND, ids=str)
def test_a_command_of_the_documents_runs(command, place, tmp_path, monkeypatch, capsys):
    if "tensorboard" in command.text and importlib.util.find_spec("tensorboardX") is None:
        pytest.skip("tensorboardX is not installed")
    for entry in place.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    name, words = named(command) or pytest.fail("unreachable")
    assert RUNS[name](smaller(name, words)) == 0, capsys.readouterr().err
