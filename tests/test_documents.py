"""The Python and shell blocks of README.md and docs/ run, in a folder where all they name is a tiny model.

Shell commands that take longer run in other files: `RUN_BY` of documents.py. `NOT_RUN` has the few that none
runs. Both, and every command between backticks, are parsed here by the program's own parser of arguments; of
training the config is loaded, with what --set changes. Of `make` the targets are looked up, of `pip install`
the extras.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import encoder_models
import httpx
import pytest
import transformers
from documents import NOT_RUN, ROOT, RUN_BY, Code, code, found, run_by, runner, why_not_run
from hub_made import Hub
from tiny_models import tiny
from tokenizers_made import CHATML, make_tokenizer

import swiftkv_jax as skv
from swiftkv_jax.cli import commands, convert, distil, plan, push, slim
from swiftkv_jax.cli import train as distill
from swiftkv_jax.core import predict
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.distill.fields import override
from swiftkv_jax.server import main as serving
from swiftkv_jax.server import ray
from swiftkv_jax.server.schema import SpeechRequest

FOUND = found()
HERE = {each.text for each in run_by("tests/test_documents.py")}
MARKS = ("slow", "soak", "aot", "ray")
SERVER = "http://127.0.0.1:8000"  # as the documents have it
TEACHER = "meta-llama/Llama-3.1-8B-Instruct"
ENCODERS = {
    "google/flan-t5-small": "t5",
    "openai/whisper-base": "whisper",
}  # tiny here
SMALLER = {"num_layers=32, split=16": "num_layers=4, split=2"}  # as deep as the tiny model is
CONFIG = skv.ModelConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what the documents speak of, by their names for it."""
    here = tmp_path_factory.mktemp("place")
    teacher, student = here / "demo" / "teacher", here / "runs" / "tiny_exit" / "export"
    plan, exiting = skv.KVPlan.swiftkv(4, 2), dataclasses.replace(CONFIG, exit_head=True)
    for folder, model in ((teacher, tiny(CONFIG, skv.KVPlan.standard(4))), (student, tiny(exiting, plan))):
        skv.save_pretrained(make_tokenizer(folder, CHATML), *model)
    base, params = tiny(CONFIG, skv.KVPlan.standard(4))
    auxiliary, kept = skv.layer_pruned(base, params, (0, 2))
    pair = skv.Predicted(base, auxiliary, skv.Prediction.nearest(4, (0, 2)))
    parts = {"base": params, "auxiliary": kept, "predictor": predict.identity(pair)}
    skv.save_pretrained(here / "runs" / "pair", pair, parts, base=teacher)
    (here / "runs" / "llama8b").symlink_to("tiny_exit")
    make_tokenizer(encoder_models.save("t5", here / "t5", vocab_size=CONFIG.vocab_size))
    make_tokenizer(encoder_models.save("whisper", here / "whisper"))
    transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(here / "whisper")
    (here / "DIR").symlink_to(teacher)
    (here / "configs").symlink_to(ROOT / "configs")
    (here / "FILE").write_text("the cat sat on the mat and the dog sat on the log\n" * 9)
    (here / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "the dog"}\n')
    return here


@pytest.fixture(scope="module")
def server(place) -> Iterator[str]:
    """The address of a `serve.py --http` that serves the tiny teacher."""
    model = ["--model", str(place / "demo" / "teacher")]
    command = [sys.executable, str(ROOT / "serve.py"), "--http", "127.0.0.1:0", "--no-warm-up", *model]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        for line in child.stderr or ():
            said += line
            if found := re.search(r"listening (http://127\.0\.0\.1:\d+) ", line):
                yield found[1]
                break
        else:
            pytest.fail(said)
    finally:
        child.kill()
        child.communicate()


def of_kind(*kinds: str) -> list[Code]:
    return [each for each in FOUND if each.kind in kinds]


MADE_UP = """Say `python -m a --b` or `make it`, never `python`.

    make one && cd two    # three
    python four.py \\
        --five '#6'

* in a list:

      $ pip install .

```python
x = 1
```
```
tree/  python
```

    lower -> upper
"""


def test_the_code_of_a_document_is_found():
    assert [(each.kind, each.text.strip()) for each in code("made-up", MADE_UP)] == [
        ("inline", "python -m a --b"),
        ("inline", "make it"),
        ("shell", "make one"),
        ("shell", "cd two"),
        ("shell", "python four.py --five '#6'"),
        ("shell", "pip install ."),
        ("python", "x = 1"),
    ]
    with pytest.raises(ValueError, match="made-up:1: no test can run 'rust'"):
        code("made-up", "```rust\nfn main() {}\n```\n")
    assert len(of_kind("python")) > 1 and len(of_kind("shell")) > 9 and len(of_kind("inline")) > 9


@pytest.mark.parametrize("document", sorted({each.document for each in of_kind("python")}))
def test_the_python_blocks_of_a_document_run_one_after_the_other(
    document, place, server, tmp_path, monkeypatch, capsys
):
    """The hub id that they name is the tiny teacher; `num_layers` and `split` follow it."""
    hub = Hub(tmp_path / "hub", monkeypatch)
    hub.publish(TEACHER, place / "demo" / "teacher")
    for name, family in ENCODERS.items():
        hub.publish(name, place / family)
    (tmp_path / "speech.wav").write_bytes(encoder_models.wav(1.5))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # transformers adds that folder
    (tmp_path / "runs").symlink_to(place / "runs")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in (each for each in of_kind("python") if each.document == document):
        text = block.text.replace(SERVER, server)
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        exec(compile("\n" * block.line + text, document, "exec"), names)
        assert "print(" not in text or capsys.readouterr().out.strip(), f"{block} prints nothing"


def test_every_shell_command_runs_in_one_test_file_or_has_a_reason():
    """The files take their commands from `run_by`. No reason and no file is one of no command."""
    shell = of_kind("shell")
    for command in shell:
        assert len(why_not_run(command)) == 1 or runner(command), f"{command}: which test runs it?"
    assert {why for each in shell for why in why_not_run(each)} == {*NOT_RUN.values()}
    assert all(run_by(file) for file in RUN_BY.values())
    for file in RUN_BY.values():
        assert f'run_by("{file}")' in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", of_kind("shell"), ids=str)
def test_a_shell_command_runs_or_at_least_is_understood(command, place, request, monkeypatch, capsys):
    monkeypatch.chdir(place)
    program, *words = shlex.split(command.text)
    if program == "curl":
        ask(words, request.getfixturevalue("server"))
    elif command.text not in HERE:
        understood(program, words, monkeypatch)
    elif words[0] == "serve.py":
        assert serving.main(words[1:]) == 0, capsys.readouterr().err
    else:
        assert importlib.import_module(words[1]).main(words[2:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", of_kind("inline"), ids=str)
def test_inline_commands_of_documents_are_parsed_by_their_programs(command, place, monkeypatch):
    """Brackets stand round what may be left out."""
    monkeypatch.chdir(place)
    program, *words = shlex.split(re.sub(r"(?<= )\[(\w+)\]", r"\1", command.text))
    understood(program, words, monkeypatch)


def ask(words: list[str], server: str) -> None:
    """Send what curl would; it must be answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    parser.add_argument("-F", action="append", default=[])
    args = parser.parse_args(words)
    if args.F:  # the teacher hears nothing: only what is sent is looked at
        form = dict(field.split("=") for field in args.F)
        sent = SpeechRequest.model_validate({name: value for name, value in form.items() if name != "file"})
        assert form["file"].startswith("@") and not sent.model_extra and "/v1/audio/tran" in args.url
        return
    headers = dict(header.split(": ") for header in args.H)
    answer = httpx.post(args.url.replace(SERVER, server), headers=headers, content=args.d, timeout=300)
    assert answer.status_code == 200, answer.text


LONGEST_DECISION = 60  # words; code is one


def decisions(text: str) -> Iterator[tuple[str, list[str], int]]:
    """(question, the first words of its points, number of words) of each decision."""
    for entry in re.findall(r"^### (.*?)(?=^##|\Z)", text, re.M | re.S):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", entry))
        words = [word for word in plain.split() if re.search(r"\w", word)]
        yield entry.splitlines()[0], re.findall(r"^- (\w+(?: again)?:?)", entry, re.M), len(words)


def test_a_decision_says_what_was_asked_measured_and_chosen_in_few_words():
    found = list(decisions((ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")))
    assert len(found) > 30
    for question, points, _ in found:
        assert points[-1] == "Look again:" and "Chosen" in points[-2], question
        assert points[0] in ("Options:", "Problem:"), question
    assert {question: words for question, _, words in found if words > LONGEST_DECISION} == {}


class Parsed(BaseException):
    """Raised in place of what a program does after it has read its arguments."""


def understood(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command without running what it starts."""
    if program in ("git", "cd"):
        assert words[0] in ("clone", "swiftkv-jax")
    elif words[:3] == ["storage", "attach"]:
        assert program == "xpk"
    elif program == "make":
        subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        if words == ["install", "jax[k8s]"]:
            return  # an extra of JAX's own
        wanted = re.fullmatch(r"(?:\.|swiftkv-jax)(?:\[(.*)\])?", words[1])
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[0] == "install" and wanted and {*(wanted[1] or "").split(","), ""} <= {*extras, ""}
    elif program == "lm_eval" or any(word.endswith(".lm_eval") for word in words):
        if importlib.util.find_spec("lm_eval") is None:
            pytest.skip("lm-eval is not installed (the `eval` extra)")
        parsed(["-m", "lm_eval", *words[words.index("--model") :]], monkeypatch)
    elif program == "swiftkv":
        name, *rest = words
        if words == ["--version"]:
            return
        assert name in commands.COMMANDS
        if not rest or rest in (["--fields"], ["--help"]):
            return
        flags = commands.expand_model_argument(name, rest)
        if name == "eval":
            return understood("lm_eval", flags, monkeypatch)
        args = parsed([f"swiftkv {name}", *flags], monkeypatch)
        if name == "train" and not args.topology:
            override(load_experiment(args.config), args.set)
    elif program == "srun":
        understood(words[0], words[1:], monkeypatch)
    elif program == "xpk":
        started = shlex.split(words[words.index("--command") + 1])
        assert words[:2] == ["workload", "create"] and started[0] == "swiftkv-train"
        understood("swiftkv", ["train", *started[1:]], monkeypatch)
    elif program == "python" and words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif program == "python" and words[:2] == ["-m", "pytest"]:
        options = argparse.ArgumentParser(exit_on_error=False)
        options.add_argument("files", nargs="+")
        options.add_argument("-m", choices=MARKS)
        options.add_argument("-k", default="")
        chosen = options.parse_args(words[2:])
        for file in chosen.files:
            tests = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
            assert any(chosen.k in test for test in tests)
    elif program == "python":
        args = parsed(words, monkeypatch)
        if words[0] == "train.py":
            override(load_experiment(args.config), args.set)
    else:
        pytest.fail(f"{program}: teach tests/test_documents.py to check it")


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The arguments as a Python program parses them; it runs no further."""
    usual = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        raise Parsed(usual(self, args, namespace))

    module = words[0] == "-m"
    name, given = (words[1], words[2:]) if module else (words[0], words[1:])
    scripts = {"train.py": distill.main, "serve.py": serving.main}
    scripts |= {"swiftkv plan": plan.main, "swiftkv distil": distil.main, "swiftkv train": distill.main}
    scripts |= {"swiftkv convert": convert.main, "swiftkv serve": serving.main}
    scripts |= {"swiftkv kernels": serving.main, "swiftkv slim": slim.main}
    scripts |= {"swiftkv replicas": ray.main, "swiftkv push": push.main}
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [name, *given])
        try:
            if name in scripts:
                scripts[name](given)
            elif module:
                spec = importlib.util.find_spec(name)
                package = spec is not None and spec.submodule_search_locations is not None
                importlib.import_module(f"{name}.__main__" if package else name).main()
            elif "argparse" in (ROOT / name).read_text(encoding="utf-8"):
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                assert not given, f"{name} takes no arguments"
                return argparse.Namespace()
        except Parsed as found:
            return found.args[0]
    pytest.fail(f"{name} did not read its arguments")
