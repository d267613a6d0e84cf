"""The systems that are compared, each in several settings, and their cost of reading a prompt."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.papers.baselines import Baseline, FFNSkip, LazyLLM, RandomPruning, StaticPruning
from benchmarks.papers.baselines.ffn_skip import cosines
from benchmarks.papers.compare import evaluation
from benchmarks.papers.compare.evaluation import Prompts
from benchmarks.papers.prediction_flops import Sizes, prediction_table, pruned
from swiftkv_jax.checkpoint.adapter import check_tokenizers
from swiftkv_jax.checkpoint.hf import from_pretrained, read_model
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.core.surgery import layer_pruned, to_swiftkv
from swiftkv_jax.distill import fit_predictor, least_squares
from swiftkv_jax.distill.config import (
    LEAST_SQUARES,
    LossConfig,
    PlanConfig,
    PredictConfig,
    PredictionLossConfig,
)
from swiftkv_jax.distill.data.packing import Batch

_NAME = "KV prediction"
_SPLITS = (0.125, 0.375, 0.5, 0.75)  # of the depth
_LAZY = ((0.75, 0.75), (0.75, 0.5), (0.75, 0.1), (0.5, 0.5), (0.5, 0.01))
_SKIPPING = (0.5, 0.0)  # quantiles of the cosine in the first layer that may skip
_LANGUAGE = LossConfig(kl_weight=0.0, lm_weight=1.0)
_OWN_WORDS = PredictionLossConfig(kl_weight=1.0, lm_weight=0.0, aux_weight=0.0)  # see configs/tiny_kvp.py


class System(NamedTuple):
    """A way to read prompts, in one setting.

    Attributes:
      flops: of reading all prompts, over those of every token in every layer.
      training: fields of the `Experiment` that trains it from this start.
    """

    name: str
    setting: str
    flops: float
    model: Transformer | Predicted
    params: PyTree
    training: dict[str, Any]


class Source(NamedTuple):
    """The inputs of a comparison: a standard model, its folder, its data, and the prompts.

    few: only one setting of each system: half of the layers, or the cheapest setting. auxiliary: a folder
    that `check_auxiliary` has accepted, for KV prediction.
    """

    model: Transformer
    params: PyTree
    folder: Path
    batches: list[Batch]
    prompts: Prompts
    few: bool = False
    auxiliary: Path | None = None

    def share(self, cost: Callable[[int], float]) -> float:
        """The FLOPs of all prompts relative to full depth; `cost` gives the FLOPs of one length."""
        sizes = Sizes.of(self.model.config)
        return total(self.prompts, cost) / total(self.prompts, lambda n: full_depth(sizes, n))


def total(prompts: Prompts, cost: Callable[[int], float]) -> float:
    """The sum of `cost` over the lengths of all prompts."""
    lengths, counts = np.unique(prompts.lengths, return_counts=True)
    return float(sum(cost(int(n)) * count for n, count in zip(lengths, counts, strict=True)))


def full_depth(sizes: Sizes, length: int) -> float:
    """FLOPs of a prompt if every token runs every layer."""
    return sizes.read(sizes.layers, sizes.layers, (length + 1) / 2) * length


def swiftkv_flops(sizes: Sizes, plan: KVPlan, length: int) -> float:
    """FLOPs of a prompt whose tokens stop at the split, where all later rows are made; its last one goes
    on."""
    below = sizes.read(plan.depth, plan.num_rows, (length + 1) / 2) * length
    return below + sizes.read(sizes.layers, 0, float(length)) - sizes.read(plan.depth, 0, float(length))


def students(source: Source) -> Iterator[System]:
    """SwiftKV, then AcrossKV with two layers for each upper row, at several splits, from their least-squares
    start."""
    model, params, sizes = source.model, source.params, Sizes.of(source.model.config)
    layers = model.config.num_layers
    depths = (0.5,) if source.few else _SPLITS
    splits = sorted({max(1, round(layers * depth)) for depth in depths})
    for share, name in ((1, "SwiftKV"), (2, "AcrossKV")):
        for split in (split for split in splits if layers - split >= share):
            plan = KVPlan.swiftkv(layers, split, share)
            student, start = to_swiftkv(model, params, plan)
            fitted = least_squares.fit(student, start, model, params, source.batches)
            cost = source.share(lambda n, plan=plan: swiftkv_flops(sizes, plan, n))
            how = PlanConfig(split=split, share=share, init=LEAST_SQUARES, init_tokens=evaluation.FIT_TOKENS)
            yield System(name, f"split {split}", cost, student, fitted, {"plan": how})


def check_auxiliary(folder: Path, auxiliary: Path, length: int) -> None:
    """Check that the model in `auxiliary` can read prompts of `length` tokens for the one in `folder`.

    Raises:
      UsageError: it is not a standard model, has another tokenizer, or a shorter context.
    """
    config, plan, _ = read_model(auxiliary)
    if plan != KVPlan.standard(config.num_layers):
        raise UsageError(f"--auxiliary {auxiliary} is a student: its FLOPs are counted of a standard model")
    check_tokenizers(folder, auxiliary)
    if (most := config.longest_context) < length:
        raise UsageError(f"--auxiliary {auxiliary} has a context of {most} tokens: lower --length {length}")


def predicted(source: Source) -> Iterator[System]:
    """KV prediction from some of the model's own layers, and from the auxiliary of the source, fitted by
    least squares. Each is followed by its auxiliary alone."""
    layers, auxiliary = source.model.config.num_layers, source.auxiliary
    for name, keep in kept_layers(Sizes.of(source.model.config)):
        if source.few and len(keep) != layers // 2:
            continue
        setting, small = f"layers {' '.join(map(str, keep))}", layer_pruned(*source[:2], keep)
        given = Prediction.nearest(layers, keep)
        how = PredictConfig(keep=keep, init_tokens=evaluation.FIT_TOKENS)
        yield _pair(source, name, setting, small, given, how)
        alone = {"keep": keep, "trainable": "all", "loss": _LANGUAGE}
        yield _alone(source, name, setting, small, alone)
    if auxiliary is None:
        return
    small = from_pretrained(auxiliary, dtype="float32")
    given = Prediction.spread(layers, small[0].plan.num_rows)
    name, setting = f"{_NAME}, its own auxiliary", auxiliary.name
    how = PredictConfig(auxiliary=str(auxiliary), init_tokens=evaluation.FIT_TOKENS)
    yield _pair(source, name, setting, small, given, how)
    alone = {"model": str(auxiliary), "trainable": "all", "loss": _LANGUAGE}
    yield _alone(source, name, setting, small, alone)


# What is compared, in the order of the table: functions from a source to systems.
SYSTEMS: list[Callable[[Source], Iterator[System]]] = [students, predicted]


def _pair(source: Source, name: str, setting: str, small, given: Prediction, how: PredictConfig) -> System:
    sizes, theirs = (Sizes.of(model.config) for model in (source.model, small[0]))
    pair = Predicted(source.model, small[0], given)
    parts = {"base": source.params, "auxiliary": small[1]}
    parts["predictor"] = fit_predictor.fit(pair, parts, source.batches)
    cost = source.share(lambda n: prediction_table(sizes, theirs, given, n)["total"] * 1e9 * n)
    training = {"predict": how, "trainable": "predictor", "loss": _OWN_WORDS}
    return System(name, setting, cost, pair, parts, training)


def _alone(source: Source, name: str, setting: str, small, training: dict[str, Any]) -> System:
    theirs = Sizes.of(small[0].config)
    cost = source.share(lambda n: full_depth(theirs, n))
    return System(f"{name}: alone", setting, cost, small[0], small[1], training)


def kept_layers(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    """(system, layers that make its auxiliary): the layers that the paper prunes to; all but the last, which
    cost as much as skipping FFNs; and the first ones."""
    strided = [pruned(sizes, share)[1] for share in (0.25, 0.5, 0.75)] + [tuple(range(sizes.layers - 1))]
    first = [tuple(range(round(sizes.layers * share))) for share in (0.25, 0.5, 0.625)]
    names = (_NAME, f"{_NAME}, first layers")
    return [(name, keep) for name, keeps in zip(names, (strided, first), strict=True) for keep in keeps]


def is_half(source: Source, system: System) -> bool:
    """Whether a system is KV prediction from every second layer, or these layers alone, untrained. The
    paper's figures and weights of losses are shown for it."""
    every_second = " ".join(map(str, pruned(Sizes.of(source.model.config), 0.5)[1]))
    return system.name in (_NAME, f"{_NAME}: alone") and system.setting == f"layers {every_second}"


def by_weights(half: System) -> Iterator[System]:
    """KV prediction to be trained by the paper's losses, with three weights of the rows' loss (its Table
    2)."""
    for words, weight in (("0", 0.0), ("1 / rows", None), ("1", 1.0)):
        training = half.training | {"loss": PredictionLossConfig(rows_weight=weight)}
        name, setting = f"{half.name}, the paper's loss", f"rows_weight {words}"
        yield half._replace(name=name, setting=setting, training=training)


def others(source: Source) -> Iterator[tuple[str, str, Baseline]]:
    """(name, setting, system): pruning of tokens, LazyLLM, and FFN-SkipLLM at 35 to 85 % of the depth."""
    every = list(_others(source))
    yield from {other[0]: other for other in every}.values() if source.few else every


def _others(source: Source) -> Iterator[tuple[str, str, Baseline]]:
    """All settings; each system's last one is its cheapest."""
    model, layers = source.model, source.model.config.num_layers
    cold = {"cold_first": math.ceil(0.35 * layers), "cold_last": layers - 1 - math.floor(0.85 * layers)}
    middle = FFNSkip(threshold=1.0, **cold).middle(layers)
    turned = np.asarray(cosines(model, source.params, jnp.asarray(source.batches[0].tokens), middle.start))
    for keep in (0.75, 0.5, 0.25):
        yield "random pruning", f"keep {keep}", RandomPruning(keep=keep)
    for keep in (0.5, 0.25):
        yield "static pruning", f"keep {keep}", StaticPruning(keep=keep)
    for start, end in _LAZY:
        yield "LazyLLM", f"{start} to {end}", LazyLLM(start=start, end=end)
    for quantile in _SKIPPING:
        threshold = round(float(np.quantile(turned, quantile)), 5) if quantile else -1.0
        yield "FFN-SkipLLM", f"threshold {threshold}", FFNSkip(threshold=threshold, **cold)
