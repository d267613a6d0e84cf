"""Which way of making prompts cheaper costs least at equal FLOPs? One model, untrained: a table and a plot.

    python -m swiftkv_jax.compare --model demo/teacher

SwiftKV, KV prediction, its auxiliaries alone, and the systems of baselines/ read the same held-out prompts.
Judged is the first token after each: its cross-entropy above the model's own, and how often both find the
same token likeliest. Costs are FLOPs of reading the prompt, over those of all its tokens in all layers.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax import predict
from swiftkv_jax.analysis import command, plots
from swiftkv_jax.analysis.prediction_flops import Sizes, prediction_table, pruned
from swiftkv_jax.baselines import Baseline, FFNSkip, LazyLLM, RandomPruning, StaticPruning, dense, read
from swiftkv_jax.baselines.ffn_skip import cosines
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.checks import integer
from swiftkv_jax.distill import fit_predictor, least_squares
from swiftkv_jax.distill.data import DataLoader, evaluation_batches
from swiftkv_jax.distill.packing import Batch
from swiftkv_jax.distill.samples import DataConfig
from swiftkv_jax.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.folder import DEMO
from swiftkv_jax.model import Transformer, forward, logits
from swiftkv_jax.plan import KVPlan, Prediction
from swiftkv_jax.shapes import Float, Int, PyTree
from swiftkv_jax.surgery import to_swiftkv
from swiftkv_jax.text.tokenizer import load_tokenizer

FIT_TOKENS = 32_768  # of training documents, for the closed-form starts
_ROWS = 8  # of a batch
_TOGETHER = 32  # prompts that a baseline reads in one batch
_PADS = 2  # lengths that prompts are padded to
_LAZY = ((0.75, 0.75), (0.75, 0.5), (0.75, 0.1), (0.5, 0.5), (0.5, 0.01))
_SKIPPING = (0.5, 0.0)  # quantiles of the cosine in the first layer that may skip


class Prompts(NamedTuple):
    """Held-out prompts: of row r its first lengths[r, i] tokens, for each i.

    Attributes:
      tokens: [R, T] int32. lengths: [R, P] int32, from 2 to T - 1.
    """

    tokens: Int[np.ndarray, "R T"]
    lengths: Int[np.ndarray, "R P"]

    @property
    def targets(self) -> Int[np.ndarray, "R P"]:
        """The token after each prompt."""
        return np.take_along_axis(self.tokens, self.lengths, axis=1)


class Answers(NamedTuple):
    """Of each prompt: nats of the token that follows it, and the likeliest one by the system."""

    nats: Float[np.ndarray, "R P"]
    likeliest: Int[np.ndarray, "R P"]


class Point(NamedTuple):
    """A system in one setting; errors are standard errors over rows, in which prompts are alike.

    Attributes:
      flops: of reading the prompts, over those of every token in every layer. gap: nats above the model's.
    """

    system: str
    setting: str
    flops: float
    gap: float
    gap_error: float
    agreement: float
    agreement_error: float


def parser() -> Parser:
    """All flags of the command."""
    p = Parser(
        prog="python -m swiftkv_jax.compare",
        description="Quality of the first token by FLOPs of the prompt: SwiftKV, KV prediction, and others.",
    )
    p.add_argument("--model", required=True, metavar="DIR", help="a standard model: folder or hub id")
    p.add_argument(
        "--text",
        default=str(DEMO / "corpus.jsonl.xz"),
        metavar="FILE",
        help="documents, as train.py takes them (default: the documentation of Python in the package)",
    )
    p.add_argument("--prompts", type=int, default=1024, metavar="N", help="at least N held-out ones (1024)")
    p.add_argument("--length", type=int, default=256, metavar="N", help="tokens of a row of text (256)")
    p.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="(runs/compare)")
    return p


def prompts_of(source: str, folder: Path, count: int, length: int) -> Prompts:
    """At least `count` prompts from held-out documents, their lengths spread evenly from 2 to `length` - 1.

    Raises:
      UsageError: no held-out document has `length` tokens.
    """
    data = DataConfig(sources=(source,), split="held_out", seq_len=length, batch_size=_ROWS, pack=False)
    batches = evaluation_batches(data, load_tokenizer(folder))
    rows = np.concatenate([np.asarray(b.tokens)[np.asarray(b.segments).all(1)] for b in batches])
    if not len(rows):
        raise UsageError(f"no held-out document of {source} has {length} tokens: lower --length")
    rows = rows[:: max(1, len(rows) // count)]
    each = -(-count // len(rows))
    start = (np.arange(len(rows)) * (math.sqrt(5) - 1) / 2) % 1  # even over rows, whatever their number
    place = (np.arange(each) + start[:, None]) / each
    return Prompts(rows, (2 + place * (length - 2)).astype(np.int32))


def fit_batches(source: str, folder: Path, length: int) -> list[Batch]:
    """FIT_TOKENS of the training documents in rows of `length`."""
    data = DataConfig(
        sources=(source,), split="train", seq_len=length, batch_size=_ROWS, long_documents="fill"
    )
    loader = DataLoader(data, load_tokenizer(folder))
    try:
        count = math.ceil(FIT_TOKENS / (_ROWS * length))
        return [batch for batch, _ in itertools.islice(loader, count)]
    finally:
        loader.close()


# ---- answers -----------------------------------------------------------------------------------------


def answers_by_rows(params: PyTree, stream: Callable, scores: Callable, prompts: Prompts) -> Answers:
    """Of systems that one pass over a row gives for prompts of every length.

    stream: (params, tokens [B, T]) -> hidden states [B, T, D]. scores: (params, hidden states) -> logits.
    """

    @jax.jit
    def some(params, tokens, lengths, targets):
        x = jnp.take_along_axis(stream(params, tokens), (lengths - 1)[..., None], axis=1)
        return _told(scores(params, x), targets)

    found = []
    for start in range(0, len(prompts.tokens), _ROWS):
        part = slice(start, start + _ROWS)
        parts = (prompts.tokens[part], prompts.lengths[part], prompts.targets[part])
        missing = _ROWS - len(parts[0])
        padded = (np.pad(x, ((0, missing), (0, 0)), mode="edge") for x in parts)
        found.append([np.asarray(x)[: len(parts[0])] for x in some(params, *padded)])
    return Answers(*(np.concatenate(x) for x in zip(*found, strict=True)))


def answers_by_prompts(
    model: Transformer, params: PyTree, baseline: Baseline, prompts: Prompts
) -> tuple[Answers, float]:
    """Of systems that read each prompt by itself; and the FLOPs of all prompts."""
    rows, each = prompts.lengths.shape
    lengths, targets = prompts.lengths.ravel(), prompts.targets.ravel()
    longest = prompts.tokens.shape[1]
    nats, likeliest, flops = np.zeros(rows * each), np.zeros(rows * each, np.int32), 0.0
    order = np.argsort(lengths, kind="stable")
    tell = jax.jit(_told)
    sizes = [-(-longest * i // _PADS) for i in range(_PADS + 1)]
    for shorter, size in itertools.pairwise(sizes):
        these = order[(lengths[order] > shorter) & (lengths[order] <= size)]
        for start in range(0, len(these), _TOGETHER):
            batch = these[start : start + _TOGETHER]
            padded = np.resize(batch, _TOGETHER)
            tokens = prompts.tokens[padded // each, :size]
            out, _, work = read(model, params, baseline, tokens, jnp.asarray(lengths[padded]), size)
            told = [np.asarray(x)[: len(batch)] for x in tell(out, targets[padded])]
            nats[batch], likeliest[batch] = told
            flops += float(dense.flops(model.config, work)[: len(batch)].sum())
    return Answers(nats.reshape(rows, each), likeliest.reshape(rows, each)), flops


def _told(scores, targets):
    known = jax.nn.log_softmax(scores, axis=-1)
    nats = -jnp.take_along_axis(known, targets[..., None], axis=-1)[..., 0]
    return nats, jnp.argmax(scores, axis=-1)


def point(system: str, setting: str, flops: float, found: Answers, own: Answers) -> Point:
    """What a system's answers cost against the model's own."""

    def mean(x) -> tuple[float, float]:
        rows = x.mean(1)
        error = rows.std(ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
        return float(rows.mean()), float(error)

    same = (found.likeliest == own.likeliest).astype(np.float64)
    return Point(system, setting, flops, *mean(found.nats - own.nats), *mean(same))


# ---- systems -----------------------------------------------------------------------------------------


def full_depth(sizes: Sizes, length: int) -> float:
    """FLOPs of a prompt of which every token runs every layer."""
    return sizes.read(sizes.layers, sizes.layers, (length + 1) / 2) * length


def swiftkv_flops(sizes: Sizes, split: int, length: int) -> float:
    """FLOPs of a prompt that stops at `split`, where all later rows are made; its last token goes on."""
    below = sizes.read(split, sizes.layers, (length + 1) / 2) * length
    return below + sizes.read(sizes.layers, 0, float(length)) - sizes.read(split, 0, float(length))


def students(
    model: Transformer, params: PyTree, batches: list[Batch], prompts: Prompts, own: Answers
) -> Iterator[Point]:
    """SwiftKV at several splits from its least-squares start."""
    sizes, layers = Sizes.of(model.config), model.config.num_layers
    full = _total(prompts, lambda n: full_depth(sizes, n))
    for split in sorted({max(1, round(layers * depth)) for depth in (0.125, 0.375, 0.5, 0.75)}):
        student, start = to_swiftkv(model, params, KVPlan.swiftkv(layers, split))
        fitted = least_squares.fit(student, start, model, params, batches)
        found = _by_rows(student, fitted, prompts)
        share = _total(prompts, lambda n, split=split: swiftkv_flops(sizes, split, n)) / full
        yield point("SwiftKV", f"split {split}", share, found, own)


def predicted(
    model: Transformer, params: PyTree, batches: list[Batch], prompts: Prompts, own: Answers
) -> Iterator[Point]:
    """KV prediction from some of the model's own layers, fitted by least squares; and those layers alone."""
    sizes, layers = Sizes.of(model.config), model.config.num_layers
    full = _total(prompts, lambda n: full_depth(sizes, n))
    for system, keep in kept_layers(sizes):
        auxiliary, kept = predict.layer_pruned(model, params, keep)
        prediction = Prediction.nearest(layers, keep)
        pair = predict.Predicted(model, auxiliary, prediction)
        parts = {"base": params, "auxiliary": kept}
        parts["predictor"] = fit_predictor.fit(pair, parts, batches)
        small = Sizes.of(auxiliary.config)

        def cost(n, small=small, prediction=prediction) -> float:
            return prediction_table(sizes, small, prediction, n)["total"] * 1e9 * n

        found = answers_by_rows(
            parts,
            lambda parts, tokens, pair=pair: predict.forward(pair, parts, tokens),
            lambda parts, x: logits(model, parts["base"], x),
            prompts,
        )
        setting = "layers " + " ".join(map(str, keep))
        yield point(system, setting, _total(prompts, cost) / full, found, own)
        alone = _total(prompts, lambda n, small=small: full_depth(small, n)) / full
        yield point(f"{system}: alone", setting, alone, _by_rows(auxiliary, kept, prompts), own)


def kept_layers(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    """(system, layers that make its auxiliary): those that the paper prunes to, and the first ones."""
    first = (tuple(range(round(sizes.layers * share))) for share in (0.25, 0.5, 0.625))
    strided = (pruned(sizes, share)[1] for share in (0.25, 0.5, 0.75))
    names = ("KV prediction", "KV prediction, first layers")
    return [(name, keep) for name, keeps in zip(names, (strided, first), strict=True) for keep in keeps]


def others(
    model: Transformer, params: PyTree, batches: list[Batch], prompts: Prompts, own: Answers
) -> Iterator[Point]:
    """Pruning of tokens, LazyLLM, and FFN-SkipLLM at 35 to 85 % of the depth."""
    sizes, layers = Sizes.of(model.config), model.config.num_layers
    full = _total(prompts, lambda n: full_depth(sizes, n))
    cold = {"cold_first": math.ceil(0.35 * layers), "cold_last": layers - 1 - math.floor(0.85 * layers)}
    middle = FFNSkip(threshold=1.0, **cold).middle(layers)
    turned = np.asarray(cosines(model, params, jnp.asarray(batches[0].tokens), middle.start))
    settings: list[tuple[str, str, Baseline]] = [
        ("random pruning", f"keep {keep}", RandomPruning(keep=keep)) for keep in (0.75, 0.5, 0.25)
    ]
    settings += [("static pruning", f"keep {keep}", StaticPruning(keep=keep)) for keep in (0.5, 0.25)]
    settings += [("LazyLLM", f"{start} to {end}", LazyLLM(start=start, end=end)) for start, end in _LAZY]
    for quantile in _SKIPPING:
        threshold = round(float(np.quantile(turned, quantile)), 5) if quantile else -1.0
        settings.append(
            ("FFN-SkipLLM", f"threshold {threshold}", FFNSkip(threshold=threshold, **cold)),
        )
    for system, setting, baseline in settings:
        found, flops = answers_by_prompts(model, params, baseline, prompts)
        yield point(system, setting, flops / full, found, own)


def _by_rows(model: Transformer, params: PyTree, prompts: Prompts) -> Answers:
    return answers_by_rows(params, partial(forward, model), partial(logits, model), prompts)


def _total(prompts: Prompts, cost: Callable[[int], float]) -> float:
    lengths, counts = np.unique(prompts.lengths, return_counts=True)
    return float(sum(cost(int(n)) * count for n, count in zip(lengths, counts, strict=True)))


# ---- the report --------------------------------------------------------------------------------------


def at_equal_flops(points: list[Point], system: str, flops: float) -> float:
    """The gap of a system's curve at some FLOPs, straight between its points; NaN beyond its ends."""
    curve = sorted((p.flops, p.gap) for p in points if p.system == system)
    x, y = zip(*curve, strict=True)
    return float(np.interp(flops, x, y, left=math.nan, right=math.nan))


def table(points: list[Point]) -> str:
    """All points as a table in Markdown, beside each the gap of KV prediction at its FLOPs."""
    lines = [
        "| system | setting | FLOPs | gap | KV prediction there | agreement |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        beside = at_equal_flops(points, "KV prediction", p.flops)
        there = "" if math.isnan(beside) or p.system.startswith("KV") else f"{beside:.4f}"
        lines.append(
            f"| {p.system} | {p.setting} | {p.flops:.3f} | {p.gap:.4f} ± {p.gap_error:.4f} | {there} | "
            f"{p.agreement:.3f} ± {p.agreement_error:.3f} |"
        )
    return "\n".join(lines)


def report(model_path: str, text: str, out: Path, count: int, length: int) -> dict:
    """Compare, print the table, write compare.json, compare.md and compare.png into `out`; what the JSON
    holds.

    Raises:
      UsageError: no standard model, a window below `length`, too few layers, or a text that is too short.
    """
    integer("--prompts", count, 1)
    folder = local_folder(model_path)
    model, params = from_pretrained(folder, dtype="float32")
    integer("--length", length, 4, model.config.max_position_embeddings)
    layers = model.config.num_layers
    if model.plan != KVPlan.standard(layers) or layers < 4 or min(model.config.windows) < length:
        raise UsageError("compare takes a standard model of 4 layers or more, no window of it below --length")
    prompts, batches = prompts_of(text, folder, count, length), fit_batches(text, folder, length)
    out.mkdir(parents=True, exist_ok=True)
    own, points = _by_rows(model, params, prompts), []
    print(f"{prompts.lengths.size} prompts of {len(prompts.tokens)} rows; the model's: {own.nats.mean():.4f}")
    for system in (students, predicted, others):
        for found in system(model, params, batches, prompts, own):
            print(
                f"{found.system}, {found.setting}: FLOPs {found.flops:.3f}, gap {found.gap:.4f}", flush=True
            )
            points.append(found)
    said = table(points)
    print(said)
    (out / "compare.md").write_text(said + "\n", encoding="utf-8")
    plots.comparison(points, out / "compare.png")
    result = {
        "model": model_path,
        "text": text,
        "prompts": int(prompts.lengths.size),
        "rows": len(prompts.tokens),
        "length": length,
        "fit_tokens": FIT_TOKENS,
        "teacher_nats": round(float(own.nats.mean()), 6),
        "points": [
            {k: round(v, 6) if isinstance(v, float) else v for k, v in p._asdict().items()} for p in points
        ],
    }
    return command.save(result, out, "compare")


def _run(args: argparse.Namespace) -> None:
    with explained(f"write to {args.out}"):
        report(args.model, args.text, args.out, args.prompts, args.length)


def main(argv: list[str] | None = None) -> int:
    """The command line; its exit code."""
    return exit_code(lambda: _run(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
