"""Errors a user can cause: one line that says what was wrong and what to do."""

import argparse
import difflib

LONGEST = 2000  # characters of a message; it may show a value that somebody else wrote


class UsageError(ValueError):
    """Bad input: a flag, a config, a file or a prompt. The command line turns it into exit code 2."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= LONGEST else f"{message[: LONGEST - 3]}...")


def suggest(name: str, known) -> str:
    """`"; did you mean 'x'?"` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Errors as UsageError: one line, and the nearest flag."""

    def error(self, message: str):
        flags = [word for word in message.split() if word.startswith("--")]
        near = suggest(flags[0], self._option_string_actions) if "unrecognized" in message and flags else ""
        raise UsageError(f"{message}{near}; --help lists the flags")
