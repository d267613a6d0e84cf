"""`swiftkv plan MODEL`: what SwiftKV would save and which chips it would fit, before anything is trained."""

import argparse
import itertools
import math
import re
import tempfile
from pathlib import Path

import numpy as np

from swiftkv_jax.analysis.flops import CHIPS, Chip, cache_bytes_per_token, prompt_gflop
from swiftkv_jax.analysis.similarity import layer_similarity, suggested_split
from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.cli import untrained
from swiftkv_jax.cli.convert import check_standard
from swiftkv_jax.common.bucket import is_bucket
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, first_line
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.hf import read_config_json
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.quantization import DTYPES
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LossConfig, OptimizerConfig
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.start import check_vocabulary
from swiftkv_jax.engine.settings import MEMORY_FRACTION
from swiftkv_jax.text.tokenizer import load_tokenizer

CONTEXT = 8192  # prompt tokens to plan for, or the model's context if that is shorter
SHARES = (1, 2, 4)
TOKENS, MFU = 680e6, 0.4  # of a distillation: the SwiftKV paper's tokens (appendix A.1); a rate it may reach


def parser() -> Parser:
    p = Parser(
        description="Show what each split of a model saves and what fits on which chip, without training. "
        "A config.json is enough; --text, which measures quality, needs weights.",
        epilog="example: %(prog)s meta-llama/Llama-3.1-8B-Instruct",
    )
    p.flag("MODEL", "a folder, a GGUF file, a config.json or a hub id")
    p.flag("--split N", "show this split only; may be repeated", action="append", type=int)
    about = f"{untrained.SHARE}; may be repeated (default: 1, 2 and 4)"
    p.flag("--share S", about, action="append", type=int)
    p.flag("--context N", f"prompt length in tokens (default: {CONTEXT}, or the model's context)", type=int)
    about = "also measure on this text how similar layers are, and each split's quality before training"
    p.flag("--text FILE", about)
    need = "3/4 of them to fit on, which needs as many as the model is wide"
    p.flag(
        "--max-tokens N", f"tokens of --text to use, {need} (default: %(default)s)", type=int, default=8192
    )
    about = "compile the engine's programs for --topology, by default with half of the layers (--split)"
    p.flag("--compile-serving", about)
    p.flag("--quantization NAME", "weights in 8 bits when served or frozen: int8 or fp8", choices=DTYPES)
    p.flag("--topology T", "h100:1x1x4, v5p:2x2x1, ...: chips that share the heads")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 130 for Ctrl-C."""
    return exit_code(lambda: _run(parser().parse_args(argv)), failures=(OSError,))


def _run(args: argparse.Namespace) -> None:
    config = config_of(args.model)
    layers = config.num_layers
    context = min(CONTEXT, config.max_position_embeddings) if args.context is None else args.context
    integer("--context", context, 1, config.longest_context)
    chosen, shares = args.split or untrained.split_candidates(layers), args.share or SHARES
    integer("--max-tokens", args.max_tokens, 256)
    for split in chosen:
        integer("--split", split, 1, layers - 1)
    for share in shares:
        integer("--share", share, 1, layers)
    if bool(args.topology) != args.compile_serving:
        raise UsageError("--compile-serving and --topology go together")
    if args.compile_serving:
        from swiftkv_jax.cli import serving_programs

        for split, share in itertools.product(args.split or [layers // 2], args.share or [1]):
            plan = config.plan(split, share)
            serving_programs.report(args.model, config, plan, context, args.topology, args.quantization)
        return
    show(report(args.model, config, chosen, shares, context, args.quantization))
    if args.text:
        measure(args.model, args.text, chosen, args.max_tokens)


def config_of(model: str) -> ModelConfig:
    """The config of a standard model from a folder, a file, or the hub (only the config is fetched)."""
    path = local_folder(model) if is_bucket(model) else Path(model).expanduser()
    if not path.exists() and not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", model):
        raise UsageError(f"no model {model}: give a folder, a GGUF file, a config.json or a hub id")
    if not path.exists():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(model, "config.json"))
        except Exception as error:  # the hub client raises many types; they all mean: not available
            raise UsageError(f"{model!r} is no folder, and the hub has none: {first_line(error)}") from None
    raw = read_config_json(path)
    config = ModelConfig.from_hf(raw)
    check_standard(model, plan_from_hf(raw))
    if config.num_layers < 2:
        raise UsageError(f"{model} has one layer: there is nothing to split")
    return config


def report(
    name: str, config: ModelConfig, chosen: list[int], shares, context: int, quantization: str | None = None
) -> str:
    """Two tables: what each split and share saves, and what fits on which chip.

    The first has FLOPs of prompt tokens in the layers, and cache bytes per token, relative to the full
    model's.
    """
    count = weights.count(weights.weights(config, config.plan()))
    whole = weight_bytes(config, quantization=quantization)
    eight = f" and {quantization}" if quantization else ""
    full, cache = prompt_gflop(config, None, context), cache_bytes_per_token(config)
    lines = [
        f"{name}: {config.num_layers} layers, {size(count)} parameters, {whole / 2**30:,.2f} GiB in "
        f"{config.dtype}{eight}",
        "",
        f"A prompt of {context:,} tokens takes {full:,.3g} GFLOP per token in the layers, and {cache:,}",
        "bytes per token of bfloat16 cache. What remains of both, by split:",
        "",
        "split" + "".join(f"   share {share}: FLOPs  cache" for share in shares),
    ]
    for split in chosen:
        cells = ""
        for share in shares:
            plan = config.plan(split, share)
            flops = prompt_gflop(config, plan, context) / full
            kept = cache_bytes_per_token(config, plan) / cache
            cells += f"{flops:{len(str(share)) + 16}.1%}{kept:7.0%}"
        lines.append(f"{split:5}{cells}")
    return "\n".join([*lines, "", fits(config, chosen, shares, context, quantization)])


def fits(
    config: ModelConfig, chosen: list[int], shares, context: int, quantization: str | None = None
) -> str:
    """For each chip: how many sequences of `context` tokens fit beside the weights, or how many chips the
    weights need; and how many chips the arrays of a distillation need."""
    split = min(chosen, key=lambda split: abs(2 * split - config.num_layers))
    plans = {"full model": config.plan()}
    plans |= {f"share {share}": config.plan(split, share) for share in shares}
    training = training_bytes(config, split, quantization)
    student = Transformer(config, config.plan(split), config.dtype)
    recipe = steps.Recipe(student, LossConfig(), OptimizerConfig(), 1, "swiftkv", False)
    work = TOKENS * steps.flops_per_token(recipe, context)[0]
    lines = [
        f"Sequences of {context:,} tokens that fit beside the weights in {MEMORY_FRACTION:.0%} of a chip's "
        f"memory, at split {split};",
        f"and chips for its distillation, which needs {training / 2**30:,.1f} GiB for weights, gradients and "
        "Adam, plus",
        f"activations; with {TOKENS / 1e6:.0f} M tokens at {MFU:.0%} of a chip's peak it takes these hours "
        "of one chip.",
        "",
        f"{'chip':<24}{'memory':>8}"
        + "".join(f"{name:>12}" for name in plans)
        + f"{'distil':>12}{'hours':>7}",
    ]
    for name, chip in CHIPS.items():
        cells = ""
        for plan in plans.values():
            taken = weight_bytes(config, plan, quantization)
            left = chip.memory * MEMORY_FRACTION - taken
            count = int(left // (cache_bytes_per_token(config, plan) * context))
            cells += f"{f'{count:,}' if left > 0 else f'{chips_for(taken, chip)} chips':>12}"
        chips, hours = chips_for(training, chip), work / (MFU * chip.flops) / 3600
        lines.append(f"{name:<24}{chip.memory / 2**30:4.0f} GiB{cells}{f'{chips} or more':>12}{hours:7,.0f}")
    return "\n".join(lines)


def chips_for(taken: int, chip: Chip) -> int:
    """The number of chips whose usable memory holds so many bytes."""
    return math.ceil(taken / (chip.memory * MEMORY_FRACTION))


def weight_bytes(config: ModelConfig, plan: KVPlan | None = None, quantization: str | None = None) -> int:
    """Bytes of a model's weights in its checkpoint's dtype, as serving keeps them, or with projections in 8
    bits."""
    tree = weights.weights(config, plan or config.plan())
    return weights.size(weights.all_in_8_bits(tree, DTYPES.get(quantization or "")), config.dtype)


def training_bytes(config: ModelConfig, split: int, quantization: str | None = None) -> int:
    """Bytes that a distillation keeps: frozen weights in bfloat16 or 8 bits, shared by student and teacher;
    for trained weights a float32 master copy, its gradient and Adam's two means."""
    student = Transformer(config, config.plan(split), "bfloat16")
    trained, frozen = steps.weight_trees(student, "swiftkv")
    kept = [
        weights.all_in_8_bits(tree, DTYPES.get(quantization or ""))
        for tree in (frozen.student, frozen.teacher)
    ]
    return 16 * weights.count(trained) + weights.size(kept, "bfloat16")


def size(count: int) -> str:
    """A number of parameters as text: 8.03 B, 135 M, 640 K."""
    for name, unit in (("B", 1e9), ("M", 1e6)):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count / 1e3:.3g} K"


def measure(name: str, text: str, chosen: list[int], max_tokens: int) -> None:
    """Print layer similarity on a text, and the cost of each split there before training."""
    show("")
    with tempfile.TemporaryDirectory(prefix="swiftkv-plan-") as scratch:
        with working(show, f"reading {name} and {text}"):
            folder = local_folder(name)
            tokenizer = load_tokenizer(folder)
            check_vocabulary(tokenizer, ModelConfig.from_hf(folder))
            parts = untrained.apart(
                DataConfig(sources=(text,), seq_len=CONTEXT, batch_size=1, long_documents="fill"),
                Path(scratch),
            )
            experiment = untrained.on_tokens(folder, *parts, max_tokens)
        with untrained.opened(experiment, tokenizer, show) as trial:
            batches = [(np.asarray(b.tokens), np.asarray(b.segments)) for b in trial.held_out]
            tokens = np.concatenate([ids[segments > 0] for ids, segments in batches])
            with working(show, f"comparing the layers' inputs on {len(tokens):,} tokens"):
                scores, _ = layer_similarity(*trial.loaded[0], tokens)
            shown = " ".join(f"{score:.2f}" for score in scores[:-1])
            show(f"SimScore by layer, the mean cosine of its input with all later layers': {shown}")
            first = suggested_split(scores)
            show(f"the paper's rule, the first split from which it stays above 0.5: {first}")
            show("quality before training, evaluated on another part of the text than it is fitted on:")
            figures = trial.by_split(chosen, show)
    kl = {split: cost["kl"] for split, cost in figures.items()}
    if any(2 * split >= len(scores) for split in chosen):
        best = untrained.chosen_split(kl, len(scores))
        show(f"of these splits, swiftkv distil --split auto would choose {best}")
