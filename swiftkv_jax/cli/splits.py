"""The cost of each split before training, and the choice of `--split auto`."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import Say, working
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.distill import loop
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.distill.data.packing import Batch

MOST_KL = 0.5  # nats per token


class Untrained(NamedTuple):
    """An untrained student, evaluated on `tokens` tokens.

    Attributes:
      gap: its cross-entropy minus its teacher's, in nats per token. kl: from teacher to student, in nats per
        token. agreement: share of positions where both have the same most likely token.
    """

    plan: KVPlan
    gap: float
    kl: float
    agreement: float
    tokens: float


def candidates(layers: int) -> list[int]:
    """Splits to measure: every eighth of the depth from a quarter on."""
    return sorted({min(max(1, round(layers * part / 8)), layers - 1) for part in range(2, 8)})


def untrained(
    model: Transformer,
    params: PyTree,
    experiment: Experiment,
    plans: Iterable[KVPlan],
    fit: Sequence[Batch],
    held_out: Sequence[Batch],
    say: Say = lambda _line: None,
) -> list[Untrained]:
    """The cost on `held_out` of each plan's student, as training would start it.

    Args:
      model, params: the teacher, a standard model.
      experiment: the settings of training: attention, loss.chunk_mib, trainable.
      fit: batches to fit the new rows on by least squares (distill/least_squares.py); with too few, or none,
        the start is "fold" (`to_swiftkv`).
    """
    tokens = sum(int((batch.segments > 0).sum()) for batch in fit)
    found = []
    for plan in plans:
        with working(say, f"split {plan.split}: compiling, fitting and evaluating"):
            student, trained, frozen = steps.prepare(model, params, plan, "fold", "swiftkv")
            recipe = steps.make_recipe(experiment, student, 1, steps.DISTIL)
            if tokens > model.config.hidden_size:
                trained = steps.fit(recipe, trained, frozen, fit)
            evaluate = jax.jit(partial(steps.evaluate_batch, recipe))
            rows = [jax.device_get(evaluate(frozen, trained, batch)) for batch in held_out]
        sums = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        means = loop.summarise(sums, has_teacher=True)
        gap = means["cross_entropy"] - means["teacher_cross_entropy"]
        found.append(Untrained(plan, gap, means["kl"], means["agreement"], float(sums["tokens"].sum())))
        say(line(found[-1]))
    return found


def line(one: Untrained) -> str:
    """One measurement as a line of text."""
    return (
        f"split {one.plan.split:3} of {one.plan.num_layers}: untrained: gap {one.gap:6.3f} nats per token, "
        f"KL {one.kl:.3f}, agreement {one.agreement:.1%}"
    )


def chosen(found: Sequence[Untrained]) -> int:
    """The earliest split from half depth on whose untrained student has a KL of at most `MOST_KL`; the best
    one if there is none.

    In the paper 50 % SwiftKV costs 1 to 2 % of accuracy after distillation, and beyond that quality drops
    quickly; where the later layers' inputs are less similar (Qwen), 50 % is already too much (SwiftKV paper,
    section 4.2). This is a first guess: only distillation shows what a split really costs.

    Raises:
      UsageError: no split from half depth on was measured.
    """
    half = [one for one in found if 2 * one.plan.split >= one.plan.num_layers]
    if not half:
        raise UsageError("no split at half depth or later was evaluated")
    good = [one for one in half if one.kl <= MOST_KL]
    best = min(good, key=lambda one: one.plan.split) if good else min(half, key=lambda one: one.kl)
    return best.plan.split
