"""SwiftKV paper, Table B.1: quality and size of a cache by its dtype, for a teacher and its students; also
with weights in 8 bits.

    python -m benchmarks.papers.cache_dtypes TEACHER [STUDENT ...]

Without a STUDENT, three are made by least squares and not distilled: half of the layers, with rows of one,
two and four layers. Quality is that of `forward` over rounded rows, which is what a server computes; KL and
agreement compare it with the teacher over rows that are not rounded.
"""

import argparse
import itertools
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import swiftkv_jax as skv
from benchmarks.common import RESULTS, machine
from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.cli.convert import CORPUS
from swiftkv_jax.cli.plan import config_of
from swiftkv_jax.cli.untrained import apart
from swiftkv_jax.common.errors import exit_code
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import rounded
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.shapes import Array, Hidden, PyTree
from swiftkv_jax.distill import loop
from swiftkv_jax.distill.config import LEAST_SQUARES, Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import Batch, DataConfig, evaluation_batches
from swiftkv_jax.text.tokenizer import load_tokenizer

EXACT, DTYPES = "float32", ("bfloat16", "float8_e4m3fn", "int8")
SHARES = (1, 2, 4)
COLUMNS = ["model", "rows", "cross-entropy", "KL", "agreement", "cache bytes per token", "saved", "weights"]
_ROWS = 4


@partial(jax.jit, static_argnums=(0, 3))
def hidden(model: Transformer, params: PyTree, batch: Batch, dtype: str) -> Hidden:
    """[B, T, D] before the head, over rows as a cache of `dtype` stores them."""
    where = batch.positions, batch.segments
    return forward(model, params, batch.tokens, *where, store=partial(rounded, dtype=dtype))


@partial(jax.jit, static_argnums=0)
def sums(model: Transformer, params: PyTree, teacher: Hidden, student: Hidden, batch: Batch) -> Array:
    """[3]: cross-entropy, KL and agreement, summed over the predictions that count; the head is common."""

    def one(row):
        t, s, targets, mask = row
        p, q = (jax.nn.log_softmax(logits(model, params, x)) for x in (t, s))
        nats = -jnp.take_along_axis(q, targets[:, None], axis=1)[:, 0]
        kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
        return jnp.stack([nats, kl, p.argmax(-1) == q.argmax(-1)]) @ mask

    return jax.lax.map(one, (teacher, student, batch.targets, batch.mask)).sum(0)


def measure(models: Sequence[tuple[Transformer, PyTree]], batches: Sequence[Batch]) -> list[list]:
    """Rows of the table; the first model is the teacher, whose head the students have too."""
    teacher, params = models[0]
    exact = [np.asarray(hidden(teacher, params, batch, EXACT)) for batch in batches]
    count = sum(float(batch.mask.sum()) for batch in batches)
    whole = skv.cache_bytes_per_token(teacher.config, teacher.plan, DTYPES[0])
    rows = []
    for model, own in models:
        weights = next((x.dtype.name for x in jax.tree.leaves(own) if x.dtype.itemsize == 1), EXACT)
        for dtype in DTYPES:
            pairs = zip(exact, batches, strict=True)
            parts = (sums(teacher, params, t, hidden(model, own, b, dtype), b) for t, b in pairs)
            nats, kl, same = np.sum([np.asarray(part, np.float64) for part in parts], axis=0) / count
            size = skv.cache_bytes_per_token(model.config, model.plan, dtype)
            quality = [round(nats, 4), round(kl, 6), round(same, 4)]
            rows.append([model.plan.description, dtype, *quality, size, f"{1 - size / whole:.1%}", weights])
            print(*rows[-1], sep="  ", flush=True)
    return rows


def fitted(teacher: str, share: int, data: DataConfig, tokens: int, scratch: Path) -> Path:
    """The folder of a student of half of the layers, fitted on `tokens` of `data` and not trained."""
    half = config_of(teacher).num_layers // 2
    plan = PlanConfig(split=half, share=share, init=LEAST_SQUARES, init_tokens=tokens)
    shape = {"data": data, "steps": 1, "remat": False, "dtype": EXACT}
    experiment = Experiment(name="fitted", model=str(local_folder(teacher)), plan=plan, **shape)
    folder = scratch / f"share{share}"
    with loop.opened(experiment, scratch / f"run{share}") as run:
        run.fit_start()
        run.export(folder)
    return folder


def main(argv: list[str] | None = None) -> int:
    """Measure, and write the record."""
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("teacher", help="a folder, a GGUF file or a hub id")
    p.add_argument("students", nargs="*", type=Path, metavar="STUDENT", help="folders of its students")
    p.add_argument("--text", default=str(CORPUS), help="text, of which the held-out part is evaluated")
    about = "also measure every model with weights in 8 bits"
    p.add_argument("--quantization", nargs="*", default=[], choices=("int8", "fp8"), help=about)
    p.add_argument("--length", type=int, default=512, help="tokens of a row")
    p.add_argument("--tokens", type=int, default=8192, help="tokens to evaluate")
    p.add_argument("--fit-tokens", type=int, default=65_536, help="tokens that a student is fitted on")
    p.add_argument("--output", type=Path, default=RESULTS / "cache_dtypes.json", metavar="FILE")
    given = sys.argv[1:] if argv is None else argv
    args = p.parse_args(given)

    def work() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            sizes = {"seq_len": args.length, "batch_size": _ROWS}
            data = DataConfig(sources=(args.text,), long_documents="fill", **sizes)
            fit, held_out = apart(data, Path(scratch))
            tokenizer = load_tokenizer(local_folder(args.teacher))
            batches = evaluation_batches(held_out, tokenizer, math.ceil(args.tokens / _ROWS / args.length))
            made = (fitted(args.teacher, n, fit, args.fit_tokens, Path(scratch)) for n in SHARES)
            folders = [args.teacher, *(args.students or made)]
            ways = itertools.product(["auto", *args.quantization], folders)
            models = [skv.from_pretrained(folder, dtype=EXACT, quantization=how) for how, folder in ways]
            rows = measure(models, batches)
        run = machine(shlex.join(["python", "-m", "benchmarks.papers.cache_dtypes", *given]))
        record = {"run": run, "columns": COLUMNS, "rows": rows}
        args.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
