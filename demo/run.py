"""The demo: convert the small teacher to SwiftKV, distil it, generate, and measure what was saved; then set
SwiftKV beside KV prediction and the systems that prune or skip, at their FLOPs.

    python demo/run.py            # `make demo`
    python demo/run.py --long     # `make demo-long`: more steps

Everything lands in runs/demo: demo.json (its keys: demo/README.md), demo.png, the two students, and the
comparison.
"""

import argparse
import dataclasses
import json
import math
import os
import platform
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers warns that PyTorch is missing

import jax  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks import latency  # noqa: E402
from benchmarks.papers import plots  # noqa: E402
from benchmarks.papers.compare import __main__ as compare  # noqa: E402
from benchmarks.papers.compare.evaluation import Point  # noqa: E402
from swiftkv_jax.cli.answering import ask  # noqa: E402
from swiftkv_jax.common.errors import exit_code  # noqa: E402
from swiftkv_jax.common.progress import show, working  # noqa: E402
from swiftkv_jax.core.cache import Cache  # noqa: E402
from swiftkv_jax.distill import loop  # noqa: E402
from swiftkv_jax.distill.config import Experiment, load_experiment  # noqa: E402
from swiftkv_jax.distill.data.loader import evaluation_batches  # noqa: E402
from swiftkv_jax.distill.fields import override  # noqa: E402
from swiftkv_jax.engine.llm import LLM  # noqa: E402
from swiftkv_jax.engine.request import SamplingParams  # noqa: E402
from swiftkv_jax.text.tokenizer import load_tokenizer  # noqa: E402

# name: (title, changes to configs/tiny.py, and to those of `--long`).
STUDENTS = {
    "swiftkv": ("50 % SwiftKV", [], ["steps=800"]),
    "acrosskv": (
        "50 % SwiftKV + 2-way AcrossKV",
        ["plan.share=2", "steps=180", "optimizer.learning_rate=4e-3"],
        ["steps=800"],
    ),
}
LENGTHS = (256, 1024, 2048)  # prompt tokens that time to first token is measured at
COMPARED = {False: 0, True: 60}  # steps that each system of the comparison trains; True: of `--long`
DECODES = {256: 1, 2048: 16}  # context in tokens: sequences that the time per output token is measured with


def distil(experiment: Experiment, out: Path) -> dict:
    """Train one student; returns held-out sums per row and context length, as rewired ("before", without the
    least-squares start) and after training, and the folder of its export."""
    with loop.opened(experiment, out) as run:
        before = run.row_sums()
        result = run.go(ask)
        if result.signal:
            raise KeyboardInterrupt
        return {"before": before, "after": run.row_sums(), "export": result.export, "steps": result.step}


def quality(before: dict, after: dict) -> dict:
    """Held-out figures of teacher and student at one length, and the share of the gap that was closed.

    The standard error of that share is a jackknife over the held-out rows: the same rows before and after.
    """

    def mean(rows, name, keep):
        return float(rows[name][keep].sum() / rows["tokens"][keep].sum())

    def closed(keep):
        gap = mean(before, "student", keep) - mean(before, "teacher", keep)
        return 1 - (mean(after, "student", keep) - mean(after, "teacher", keep)) / gap

    rows = np.flatnonzero(before["tokens"] > 0)
    left_out = np.array([closed(np.delete(rows, i)) for i in range(len(rows))])
    error = math.sqrt((len(rows) - 1) / len(rows) * ((left_out - left_out.mean()) ** 2).sum())
    out = {
        "teacher_cross_entropy": mean(before, "teacher", rows),
        "gap_closed": closed(rows),
        "gap_closed_se": error,
    }
    for when, sums in (("before", before), ("after", after)):
        out |= {f"cross_entropy_{when}": mean(sums, "student", rows)}
        out |= {f"kl_{when}": mean(sums, "kl", rows), f"agreement_{when}": mean(sums, "agree", rows)}
    return out


def prompts(experiment: Experiment, count: int, tokens: int) -> list[list[int]]:
    """The beginnings of some held-out documents."""
    tokenizer = load_tokenizer(experiment.model)
    config = dataclasses.replace(experiment.evaluation, batch_size=1, pack=False, long_documents="truncate")
    rows = [batch.tokens[0] for batch in evaluation_batches(config, tokenizer) if batch.segments[0][tokens]]
    long = [np.asarray(row) for row in rows]
    return [row[:tokens].tolist() for row in long[:: max(1, len(long) // count)][:count]]


def generate(folders: dict[str, Path], chosen: list[list[int]]) -> list[dict]:
    """Greedy continuations of the same prompts by every model."""
    answers = {}
    for name, folder in folders.items():
        with working(show, f"loading {name} and generating"):
            llm = LLM(folder, dtype="float32")
            params = SamplingParams(temperature=0.0, max_tokens=48)
            answers[name] = [o.outputs[0].text for o in llm.generate(chosen, params, use_tqdm=False)]
    tail = load_tokenizer(folders["teacher"])
    return [
        {"prompt": tail.decode(ids), **{name: texts[i] for name, texts in answers.items()}}
        for i, ids in enumerate(chosen)
    ]


def bytes_per_token(contender: latency.Contender) -> int:
    """Cache bytes per token, read from the arrays of a bfloat16 cache (the dtype of the checkpoint)."""
    return Cache.dense(
        contender.model.config, contender.model.plan, 1, 16, jax.numpy.bfloat16
    ).bytes_per_token


def compared(model: Path, out: Path, steps: int) -> dict:
    """The result of `python -m benchmarks.papers.compare` on few prompts, with `steps` of training for each
    system."""
    asked = ["--model", str(model), "--out", str(out), "--few", "--prompts", "128", "--rounds", "0"]
    return compare.report(compare.parser().parse_args([*asked, "--train", str(steps)]))


def table(report: dict) -> str:
    """The one table of the demo: for each model, quality and speed at the same contexts."""
    head = ["", "context", "cross-entropy", "rewired", "KL", "agreement", "gap closed", "TTFT", "TPOT"]
    lines = [[*head, "cache B/token"]]
    ttft, tpot = report["latency"]["ttft"], report["latency"]["tpot"]
    size = report["cache_bytes_per_token"]

    def add(title: str, name: str, length: str, figures: list[str]) -> None:
        decode = next(key for key in tpot if key.endswith(f"x{length}"))
        output = tpot[decode].get(name)
        per_token = f"{output['ms']:.2f} ms ({decode.split('x')[0]})" if output else "as our step"
        first = f"{ttft[length][name]['ms']:.1f} ms"
        lines.append([title, length, *figures, first, per_token, f"{size.get(name, size['standard']):,}"])

    students = report["students"]
    for name, title in (("full_depth", "teacher, full depth"), ("standard", "teacher, our step")):
        for length, q in students["swiftkv"]["quality"].items():
            add(title, name, length, [f"{q['teacher_cross_entropy']:.4f}", "", "", "", ""])
    for name, student in students.items():
        for length, q in student["quality"].items():
            figures = [q[f"cross_entropy_{when}"] for when in ("after", "before")] + [q["kl_after"]]
            closed = f"{q['gap_closed']:.0%} ± {q['gap_closed_se']:.1%}"
            shown = [*(f"{x:.4f}" for x in figures), f"{q['agreement_after']:.3f}", closed]
            add(STUDENTS[name][0], name, length, shown)
    return aligned(lines)


def aligned(lines: list[list[str]]) -> str:
    """A table with aligned columns, the first one aligned to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def plot(report: dict, path: Path) -> None:
    """Plot quality at the longest context, time to first token, and all methods by FLOPs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right, last) = pyplot.subplots(1, 3, figsize=(16, 4.2), layout="constrained")
    length = list(report["students"]["swiftkv"]["quality"])[-1]
    students = {name: s["quality"][length] for name, s in report["students"].items()}
    names = [STUDENTS[name][0].replace(" + ", "\n+ ") for name in students]
    for shift, when, label, colour in (
        (-0.2, "before", "rewired", "#c8553d"),
        (0.2, "after", "distilled", "#28666e"),
    ):
        values = [q[f"cross_entropy_{when}"] for q in students.values()]
        bars = left.bar(np.arange(len(names)) + shift, values, 0.4, label=label, color=colour)
        left.bar_label(bars, fmt="%.2f")
    teacher = students["swiftkv"]["teacher_cross_entropy"]
    left.axhline(teacher, color="#222222", linestyle="--", label=f"teacher {teacher:.2f}")
    left.set(xticks=np.arange(len(names)), xticklabels=names)
    left.set_ylabel(f"held-out cross-entropy at {length} tokens, nats")
    left.set_ylim(teacher - 0.3, None)
    left.legend()
    ttft = report["latency"]["ttft"]
    labels = {"full_depth": "standard, full depth", "standard": "standard, our step"} | {
        n: t for n, (t, *_) in STUDENTS.items()
    }
    for name, label in labels.items():
        right.plot(
            [int(n) for n in ttft], [row[name]["ms"] for row in ttft.values()], marker="o", label=label
        )
    right.set(xlabel="prompt tokens", ylabel="time to first token, ms")
    right.set_ylim(0, None)
    right.legend()
    plots.gaps(last, [Point(**point) for point in report["comparison"]["points"]])
    figure.savefig(path, dpi=130)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--long", action="store_true", help="about an hour instead of six minutes")
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override a field of configs/tiny.py"
    )
    p.add_argument("--out", type=Path, default=ROOT / "runs" / "demo")
    args = p.parse_args()
    return exit_code(lambda: run(args), f"\ninterrupted; results so far are in {args.out}")


def run(args: argparse.Namespace) -> int:
    began, results = time.monotonic(), {}
    for name, (title, changes, longer) in STUDENTS.items():
        print(f"\n== {title}: convert and distil")
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        changes = [f"name={name}", *changes, *(longer if args.long else []), *args.set]
        results[name] = distil(override(load_experiment(ROOT / "configs" / "tiny.py"), changes), folder)
    experiment = load_experiment(ROOT / "configs" / "tiny.py")
    folders = {"teacher": Path(experiment.model)} | {name: r["export"] for name, r in results.items()}
    print("\n== generate from all three")
    samples = generate(folders, prompts(experiment, 2, 96))
    for sample in samples:
        print(f"\n...{sample['prompt'][-160:]!r}")
        for name in folders:
            print(f"  {name:9s} {sample[name]!r}")
    print("\n== time to first token and per output token (medians of interleaved rounds)")
    standard = latency.load("standard", folders["teacher"])
    contenders = [dataclasses.replace(standard, name="full_depth", full_depth=True), standard]
    contenders += [latency.load(name, folders[name]) for name in results]
    with working(show, "timing"):
        timed = latency.measure(contenders, LENGTHS, 15, 60, list(DECODES.items()))
    print("\n== KV prediction, and systems that prune or skip, beside SwiftKV")
    shutil.rmtree(args.out / "compare", ignore_errors=True)
    comparison = compared(folders["teacher"], args.out / "compare", COMPARED[args.long])
    report = {
        "students": {
            name: {
                "quality": {str(n): quality(rows, r["after"][n]) for n, rows in r["before"].items()},
                "steps": r["steps"],
                "folder": str(r["export"]),
            }
            for name, r in results.items()
        },
        "latency": timed,
        "cache_bytes_per_token": {c.name: bytes_per_token(c) for c in contenders[1:]},
        "samples": samples,
        "comparison": comparison,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "jax": jax.__version__,
            "date": time.strftime("%Y-%m-%d"),
        },
        "seconds": time.monotonic() - began,
    }
    (args.out / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(report, args.out / "demo.png")
    print("\n" + table(report))
    print(f"\n{report['seconds']:.0f} s. Saved in {args.out}: demo.json, demo.png, and the students:")
    for r in results.values():
        print(f"  python serve.py --model {r['export']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
