"""The commands of README and docs, on tiny models and with little data: students, servers, benchmarks."""

import contextlib
import importlib
import importlib.util
import json
import lzma
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import encoder_models
import httpx
import huggingface_hub
import jax
import pytest
import transformers
from documents import ROOT, Code, run_by
from tiny_models import tiny
from tokenizers_made import CHATML, make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.cli import commands, convert, distil, plan, push, slim
from swiftkv_jax.cli import train as training
from swiftkv_jax.distill.config import load_experiment

pytestmark = pytest.mark.slow
FOUND = run_by("tests/test_document_commands.py")
SERVE = str(ROOT / "serve.py")
SERVER = "http://127.0.0.1:8000"  # as the documents have it
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
    "swiftkv convert": "--tokens 400 --length 24 --text text.jsonl",
    "swiftkv slim": "--text text.jsonl",
    "benchmarks.papers.slim_threshold": "--text text.jsonl",
    "benchmarks.papers.compare": "--text text.jsonl --prompts 4 --length 24 --rounds 0 --few",
    "benchmarks.latency": "--lengths 24 --rounds 1 --decode-rounds 1",
    "benchmarks.throughput": "--workloads 24:3 --budgets 0.5 --budget-workload 24:3 --requests 2 --rounds 1 "
    "--max-num-seqs 2 --page-size 16 --output results",
    "benchmarks.papers.flops": "",
    "benchmarks.papers.cache_dtypes": "--text text.jsonl --length 24 --tokens 48 --output dtypes.json",
    "benchmarks.peers": "--prompts 2 --lengths 4 9 --outputs 3 --rounds 1 --threads 1 --output results",
    "benchmarks.serving": "--scale 1 --lengths 20 --output-len 4 --load 20 --ratios 0 --dataset talks.json "
    "--rates 1x --budgets 1 --num-prompts 2 --rounds 1 --num-warmups 0 --no-warm-up --max-num-seqs 2 "
    "--page-size 16 --output results",
    "benchmarks.slim_engine": "--shape tiny --layers 1 --workload 24:3 --requests 2 --chunk 32 --rounds 1 "
    "--output results",
    "serve": "--http 127.0.0.1:0 --no-warm-up --max-num-seqs 2 --max-num-batched-tokens 32",
    "swiftkv push": "",
}


def module(name: str) -> Callable[[list[str]], int]:
    """Run `python -m name` in this process; some read their words from `sys.argv` alone."""

    def run(words: list[str]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *words])
            package = (ROOT / name.replace(".", "/")).is_dir()
            return importlib.import_module(f"{name}.__main__" if package else name).main() or 0

    return run


RUNS: dict[str, Callable[[list[str]], int]] = {
    "swiftkv plan": plan.main,
    "swiftkv distil": distil.main,
    "swiftkv train": training.main,
    "swiftkv convert": convert.main,
    "swiftkv push": push.main,
    "swiftkv slim": lambda words: slim.main(commands.expand_model_argument("slim", words)),
}
MODULES = (
    "benchmarks.papers.slim_threshold",
    "benchmarks.papers.compare",
    "benchmarks.latency",
)
MODULES += ("benchmarks.papers.flops", "benchmarks.papers.cache_dtypes")
MODULES += ("benchmarks.throughput", "benchmarks.peers", "benchmarks.serving", "benchmarks.slim_engine")
RUNS |= {name: module(name) for name in MODULES}
NAMES = {"train.py": "swiftkv train", "swiftkv_jax.cli.convert": "swiftkv convert"}
NAMES |= {"serve.py": "serve", "swiftkv serve": "serve"}
# Words of the documents for what is tiny here.
WORDS = {
    "MODEL": "demo/teacher",
    "DIR": "demo/teacher",
    "FILE": "text.jsonl",
    "FOLDER": "sounds",
    "OWNER/NAME": "me/student",
    "BRANCH": "second",
    "data/*.jsonl": "more.jsonl",
    "SmolLM2-135M-Instruct.Q4_1.gguf": "demo/teacher",
    "meta-llama/Llama-2-7b-hf": "multi_head",
    "runs/mha_teacher/export": "multi_head",
    "runs/demo/swiftkv/export": "student",
    "runs/llama8b/export": "student",
    "runs/mine/export": "student",
    "self://prompts.jsonl?max_tokens=512": "self://prompts.jsonl?max_tokens=4",
}
VALUES = {"--split": "2", "--keep": "0,2", "--train": "1", "--auxiliary": "small"}
# The model of commands with a certain word.
MODELS = {
    "--audio": "whisper",
    "runs/t5_slim": "t5",
    "--forms": "multi_head",
    "--tensor-parallel-size": "wide",
}


def named(command: Code) -> tuple[str, list[str]]:
    """(which of `SMALLER` and of what runs here, its words) of a command."""
    program, *words = shlex.split(command.text)
    if program == "curl":
        name, given = program, words
    elif program == "swiftkv":
        name, given = f"swiftkv {words[0]}", words[1:]
    else:
        name, *given = words[1:] if words[0] == "-m" else words
    return NAMES.get(name, name), given


def of(*names: str) -> list[Code]:
    """The commands that these names begin."""
    return [each for each in FOUND if named(each)[0] in names]


def smaller(name: str, words: list[str]) -> list[str]:
    """The words of a command, with tiny models and little data."""
    usual = {"DIR": next((model for word, model in MODELS.items() if word in words), WORDS["DIR"])}
    words = [(WORDS | usual).get(word, word) for word in words]
    for flag, value in VALUES.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if "--audio" in words:
        return words
    if name != "swiftkv train":
        return [*words, *SMALLER[name].split()]
    e, settings = load_experiment(words[words.index("--config") + 1]), SETTINGS.split()
    settings += ["model=demo/teacher"] if e.model else []
    settings += ["plan.split=2", "plan.init_tokens=400"] if e.plan.split else []
    if e.predict is not None:
        settings += ["predict.keep=(0,2)" if e.predict.keep else "predict.auxiliary=small"]
        settings += ["predict.init_tokens=400"]
    return [*words, *(word for setting in settings for word in ("--set", setting))]


def save(folder: Path, layers: int = 4, heads: int = 2, kv_heads: int = 1, split: int | None = None) -> None:
    config = skv.ModelConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=128,
    )
    made = skv.KVPlan.swiftkv(layers, split) if split else skv.KVPlan.standard(layers)
    skv.save_pretrained(make_tokenizer(folder, CHATML), *tiny(config, made))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The models and data that the documents speak of."""
    here = tmp_path_factory.mktemp("place")
    save(here / "demo" / "teacher")
    save(here / "small", layers=2)
    save(here / "multi_head", kv_heads=2)
    save(here / "wide", heads=4, kv_heads=4)
    save(here / "student", split=2)
    make_tokenizer(encoder_models.save("t5", here / "t5", vocab_size=300))
    make_tokenizer(encoder_models.save("whisper", here / "whisper"))
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(here / "whisper")
    (here / "sounds").mkdir()
    for seed in range(16):
        (here / "sounds" / f"{seed:02}.wav").write_bytes(encoder_models.wav(2.0, seed))
    (here / "speech.wav").write_bytes(encoder_models.wav(1.5))
    rows = [
        {"text": f"the cat {i} sat on the mat and the dog sat on log {i * 7 % 11}. " * 4} for i in range(800)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (here / "text.jsonl").write_text("".join(lines[:400]))
    (here / "more.jsonl").write_text("".join(lines[400:]))
    prompts = [{"prompt": f"the cat {i}"} for i in range(400)]
    (here / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    turns = [{"from": "human", "value": "the cat sat on"}, {"from": "gpt", "value": "the mat and the dog"}]
    (here / "talks.json").write_text(json.dumps([{"conversations": turns}] * 4))
    (here / "demo" / "corpus.jsonl.xz").write_bytes(lzma.compress("".join(lines).encode()))
    (here / "configs").symlink_to(ROOT / "configs")
    return here


@pytest.fixture
def inside(place, tmp_path, monkeypatch) -> Path:
    """A folder of the test's own with all of `place`, and in it."""
    for entry in place.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    # For servers in processes of their own: what one has compiled the next one finds.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(jax.config.values["jax_compilation_cache_dir"]))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def serving(*words: str) -> Iterator[str]:
    """The address of what `python *words` serves, once it is ready; a SIGTERM must end it with code 0."""
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    said = process.stderr
    assert said is not None
    lines: list[str] = []
    for line in said:
        lines.append(line)
        if line.startswith("ready"):
            break
    rest = threading.Thread(target=lambda: lines.extend(said))
    rest.start()
    try:
        found = re.search(r"listening (http://127\.0\.0\.1:\d+) ", "".join(lines))
        assert found, "".join(lines)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        rest.join()
        said.close()
    assert code == 0, "".join(lines)


@pytest.mark.parametrize("command", of(*RUNS), ids=str)
def test_a_command_of_the_documents_runs(command, inside, monkeypatch, capsys):
    if "tensorboard" in command.text and importlib.util.find_spec("tensorboardX") is None:
        pytest.skip("tensorboardX is not installed")
    name, words = named(command)
    if name == "swiftkv push":
        hub = SimpleNamespace(create_repo=lambda *_, **__: None, create_branch=lambda *_, **__: None)
        hub.upload_folder = lambda **_: SimpleNamespace(commit_url="https://huggingface.co/made/up")
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    assert RUNS[name](smaller(name, words)) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", of("serve"), ids=str)
def test_a_server_of_the_documents_answers_by_each_of_its_models(command, inside, monkeypatch):
    """On a free port instead of 8000. It ends when it is told to."""
    program = ("-m", "swiftkv_jax", "serve") if command.text.startswith("swiftkv") else (SERVE,)
    words = smaller("serve", named(command)[1])
    if "runs/slim" in words:
        flags = "--model multi_head --text text.jsonl --cache-dtype bfloat16 --out runs/slim"
        assert RUNS["swiftkv slim"](flags.split()) == 0
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    with (
        serving(*program, *words) as address,
        httpx.Client(base_url=address, timeout=300, trust_env=False) as http,
    ):
        models = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert len(models) == 1 + ("--compare" in words)
        for model in models:
            asked = {"model": model, "prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
            answer = http.post("/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("model, asked", [("demo/teacher", "completions"), ("whisper", "audio")])
def test_curl_is_answered(model, asked, inside):
    """Every curl of the documents, sent to a server of the model that it is for."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    commands = [each for each in of("curl") if asked in each.text]
    with serving(SERVE, *smaller("serve", ["--model", model])) as address:
        for command in commands:
            words = shlex.split(command.text.replace(SERVER, address))
            done = subprocess.run([*words, "--fail-with-body", "--silent"], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
            assert "response_format=text" in words or json.loads(done.stdout)
    assert len(commands) == 2


def test_every_command_of_this_file_is_in_a_document():
    assert {named(each)[0] for each in FOUND} == {*RUNS, "serve", "curl"}
