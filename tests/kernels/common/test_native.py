"""C++ is compiled once for a machine, and where it cannot be, XLA does its work and one line says why."""

import functools
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from swiftkv_jax.kernels.common import dispatch, native
from swiftkv_jax.kernels.paged_attention import cases, native_cpu

SOURCE = Path(native_cpu.__file__).with_suffix(".cc")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of its own, and nothing known of earlier calls."""
    (tmp_path / "home").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native, "register", functools.cache(native.register.__wrapped__))
    return tmp_path / "home"


def compiler(folder: Path, script: str) -> str:
    """A folder with a C++ compiler that is a shell script."""
    folder.mkdir()
    (folder / "c++").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / "c++").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def refused() -> str:
    args, arrays = cases.SMALL["lengths"].shapes()
    return native_cpu.refuses(*args, **arrays)


@pytest.mark.slow
def test_without_a_compiler_xla_does_the_work_and_one_line_says_why(home, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    caplog.set_level(logging.WARNING)
    case = cases.SMALL["lengths"]
    args, arrays = case.make()
    run = functools.partial(cases.call, *args, **arrays, **case.options)
    got = [np.asarray(run()) for _ in range(2)]
    np.testing.assert_array_equal(got, [np.asarray(run(implementation="xla"))] * 2)
    why = "no C++ compiler is installed: c++, g++, clang++"
    assert [r.getMessage() for r in caplog.records] == [f"paged_attention by XLA, slower than in C++: {why}"]
    with pytest.raises(dispatch.UnsupportedError, match="native_cpu"):
        run(implementation="native_cpu")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "fails"),
        (
            'test "$1" = --version || { echo "note"; echo "x.cc:1: error: no such thing" >&2; exit 1; }',
            "error",
        ),
        (
            'test "$1" = --version || echo rubbish > "$(eval echo \\${$#})"',
            "invalid ELF header|file too short",
        ),
    ],
)
def test_a_compiler_that_fails_is_one_line(script, why, home, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", script))
    first = refused()
    assert re.search(why, first) and "\n" not in first
    assert refused() == first
    assert len(caplog.records) == 1  # and is not tried again


def test_a_cache_that_others_can_write_is_not_run(home):
    (home / ".cache" / "swiftkv-jax" / "native").mkdir(parents=True)
    (home / ".cache" / "swiftkv-jax" / "native").chmod(0o777)
    assert "must be writable by you alone" in refused()


@pytest.mark.slow
def test_concurrent_and_later_processes_compile_a_file_once(home, tmp_path, monkeypatch):
    """A compiler that counts its calls, and is quick, is used by two processes at once and by a later one."""
    real = shutil.which("c++") or pytest.skip("needs a C++ compiler named c++")
    count = tmp_path / "count"
    script = f'test "$1" = --version || echo once >> {count}; exec {real} "$@" -O0'
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", script))
    said = f"from swiftkv_jax.kernels.common.native import Path, library; library(Path({str(SOURCE)!r}))"
    both = [subprocess.Popen([sys.executable, "-c", said], cwd=SOURCE.parents[3]) for _ in range(2)]
    assert [p.wait(300) for p in both] == [0, 0]
    assert native.library(SOURCE).suffix == ".so"
    assert count.read_text(encoding="utf-8") == "once\n"
    left = sorted(p.suffix for p in (home / ".cache" / "swiftkv-jax" / "native").iterdir())
    assert left == ["", ".so"]  # nothing half made


def test_native_code_is_refused_on_a_mesh_of_several_devices():
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("tensor",))):
        assert refused() == "a mesh of 2 devices: one"
