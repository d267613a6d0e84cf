"""The command line of train.py and swiftkv-train."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from swiftkv_jax.common.bucket import at, path_or_url
from swiftkv_jax.common.errors import Parser, UsageError, exit_code


class _Fields(argparse.Action):
    """--fields: like --help, it works whatever other arguments are missing."""

    def __call__(self, parser, namespace, values, option_string=None):
        from swiftkv_jax.distill.fields import table

        print(table(str(values or "")))
        parser.exit()


class FieldsParser(Parser):
    """Parser of a command with --set, whose --help ends with the fields that it takes."""

    def format_help(self) -> str:
        from swiftkv_jax.distill.fields import table

        return f"{super().format_help()}\nfields of the config; change one by --set NAME=VALUE:\n{table()}\n"


def parser() -> Parser:
    p = FieldsParser(
        description="Convert a checkpoint to SwiftKV and distil it, as a Python config file says.",
        epilog="example: %(prog)s --config tiny --set steps=100 --out runs/mine",
    )
    about = "a Python file that defines `config = Experiment(...)`, or the name of one of the package: tiny"
    p.flag("--config FILE", about, required=True)
    p.flag("--set a.b=value", "override one field; may be repeated", action="append", default=[])
    about = "describe the fields that --set takes, or those under a.b, and exit"
    p.flag("--fields a.b", about, action=_Fields, nargs="?")
    about = "folder of the run, here or gs://BUCKET/PATH (default: runs/<name>)"
    p.flag("--out DIR", about, type=path_or_url)
    p.flag("--resume", "continue from the newest good checkpoint in --out")
    p.flag(
        "--distributed",
        "join the processes that a launcher started (default: where SLURM, Open MPI, a Kubernetes "
        "job, a Cloud TPU or JAX_COORDINATOR_ADDRESS announces several)",
        action=argparse.BooleanOptionalAction,
    )
    p.flag("--compile-only", "compile the real step for --topology, without hardware")
    p.flag("--topology T", "v5p:2x2x4, v4:2x2x1, v6e:2x2, h100:1x1x8, ... (with --compile-only)")
    return p


def main(argv: list[str] | None = None, join: Callable[[bool | None], object] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 1 for a failed run, 130 for Ctrl-C (saved).

    Args:
      join: called with the value of --distributed before JAX is used; None if the caller has joined already.
    """
    interrupted = "\ninterrupted: the newest checkpoint is kept; --resume continues from it"
    return exit_code(lambda: _run(parser().parse_args(argv), join), interrupted, (RuntimeError, OSError))


def _run(args: argparse.Namespace, join: Callable[[bool | None], object] | None) -> int:
    if bool(args.topology) != args.compile_only:
        raise UsageError("--compile-only and --topology go together")
    from swiftkv_jax.cli.answering import ask
    from swiftkv_jax.cli.teacher_chats import with_chats
    from swiftkv_jax.common import processes
    from swiftkv_jax.common.progress import show
    from swiftkv_jax.distill.compile_only import report
    from swiftkv_jax.distill.config import from_package, load_experiment
    from swiftkv_jax.distill.fields import override
    from swiftkv_jax.distill.kernels import choose
    from swiftkv_jax.distill.loop import opened
    from swiftkv_jax.distill.run_folder import check_free

    if args.compile_only:
        return report(from_package(override(load_experiment(args.config), args.set)), args.topology)
    if join is not None:
        join(args.distributed)
    with processes.together():
        experiment = from_package(override(load_experiment(args.config), args.set))
        out = args.out or Path("runs") / experiment.name
        if processes.is_first():  # now: kernels are checked for minutes, and a teacher writes chats for hours
            check_free(at(out), args.resume)
    chosen = choose(experiment)  # now: a teacher that writes chats takes the devices
    with processes.together():
        experiment = with_chats(experiment)
    say = show if processes.is_first() else lambda _line: None
    began = time.monotonic()
    with processes.reporting_lost_peers(), opened(experiment, out, args.resume, say, chosen) as run:
        result = run.go(partial(ask, say=say))
    if result.signal:
        say(f"saved step {result.step} in {out}; continue with --resume --out {out}")
        return 130 if result.signal == 2 else 0
    say(f"done: {result.step} steps in {time.monotonic() - began:.0f} s; model in {result.export}")
    return 0
