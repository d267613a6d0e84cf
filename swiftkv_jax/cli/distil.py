"""`swiftkv distil MODEL --data X`: a student in one command; settings follow from model and machine."""

import argparse
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.cli import untrained
from swiftkv_jax.cli.answering import ask
from swiftkv_jax.cli.convert import serving
from swiftkv_jax.cli.plan import config_of
from swiftkv_jax.cli.teacher_chats import sources_with_chats
from swiftkv_jax.cli.train import FieldsParser
from swiftkv_jax.cli.untrained import apart, on_tokens, opened
from swiftkv_jax.common.bucket import Home, at, path_or_url
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.distill import kernels, loop
from swiftkv_jax.distill.config import LEAST_SQUARES, Experiment, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig, DataLoader
from swiftkv_jax.distill.data.sources import open_documents
from swiftkv_jax.distill.fields import override
from swiftkv_jax.distill.run_folder import check_free
from swiftkv_jax.distill.start import check_vocabulary
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

AUTO = "auto"
_LONG = 2048  # a context length that every student is evaluated at, if its model supports it
_READ = ("data.sources=", "data.columns=")  # settings that only hold for what --data names


class Machine(NamedTuple):
    """The machine that settings depend on: JAX's platform ("cpu", "gpu" or "tpu"), and the number of
    devices."""

    platform: str
    devices: int


def parser() -> Parser:
    p = _Parser(
        description="Make a SwiftKV student of a model, distil it on your data and export it. Settings "
        "follow from the model's size and this machine's devices; --set changes any of them.",
        epilog="example: %(prog)s meta-llama/Llama-3.2-1B-Instruct --data chats.jsonl",
    )
    several = {"action": "append", "default": []}
    p.flag("MODEL", "a folder, a GGUF file or a hub id")
    own = "self://prompts.jsonl or self://?prompts=N for chats that the model writes itself; may be repeated"
    about = f"a file of texts or chats, a folder or pattern of them, hf://org/name, or {own}"
    p.flag("--data X", about, action="append", required=True)
    about = "sampling weight of each --data, in order: 2 takes every document twice per pass (default: 1)"
    p.flag("--weight W", about, type=float, **several)
    about = "rename a column of your rows, as in prompt=question; may be repeated"
    p.flag("--columns OURS=THEIRS", about, **several)
    about = "number of layers that prompt tokens run; auto (the default) fits students and compares them"
    p.flag("--split N", about, default=AUTO)
    p.flag("--share S", untrained.SHARE, type=int, default=1)
    about = "folder of the run, here or gs://BUCKET/PATH (default: runs/<the model's name>)"
    p.flag("--out DIR", about, type=path_or_url)
    p.flag("--length N", "tokens per row (default: 4096, on CPUs 512)", type=int)
    about = "training steps (default: one pass over the data, at most 2000, on CPUs 200)"
    p.flag("--steps N", about, type=int)
    p.flag("--set a.b=value", "override a field of the config, see below; may be repeated", **several)
    p.flag("--resume", "continue from the newest good checkpoint in --out")
    return p


class _Parser(FieldsParser):
    """It knows that a shell makes several words of a pattern."""

    def error(self, message: str):
        words = message.removeprefix("unrecognized arguments: ").split()
        if words != message.split() and not any(word.startswith("--") for word in words):
            message += ": put quotes around a pattern, and --data before each file"
        super().error(message)


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 1 for a failed run, 130 for Ctrl-C (saved)."""
    interrupted = "\ninterrupted: the newest checkpoint is kept; --resume continues from it"
    return exit_code(lambda: _run(parser().parse_args(argv)), interrupted, (RuntimeError, OSError))


def _run(args: argparse.Namespace) -> int:
    began, config = time.monotonic(), config_of(args.model)
    split = None
    if args.split != AUTO:
        if not args.split.isdecimal():
            raise UsageError(f"--split is auto or a number of layers, not {args.split!r}")
        split = integer("--split", int(args.split), 1, config.num_layers - 1)
    out = args.out or Path("runs") / _name(args.model)
    check_free(at(out), args.resume)
    home = Home(out)
    if args.steps is not None:
        integer("--steps", args.steps, 1)
    # The attention kernel is chosen before JAX has its devices, on an experiment of one of them.
    recognised = Machine(platform=machines.recognise().platform, devices=1)
    tokens = _row_tokens(args.length, config, recognised)
    data = DataConfig(sources=tuple(args.data), seq_len=tokens, batch_size=1)
    plan = PlanConfig(split=split or config.num_layers - 1, share=args.share)
    first = make_experiment(args.model, config, recognised, data, data, plan, 1)
    chosen = kernels.choose(override(first, args.set))
    machine = Machine(platform=jax.default_backend(), devices=jax.device_count())

    def experiment(data: DataConfig, held_out: DataConfig, split: int, steps: int) -> Experiment:
        plan = PlanConfig(split=split, share=args.share)
        made = make_experiment(args.model, config, machine, data, held_out, plan, steps)
        later = [setting for setting in args.set if not setting.startswith(_READ)]
        return override(dataclasses.replace(made, name=home.here.name), later)

    sources = sources_with_chats(args.data, args.model)
    with working(show, f"reading the tokenizer of {args.model}, and {', '.join(sources)}"):
        folder = local_folder(args.model)
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, config)
        data = data_for(sources, config, tokenizer, machine, args.length, args.weight, args.columns, args.set)
        experiment(data, data, split or config.num_layers - 1, 1)  # fail early on mistakes in --set
        with explained(f"write to {out}"):
            data, held_out = apart(data, home.here / "data")
        steps = args.steps
        if steps is None:
            with contextlib.closing(DataLoader(data, tokenizer)) as loader:
                steps = min(loader.steps_per_epoch(), 200 if machine.platform == "cpu" else 2000)
    if split is None and args.resume:
        path = home.here / "config.json"
        with explained(f"read {path}"):
            try:
                split = json.loads(path.read_text())["plan"]["split"] if path.exists() else None
            except (KeyError, TypeError, ValueError):
                raise UsageError(f"{path} is not that of a run: give another --out") from None
    if split is None:
        layers = config.num_layers
        with opened(on_tokens(folder, data, held_out, 16_384), tokenizer, show) as trial:
            show("choosing a split: evaluating a least-squares student of each candidate")
            later = [split for split in untrained.split_candidates(layers) if 2 * split >= layers]
            kl = {split: cost["kl"] for split, cost in trial.by_split(later, show).items()}
        split = untrained.chosen_split(kl, layers)
        rule = f"the earliest from half depth on with a KL of at most {untrained.MOST_KL}, or the best"
        show(f"split {split}: {rule}")
    made = experiment(data, held_out, split, steps)
    with loop.opened(made, home, args.resume, chosen=chosen) as run:
        result = run.go(ask)
    if result.signal:
        show(f"saved step {result.step} in {out}; the same command with --resume continues")
        return 130 if result.signal == 2 else 0
    assert result.export is not None  # a run that no signal ended has one
    show(f"done after {time.monotonic() - began:.0f} s; the student is in {result.export}")
    show(f"quality and costs: {out}/report.md")
    show(f"to serve it: {serving(result.export)}")
    return 0


def _row_tokens(length: int | None, config: ModelConfig, machine: Machine) -> int:
    """Tokens of a row: the value of --length, or as many as suit the machine."""
    usual = min(512 if machine.platform == "cpu" else 4096, config.max_position_embeddings)
    return integer("--length", usual if length is None else length, 2, config.longest_context)


def _name(model: str) -> str:
    return Path(model).name.removesuffix(".gguf") or "student"


def data_for(
    sources: Sequence[str],
    config: ModelConfig,
    tokenizer: Tokenizer,
    machine: Machine,
    length: int | None,
    weights: Sequence[float] = (),
    columns: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> DataConfig:
    """The data config, with rows that suit the machine. If the tokenizer has a chat template, only the
    assistant's turns of chats are trained on.

    Args:
      settings: `a.b=value` each, as --set takes them; those of `data` are applied.
    """
    seq_len = _row_tokens(length, config, machine)
    rows = 4 if machine.platform == "cpu" else max(4, 65_536 // seq_len)
    data = DataConfig(
        sources=tuple(sources),
        weights=tuple(weights),
        columns=tuple(columns),
        chats="template" if tokenizer.template is not None else "plain",
        seq_len=seq_len,
        batch_size=machine.devices * math.ceil(rows / machine.devices),
    )
    read = override(data, settings, under="data.")
    documents = open_documents(read.sources, read.skip_bad_lines, read.columns, read.stream_rows)
    chats = all(documents[i].messages for i in range(min(64, len(documents))))
    chats = chats and read.chats == "template"
    mask, long_documents = ("assistant", "split") if chats else ("all", "fill")
    made = dataclasses.replace(data, mask=mask, long_documents=long_documents)
    return override(made, settings, under="data.")


def make_experiment(
    model: str,
    config: ModelConfig,
    machine: Machine,
    data: DataConfig,
    held_out: DataConfig,
    plan: PlanConfig,
    steps: int,
) -> Experiment:
    """A distillation with settings that worked for models of that size on such machines.

    The learning rate is the paper's 3e-4 (SwiftKV, appendix A.1) from a billion parameters on. For smaller
    models it rises with the fourth root of the ratio, to at most 2e-3, which the demo's 3.6 M parameters use.
    A micro-batch has at least one row a device (four for smaller models and on CPUs); activations are
    recomputed, except on CPUs.
    """
    count = weights.count(weights.weights(config, config.plan()))
    on_cpu = machine.platform == "cpu"
    micro = machine.devices * (4 if on_cpu or count < 1e9 else 1)
    most = range(max(1, data.batch_size // micro), 0, -1)
    rate = min(2e-3, 3e-4 * max(1.0, 1e9 / count) ** 0.25)
    lengths = tuple(sorted({data.seq_len, _LONG if config.longest_context >= _LONG else data.seq_len}))
    rows = machine.devices * max(1, data.batch_size * data.seq_len // (lengths[-1] * machine.devices))
    return Experiment(
        name=_name(model),
        model=model,
        plan=dataclasses.replace(plan, init=LEAST_SQUARES, init_tokens=max(65_536, 8 * config.hidden_size)),
        data=data,
        evaluation=dataclasses.replace(held_out, seq_len=lengths[-1], batch_size=rows),
        evaluation_batches=max(1, (16_384 if on_cpu else 65_536) // (rows * lengths[-1])),
        eval_lengths=lengths if len(lengths) > 1 else (),
        optimizer=OptimizerConfig(
            learning_rate=float(f"{rate:.1e}"), accumulate=next(n for n in most if data.batch_size % n == 0)
        ),
        dtype="float32" if on_cpu else "bfloat16",
        export_dtype=config.dtype,
        steps=steps,
        remat=not on_cpu,
        evaluate_every=max(50, steps // 4),
    )
