"""Make a student of a checkpoint without a training step, and measure its cost.

    swiftkv convert MODEL --split 20 --out DIR
    swiftkv convert MODEL --keep 0,1,2,3 --out DIR

The later layers' keys and values are fitted by least squares on a text (distill/least_squares.py), or with
KV prediction all layers' (distill/fit_predictor.py); teacher and student are compared on rows of text that
were not fitted on.
"""

import argparse
import dataclasses
import shlex
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from swiftkv_jax.checkpoint.hf import local_folder, read_model
from swiftkv_jax.cli.answering import ask
from swiftkv_jax.cli.untrained import ROWS, SHARE, apart, costs, opened
from swiftkv_jax.common.bucket import Home, Place, path_or_url
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.common.folder import DEMO
from swiftkv_jax.common.progress import Say, show, working
from swiftkv_jax.config.model import DTYPES, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.surgery import INITS
from swiftkv_jax.distill import kernels, start
from swiftkv_jax.distill.answers import StudentAndTeacher, to_held_out
from swiftkv_jax.distill.config import (
    LEAST_SQUARES,
    MAPS,
    STARTS,
    Experiment,
    PlanConfig,
    PredictConfig,
    PredictionLossConfig,
)
from swiftkv_jax.distill.data.loader import DataConfig, longest_piece
from swiftkv_jax.distill.report import Outcome, card, license_of
from swiftkv_jax.text.tokenizer import load_tokenizer

CORPUS = DEMO / "corpus.jsonl.xz"
HELD_OUT_TOKENS = 16_384  # at most, that a student is evaluated on


def parser() -> Parser:
    p = Parser(
        description="Make a SwiftKV student, or a KV prediction adapter, of a checkpoint without training, "
        "and measure its quality.",
        epilog="example: %(prog)s model.gguf --split 20 --out student",
    )
    inits = tuple(dict.fromkeys((LEAST_SQUARES, *INITS, *STARTS)))
    count = f"{PlanConfig().init_tokens}, for KV prediction {PredictConfig(keep=(0,)).init_tokens}"
    method = p.add_mutually_exclusive_group(required=True)
    p.flag("MODEL", "a folder, a GGUF file or a hub id")
    about = "layers that prompt tokens run; later layers' keys and values come from the output of these"
    p.flag("--split N", about, method, type=int)
    p.flag("--keep N,N,...", "KV prediction: layers of MODEL that read prompts for it", method)
    p.flag("--auxiliary DIR", "KV prediction: folder or hub id of a model that reads prompts", method)
    p.flag("--share S", SHARE, type=int, default=1)
    p.flag("--map", "which auxiliary row predicts which row (nearest with --keep, else spread)", choices=MAPS)
    about = "tokens at a prompt's end that MODEL itself reads, before it generates (0; KV prediction: 1)"
    p.flag("--tail N", about, type=int)
    kinds = ".txt, .md or .jsonl, a folder of them, or hf://org/name; may be repeated"
    about = f"text to fit and evaluate on: {kinds} (default: Python's documentation, of the package)"
    p.flag("--text FILE", about, action="append")
    about = "initialisation of the new keys and values, or of KV prediction's maps (default: %(default)s)"
    p.flag("--init", about, choices=inits, default=LEAST_SQUARES)
    p.flag("--tokens N", f"approximate number of tokens for least squares (default: {count})", type=int)
    p.flag("--length N", "context length in tokens (default: %(default)s)", type=int, default=512)
    about = "dtype of the computation (default: %(default)s)"
    p.flag("--dtype", about, choices=DTYPES, default="float32")
    about = "held-out prompts that student and teacher both answer (default: %(default)s; 0: none)"
    p.flag("--answers N", about, type=int, default=16)
    p.flag("--out DIR", "folder for the student, here or gs://BUCKET/PATH", type=path_or_url, required=True)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 130 for Ctrl-C."""
    return exit_code(lambda: _run(parser().parse_args(argv)), failures=(OSError,))


def _run(args: argparse.Namespace) -> None:
    tokens = {} if args.tokens is None else {"init_tokens": integer("--tokens", args.tokens, 1)}
    start: dict[str, Any] = {"init": args.init} | tokens
    if args.tail is not None:
        start["tail"] = args.tail
    if args.split is not None:
        part = PlanConfig(split=args.split, share=args.share, **start)
    else:
        try:
            keep = tuple(int(layer) for layer in args.keep.split(",")) if args.auxiliary is None else ()
        except ValueError:
            raise UsageError(f"--keep takes layers as 0,2,4, not {args.keep!r}") from None
        part = PredictConfig(auxiliary=args.auxiliary or "", keep=keep, map=args.map, **start)
    text, answers = args.text or str(CORPUS), integer("--answers", args.answers, 0)
    convert(args.model, part, args.out, text, args.length, args.dtype, answers=answers)


def convert(
    model: str,
    part: PlanConfig | PredictConfig,
    out: Path | str,
    text: str | Sequence[str] = str(CORPUS),
    length: int = 512,
    dtype: str = "float32",
    say: Say = show,
    answers: int = 0,
) -> dict[str, float]:
    """Save the student of `model` that training would start with, in its own dtype, with a model card.

    Args:
      model: a folder, a GGUF file or a hub id.
      part: the student's plan; or KV prediction, which makes an adapter.
      text: sources of documents, see `open_documents`. The same documents are held out as in training; with
        few documents, every tenth piece.
      length: tokens of a row, for fitting and for evaluation.
      dtype: to compute in.
      answers: most held-out prompts that both models answer, greedily; 0: none.

    Returns:
      `costs` of the student.

    Raises:
      UsageError: the model, the text or the plan makes no sense, or `out` cannot be written.
    """
    home, texts = Home(out), (text,) if isinstance(text, str) else tuple(text)
    _check_out(home.here)
    with working(say, f"reading {model}"):
        folder = local_folder(model)
        config, plan, _ = read_model(folder)
        tokenizer = load_tokenizer(folder)
    if isinstance(part, PlanConfig):
        check_standard(model, plan)
    with tempfile.TemporaryDirectory(prefix="swiftkv-convert-") as scratch:
        with working(say, f"reading {', '.join(texts)}"):
            context = config.longest_context
            kind: dict[str, Any] = {"plan": part}
            if isinstance(part, PlanConfig):
                integer("--split", part.split, 1, config.num_layers - 1)
                if part.init == LEAST_SQUARES:
                    integer("--tokens", part.init_tokens, config.hidden_size + 1)
            else:
                if part.auxiliary:
                    context = min(context, read_model(local_folder(part.auxiliary))[0].longest_context)
                kind = {"predict": part, "trainable": "predictor", "loss": PredictionLossConfig()}
            integer("--length", length, 2, context)
            data = DataConfig(sources=texts, seq_len=length, batch_size=ROWS, long_documents="fill")
            data, evaluation = apart(data, Path(scratch))
            types = {"dtype": dtype, "export_dtype": config.dtype}
            kind |= {"model": str(folder), "data": data, "evaluation": evaluation, "steps": 1}
            # The run that would train this student on one device; none of its steps is taken.
            experiment = Experiment(name="convert", remat=False, **types, **kind)
        attention, _ = kernels.choose(experiment)  # before JAX has its devices
        rows = jax.device_count() * ROWS
        data, evaluation = (dataclasses.replace(part, batch_size=rows) for part in (data, evaluation))
        count = max(1, HELD_OUT_TOKENS // (rows * length))
        changes = {"evaluation_batches": count, "attention": attention}
        experiment = dataclasses.replace(experiment, data=data, evaluation=evaluation, **changes)
        began = time.monotonic()
        with opened(experiment, tokenizer, say) as trial:
            student = trial.student(part, say)
            figures = costs(student, student.rows, length)
            say(report(figures, part, config.num_layers, length))
            longest = longest_piece(trial.held_out)
            if longest < length:
                say(f"the longest held-out document has {longest:,} tokens, fewer than --length {length:,}")
            made = student.recipe.student
            with working(say, f"exporting to {home.here}"):
                start.export(home.here, made, student.params, config.dtype, folder, tokenizer.folder)
            models = StudentAndTeacher(made, student.params, folder, tokenizer)
            asked = to_held_out(partial(ask, say=say), models, evaluation, answers, say)
        named = dataclasses.replace(experiment, name=home.here.name, model=model)
        with explained(f"write to {out}"):
            shown = {
                f"{length}/{name}": figures[name]
                for name in ("cross_entropy", "teacher_cross_entropy", "kl", "agreement")
            }
            page = card(Outcome(named, made, shown, {length: longest}, asked), license_of(folder))
            (home.here / "README.md").write_text(page, encoding="utf-8")
        home.send()
    say(f"saved in {out} after {time.monotonic() - began:.0f} s; to serve it: {serving(home.place)}")
    return figures


def serving(folder: Place) -> str:
    """The command that serves a folder, as one types it in a shell."""
    return f"swiftkv serve {shlex.quote(str(folder))} --http"


def check_standard(model: str, plan: KVPlan) -> None:
    """Raises UsageError: the plan is a student's, and students are made only from standard models."""
    if plan != plan.full:
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
    if plan is None or plan == plan.full:
        raise UsageError(f"{out} holds a run, or a model that is not a student: give another --out")


def report(figures: dict[str, float], part: PlanConfig | PredictConfig, layers: int, length: int) -> str:
    if isinstance(part, PlanConfig):
        more = f", share {part.share}" if part.share > 1 else ""
        more += f", tail {part.tail}" if part.tail else ""
        student = f"split {part.split} of {layers} layers{more}, {part.init}"
        saved = [
            f"  prompt FLOPs   {1 - figures['prompt_flops']:.0%} saved in the layers, at {length} tokens",
            f"  cache          {1 - figures['cache_bytes']:.0%} saved",
        ]
    else:
        student = f"KV prediction from {part.auxiliary or f'layers {part.keep}'}, {part.init}"
        student += ", as served" if part.tail == 1 else ", every row predicted"
        saved = [f"  auxiliary      a gap of {figures['auxiliary_gap']:.3f} by itself"]
    return "\n".join(
        (
            f"{student}, on {figures['tokens']:,.0f} held-out tokens in rows of {length}:",
            f"  cross-entropy  {figures['cross_entropy']:.3f} nats per token, the teacher's "
            f"{figures['teacher_cross_entropy']:.3f}: a gap of {figures['gap']:.4f} "
            f"+- {figures['gap_error']:.4f}",
            f"  KL             {figures['kl']:.4f} nats per token from the teacher",
            f"  agreement      the teacher's most likely token at {figures['agreement']:.1%} of positions",
            *saved,
        )
    )
