"""Training checkpoints: saved in the background by Orbax, verified byte for byte before they are trusted.

    DIR/20/state, meta       Orbax: the arrays, and one JSON object; committed together by a rename
    DIR/20/manifest.json     ours, written after that; a step without it counts as unfinished

In a bucket, which checks its own bytes, the manifest holds the bucket's checksums.

Orbax restores a flipped bit silently and fails on a truncated file; here the step is rejected instead, and
the next older one is used. An old step is deleted only when newer ones have their manifests.
"""

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.checkpoint import manifest
from swiftkv_jax.common.bucket import Place, at, is_bucket
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.processes import any_process, from_first
from swiftkv_jax.core.shapes import PyTree

_LISTED = 10  # differences that one message names
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read: a failure of the run, in one line."""


class Checkpointer:
    """The checkpoints of one run, in one directory, written by one run at a time.

    Every process calls every method, in the same order; the directory is one they all see. Restore and
    save through the same instance: it remembers which steps were rejected. Close it (or use `with`): what
    is still being written when the interpreter exits is lost.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3):
        """Keep the newest `keep` good steps. Raises UsageError: `directory` is a file, or `keep` below 1."""
        self.directory = at(directory) if is_bucket(directory) else Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise UsageError(f"checkpoint directory {directory} is a file; name a directory")
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints would leave none to resume from; use 1 or more")
        self.keep = keep
        self._latest: int | None = None  # saved or restored last, by this instance
        self._rejected: set[int] = set()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._silence = lambda record: "/orbax/" not in record.pathname
        _absl_logger().addFilter(self._silence)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Committed steps, oldest first, good or not."""
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal() and p.is_dir())

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Start saving; when this returns, `state` may be donated. A step just saved or restored is kept.

        Args:
          state: jax arrays.
          meta: what `json` can hold; read back with tuples as lists and all keys as strings.
        """
        self.wait()
        if step == self._latest:
            return
        if later := [s for s in self._with_manifest() if s >= step]:
            there = f"{self.directory} already holds checkpoint {later[-1]}"
            raise UsageError(f"cannot save step {step}: {there}; resume from it, or choose another directory")
        named = _named(state)
        arrays = {name: leaf for name, leaf in named.items() if leaf.size}
        with _explained(f"saving checkpoint {step} in {self.directory}"):
            import orbax.checkpoint as ocp

            self._make_room(step, sum(array.nbytes for array in arrays.values()))
            manager = self._manager()
            stored = {"leaves": _described(named), "meta": meta}
            items = {"state": ocp.args.StandardSave(arrays), "meta": ocp.args.JsonSave(stored)}
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._thread = threading.Thread(target=self._finish, args=(manager, step), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return once the last save is safe on disk, its manifest included."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        failed = any_process(error is not None)
        if error is not None:
            intact = self._with_manifest()
            kept = f"checkpoint {intact[-1]} is intact" if intact else "there is no older one"
            raise CheckpointError(f"{error}; {kept}") from error.__cause__
        if failed:
            raise CheckpointError("saving a checkpoint failed in another process; its log says why")

    def close(self) -> None:
        """`wait`, and let Orbax's log messages through again."""
        try:
            self.wait()
        finally:
            _absl_logger().removeFilter(self._silence)

    def restore(
        self, abstract_state: PyTree, report: Callable[[str], object] = _log.warning
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """(step, state, meta) of the newest good step, or None when there is no checkpoint at all.

        Args:
          abstract_state: arrays or `jax.ShapeDtypeStruct`s; the state comes back in their tree, shapes,
            dtypes and shardings (on the first device where they have none).
          report: is given one line for each step that had to be rejected (in process 0).
        """
        self.wait()
        if not (steps := self.steps()):
            return None
        if (step := self._newest_good(steps, report)) is None:
            return None
        self._rejected |= {s for s in steps if s > step}
        named = _named(abstract_state)
        with _explained(f"restoring checkpoint {step} of {self.directory}"):
            import orbax.checkpoint as ocp

            with self._manager(read_only=True) as manager:
                stored = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
                there, here = stored["leaves"], _described(named)
                names = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
                if names:
                    other = [
                        f"{n} ({there.get(n, 'nothing')} saved, {here.get(n, 'nothing')} here)"
                        for n in names[:_LISTED]
                    ]
                    other += [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
                    differs = f"checkpoint {step} in {self.directory} is of another model or optimiser"
                    raise UsageError(
                        f"{differs}: {'; '.join(other)}. Take the run's config, or another folder"
                    )
                stand_ins = {
                    name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_place(leaf))
                    for name, leaf in named.items()
                    if leaf.size
                }
                args = ocp.args.Composite(state=ocp.args.StandardRestore(stand_ins))
                arrays = manager.restore(step, args=args).state
        self._latest = step
        values = [
            arrays[name] if leaf.size else jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), _place(leaf))
            for name, leaf in named.items()
        ]
        return step, jax.tree.unflatten(jax.tree.structure(abstract_state), values), stored["meta"]

    def _manager(self, read_only: bool = False):
        """A fresh Orbax manager: it lists the directory as it is now, and keeps nothing of a failed save."""
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(save_root_metadata=False, create=False, read_only=read_only)
        return ocp.CheckpointManager(self.directory, options=options)

    def _finish(self, manager, step: int) -> None:
        """In the background: wait for the commit, write the manifest, only then delete old steps."""
        try:
            with _explained(f"saving checkpoint {step} in {self.directory}"):
                manager.close()
                self._rejected.discard(step)
                if jax.process_index() == 0:
                    manifest.write(self.directory / str(step), step)
                    oldest = self._with_manifest()[-self.keep :][0]
                    for old in self.steps():  # also unfinished and rejected ones
                        if old < oldest:
                            _delete_step(self.directory / str(old))
            self._latest = step
        except CheckpointError as error:
            self._error = error
            self._sweep()

    def _with_manifest(self) -> list[int]:
        """Steps that are complete and not known to be damaged."""
        complete = (s for s in self.steps() if (self.directory / str(s) / manifest.NAME).exists())
        return [s for s in complete if s not in self._rejected]

    def _sweep(self) -> None:
        """Delete what killed or failed saves left half-written."""
        if jax.process_index() == 0:
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                with contextlib.suppress(OSError):
                    _remove(path)

    def _make_room(self, step: int, size: int) -> None:
        """Prepare the directory for `size` more bytes; a rejected step of the same number is deleted."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        if jax.process_index() == 0 and (old := self.directory / str(step)).exists():
            _delete_step(old)
        if isinstance(self.directory, Path) and (free := shutil.disk_usage(self.directory).free) < size:
            raise OSError(errno.ENOSPC, f"No space left ({size:,} bytes needed, {free:,} free)")
        any_process(False)  # no process continues before the old step is deleted

    def _newest_good(self, steps: list[int], report: Callable[[str], object]) -> int | None:
        """The newest good step, chosen by process 0 for all; raises CheckpointError if none is left.

        None: the only step is the run's first, and its save was killed before the manifest was written.
        """
        good = -1
        if jax.process_index() == 0:
            for step in reversed(steps):
                if (fault := manifest.fault(self.directory / str(step), step)) is None:
                    good = step
                    break
                report(f"checkpoint {step} rejected: {fault}")
            if good < 0 and len(steps) == 1 and not (self.directory / str(steps[0]) / manifest.NAME).exists():
                good = -2
        if (good := from_first(good)) == -2:
            return None
        if good < 0:
            none = f"none of the {len(steps)} checkpoint(s) in {self.directory} is whole"
            raise CheckpointError(f"{none}: put back a copy of one, or start again in another directory")
        return good


def _delete_step(folder: Place) -> None:
    """Delete a step, its manifest first, so that a half-deleted step counts as unfinished."""
    (folder / manifest.NAME).unlink(missing_ok=True)
    _remove(folder)


def _remove(folder: Place) -> None:
    shutil.rmtree(folder) if isinstance(folder, Path) else folder.rmtree()


@contextlib.contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn any error of Orbax, TensorStore or the file system into a CheckpointError of one line."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror + (f": {error.filename}" if error.filename else "")
        else:  # TensorStore's messages are long, so the operating system's part comes first
            text = " ".join(str(error).split()) or type(error).__name__
            code = re.search(r"os_error_code='(\d+)'", text)
            reason = (f"{os.strerror(int(code[1]))}: " if code else "") + text[:200]
        raise CheckpointError(f"{doing} failed: {reason}") from error


def _absl_logger() -> logging.Logger:
    """Orbax's logger, made by absl itself: one that `logging` made first would break absl."""
    from absl import logging as absl_logging

    return absl_logging.get_absl_logger()


def _named(tree: PyTree) -> dict[str, Any]:
    """The leaves by path ("trainable/rows/0/k_proj/kernel"). Orbax stores a flat dict of those that have
    elements, so that the types of containers need no support from it."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path: a dict key holds '/'")
    return leaves


def _described(named: dict[str, Any]) -> dict[str, str]:
    """`{"trainable/shared_norm": "float32[48]"}`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named.items()}


def _place(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
