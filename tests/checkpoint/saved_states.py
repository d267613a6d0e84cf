"""Training checkpoints made and looked at by more than one test file."""

from pathlib import Path

import jax
import numpy as np
from back_to_back import state_at

from swiftkv_jax.checkpoint.training import Checkpointer


def bits(tree):
    """Every leaf as (path, dtype, shape, bytes), NaNs too."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(p), str(x.dtype), x.shape, np.asarray(x).tobytes()) for p, x in pairs]


def shapes_of(tree):
    return jax.eval_shape(lambda: tree)


def saved(directory, steps, keep=9):
    """A directory with these steps of `state_at`."""
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_at(step), {"step": step})
    return Path(directory)


def restored(directory):
    """(step, lines reported); the values must be that step's."""
    lines = []
    with Checkpointer(directory) as checkpointer:
        step, state, meta = checkpointer.restore(shapes_of(state_at(0)), report=lines.append)
    assert meta == {"step": step}
    assert bits(state) == bits(state_at(step))
    return step, lines


def files_of(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())
