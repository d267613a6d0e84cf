"""The prompts for the compared systems, and the evaluation of their answers."""

import itertools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import table as markdown
from benchmarks.papers.baselines import Baseline, dense, read
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core import predict
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, generator
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.shapes import Float, Int, PyTree
from swiftkv_jax.distill.data.loader import DataLoader, evaluation_batches
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.distill.data.samples import DataConfig
from swiftkv_jax.text.tokenizer import load_tokenizer

FIT_TOKENS = 32_768  # of training documents, for the closed-form starts
ROWS = 8  # of a batch
TRAINED = ", trained"  # the suffix of the names of trained systems
_TOGETHER = 32  # prompts that a baseline reads in one batch
_PADS = 2  # lengths that prompts are padded to


class Prompts(NamedTuple):
    """Held-out prompts: the first lengths[r, i] tokens of row r, for each r and i.

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
    """For each prompt: nats of the token that follows it, and the system's most likely token there."""

    nats: Float[np.ndarray, "R P"]
    likeliest: Int[np.ndarray, "R P"]


class Point(NamedTuple):
    """A system in one setting; errors are standard errors over rows, since prompts of one row are correlated.

    Attributes:
      flops: of reading the prompts, over those of every token in every layer. gap: nats above the model's.
      ttft, ttft_short: time to the first token relative to full depth, for one prompt of a row's length and
        for the batch of short prompts (times.py); None if it was not measured.
    """

    system: str
    setting: str
    flops: float
    gap: float
    gap_error: float
    agreement: float
    agreement_error: float
    ttft: float | None = None
    ttft_short: float | None = None


def prompts_of(source: str, folder: Path, count: int, length: int) -> Prompts:
    """At least `count` prompts from held-out documents, their lengths spread evenly from 2 to `length` - 1.

    Raises:
      UsageError: no held-out document has `length` tokens.
    """
    data = DataConfig(sources=(source,), split="held_out", seq_len=length, batch_size=ROWS, pack=False)
    batches = evaluation_batches(data, load_tokenizer(folder))
    rows = np.concatenate([np.asarray(b.tokens)[np.asarray(b.segments).all(1)] for b in batches])
    if not len(rows):
        raise UsageError(f"no held-out document of {source} has {length} tokens: lower --length")
    rows = rows[:: max(1, len(rows) // count)]
    each = -(-count // len(rows))
    start = (np.arange(len(rows)) * (math.sqrt(5) - 1) / 2) % 1  # evenly spread, for any number of rows
    place = (np.arange(each) + start[:, None]) / each
    return Prompts(rows, (2 + place * (length - 2)).astype(np.int32))


def fit_batches(source: str, folder: Path, length: int) -> list[Batch]:
    """FIT_TOKENS of the training documents in rows of `length`."""
    data = DataConfig(
        sources=(source,), split="train", seq_len=length, batch_size=ROWS, long_documents="fill"
    )
    loader = DataLoader(data, load_tokenizer(folder))
    try:
        count = math.ceil(FIT_TOKENS / (ROWS * length))
        return [batch for batch, _ in itertools.islice(loader, count)]
    finally:
        loader.close()


def answers_by_rows(model: Transformer | Predicted, params: PyTree, prompts: Prompts) -> Answers:
    """Answers of a system for which one pass over a row covers prompts of every length."""

    @jax.jit
    def some(params, tokens, lengths, targets):
        run = predict.forward if isinstance(model, Predicted) else forward
        x = run(model, params, tokens)
        x = jnp.take_along_axis(x, (lengths - 1)[..., None], axis=1)
        return _answer(logits(*generator(model, params), x), targets)

    found = []
    for start in range(0, len(prompts.tokens), ROWS):
        part = slice(start, start + ROWS)
        parts = (prompts.tokens[part], prompts.lengths[part], prompts.targets[part])
        missing = ROWS - len(parts[0])
        padded = (np.pad(x, ((0, missing), (0, 0)), mode="edge") for x in parts)
        found.append([np.asarray(x)[: len(parts[0])] for x in some(params, *padded)])
    return Answers(*(np.concatenate(x) for x in zip(*found, strict=True)))


def answers_by_prompts(
    model: Transformer, params: PyTree, baseline: Baseline, prompts: Prompts
) -> tuple[Answers, float]:
    """Answers of a system that must read each prompt separately, and the FLOPs of all prompts."""
    rows, each = prompts.lengths.shape
    lengths, targets = prompts.lengths.ravel(), prompts.targets.ravel()
    longest = prompts.tokens.shape[1]
    nats, likeliest, flops = np.zeros(rows * each), np.zeros(rows * each, np.int32), 0.0
    order = np.argsort(lengths, kind="stable")
    answer = jax.jit(_answer)
    sizes = [-(-longest * i // _PADS) for i in range(_PADS + 1)]
    for shorter, size in itertools.pairwise(sizes):
        these = order[(lengths[order] > shorter) & (lengths[order] <= size)]
        for start in range(0, len(these), _TOGETHER):
            batch = these[start : start + _TOGETHER]
            padded = np.resize(batch, _TOGETHER)
            tokens = prompts.tokens[padded // each, :size]
            out, _, work = read(model, params, baseline, tokens, jnp.asarray(lengths[padded]), size)
            answered = [np.asarray(x)[: len(batch)] for x in answer(out, targets[padded])]
            nats[batch], likeliest[batch] = answered
            flops += float(dense.flops(model.config, work)[: len(batch)].sum())
    return Answers(nats.reshape(rows, each), likeliest.reshape(rows, each)), flops


def _answer(scores, targets):
    known = jax.nn.log_softmax(scores, axis=-1)
    nats = -jnp.take_along_axis(known, targets[..., None], axis=-1)[..., 0]
    return nats, jnp.argmax(scores, axis=-1)


def point(system: str, setting: str, flops: float, found: Answers, own: Answers) -> Point:
    """A system's answers compared with the model's own."""

    def mean(x) -> tuple[float, float]:
        rows = x.mean(1)
        error = rows.std(ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
        return float(rows.mean()), float(error)

    same = (found.likeliest == own.likeliest).astype(np.float64)
    return Point(system, setting, flops, *mean(found.nats - own.nats), *mean(same))


def at_equal_flops(points: list[Point], system: str, flops: float) -> float:
    """The gap of a system's curve at some FLOPs, interpolated linearly between its points; NaN outside."""
    curve = sorted((p.flops, p.gap) for p in points if p.system == system)
    if not curve:
        return math.nan
    x, y = zip(*curve, strict=True)
    return float(np.interp(flops, x, y, left=math.nan, right=math.nan))


def table(points: list[Point]) -> str:
    """All points as a table in Markdown, beside each the gap of KV prediction at its FLOPs."""
    timed = any(p.ttft is not None for p in points)
    heads = ["system", "setting", "FLOPs", "gap", "KV prediction there", "agreement"]
    heads[3:3] = ["TTFT", "TTFT, short"] if timed else []
    lines = []
    for p in points:
        like = f"KV prediction{TRAINED}" if p.system.endswith(TRAINED) else "KV prediction"
        beside = at_equal_flops(points, like, p.flops)
        there = "" if math.isnan(beside) or p.system.startswith("KV") else f"{beside:.4f}"
        times = ["" if t is None else f"{t:.2f}" for t in (p.ttft, p.ttft_short)] if timed else []
        gap = f"{p.gap:.4f} ± {p.gap_error:.4f}"
        agreement = f"{p.agreement:.3f} ± {p.agreement_error:.3f}"
        lines.append([p.system, p.setting, f"{p.flops:.3f}", *times, gap, there, agreement])
    return markdown(heads, lines)
