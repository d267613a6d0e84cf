"""A training checkpoint that cannot be written, or whose writer is killed: nothing good is lost."""

import gc
import os
import random
import resource
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from back_to_back import state_at
from saved_states import bits, restored, saved

from swiftkv_jax.checkpoint import manifest
from swiftkv_jax.checkpoint.training import Checkpointer, CheckpointError


@pytest.fixture
def late_writes(monkeypatch):
    """When one write fails, TensorStore's others still report to Orbax's event loop, which is closed, and
    some never begin: collected here, lest a later test be blamed for them."""

    def hook(args):
        known = ("Event loop is closed", "write_fragment' was never awaited")
        if not str(args.exc_value).endswith(known):
            other.append(args.exc_value)

    other = []
    monkeypatch.setattr(sys, "unraisablehook", hook)
    yield
    time.sleep(0.3)
    gc.collect()
    assert not other


def fails_in_one_line(caught, *words):
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600, text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("surface", ["wait", "save", "close"])
def test_a_write_that_fails_in_the_background_surfaces(tmp_path, late_writes, surface):
    """A limit on file sizes is the nearest thing to a full disk that needs no root."""
    big = state_at(2) | {"weights": jax.random.normal(jax.random.key(0), (1024, 1024))}
    saved(tmp_path, [1])
    checkpointer = Checkpointer(tmp_path, keep=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        checkpointer.save(2, big, {})
        checkpointer._thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ways = {
        "wait": checkpointer.wait,
        "save": lambda: checkpointer.save(3, big, {}),
        "close": checkpointer.close,
    }
    with pytest.raises(CheckpointError) as caught:
        ways[surface]()
    fails_in_one_line(caught, "saving checkpoint 2", "File too large", "checkpoint 1 is intact")
    assert [p.name for p in tmp_path.iterdir()] == ["1"]  # nothing half-written stays
    assert restored(tmp_path) == (1, [])
    checkpointer.save(3, state_at(3), {"step": 3})  # reported once; the next save works
    checkpointer.close()
    assert restored(tmp_path) == (3, [])


def test_manifest_that_cannot_be_written(tmp_path, monkeypatch):
    saved(tmp_path, [1])

    def full(folder, step):
        raise OSError(28, "No space left on device", str(folder / "manifest.json"))

    checkpointer = Checkpointer(tmp_path, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", full)
        checkpointer.save(2, state_at(2), {"step": 2})
        with pytest.raises(CheckpointError) as caught:
            checkpointer.wait()
    fails_in_one_line(caught, "No space left on device", "checkpoint 1 is intact")
    assert restored(tmp_path)[0] == 1
    checkpointer.save(2, state_at(2), {"step": 2})
    checkpointer.close()
    assert restored(tmp_path) == (2, [])


def test_too_little_room_is_known_before_writing(tmp_path, monkeypatch):
    saved(tmp_path, [1])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5000))
    with pytest.raises(CheckpointError) as caught, Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state_at(2), {})
    fails_in_one_line(caught, "No space left", "5,000 free")
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_directory_removed_during_a_save(tmp_path, late_writes, monkeypatch):
    checkpointer = Checkpointer(tmp_path / "ckpt")
    state = {str(i): jax.random.normal(jax.random.key(i), (512, 512)) for i in range(8)}
    finish = checkpointer._finish

    def removed(*args):  # Orbax is writing, or has just written; the manifest is not there yet
        (tmp_path / "ckpt").rename(tmp_path / "gone")
        finish(*args)

    monkeypatch.setattr(checkpointer, "_finish", removed)
    checkpointer.save(1, state, {})
    with pytest.raises(CheckpointError) as caught:
        checkpointer.wait()
    monkeypatch.setattr(checkpointer, "_finish", finish)
    fails_in_one_line(caught, "saving checkpoint 1", "no older one")
    assert checkpointer.restore(state) is None
    checkpointer.save(2, state, {})
    checkpointer.close()
    assert bits(checkpointer.restore(state)[1]) == bits(state)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_directory(tmp_path):
    saved(tmp_path, [1])
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError) as caught, Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(2, state_at(2), {})
        fails_in_one_line(caught, "Permission denied")
        assert restored(tmp_path) == (1, [])
    finally:
        tmp_path.chmod(0o700)


def kill_and_restore(directory, delays):
    """Kill a process that saves back to back, restore here, let the next one go on from there."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("back_to_back.py"), directory]
    env = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    steps = []
    with subprocess.Popen(command, env=env, cwd=root, **pipes) as process:
        for delay in delays:
            process.stdin.write(f"{delay}\n")
            process.stdin.flush()
            safe = int(process.stdout.readline())
            step, _ = restored(directory)
            assert safe <= step <= safe + 2  # the pipe may lag behind the disk
            steps.append(step)
        process.stdin.close()
    assert process.returncode == 0
    assert steps == sorted(steps) and steps[-1] > 0


def test_kill_9_at_random_moments_leaves_whole_checkpoints(tmp_path):
    rng = random.Random(0)
    kill_and_restore(tmp_path, [rng.uniform(0.0, 0.3) for _ in range(3)])


@pytest.mark.soak
def test_kill_9_twenty_times_leaves_whole_checkpoints(tmp_path):
    rng = random.Random(1)
    kill_and_restore(tmp_path, [rng.uniform(0.0, 0.3) for _ in range(20)])


def test_a_first_save_that_was_killed_is_no_checkpoint_yet(tmp_path):
    """Killed between Orbax's commit and the manifest, a run begins again; a later one that lacks its manifest
    has one before it, so that two without are damage."""
    saved(tmp_path, [1])
    (tmp_path / "1" / manifest.NAME).unlink()
    told = []
    assert Checkpointer(tmp_path).restore(state_at(1), told.append) is None
    assert told == [f"checkpoint 1 rejected: {manifest.NAME}: missing, the save was cut short"]
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    with pytest.raises(CheckpointError):
        Checkpointer(tmp_path).restore(state_at(1), told.append)
