"""Write docs/config.md, the reference of every setting, from the dataclasses and their docstrings.

python docs/reference.py
"""

import dataclasses
import textwrap
import typing
from pathlib import Path

from swiftkv_jax import SamplingParams
from swiftkv_jax.common.checks import type_of
from swiftkv_jax.distill.config import PredictionLossConfig
from swiftkv_jax.distill.fields import meanings, rows
from swiftkv_jax.engine.settings import Settings

PAGE = Path(__file__).parent / "config.md"
WIDTH = 100
HEAD = """# Config fields

<!-- Made by `python docs/reference.py`. Change the docstrings of the dataclasses instead. -->

This page lists the fields of a config file, of the engine and of a request. `swiftkv train
--fields` prints the first part, and `--set NAME=VALUE` overrides any of its fields.
"""
TRAINING = """## Training: `Experiment`

`train.py`, `swiftkv train` and `swiftkv distil` read these. `evaluation` has the fields of `data`.
"""
ENGINE = """## The engine: `Settings`

Keyword arguments of `LLM`. Most are flags of `serve.py` too (`--help`, and `--http --help`).
"""
SAMPLING = """## A request: `SamplingParams`

HTTP requests take these fields too, except `prompt_logprobs`, and with OpenAI's form of `logprobs`.
They may also have a `priority` (0 to 100) and a `cache_salt` (prompts with different salts share no
pages).
"""


def entry(name: str, kind: str, default: str, meaning: str) -> str:
    """One field as a list item; `default` is "required" or the value's repr."""
    shown = default if default == "required" else f"default `{default}`"
    text = f"`{name}` ({kind}, {shown})" + (f": {meaning}" if meaning else "")
    lines = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return "* " + "\n  ".join(lines)


def named(hint) -> str:
    """A type as a reader writes it."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("collections.abc.", "").replace("typing.", "")


def fields(config: type) -> list[str]:
    """The entries of a dataclass whose fields hold no others."""
    told, out = meanings(config), []
    for field in dataclasses.fields(config):
        default = "required" if field.default is dataclasses.MISSING else repr(field.default)
        out.append(entry(field.name, named(type_of(field)), default, told.get(field.name, "")))
    return out


def page() -> str:
    """docs/config.md as it should be."""
    parts: dict[str, list[str]] = {}
    for row in rows():
        part, dot, _ = row[0].partition(".")
        parts.setdefault(part if dot else "", []).append(entry(*row))
    out = [HEAD, TRAINING, "\n".join(parts.pop("")) + "\n"]
    for part, entries in parts.items():
        out += [f"### {part}\n", "\n".join(entries) + "\n"]
    of_predictor = [entry(*row) for row in rows(PredictionLossConfig, "loss.")]
    out += ["### loss, of KV prediction\n", "\n".join(of_predictor) + "\n"]
    out += [ENGINE, "\n".join(fields(Settings)) + "\n", SAMPLING, "\n".join(fields(SamplingParams)) + "\n"]
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
