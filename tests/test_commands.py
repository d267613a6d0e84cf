"""The commands as a user types them: their names, versions, misspelt flags, and extras that are missing."""

import os
import sys

import pytest

import swiftkv_jax as skv
from swiftkv_jax.cli import commands

ENTRIES = {"swiftkv-train": commands.train, "train.py": commands.train}
ENTRIES |= {"swiftkv-serve": commands.serve, "serve.py": commands.serve}
ENTRIES |= {"swiftkv-convert": commands.convert}
PARTS = ("plan", "distil", "train", "convert", "slim", "serve", "push")  # of `swiftkv`, with one parser each


def ran(entry, monkeypatch, *words: str) -> int:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{words[0]}", *words[1:]])
    try:
        return entry()
    except SystemExit as stopped:  # how argparse ends --help and --version
        return int(stopped.code or 0)


@pytest.fixture(autouse=True)
def no_cache_of_programs(monkeypatch):
    """The tests have their own."""
    monkeypatch.setattr(commands, "cache_programs", lambda: None)


@pytest.mark.parametrize("name, entry", [*ENTRIES.items(), ("swiftkv-eval", commands.evaluate)])
def test_every_command_tells_its_version(name, entry, monkeypatch, capsys):
    assert ran(entry, monkeypatch, name, "--version") == 0
    assert capsys.readouterr().out == f"swiftkv-jax {skv.__version__}\n"


@pytest.mark.parametrize("name", PARTS)
def test_every_subcommand_has_help_and_refuses_unknown_flags(name, monkeypatch, capsys):
    assert ran(commands.main, monkeypatch, "swiftkv", name, "--help") == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: swiftkv {name} ")
    flags, _, _ = told.partition("fields of the config")
    assert len(flags.splitlines()) < (100 if name == "serve" else 50), "two screens, and serve.py's own"
    assert ran(commands.main, monkeypatch, "swiftkv", name, "--nonsense") == 2
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --nonsense")


def test_help_of_eval_has_the_flags_of_our_own_and_needs_no_lm_eval(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for words in (["--help"], ["DIR", "-h"]):
        assert ran(commands.main, monkeypatch, "swiftkv", "eval", *words) == 0
        told = capsys.readouterr().out
        assert {"--against", "--prompts", "--tasks", "--files"} <= set(told.replace("[", " ").split())


@pytest.mark.parametrize(
    "words, given",
    [
        (["serve", "DIR", "--http"], ["--model", "DIR", "--http"]),
        (["serve", "--model", "DIR"], ["--model", "DIR"]),
        (["eval", "DIR", "--tasks", "t"], "--model swiftkv --model_args pretrained=DIR --tasks t".split()),
        (["convert", "DIR", "--split", "2"], ["DIR", "--split", "2"]),
    ],
)
def test_a_model_behind_the_command_is_what_its_flag_would_be(words, given, monkeypatch):
    seen = []
    monkeypatch.setitem(commands.COMMANDS, words[0], lambda: seen.extend(sys.argv) or 0)
    assert ran(commands.main, monkeypatch, "swiftkv", *words) == 0
    assert seen == [f"swiftkv {words[0]}", *given]


@pytest.mark.parametrize(
    "words, given, taken",
    [
        ([], {}, "0.9"),
        (["--memory-fraction", "0.5", "--quiet"], {}, "0.5"),
        (["--memory-fraction=2"], {}, None),
        (["--memory-fraction", "much"], {}, None),
        ([], {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, None),
        ([], {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None),
    ],
)
def test_a_gpus_memory_is_claimed_as_asked_unless_the_environment_says(words, given, taken, monkeypatch):
    for name in (
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["serve.py", *words])
    commands.claim_gpu_memory()
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == taken
