"""README.md and docs/: their Python blocks run, their commands are parsed by their programs, links exist.

Everything that a block names is a tiny model here. Of training the config is loaded, with what --set changes;
of `make` the targets are looked up, of `pip install` the extras.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import encoder_models
import pytest
import transformers
import yaml
from documents import DOCUMENTS, ROOT, Code, found
from hub_made import Hub
from markdown_it import MarkdownIt
from tiny_models import WORDS, tiny
from tokenizers_made import CHATML, make_tokenizer

import swiftkv_jax as skv
from benchmarks import report
from docs import reference
from swiftkv_jax.cli import answers, commands, convert, distil, plan, push, slim, tasks
from swiftkv_jax.cli import train as distill
from swiftkv_jax.core import predict
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.distill.fields import override
from swiftkv_jax.server import main as serving
from swiftkv_jax.server import ray

FOUND = found()
PAGES = [path for path in DOCUMENTS if "benchmarks" not in path.parts]
PAGES += [ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
SERVER = "http://127.0.0.1:8000"  # as the documents have it
TEACHER = "meta-llama/Llama-3.1-8B-Instruct"
ENCODERS = {"google/flan-t5-small": "t5", "openai/whisper-base": "whisper"}  # tiny here
SMALLER = {"num_layers=32, split=16": "num_layers=4, split=2"}  # as deep as the tiny model is


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what the documents speak of, by their names for it."""
    here = tmp_path_factory.mktemp("place")
    teacher, student = here / "demo" / "teacher", here / "runs" / "tiny_exit" / "export"
    plan, exiting = skv.KVPlan.swiftkv(4, 2), dataclasses.replace(WORDS, exit_head=True)
    for folder, model in ((teacher, tiny(WORDS, skv.KVPlan.standard(4))), (student, tiny(exiting, plan))):
        skv.save_pretrained(make_tokenizer(folder, CHATML), *model)
    base, params = tiny(WORDS, skv.KVPlan.standard(4))
    auxiliary, kept = skv.layer_pruned(base, params, (0, 2))
    pair = skv.Predicted(base, auxiliary, skv.Prediction.nearest(4, (0, 2)))
    parts = {"base": params, "auxiliary": kept, "predictor": predict.identity(pair)}
    skv.save_pretrained(here / "runs" / "pair", pair, parts, base=teacher)
    (here / "runs" / "llama8b").symlink_to("tiny_exit")
    make_tokenizer(encoder_models.save("t5", here / "t5", vocab_size=WORDS.vocab_size))
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


@pytest.mark.slow("docs/api.md", "docs/comparison.md", "docs/quickstart.md", "docs/serving.md")
@pytest.mark.parametrize("document", sorted({each.document for each in FOUND if each.kind == "python"}))
def test_the_python_blocks_of_a_document_run_one_after_the_other(
    document, place, server, tmp_path, monkeypatch
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
    for block in (each for each in FOUND if each.document == document and each.kind == "python"):
        text = block.text.replace(SERVER, server)
        for old, new in SMALLER.items():
            text = text.replace(old, new)
        exec(compile("\n" * block.line + text, document, "exec"), names)


@pytest.mark.parametrize("command", [each for each in FOUND if each.kind != "python"], ids=str)
def test_a_command_is_parsed_by_its_program(command: Code, place, monkeypatch):
    """Brackets between backticks stand round what may be left out."""
    monkeypatch.chdir(place)
    text = re.sub(r"(?<= )\[(\w+)\]", r"\1", command.text) if command.kind == "inline" else command.text
    program, *words = shlex.split(text)
    understood(program, words, monkeypatch)


class Parsed(BaseException):
    """Raised in place of what a program does after it has read its arguments."""


def understood(program: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command without running what it starts."""
    if program in ("git", "cd", "curl") or words[:3] == ["storage", "attach"]:
        return
    if program == "make":
        dry_run(*words)
    elif program == "pip":
        wanted = re.fullmatch(r"(?:\.|swiftkv-jax)(?:\[(.*)\])?", words[1])
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        own = wanted and {*(wanted[1] or "").split(","), ""} <= {*extras, ""}
        assert words[0] == "install" and (own or words[1] == "jax[k8s]")
    elif program == "lm_eval" or any(word.endswith(".lm_eval") for word in words):
        if importlib.util.find_spec("lm_eval") is None:
            pytest.skip("lm-eval is not installed (the `eval` extra)")
        parsed(["lm_eval", *words[words.index("--model") :]], monkeypatch)
    elif program == "swiftkv":
        name, *rest = words
        assert name == "--version" or name in commands.COMMANDS
        if not rest or rest in (["--fields"], ["--help"]):
            return
        flags = commands.expand_model_argument(name, rest)
        if name == "eval":
            name = commands.our_eval(flags)
            if not name:
                return understood("lm_eval", flags, monkeypatch)
        args = parsed([f"swiftkv {name}", *flags], monkeypatch)
        if name == "train" and not args.topology:
            override(load_experiment(args.config), args.set)
    elif program == "srun":
        understood(words[0], words[1:], monkeypatch)
    elif program == "xpk":
        started = shlex.split(words[words.index("--command") + 1])
        understood("swiftkv", ["train", *started[1:]], monkeypatch)
    elif program == "python" and words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    else:
        args = parsed(words, monkeypatch)
        if words[0] == "train.py":
            override(load_experiment(args.config), args.set)


@functools.cache
def dry_run(*words: str) -> None:
    subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)


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
    scripts |= {"swiftkv tasks": tasks.main, "swiftkv answers": answers.main}
    scripts |= {"lm_eval": lambda _: importlib.import_module("lm_eval.__main__").cli_evaluate()}
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


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, on GitHub and on the site alike."""
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    headings = (after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open")
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each.lower()).strip()) for each in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_and_lines_are_at_most_100_characters(path):
    """But for tables, code, and lines that are one link or command long."""
    text, fenced = path.read_text(encoding="utf-8"), False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for child in token.children or ():
            link = str(child.attrs.get("href") or child.attrs.get("src") or "")
            file, _, anchor = link.partition("#")
            if link and not re.match(r"\w+:", link):
                target = (path.parent / file).resolve() if file else path
                assert target.exists() and (not anchor or anchor in anchors(target)), link
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        free = fenced or line.startswith(("|", "    ", "```")) or " " not in line.strip("*- ")
        assert len(line) <= 100 or free or "](http" in line, line


def test_the_site_has_every_page_once_every_public_name_and_the_reference_of_the_dataclasses():
    """Documents outside docs/ become pages by docs/hooks.py."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    flat = re.findall(r"'([\w./-]+\.md)'", str(config["nav"]))
    hooks = (ROOT / "docs" / "hooks.py").read_text()
    outside = dict(re.findall(r'^    "([\w./]+)": "([\w./]+)",$', hooks, re.M))
    names = [str(path.relative_to(ROOT)) for path in PAGES]
    assert sorted(flat) == sorted(outside.get(name) or name.removeprefix("docs/") for name in names)
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^::: swiftkv_jax\.(\w+)$", text, re.M)} == {*skv.__all__} - {"__version__"}
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run: python docs/reference.py"


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_results(path):
    text = path.read_text(encoding="utf-8")
    assert "<!-- results: " in text and report.filled(text) == text, "run: python -m benchmarks.report"
