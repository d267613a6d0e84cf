"""Make a SwiftKV student of a checkpoint without a training step, and measure its cost.

    swiftkv convert MODEL --split 20 --out DIR

The same as `swiftkv-convert`. The later layers' keys and values are fitted by least squares on a text
(distill/least_squares.py), and teacher and student are compared on rows of text that were not fitted on.
"""

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from swiftkv_jax.analysis.flops import cache_bytes_per_token, prompt_gflop
from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.common.bucket import Home, Place, path_or_url
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.common.progress import Say, show, working
from swiftkv_jax.config.model import DTYPES, ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.surgery import INITS
from swiftkv_jax.distill import kernels, loop
from swiftkv_jax.distill.config import LEAST_SQUARES, Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.data.samples import documents_of
from swiftkv_jax.distill.data.sources import PLACE, split_of
from swiftkv_jax.distill.report import card, license_of

CORPUS = DEMO / "corpus.jsonl.xz"
HELD_OUT_TOKENS = 16_384  # at most, that a student is evaluated on
_FIGURES = ("cross_entropy", "teacher_cross_entropy", "kl", "agreement")  # of `costs`, in the model card
_ROWS = 4  # of a batch on each device
_FEW = 8  # held-out documents; fewer are not enough to evaluate on
_PIECE = 4000  # characters that a text is cut into, where there are few documents
_EVERY = 10  # of these pieces one is held out


def parser() -> Parser:
    """All flags of the command."""
    p = Parser(
        description="Make a SwiftKV student of a checkpoint without training, and measure its quality.",
        epilog="example: %(prog)s model.gguf --split 20 --out student",
    )
    p.add_argument("model", metavar="MODEL", help="a folder, a GGUF file or a hub id")
    p.add_argument(
        "--split",
        type=int,
        required=True,
        metavar="N",
        help="layers that prompt tokens run; later layers' keys and values come from the output of these",
    )
    p.add_argument(
        "--share",
        type=int,
        default=1,
        metavar="S",
        help="AcrossKV: number of later layers that share one row",
    )
    p.add_argument(
        "--text",
        default=str(CORPUS),
        metavar="FILE",
        help="text to fit and evaluate on: .txt, .md or .jsonl, a folder of them, or hf://org/name "
        "(default: Python's documentation, which comes with the package)",
    )
    p.add_argument(
        "--init",
        choices=(LEAST_SQUARES, *INITS),
        default=LEAST_SQUARES,
        help="initialisation of the new keys and values (default: %(default)s)",
    )
    p.add_argument(
        "--tokens",
        type=int,
        default=PlanConfig().init_tokens,
        metavar="N",
        help="approximate number of tokens for least squares (default: %(default)s)",
    )
    p.add_argument(
        "--length", type=int, default=512, metavar="N", help="context length in tokens (default: %(default)s)"
    )
    p.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="dtype of the computation (default: %(default)s)"
    )
    about = "folder for the student, here or gs://BUCKET/PATH"
    p.add_argument("--out", type=path_or_url, required=True, metavar="DIR", help=about)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 130 for Ctrl-C."""
    return exit_code(lambda: _run(parser().parse_args(argv)), failures=(OSError,))


def _run(args: argparse.Namespace) -> int:
    plan = PlanConfig(split=args.split, share=args.share, init=args.init, init_tokens=args.tokens)
    convert(args.model, plan, args.out, args.text, args.length, args.dtype)
    return 0


def convert(
    model: str,
    plan: PlanConfig,
    out: Path | str,
    text: str = str(CORPUS),
    length: int = 512,
    dtype: str = "float32",
    say: Say = show,
) -> dict[str, float]:
    """Save the student of `model` that `plan` would start training with, in its own dtype, with a model card.

    Args:
      model: a folder, a GGUF file or a hub id.
      text: a source of documents, see `open_documents`. The same documents are held out as in training; with
        few documents, every tenth piece.
      length: tokens of a row, for fitting and for evaluation.
      dtype: to compute in.

    Returns:
      `costs` of the student.

    Raises:
      UsageError: the model, the text or the plan makes no sense, or `out` cannot be written.
    """
    home = Home(out)
    _check_out(home.here)
    with working(say, f"reading {model}"):
        folder = local_folder(model)
    config = ModelConfig.from_hf(folder)
    check_standard(model, plan_from_hf(folder))
    with tempfile.TemporaryDirectory(prefix="swiftkv-convert-") as scratch:
        with working(say, f"reading {text}"):
            experiment = _experiment(str(folder), config, plan, text, length, dtype, Path(scratch))
        chosen = kernels.choose(experiment)  # before JAX has its devices
        experiment = _on_each(experiment, jax.device_count())
        with loop.opened(experiment, Path(scratch) / "run", say=say, chosen=chosen) as run:
            began = time.monotonic()
            run.fit_start()
            found = costs(run, run.row_sums()[length], length)
            say(report(found, plan, config.num_layers, length))
            if (longest := run.longest[length]) < length:
                say(f"the longest held-out document has {longest:,} tokens, fewer than --length {length:,}")
            run.export(home.here)
            figures = {f"{length}/{name}": found[name] for name in _FIGURES}
            named = dataclasses.replace(experiment, name=home.here.name, model=model)
            with explained(f"write to {out}"):
                text = card(named, run.recipe.student, figures, license_of(folder), run.longest)
                (home.here / "README.md").write_text(text, encoding="utf-8")
            home.send()
    say(f"saved in {out} after {time.monotonic() - began:.0f} s; to serve it: {serving(home.place)}")
    return found


def serving(folder: Place) -> str:
    """The command that serves a folder, as one types it in a shell."""
    return f"swiftkv serve {shlex.quote(str(folder))} --http"


def check_standard(model: str, plan: KVPlan) -> None:
    """Raises UsageError: the plan is a student's, and students are made only from standard models."""
    if plan != KVPlan.standard(plan.num_layers):
        raise UsageError(f"{model} is already a student; give the model it was made from")


def _check_out(out: Path) -> None:
    """Raises UsageError: `out` cannot be written, or holds a run or a model that is not a student. An earlier
    student may be replaced."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"cannot write to {out}: it is a file")
    with explained(f"write to {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out if out.exists() else out.parent):
            pass
        if not (out / "config.json").exists():
            return
    try:
        plan = plan_from_hf(out)
    except UsageError:  # a model of another kind, or the settings of a run
        plan = None
    if plan is None or plan == KVPlan.standard(plan.num_layers):
        raise UsageError(f"{out} holds a run, or a model that is not a student: give another --out")


def _experiment(
    model: str, config: ModelConfig, plan: PlanConfig, text: str, length: int, dtype: str, scratch: Path
) -> Experiment:
    """The run that would train this student on one device; none of its steps is taken."""
    integer("--split", plan.split, 1, config.num_layers - 1)
    integer("--length", length, 2, config.longest_context)
    if plan.init == LEAST_SQUARES:
        integer("--tokens", plan.init_tokens, config.hidden_size + 1)
    data = DataConfig(sources=(text,), seq_len=length, batch_size=_ROWS, long_documents="fill")
    data, evaluation = apart(data, scratch)
    return Experiment(
        name="convert",
        model=model,
        plan=plan,
        data=data,
        evaluation=evaluation,
        dtype=dtype,
        export_dtype=config.dtype,
        steps=1,
        remat=False,
    )


def _on_each(experiment: Experiment, devices: int) -> Experiment:
    """The same experiment spread over `devices`, with as many tokens to evaluate on."""
    rows, length = devices * experiment.data.batch_size, experiment.data.seq_len
    parts = {
        name: dataclasses.replace(data, batch_size=rows)
        for name in ("data", "evaluation")
        if (data := getattr(experiment, name)) is not None
    }
    return dataclasses.replace(
        experiment, **parts, evaluation_batches=max(1, HELD_OUT_TOKENS // (rows * length))
    )


def apart(data: DataConfig, scratch: Path) -> tuple[DataConfig, DataConfig]:
    """The data to fit or train on, and the held-out data to evaluate on.

    The same documents are held out as in training; with few documents, every tenth piece, in files that are
    written to `scratch`.

    Raises:
      UsageError: sources that cannot be read, or too little text.
    """
    documents = documents_of(data)
    if sum(split_of(name) == "held_out" for name in documents.ids()) >= _FEW:
        return dataclasses.replace(data, split="train"), dataclasses.replace(data, split="held_out")
    if data.weights:
        raise UsageError(
            f"{', '.join(data.sources)} hold too few documents for weights: give more, or no weights"
        )
    pieces: list[dict] = []
    for document in (documents[i] for i in range(len(documents))):
        place = {PLACE: document.place or document.id}
        if document.messages:
            pieces.append({"messages": list(document.messages)} | place)
        cuts = range(0, len(document.text), _PIECE)
        pieces += [{"text": document.text[start : start + _PIECE]} | place for start in cuts]
    if len(pieces) < _EVERY:
        raise UsageError(
            f"{', '.join(data.sources)} is too short: give a text of {_PIECE * _EVERY:,} characters or more"
        )
    parts = {
        "fit": [piece for i, piece in enumerate(pieces) if i % _EVERY != _EVERY - 1],
        "held_out": pieces[_EVERY - 1 :: _EVERY],
    }
    scratch.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        lines = (json.dumps(piece) + "\n" for piece in part)
        (scratch / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    fit, held_out = (
        dataclasses.replace(data, sources=(str(scratch / f"{name}.jsonl"),), split="all", columns=())
        for name in parts
    )
    return fit, held_out


def costs(run: loop.Run, rows: dict[str, np.ndarray], length: int) -> dict[str, float]:
    """The current cost of a run's student, from its `row_sums` of rows of `length` tokens.

    "gap" is the student's cross-entropy minus its teacher's, and "kl" the KL from teacher to student, both in
    nats per token; "agreement" is the share of positions where both have the same most likely token, and
    "tokens" the number of tokens evaluated. "prompt_flops" and "cache_bytes" are relative to the teacher's:
    FLOPs of prompt tokens in the layers at that length, and bytes of a token's rows.
    """
    found = loop.summarise(rows, has_teacher=True)
    config, plan = run.recipe.student.config, run.recipe.student.plan
    return {
        "cross_entropy": found["cross_entropy"],
        "teacher_cross_entropy": found["teacher_cross_entropy"],
        "gap": found["cross_entropy"] - found["teacher_cross_entropy"],
        "kl": found["kl"],
        "agreement": found["agreement"],
        "tokens": float(rows["tokens"].sum()),
        "prompt_flops": prompt_gflop(config, plan, length) / prompt_gflop(config, None, length),
        "cache_bytes": cache_bytes_per_token(config, plan) / cache_bytes_per_token(config),
    }


def report(found: dict[str, float], plan: PlanConfig, layers: int, length: int) -> str:
    """The costs as text."""
    shared = f", share {plan.share}" if plan.share > 1 else ""
    return "\n".join(
        (
            f"split {plan.split} of {layers} layers{shared}, {plan.init}, on {found['tokens']:,.0f} held-out "
            f"tokens in rows of {length}:",
            f"  cross-entropy  {found['cross_entropy']:.3f} nats per token, the teacher's "
            f"{found['teacher_cross_entropy']:.3f}: a gap of {found['gap']:.3f}",
            f"  KL             {found['kl']:.3f} nats per token from the teacher",
            f"  agreement      the teacher's most likely token at {found['agreement']:.1%} of positions",
            f"  prompt FLOPs   {1 - found['prompt_flops']:.0%} saved in the layers, at {length} tokens",
            f"  cache          {1 - found['cache_bytes']:.0%} saved",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
