"""Errors a user can cause: one line that says what was wrong and what to do."""

import argparse
import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from swiftkv_jax.version import __version__

LONGEST = 2000  # characters of a message; it may show a value that somebody else wrote


class UsageError(ValueError):
    """Bad input: a flag, a config, a file or a prompt. The command line turns it into exit code 2."""

    def __init__(self, message: str):
        super().__init__(message if len(message) <= LONGEST else f"{message[: LONGEST - 3]}...")


class UsageWarning(UserWarning):
    """Accepted input that may not have the intended meaning; the command line shows it in one line."""


def suggest(name: str, known, likeness: float = 0.6) -> str:
    """`"; did you mean 'x'?"` for the nearest known name with a similarity of at least `likeness` (1: equal),
    else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line of an error's message, cut to `most` characters; its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an OSError raised inside into a UsageError: "cannot read x: No such file or directory"."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot {doing}: {error.strerror or error}") from None


def exit_code(
    run: Callable[[], int | None],
    interrupted: str = "interrupted",
    failures: tuple[type[Exception], ...] = (),
) -> int:
    """Return the result of `run` (None is 0); 2 for bad usage, 130 for Ctrl-C, 1 for a failure, each reported
    on stderr; and 141, without a word, where the reader of stdout has left, as `head` does.

    Errors of the classes `failures` are reported in one line, those of other classes with their traceback.
    """
    try:
        try:
            return run() or 0
        finally:  # now, and not at the interpreter's end, where an error could not be caught
            sys.stdout.flush()
    except UsageError as error:
        code, report = 2, f"error: {error}"
    except KeyboardInterrupt:
        code, report = 130, interrupted
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return 141
    except failures as error:
        code, report = 1, f"error: {first_line(error, 500)}"
    except Exception as error:
        traceback.print_exc()
        code, report = 1, f"error: {type(error).__name__}: {error}"
    print(report, file=sys.stderr)
    return code


def local_path(text: str) -> Path:
    """The type of a flag for a file or folder that cannot be in a bucket."""
    if "://" in text:
        about = "docs/tpu_and_gpu.md says which flags take gs://"
        raise argparse.ArgumentTypeError(f"{text} is no folder or file here; {about}")
    return Path(text)


class Parser(argparse.ArgumentParser):
    """A parser that raises errors as UsageError: one line, and the nearest flag. Every command has --version.

    Without `prog`, messages name the command as the user typed it (argparse's default).
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, add_help=False, **kwargs)
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.register("type", Path, local_path)
        version = f"swiftkv-jax {__version__}"
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def flag(self, usage: str, text: str, group=None, **options) -> None:
        """Add a flag, to a group or to the parser itself, by its usage as --help shows it: "--split N", or
        "MODEL", or "--resume", which is true if it is given."""
        name, _, metavar = usage.partition(" ")
        if metavar:
            options["metavar"] = metavar
        elif not name.startswith("-"):
            name, options["metavar"] = name.lower(), name
        elif not options:
            options["action"] = "store_true"
        (group or self).add_argument(name, help=text, **options)

    def parse_known_args(self, args=None, namespace=None):
        """Report an unknown flag before a missing one: most often it is the missing one, misspelt."""
        words = sys.argv[1:] if args is None else list(args)
        flags = (word.partition("=")[0] for word in words if word.startswith("--") and " " not in word)
        known = tuple(self._option_string_actions)
        for flag in flags:
            if flag != "--" and not any(name.startswith(flag) for name in known):
                self.error(f"unrecognized arguments: {flag}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        flags = [word for word in message.split() if word.startswith("--")]
        near = suggest(flags[0], self._option_string_actions) if "unrecognized" in message and flags else ""
        if "unrecognized" in message and not flags and "--model" in self._option_string_actions:
            near = ": a model is given by --model DIR, or first: swiftkv serve MODEL"
        raise UsageError(f"{message}{near}; --help lists the flags")
