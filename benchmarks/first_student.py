"""Students of a real model, made on a GPU in minutes: least squares, then distillation; quality of each.

    python -m benchmarks.first_student --minutes 9 --output benchmarks/results [--model FILE.gguf | PART ...]

The teacher first writes chats of its own. A line is a student: its split, how many layers share a row of the
cache, and its gap to the teacher, KL and agreement on held-out rows of two lengths. These are measured as
rewired, after least squares, and after distillation on the demo's corpus and those chats, for an equal share
of the remaining minutes. If lm-eval is installed, teacher and students also run one of its tasks on local
texts (`local_task`). The JSON is written after every line. The default model is the one that `make
demo-smollm2` installs; a GGUF file that was cut, `split -n 2 FILE.gguf`, is given by its parts.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import lzma
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import local_task
from benchmarks.common import RESULTS, not_measured, table
from benchmarks.first_light import machine
from demo import smollm2
from swiftkv_jax.convert import costs
from swiftkv_jax.distill import loop
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.errors import exit_code
from swiftkv_jax.folder import DEMO
from swiftkv_jax.kernels.check.supervisor import Book, Line, answer_tasks, write_whole
from swiftkv_jax.teacher_chats import Sampling, write_chats

WORKER = (sys.executable, "-m", "benchmarks.first_student", "--worker")
TITLE = "First students of a real model"
STUDENTS = ((20, 1), (15, 1), (15, 2))  # split, of 30 layers, and layers that share a row
CHATS, WORDS = 256, 192  # answers that the teacher writes, and their longest, in tokens
ASKED = ("Summarise this in two sentences:", "Explain this to a beginner:", "What is this about?")
STAGES = ("rewired", "least_squares", "distilled")
EVALUATION_SHARE = 0.25  # share of a student's seconds for its last evaluation
ENDLESS = 100_000  # steps of a distillation that a time limit ends
WARM_UP = 10  # steps


def chats(model: str, path: str, count: int, words: int) -> Iterator[dict]:
    """The teacher's answers to questions about passages of the corpus, as conversations in a JSONL file."""
    with lzma.open(DEMO / "corpus.jsonl.xz", "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    passages = [texts[i % len(texts)][400 * (i // len(texts)) :][:600] for i in range(count)]
    asked = [f"{ASKED[i % len(ASKED)]}\n\n{passage}" for i, passage in enumerate(passages)]
    done = write_chats(
        model,
        [[{"role": "user", "content": question}] for question in asked],
        Path(path),
        Sampling(max_tokens=words),
        lambda line: print(line, file=sys.stderr),
    )
    yield {"chats": done.chats, "tokens": done.tokens, "tokens_per_s": done.tokens / done.seconds}


def experiment(model: str, path: str, split: int, share: int, steps: int | None, rows: int) -> Experiment:
    """The demo's run on this model, with other rows, and the teacher's own chats beside the corpus. Without
    `steps` it runs at a constant learning rate until it is stopped."""
    e = smollm2.experiment(Path(model), split)
    if steps is None:
        steps, constant = ENDLESS, {"schedule": "constant", "warmup": WARM_UP / ENDLESS}
        e = dataclasses.replace(e, optimizer=dataclasses.replace(e.optimizer, **constant))
    own = (path,) if Path(path).exists() else ()  # none, where the teacher could not write them in time
    return dataclasses.replace(
        e,
        plan=dataclasses.replace(e.plan, share=share),
        data=dataclasses.replace(e.data, sources=(*e.data.sources, *own), batch_size=rows),
        steps=steps,
        log_every=steps,
    )


def student(
    model: str, path: str, split: int, share: int, steps: int | None, rows: int, seconds: float, tasks: str
) -> Iterator[dict]:
    """Make one student and evaluate each stage; training stops when enough of `seconds` is left to
    evaluate."""
    end = time.monotonic() + (1 - EVALUATION_SHARE) * seconds
    e = experiment(model, path, split, share, steps, rows)
    with (
        tempfile.TemporaryDirectory() as folder,
        loop.opened(e, Path(folder) / "run", say=lambda line: print(line, file=sys.stderr)) as run,
    ):
        yield smollm2.before_training(run)
        yield {"least_squares_long": smollm2.long_rows(run)}
        began = time.perf_counter()
        done = _until(end, run)
        took = time.perf_counter() - began
        yield {
            "kernels": run.kernels,
            "steps": done,
            "distilled_seconds": took,
            "tokens_per_s": done * rows * e.data.seq_len / took,
            "distilled": costs(run, run.row_sums()[e.data.seq_len], e.data.seq_len),
            "distilled_long": smollm2.long_rows(run),
        }
        if tasks:
            run.export(Path(folder) / "export")
            yield from asked(str(Path(folder) / "export"), tasks)


def _until(end: float, run: loop.Run) -> int:
    """Train to the last step, or until a time limit ends the run as a signal would; returns the steps
    done."""
    left = max(1.0, end - time.monotonic())
    clock = threading.Timer(left, os.kill, (os.getpid(), signal.SIGTERM))
    usual = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # in case the signal comes before the first step
    clock.start()
    try:
        return run.go().step
    finally:
        clock.cancel()
        clock.join()
        signal.signal(signal.SIGTERM, usual)


def asked(model: str, tasks: str) -> Iterator[dict]:
    """A model's result in the lm-eval task of this folder."""
    yield {"lm_eval": local_task.ask(model, tasks)}


def joined(parts: list[Path], folder: Path) -> Path:
    """Join a file from its parts."""
    if len(parts) == 1:
        return parts[0]
    whole = folder / "model.gguf"
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)
    return whole


def markdown(result: dict) -> str:
    """A Markdown table with a row for each student, stage and length."""
    lines = result["lines"]
    where = lines.get("hardware", {})
    rows = []
    for name, line in lines.items():
        if not name.startswith(("student: ", "teacher")):
            continue
        title = name.removeprefix("student: ")
        found = [(stage, kind) for stage in STAGES for kind in (stage, f"{stage}_long") if kind in line]
        for stage, kind in found:
            c = line[kind]
            length = smollm2.LONG if kind.endswith("_long") else smollm2.CONTEXT
            figures = [f"{c[key]:.3f}" for key in ("gap", "kl", "agreement")]
            rows.append([title, stage.replace("_", " "), str(length), *figures])
        if "lm_eval" in line:
            rows.append([title, f"lm-eval: {line['lm_eval']}", *["-"] * 4])
        if line["status"] != "done":
            rows.append([title, line.get("reason", line["status"]), *["-"] * 4])
    about = f"{where.get('device', '?')}, {where.get('driver', '')}, {where.get('versions', {})}"
    head = ["student", "stage", "context", "gap, nats", "KL", "agreement"]
    return f"# {TITLE}\n\n`{result['command']}`, {result['date']}. {about}.\n\n{table(head, rows)}\n"


def save(path: Path, result: dict) -> None:
    """Write the result as JSON and as Markdown."""
    write_whole(path, json.dumps(result, indent=1) + "\n")
    write_whole(path.with_suffix(".md"), markdown(result))


def run(args: argparse.Namespace, folder: str) -> int:
    """Make the chats, then every student."""
    name, command = "first_student", "python -m benchmarks.first_student"
    head = {"command": " ".join([command, *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d")}
    env = {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "xla")}
    book = Book(WORKER, lambda result: None, args.minutes, head, os.environ | env)
    try:
        where = book.run(Line("hardware", "hardware", {}, 60.0, 0.0, "student"))
        if where.get("platform") == "cpu" and not args.cpu:
            print(not_measured(name, TITLE, "GPU", command, args.output))
            return 1
        args.output.mkdir(parents=True, exist_ok=True)
        book.save = functools.partial(save, args.output / f"{name}.json")
        path = str(Path(folder) / "chats.jsonl")
        model = str(joined(args.model, Path(folder)) if args.model else smollm2.weights())
        given = {"model": model, "path": path, "count": args.chats, "words": WORDS}
        book.run(Line("chats", "chats", given, book.left / 3, 10.0, "chats"))
        tasks = local_task.write(Path(folder) / "tasks") if importlib.util.find_spec("lm_eval") else ""
        if tasks:
            book.run(Line("teacher", "asked", {"model": model, "tasks": tasks}, 60.0, 30.0, "student"))
        students = STUDENTS if args.splits is None else [(s, 1) for s in args.splits]
        for number, (split, share) in enumerate(students):
            title = f"student: split {split}" + (f", {share} layers share a row" if share > 1 else "")
            seconds = book.left / (len(students) - number)
            given = {"model": model, "path": path, "split": split, "share": share, "tasks": tasks}
            given |= {"steps": args.steps, "rows": args.rows, "seconds": seconds}
            book.run(Line(title, "student", given, max(60.0, seconds), 60.0, "student"))
    finally:
        book.close()
    print((args.output / f"{name}.md").read_text())
    return 0


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(prog="first_student", description=__doc__.splitlines()[0])
    p.add_argument(
        "--model", type=Path, nargs="+", help="a folder, a GGUF file or its parts (default: demo-smollm2's)"
    )
    p.add_argument("--minutes", type=float, default=9.0, help="time limit of the run (default 9)")
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument("--steps", type=int, help="distillation steps per student (default: while time is left)")
    p.add_argument("--rows", type=int, default=16, help="rows of 512 tokens per step (default 16)")
    p.add_argument(
        "--chats", type=int, default=CHATS, help=f"chats that the teacher writes (default {CHATS})"
    )
    p.add_argument("--splits", type=int, nargs="+", help="(default: 20, 15, and 15 with shared rows)")
    p.add_argument("--cpu", action="store_true", help="run without a GPU, to try this out")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        tasks = {"hardware": machine.hardware, "chats": chats, "student": student, "asked": asked}
        answer_tasks(tasks)
        return 0
    for name in ("minutes", "steps", "rows", "chats"):
        if (getattr(args, name) or 1) <= 0:
            p.error(f"--{name} must be positive, not {getattr(args, name):g}")
    with tempfile.TemporaryDirectory() as folder:
        return exit_code(lambda: run(args, folder))


if __name__ == "__main__":
    raise SystemExit(main())
