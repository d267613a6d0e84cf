"""The folder of a run: taken by one run, which a later command may continue if it is the same."""

import json
import os
import typing
from pathlib import Path

from swiftkv_jax.common.bucket import Place, reached
from swiftkv_jax.common.errors import UsageError, explained
from swiftkv_jax.distill.config import Experiment, resolved

_MAY_CHANGE = (  # fields of an Experiment that may differ when a run is resumed
    "log_every evaluate_every checkpoint_every keep_checkpoints trackers mesh attention evaluation "
    "evaluation_batches eval_lengths answers plan.init_tokens predict.init_tokens "  # the start is past
    "data.skip_bad_lines"  # rows that are broken when they are met give no tokens
).split()


def check_free(out: Place, resume: bool) -> None:
    """Refuse a folder that holds a run, unless that run is to be resumed."""
    with reached(f"read {out / 'config.json'}"):
        if (out / "config.json").exists() and not resume:
            raise UsageError(f"{out} already holds a run: give --resume to continue it, or another --out")


def check(out: Place, experiment: Experiment, resume: bool) -> None:
    """Refuse to mix two runs in one folder, before anything is loaded."""
    check_free(out, resume)
    path = out / "config.json"
    with reached(f"read {path}"):
        if not path.exists():
            return
        try:
            there = identity(json.loads(path.read_text()))
        except ValueError as error:
            why = f"{path} is not valid JSON ({error})"
            raise UsageError(f"{why}; to continue the run, delete it and give --resume") from None
    here = identity(json.loads(resolved(experiment)))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if names:
        changes = [
            f"{name} is {_short(there.get(name))} there, {_short(here.get(name))} here" for name in names
        ]
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise UsageError(f"{path} belongs to another run: {'; '.join(changes[:3])}{more}. Use another --out")


def make(out: Path, experiment: Experiment) -> None:
    """The run's folder with the resolved config in it, which marks it as taken."""
    with explained(f"write to {out}"):
        out.mkdir(parents=True, exist_ok=True)
        draft = out / ".config.json.tmp"  # a kill leaves the old file or the new one, never half of one
        draft.write_text(resolved(experiment))
        os.replace(draft, out / "config.json")


def identity(config: dict) -> dict[str, typing.Any]:
    """The fields of a config that must not change between a run and its resumption, by dotted name.

    A field that is off (0, false, null) counts as absent: a run from before the field existed lacks it.
    """
    fields = {}

    def add(name: str, value) -> None:
        if name in _MAY_CHANGE or not value:
            return
        if not isinstance(value, dict):
            fields[name] = value
            return
        for inner, part in value.items():
            add(f"{name}.{inner}" if name else inner, part)

    add("", config)
    return fields


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
