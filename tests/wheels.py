"""The wheel of this checkout, built from a copy: no build folder is left here, and none is reused."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("swiftkv_jax", "kernels", "configs", "demo", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build(folder: Path) -> Path:
    """The wheel's file, somewhere in `folder`."""
    copy, out = folder / "copy", folder / "dist"
    copy.mkdir(parents=True)
    for name in SOURCES:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=300)
    (wheel,) = out.glob("*.whl")
    shutil.rmtree(copy)
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Unpack what pip would put into site-packages; dependencies are those of the tests."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def environment(site: Path) -> dict[str, str]:
    """The variables of a process that has the wheel installed and nothing of this checkout but its caches."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | cache | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site), "MPLBACKEND": "Agg"}
