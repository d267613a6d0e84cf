"""Values that users give: what passes, and one line that names what does not."""

import math

import pytest

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError

REFUSED = [
    (lambda: checks.integer("x", True), "x must be an integer, not True"),
    (lambda: checks.integer("x", 2.0), "x must be an integer, not 2.0"),
    (lambda: checks.integer("x", 0, 1), "x must be at least 1, not 0"),
    (lambda: checks.integer("x", 2**31, 0, 2**31 - 1), r"x must be in \[0, 2147483647\], not 2147483648"),
    (lambda: checks.number("x", math.nan), "x must be a finite number, not nan"),
    (lambda: checks.number("x", 10**400), "x must be a finite number, not 10"),
    (lambda: checks.number("x", "1"), "x must be a finite number, not '1'"),
    (lambda: checks.number("x", False), "x must be a finite number, not False"),
    (lambda: checks.number("x", -0.1, 0), "x must be at least 0, not -0.1"),
    (lambda: checks.above("x", 0, 0), "x must be above 0, not 0.0"),
    (lambda: checks.above("x", 1.5, 0, 1), r"x must be in \(0, 1\], not 1.5"),
    (lambda: checks.flag("x", 1), "x must be true or false, not 1"),
    (lambda: checks.choice("x", "met", ("mean", "sum")), "x must be one of mean, sum, not 'met'"),
    (lambda: checks.choice("x", 200, (429, 503)), "x must be one of 429, 503, not 200"),
]


@pytest.mark.parametrize("check, message", REFUSED)
def test_a_value_out_of_bounds_is_refused_by_name(check, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        check()


def test_values_within_bounds_are_returned():
    assert checks.integer("x", 3, 3, 3) == 3 and checks.number("x", 2, 0) == 2.0
    assert checks.above("x", 1, 0, 1) == 1.0 and isinstance(checks.above("x", 1, 0), float)
    assert checks.flag("x", False) is False and checks.choice("x", None, (None, "a")) is None
    assert isinstance(checks.whole(8.0), int) and checks.whole(8.5) == 8.5 and checks.whole("8") == "8"
    assert checks.whole(math.inf) == math.inf
