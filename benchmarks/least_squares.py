"""Is SwiftKV's least-squares start nearer to its teacher than the folded one? On the same prompts, in pairs.

python -m benchmarks.least_squares demo/teacher --splits 1 3 4
"""

import argparse
import json
import math
import sys
from typing import NamedTuple

import numpy as np

from benchmarks.common import command, machine
from benchmarks.papers.compare.evaluation import answers_by_rows, fit_batches, prompts_of
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.common.errors import exit_code
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.surgery import to_swiftkv
from swiftkv_jax.distill import least_squares


class Difference(NamedTuple):
    """Cross-entropy of first tokens after the same prompts, in nats above the teacher's: for both starts, the
    advantage of the fitted one, and its standard error over rows of text."""

    split: int
    fold: float
    fitted: float
    lower_by: float
    error: float

    @property
    def errors_apart(self) -> float:
        return self.lower_by / self.error


def paired(split: int, fold: np.ndarray, fitted: np.ndarray, own: np.ndarray) -> Difference:
    """The difference of two starts, from nats [rows, prompts] of both and of the teacher."""
    lower = (fold - fitted).mean(1)
    error = lower.std(ddof=1) / math.sqrt(len(lower))
    means = ((fold - own).mean(), (fitted - own).mean(), lower.mean(), error)
    return Difference(split, *map(float, means))


def measure(args: argparse.Namespace) -> list[Difference]:
    """One difference for each split."""
    folder = local_folder(args.model)
    model, params = from_pretrained(folder, dtype="float32")
    prompts = prompts_of(args.text, folder, args.prompts, args.length)
    batches = fit_batches(args.text, folder, args.length)
    own, differences = answers_by_rows(model, params, prompts).nats, []
    for split in args.splits:
        student, start = to_swiftkv(model, params, KVPlan.swiftkv(model.config.num_layers, split))
        fitted = least_squares.fit(student, start, model, params, batches)
        nats = [answers_by_rows(student, p, prompts).nats for p in (start, fitted)]
        differences.append(paired(split, *nats, own))
        print(f"{differences[-1]}: {differences[-1].errors_apart:.1f} standard errors", flush=True)
    return differences


def main() -> int:
    """The command line; its exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", help="a standard model: folder or hub id")
    p.add_argument("--splits", type=int, nargs="+", default=[1, 3, 4])
    p.add_argument("--text", default=str(DEMO / "corpus.jsonl.xz"), metavar="FILE")
    p.add_argument("--prompts", type=int, default=5000, metavar="N", help="at least N held-out ones")
    p.add_argument("--length", type=int, default=256, metavar="N", help="tokens of a row of text")
    args = p.parse_args()

    def work() -> None:
        rows = [d._asdict() | {"errors_apart": d.errors_apart} for d in measure(args)]
        print(json.dumps({"differences": rows, "machine": machine(command("least_squares"))}, indent=1))

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
