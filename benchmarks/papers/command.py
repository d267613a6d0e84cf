"""Shared code of the commands that measure a model on a text: flags, reading, exit codes."""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.common.folder import read_text
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Int, PyTree
from swiftkv_jax.text.tokenizer import load_tokenizer

MIN_TOKENS = 16  # an average over fewer says nothing about the model


def parser(name: str, description: str, model: str) -> Parser:
    """The flags of `python -m benchmarks.papers.NAME`; `model` is the help of --model."""
    p = Parser(prog=f"python -m benchmarks.papers.{name}", description=description)
    out = Path("runs") / name
    p.add_argument("--model", required=True, metavar="DIR", help=model)
    p.add_argument("--text", required=True, type=Path, metavar="FILE", help="UTF-8 text to measure on")
    p.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"default: {out}")
    p.add_argument("--max-tokens", type=int, default=16384, metavar="N", help="read at most N tokens (16384)")
    return p


def run(p: Parser, argv: list[str] | None, report: Callable[[argparse.Namespace], object]) -> int:
    """Exit code 0, or 2 for bad input or when the results cannot be written."""

    def work() -> None:
        args = p.parse_args(argv)
        with explained(f"write to {args.out}"):
            report(args)

    return exit_code(work)


def load(model_path: str, text: Path, limit: int) -> tuple[Transformer, PyTree, Int[np.ndarray, " n"]]:
    """(model, params, the first `limit` token ids of a UTF-8 text file).

    Raises:
      UsageError: unreadable, not text, too short, or ids that the model does not know.
    """
    if limit < MIN_TOKENS:
        raise UsageError(f"--max-tokens must be at least {MIN_TOKENS}, not {limit}")
    words = read_text(text)
    with working(show, f"reading {model_path}"):
        model, params = from_pretrained(model_path)
    tokens = np.asarray(load_tokenizer(model_path).encode(words)[:limit], np.int32)
    if len(tokens) < MIN_TOKENS:
        raise UsageError(f"{text} holds {len(tokens)} token(s); give a text of at least {MIN_TOKENS}")
    if tokens.max() >= model.config.vocab_size:
        raise UsageError(
            f"token id {tokens.max()} is outside the model's vocabulary of {model.config.vocab_size}: "
            "another tokenizer?"
        )
    return model, params, tokens
