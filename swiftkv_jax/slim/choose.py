"""Choice of the rows to store in another form, from measured costs, under a bound for the whole model."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.slim.calibrate import EXACT, Candidate, RowCandidates


class Choice(NamedTuple):
    """The decision for one row: a candidate, or None for keys and values; and the reason."""

    candidate: Candidate | None
    why: str


def forced(rows: Sequence[RowCandidates]) -> list[Choice]:
    """The best candidate of each row, at any cost."""
    return [Choice(_best(row.candidates), "asked for") for row in rows]


def check(choices: Sequence[Choice], bound: float, name: Callable[[int], str]) -> None:
    """Check that each chosen row by itself is under the bound; `name` gives a row's name."""
    taken = [choice.candidate for choice in choices if choice.candidate]
    for worst in sorted(taken, key=lambda c: c.kl)[-1:]:
        if not worst.kl <= bound:
            row = f"{name(worst.row)}, stored as {worst.form!r}"
            cost = f"costs KL {worst.kl:.1e}, over the bound of {bound:.1e}"
            raise UsageError(f"{row}, {cost}: use --forms auto, or raise --max-kl")


def under(
    rows: Sequence[RowCandidates],
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
    choices = [_smallest(row, size, plain, share) for row in rows]
    while stored := {i: c.candidate for i, c in enumerate(choices) if c.candidate}:
        total = whole([*stored.values()])
        if total <= bound:
            break
        worst = max(stored, key=lambda i: stored[i].kl)
        choices[worst] = Choice(
            None, f"the whole model's KL was {total:.1e} with this row, the costliest of those left"
        )
    return choices


def _smallest(row: RowCandidates, size, plain: float, share: float) -> Choice:
    fitting = [
        c for c in row.candidates if c.kl - plain <= share and size(row.row, c.form) < size(row.row, "kv")
    ]
    if fitting:
        least = min(size(row.row, c.form) for c in fitting)
        best = _best([c for c in fitting if size(row.row, c.form) == least])
        return Choice(best, f"KL {best.kl:.1e}, within its share of {share:.1e}")
    reasons = list(row.refused.values())
    if row.candidates:
        best = _best(row.candidates)
        reasons.append(f"{best.form} would cost KL {best.kl:.1e}, over its share of {share:.1e}")
    return Choice(None, "; ".join(reasons))


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the least KL; among those within 5 % of it an exact matrix, if there is one, because
    it does not depend on a calibration text."""
    finite = [c for c in candidates if math.isfinite(c.kl)]
    if not finite:
        return candidates[0]
    least = min(c.kl for c in finite)
    near = [c for c in finite if c.kl <= max(1.05 * least, least + 1e-9)]  # nats that say nothing
    return min(near, key=lambda c: (c.how != EXACT, c.kl))
