"""The command line, and the order of the lines."""

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import RESULTS, not_measured
from benchmarks.first_light import report
from benchmarks.first_light.candidates import Candidate, of
from benchmarks.first_light.engine import PLANS
from benchmarks.first_light.peers import PEERS
from benchmarks.first_light.shapes import Shape
from benchmarks.first_light.shapes import shape as shape_of
from swiftkv_jax.kernels.check.supervisor import Book, Line, write_whole

# What XLA may put into command buffers, beside its own choice of kinds.
BUFFERS = {"as it is": None, "with WHILE": "+WHILE", "none": ""}
WORKER = (sys.executable, "-m", "benchmarks.first_light.worker")
_FEWEST = 5.0  # seconds left without which no line is begun
_LOAD = 35.0  # the same for a line of the engine
_ENGINE = 0.45  # share of the run that is kept for the engine


def kept(minutes: float) -> float:
    """Seconds to reserve for the engine: no kernel is measured in them."""
    return max(_FEWEST, _ENGINE * 60 * minutes)


def kernel_lines(
    book: Book, name: str, candidates: Sequence[Candidate], module: str | None, least: float = _FEWEST
) -> None:
    """Of each kind, check every candidate, then time those that are right."""
    lines = book.result["lines"]
    common = {"shape": name, "module": module}

    def run(task: str, candidate: Candidate, **args) -> None:
        line = Line(
            name=report.line_of(task, candidate),
            task=task,
            args=common | {"candidate": dataclasses.asdict(candidate)} | args,
            limit=candidate.limit,
            least=least,
            group="kernels",
        )
        book.run(line, report.said(task, lines.get("ceilings", {}), candidate.kind))

    with tempfile.TemporaryDirectory() as folder:
        for kind in dict.fromkeys(candidate.kind for candidate in candidates):
            safe, *others = (candidate for candidate in candidates if candidate.kind == kind)
            for candidate in (safe, *others):
                run("numerics", candidate)
            run("contest", safe, folder=folder, safe=True)
            for candidate in others:
                if report.is_right(lines, candidate):
                    run("contest", candidate, folder=folder, safe=False)


def peer_lines(book: Book, name: str) -> None:
    """Time what others made for the same calls."""
    top = book.result["lines"].get("ceilings", {})
    for kind, peer in PEERS:
        args = {"shape": name, "kind": kind, "name": peer}
        line = Line(f"peer: {kind}, {peer}", "peer", args, 40.0, _FEWEST, "kernels")
        book.run(line, report.said("peer", top, kind))


def engine_lines(book: Book, name: str, candidates: Sequence[Candidate], module: str | None) -> None:
    """Measure each plan at each depth, then 8-bit rows."""
    lines, sizes = book.result["lines"], shape_of(name)
    top = {k: v for k, v in lines.get("ceilings", {}).items() if k in ("bytes", "flops")}
    runs = [(layers, plan, "auto") for layers in sizes.layers for plan in PLANS]
    runs += [(layers, "SwiftKV 50 %", "float8_e4m3fn") for layers in sizes.layers]
    for layers, plan, dtype in runs:
        wide = dtype == "auto"
        decode = report.winner(lines, candidates, "decode" if wide else "fp8 decode")
        chunk = report.winner(lines, candidates, "chunk", decode.page)
        fill = report.winner(lines, candidates, "fill").implementation
        args = {"shape": name, "module": module, "layers": layers, "plan": plan, "cache_dtype": dtype}
        args |= {"decode": dataclasses.asdict(decode), "chunk": dataclasses.asdict(chunk)}
        args |= {"fill": fill if wide and fill != "xla" else None, "ceilings": top}
        what = f"engine: {layers} layers, {plan}" + ("" if wide else ", fp8 rows")
        book.run(Line(what, "engine", args, 240.0, _LOAD, "engine"), report.said("engine", top))


def machine_lines(book: Book, name: str, flags: str) -> None:
    """Measure launches, by the kinds of operation allowed in command buffers."""
    for how, kinds in BUFFERS.items():
        env = (
            {} if kinds is None else {"XLA_FLAGS": f"{flags} --xla_gpu_enable_command_buffer={kinds}".strip()}
        )
        args = {"count": 20 if name == "tiny" else 500}
        line = Line(f"launches: command buffers {how}", "launches", args, 60.0, _FEWEST, "launches", env)
        book.run(line, report.said("launches", {}))


def save(path: Path, sizes: Shape, candidates: Sequence[Candidate], result: dict) -> None:
    """Write the result, the winners and the goals met, as JSON and as Markdown."""
    lines = result["lines"]
    result["winners"] = report.winners(lines, candidates)
    decode, keys = (f"{pair[0]} x {pair[1]}" for pair in (sizes.decodes[0], sizes.keys))
    result["goals"] = report.goals(lines, candidates, sizes.layers, decode, keys)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    write_whole(path.with_suffix(".md"), report.markdown(result))


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="first_light", description="Find out which kernels are correct and fast on this machine."
    )
    p.add_argument("--shape", choices=("llama8b", "tiny"), default="llama8b")
    p.add_argument("--minutes", type=float, default=9.0, help="time limit of the run (default 9)")
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument("--candidates", metavar="MODULE", help="a module with more CANDIDATES to try")
    args = p.parse_args()
    if args.minutes <= 0:
        p.error(f"--minutes must be positive, not {args.minutes:g}")
    try:
        candidates = of(args.shape, args.candidates)
    except (ImportError, AttributeError) as error:
        p.error(f"--candidates {args.candidates}: {error}; name a module that has CANDIDATES")
    tiny, sizes = args.shape == "tiny", shape_of(args.shape)
    name = "first_light_tiny" if tiny else "first_light"
    command = " ".join(["python -m benchmarks.first_light", *sys.argv[1:]])
    head = {"command": command, "date": time.strftime("%Y-%m-%d"), "shape": args.shape}
    with tempfile.TemporaryDirectory() as folder:
        # Workers share compiled programs. A CPU gets extra threads for those that the interpreter blocks.
        env = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
        env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")}
        env |= {"JAX_PLATFORMS": "cpu", "NPROC": "4"} if tiny else {}
        book = Book(WORKER, lambda result: None, args.minutes, head, os.environ | env)
        try:
            where = book.run(
                Line("hardware", "hardware", {}, 60.0, 0.0, "kernels"), report.said("hardware", {})
            )
            if not tiny and where.get("platform") != "gpu":
                print(
                    not_measured(name, "First light", "GPU", "python -m benchmarks.first_light", args.output)
                )
                return 1
            book.save = functools.partial(save, args.output / f"{name}.json", sizes, candidates)
            ceilings = Line("ceilings", "ceilings", {"shape": args.shape}, 60.0, _FEWEST, "kernels")
            book.run(ceilings, report.said("ceilings", {}))
            kernel_lines(book, args.shape, candidates, args.candidates, kept(args.minutes))
            engine_lines(book, args.shape, candidates, args.candidates)
            machine_lines(book, args.shape, where["xla_flags"])
            peer_lines(book, args.shape)
        finally:
            book.close()
    print((args.output / f"{name}.md").read_text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
