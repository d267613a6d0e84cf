"""One of two processes that disagree; run by test_processes.py. Prints what was raised in it."""

import json
import os

import jax

from swiftkv_jax.common import processes
from swiftkv_jax.common.errors import UsageError


def raised(work) -> str:
    try:
        with processes.together():
            work()
    except (UsageError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail(error: Exception | None) -> None:
    if error is not None:
        raise error


if __name__ == "__main__":
    index = int(os.environ["JAX_PROCESS_ID"])
    processes.start(None, os.environ)
    report = {
        "processes": jax.process_count(),
        "first": processes.is_first(),
        "well": raised(lambda: fail(None)),
        "refused by 1": raised(lambda: fail(UsageError("no such folder: é") if index else None)),
        "refused by both": raised(lambda: fail(UsageError(f"said by {index}"))),
        "failed in 0": raised(lambda: fail(None if index else OSError("disk full"))),
        "failed in 0, refused by 1": raised(
            lambda: fail(UsageError("no") if index else RuntimeError("died"))
        ),
        "same": raised(lambda: processes.check_same("the config", "a")),
        "not the same": raised(lambda: processes.check_same("the config", "ab"[index])),
        "any": [processes.any_process(False), processes.any_process(index == 1)],
        "from the first": processes.from_first(7 + index),
    }
    print(json.dumps(report))
