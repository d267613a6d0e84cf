"""Choice of the rows to store in another form, from measured costs, under a bound for the whole model."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.slim.calibrate import EXACT, Candidate, RowCandidates


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """A candidate, and its cost if only this row is stored so: KL to the plain model, and agreement."""

    candidate: Candidate
    kl: float
    agreement: float


class Choice(NamedTuple):
    """The decision for one row: a candidate, or None for keys and values; and the reason."""

    measured: Measured | None
    why: str


def forced(options: Sequence[Sequence[Measured]]) -> list[Choice]:
    """The best candidate of each row, at any cost."""
    return [Choice(_best(each), "asked for") for each in options]


def check(choices: Sequence[Choice], bound: float, name: Callable[[int], str]) -> None:
    """Check that each chosen row by itself is under the bound; `name` gives a row's name."""
    taken = [choice.measured for choice in choices if choice.measured]
    for worst in sorted(taken, key=lambda m: m.kl)[-1:]:
        if not worst.kl <= bound:
            row = f"{name(worst.candidate.row)}, stored as {worst.candidate.form!r}"
            cost = f"costs KL {worst.kl:.1e}, over the bound of {bound:.1e}"
            raise UsageError(f"{row}, {cost}: use --forms auto, or raise --max-kl")


def under(
    rows: Sequence[RowCandidates],
    options: Sequence[Sequence[Measured]],
    size: Callable[[int, str], float],
    plain: float,
    bound: float,
    whole: Callable[[list[Candidate]], float],
) -> list[Choice]:
    """For each row the smallest candidate under its share of `bound`, so that the whole model is under it
    too.

    Rows share equally what `plain`, the KL of rounding keys and values, leaves of the bound. Among equal
    sizes the candidate with the better measurement is taken. Then the whole model is measured, and the worst
    row returns to keys and values until the model is under the bound.

    size: bytes of a row, by its number, in a form. whole: KL of the model with these candidates.
    """
    share = max(bound - plain, 0.0) / len(rows)
    choices = [_smallest(row, each, size, plain, share) for row, each in zip(rows, options, strict=True)]
    while stored := {i: c.measured for i, c in enumerate(choices) if c.measured}:
        total = whole([measured.candidate for measured in stored.values()])
        if total <= bound:
            break
        worst = max(stored, key=lambda i: stored[i].kl)
        choices[worst] = Choice(
            None, f"the whole model's KL was {total:.1e} with this row, the costliest of those left"
        )
    return choices


def _smallest(row: RowCandidates, options: Sequence[Measured], size, plain: float, share: float) -> Choice:
    fitting = [
        m for m in options if m.kl - plain <= share and size(row.row, m.candidate.form) < size(row.row, "kv")
    ]
    if fitting:
        least = min(size(row.row, m.candidate.form) for m in fitting)
        best = _best([m for m in fitting if size(row.row, m.candidate.form) == least])
        return Choice(best, f"KL {best.kl:.1e}, within its share of {share:.1e}")
    reasons = list(row.refused.values())
    if options:
        best = _best(options)
        reasons.append(f"{best.candidate.form} would cost KL {best.kl:.1e}, over its share of {share:.1e}")
    return Choice(None, "; ".join(reasons))


def _best(options: Sequence[Measured]) -> Measured:
    """The candidate with the least KL; among those within 5 % of it an exact matrix, if there is one, because
    it does not depend on a calibration text."""
    finite = [m for m in options if math.isfinite(m.kl)]
    if not finite:
        return options[0]
    least = min(m.kl for m in finite)
    near = [m for m in finite if m.kl <= max(1.05 * least, least + 1e-9)]  # nats that say nothing
    return min(near, key=lambda m: (m.candidate.how != EXACT, m.kl))
