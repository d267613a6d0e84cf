"""The command line of train.py."""

import argparse
import sys
import time
from pathlib import Path

from swiftkv_jax.errors import UsageError


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="train.py",
        description="Convert a checkpoint to SwiftKV and distil it, as a Python config file says.",
        epilog="example: python train.py --config configs/tiny.py --set steps=100 --out runs/mine",
    )
    p.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a Python file that defines `config = Experiment(...)`",
    )
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override one field; may be repeated"
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="where the run is kept (default: runs/<name>)")
    p.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint in --out")
    p.add_argument(
        "--compile-only", action="store_true", help="compile the real step for --topology, without hardware"
    )
    p.add_argument(
        "--topology", metavar="T", help="v5p:2x2x4, v4:2x2x1, v6e:2x2, h100:1x1x8, ... (with --compile-only)"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 1 for a failed run, 130 for Ctrl-C (saved)."""
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as error:
        print(f"error: {_first_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: the newest checkpoint is kept; --resume goes on from it", file=sys.stderr)
        return 130


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) < 500 else lines[0][:500] + "..."


def _run(args: argparse.Namespace) -> int:
    from swiftkv_jax.distill.config import load_experiment, override

    experiment = override(load_experiment(args.config), args.set)
    if args.compile_only or args.topology:
        if not (args.compile_only and args.topology):
            raise UsageError("--compile-only and --topology go together")
        from swiftkv_jax.distill.compile_only import report

        return report(experiment, args.topology)
    from swiftkv_jax.distill.loop import train

    out = args.out or Path("runs") / experiment.name
    began = time.monotonic()
    result = train(experiment, out, args.resume)
    if result.signal:
        print(f"saved step {result.step} in {out}; go on with --resume --out {out}")
        return 130 if result.signal == 2 else 0
    print(f"done: {result.step} steps in {time.monotonic() - began:.0f} s; model in {result.export}")
    return 0
