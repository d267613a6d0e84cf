"""Which rows are converted: the law of shares, sizes and turning back, on made-up measurements."""

import pytest

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.slim.calibrate import EXACT, FITTED, Candidate, RowCandidates
from swiftkv_jax.slim.choose import check, forced, under

SIZES = {"kv": 8, "k": 4, "v": 4, "x": 3}


def option(row: int, kl: float, form: str = "k", how: str = EXACT) -> Candidate:
    return Candidate(row, form, how, kl=kl)


def rows(options, refused=()) -> list[RowCandidates]:
    return [RowCandidates(i, 1.0, 1.0, tuple(each), dict(refused)) for i, each in enumerate(options)]


def choose(options, bound: float = 1.0, plain: float = 0.0, whole=lambda picks: 0.0, refused=()):
    return under(rows(options, refused), lambda row, form: SIZES[form], plain, bound, whole)


def forms(choices) -> list[str]:
    return [c.candidate.form if c.candidate else "kv" for c in choices]


def test_the_smallest_row_under_its_share_is_taken():
    """A share is the bound over the rows: 0.5 of two."""
    options = [[option(0, 0.01), option(0, 0.4, "x")], [option(1, 0.01), option(1, 0.6, "x")]]
    assert forms(choose(options)) == ["x", "k"]


@pytest.mark.parametrize(
    "kl, how",
    [((1e-9, 1e-7), EXACT), ((1e-3, 1e-4), FITTED), ((1.7e-12, 1.6e-12), EXACT), ((1e-3, 0.97e-3), EXACT)],
    ids=["float32", "bfloat16", "both no more than rounding", "nearly alike"],
)
def test_equal_sizes_are_decided_by_the_measured_cost(kl, how):
    options = [[option(0, kl[0]), option(0, kl[1], how=FITTED)]]
    (choice,) = choose(options)
    assert choice.candidate and choice.candidate.how == how


def test_the_cost_of_rounding_keys_and_values_is_not_charged_to_rows():
    """The share of two rows under 1.0 is 0.3 when 0.4 are gone before; a row costs what it adds."""
    options = [[option(0, 0.69)], [option(1, 0.71)]]
    choices = choose(options, plain=0.4)
    assert forms(choices) == ["k", "kv"]
    assert choices[1].why == "k would cost KL 7.1e-01, over its share of 3.0e-01"


def test_the_worst_rows_go_back_until_the_whole_is_under_the_bound():
    asked = []

    def whole(picks) -> float:
        asked.append([pick.row for pick in picks])
        return float(len(picks))  # rows that are harmless alone, and not together

    options = [[option(i, kl)] for i, kl in enumerate((0.1, 0.2, 0.05, 0.15))]
    choices = choose(options, bound=2.0, whole=whole)
    assert forms(choices) == ["k", "kv", "k", "kv"]
    assert asked == [[0, 1, 2, 3], [0, 2, 3], [0, 2]]
    assert choices[1].why.startswith("the whole model's KL was 4.0e+00 with this row")


def test_a_row_without_candidates_reports_the_reason():
    (choice,) = choose([[]], refused={"k": "layer 0: W_K is singular (condition inf)"}.items())
    assert choice.candidate is None and choice.why == "layer 0: W_K is singular (condition inf)"


def test_forced_forms_use_each_rows_best_candidate_at_any_cost():
    (choice,) = forced(rows([[option(0, 9.0), option(0, 4.0, how=FITTED)]]))
    assert choice.candidate and choice.candidate.kl == 4.0


def test_a_row_that_is_asked_for_and_over_the_bound_is_refused():
    choices = forced(rows([[option(0, 0.5)], [option(1, 2.0)], [option(2, 1.0)]]))
    check(choices, 2.0, "row {}".format)
    said = "row 1, stored as 'k', costs KL 2.0e\\+00, over the bound of 1.0e\\+00: use --forms auto"
    with pytest.raises(UsageError, match=said):
        check(choices, 1.0, "row {}".format)
    with pytest.raises(UsageError, match="costs KL nan"):
        check(forced(rows([[option(0, float("nan"))]])), 1.0, "row {}".format)


def test_sizes_are_compared_row_by_row():
    """All inputs of a source are one row: there they are smaller than keys, and elsewhere as large."""
    options = [[option(i, 0.1), option(i, 0.2, "x")] for i in range(2)]
    size = {(0, "x"): 4.0, (1, "x"): 2.0}
    choices = under(rows(options), lambda i, f: size.get((i, f), SIZES[f]), 0.0, 1.0, lambda picks: 0.0)
    assert forms(choices) == ["k", "x"]
