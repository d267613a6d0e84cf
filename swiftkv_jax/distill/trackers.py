"""Trackers of metrics beside metrics.jsonl: TensorBoard, wandb and trackio, each imported only if named."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftkv_jax.common.errors import UsageError, first_line

# Tracker -> its module, and the package to install.
NEEDS = {
    "tensorboard": ("tensorboardX", "'swiftkv-jax[tensorboard]'"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}
TRACKERS = tuple(NEEDS)
Tracker = Any  # a run of wandb or of trackio, or the `Board` of TensorBoard: `log` and `finish`


class Board:
    """TensorBoard's files in a folder."""

    def __init__(self, folder: Path):
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        self.writer = SummaryWriter(str(folder))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def check(names: Sequence[str]) -> None:
    """Raises UsageError: a tracker is not installed; the message says how to install it."""
    for name in names:
        module, package = NEEDS[name]
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"trackers: {name} needs {module}, which is not here: pip install {package}")


def start(names: Sequence[str], run: str, folder: Path, config: dict) -> list[Tracker]:
    """Start the trackers of the run `run`, stored in `folder`; resuming adds another run of that name."""
    started: list[Tracker] = []
    for name in names:
        try:
            if name == "tensorboard":
                started.append(Board(folder / "tensorboard"))
                continue
            place = {"dir": str(folder)} if name == "wandb" else {}
            init = importlib.import_module(name).init
            started.append(init(project="swiftkv-jax", name=run, config=config, **place))
        except Exception as error:  # they may raise any class
            raise UsageError(f"trackers: {name} does not start: {first_line(error)}") from error
    return started
