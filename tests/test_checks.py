"""Values that users give: what passes, and one line that names what does not; the form of every message."""

import ast
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError

ROOT = Path(__file__).parent.parent
REFUSED = [
    lambda: checks.integer("x", True),
    lambda: checks.integer("x", 2.0),
    lambda: checks.integer("x", 0, 1),
    lambda: checks.integer("x", 2**31, 0, 2**31 - 1),
    lambda: checks.number("x", math.nan),
    lambda: checks.number("x", 10**400),
    lambda: checks.number("x", "1"),
    lambda: checks.number("x", False),
    lambda: checks.number("x", -0.1, 0),
    lambda: checks.above("x", 0, 0),
    lambda: checks.above("x", 1.5, 0, 1),
    lambda: checks.flag("x", 1),
    lambda: checks.choice("x", "met", ("mean", "sum")),
]


@pytest.mark.parametrize("check", REFUSED)
def test_a_value_out_of_bounds_is_refused_by_name(check):
    with pytest.raises(UsageError, match=r"^x "):
        check()


def test_values_within_bounds_are_returned():
    assert checks.integer("x", 3, 3, 3) == 3 and checks.number("x", 2, 0) == 2.0
    assert checks.above("x", 1, 0, 1) == 1.0 and isinstance(checks.above("x", 1, 0), float)
    assert checks.flag("x", False) is False and checks.choice("x", None, (None, "a")) is None
    assert isinstance(checks.whole(8.0), int) and checks.whole(8.5) == 8.5 and checks.whole("8") == "8"


def test_every_message_is_one_line_without_a_full_stop_or_a_path_of_a_machine():
    """The texts in the code of all errors that a command prints; what is filled in is not seen here."""
    names, seen = {"UsageError", "UnsupportedError", "CheckpointError", "BadRow"}, 0
    for path in [*(ROOT / "swiftkv_jax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and call.args and ast.unparse(call.func).split(".")[-1] in names:
                message = call.args[0]
                texts = [n.value for n in ast.walk(message) if isinstance(getattr(n, "value", None), str)]
                last = message.values[-1] if isinstance(message, ast.JoinedStr) else message
                end, seen = str(getattr(last, "value", "")), seen + 1
                assert "\n" not in "".join(texts) and not end.endswith((".", " ")), (path, call.lineno)
                assert not re.search(r"/(root|home|tmp|work|Users)/", "".join(texts)), (path, call.lineno)
    assert seen > 400


def test_a_command_whose_reader_has_left_ends_without_a_word():
    code = "import sys\nfrom swiftkv_jax.common.errors import exit_code\n"
    code += "exit(exit_code(lambda: sys.exit(print('a'))))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
