"""The command line."""

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import RESULTS, command, table
from benchmarks.device import order, report
from benchmarks.device.ledger import Ledger, pack, unpack
from benchmarks.device.shapes import shape_of
from benchmarks.device.student import CHATS
from demo import smollm2
from swiftkv_jax.common.errors import UsageError, exit_code
from swiftkv_jax.kernels.check.supervisor import Measurement, Supervisor, write_whole

WORKER = (sys.executable, "-m", "benchmarks.device.worker")


def weights(given: list[Path] | None) -> list[str]:
    """The model of which a student is made, as absolute paths: as given, or as `make demo-smollm2` installs
    it; none where it is not there.

    Raises:
      UsageError: a given path does not exist, or a GGUF file cannot be read here.
    """
    try:
        paths = given or [smollm2.weights()]
    except UsageError as error:
        print(f"no student is made: {error}")
        return []
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(f"--model {missing[0]}: no such file or folder")
    if not paths[0].is_dir() and importlib.util.find_spec("gguf") is None:
        raise UsageError(
            "--model: a GGUF file needs the package gguf: pip install gguf, or leave --model out"
        )
    return [str(path.absolute()) for path in paths]


def run(args: argparse.Namespace) -> int:
    """Run the lines that are not done, in their order."""
    tiny, shape = args.shape == "tiny", shape_of(args.shape)
    torch = importlib.util.find_spec("torch") is not None
    if args.list:
        print(listed(order.order(args.shape, {}, ["MODEL"], winner=lambda _, names, __: names[-1])))
        return 0
    model = weights(args.model)
    if not torch:
        print("transformers is not measured: PyTorch is not installed")
    args.output.mkdir(parents=True, exist_ok=True)
    head = {"command": command("device"), "date": time.strftime("%F")}
    ledger = Ledger([*args.resume, args.output])
    with tempfile.TemporaryDirectory() as scratch:
        programs, chats = Path(scratch) / "programs", args.output.absolute() / CHATS
        unpack([*args.resume, args.output], programs)
        for earlier in (folder / CHATS for folder in args.resume):
            if earlier.exists() and not chats.exists():
                shutil.copy(earlier, chats)
        env = {"JAX_COMPILATION_CACHE_DIR": str(programs)}
        env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")}
        env |= {"JAX_PLATFORMS": "cpu"} if tiny else {}
        supervisor = Supervisor(WORKER, lambda: None, 60 * args.minutes, os.environ | env)
        lines = supervisor.results

        def every() -> Iterator[Measurement]:
            files = {"folder": scratch, "chats": str(chats)}
            return order.order(args.shape, lines, model, files, lambda: supervisor.left, torch)

        def save() -> None:
            asked = {line.name: line for line in every()}
            ledger.save(args.output, asked.values(), lines, head["date"])
            before = {name: ledger.earlier(line) for name, line in asked.items()}
            write_whole(args.output / "report.md", report.markdown(shape, head, asked, lines, before))

        with contextlib.closing(supervisor):
            where = supervisor.run(order.line("hardware", "hardware", {}))
            if where["status"] != "done" or (not tiny and where["platform"] == "cpu"):
                print("no GPU is found here: nothing was measured; --shape tiny tries the lines on a CPU")
                return 1
            supervisor.save, ledger.where = save, where
            for line in every():
                if (before := ledger.done(line)) is not None:
                    lines[line.name] = before
                    print(f"{line.name}: done on {before['date']}", flush=True)
            for line in every():
                if line.name not in lines:
                    supervisor.run(line, lambda _, line=line: report.said(shape, line, lines))
                    pack(programs, args.output)
            save()
    print((args.output / "report.md").read_text())
    return 0


def listed(lines) -> str:
    """The lines with the seconds that they are expected to take, added up, and may take."""
    rows, total = [], 0.0
    for line in (order.line("hardware", "hardware", {}), *lines):
        total += line.least
        together = f"{int(total / 60)}:{total % 60:02.0f}"
        rows.append([line.name, f"{line.least:.0f}", together, f"{line.limit:.0f}"])
    return table(["line", "expected, s", "together", "limit, s"], rows)


def main() -> int:
    """The command line."""
    about = "Measure what matters most on this accelerator, in the minutes that there are."
    p = argparse.ArgumentParser(prog="python -m benchmarks.device", description=about)
    p.add_argument("--shape", choices=("llama8b", "tiny"), default="llama8b")
    p.add_argument("--minutes", type=float, default=9.0, help="time limit of the run (default 9)")
    out = "folder of the results (default device)"
    p.add_argument("--output", type=Path, default=Path("device"), help=out)
    kept = "earlier results: what they have is not measured again (default benchmarks/results/device)"
    p.add_argument("--resume", type=Path, nargs="+", default=[RESULTS / "device"], metavar="DIR", help=kept)
    teacher = "the student's teacher: a folder, or a GGUF file's parts"
    p.add_argument("--model", type=Path, nargs="+", metavar="PART", help=teacher)
    p.add_argument("--list", action="store_true", help="print the lines and their expected seconds, and exit")
    args = p.parse_args()
    if args.minutes <= 0:
        p.error(f"--minutes must be positive, not {args.minutes:g}")
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
