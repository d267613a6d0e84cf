"""What the commands share that measure a model on a text: flags, the file that is written, exit codes."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from swiftkv_jax.errors import Parser, UsageError


def parser(name: str, description: str, model: str) -> Parser:
    """The flags of `python -m swiftkv_jax.analysis.NAME`; `model` is the help of --model."""
    p = Parser(prog=f"python -m swiftkv_jax.analysis.{name}", description=description)
    out = Path("runs") / name
    p.add_argument("--model", required=True, metavar="DIR", help=model)
    p.add_argument("--text", required=True, type=Path, metavar="FILE", help="UTF-8 text to measure on")
    p.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"default: {out}")
    p.add_argument("--max-tokens", type=int, default=16384, metavar="N", help="read at most N tokens (16384)")
    return p


def run(p: Parser, argv: list[str] | None, report: Callable[[argparse.Namespace], object]) -> int:
    """Exit code 0, 2 for bad input, 1 when the results cannot be written."""
    try:
        args = p.parse_args(argv)
        try:
            report(args)
        except OSError as error:
            print(f"error: cannot write to {args.out}: {error.strerror or error}", file=sys.stderr)
            return 1
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def save(result: dict, path: Path) -> None:
    """JSON, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
