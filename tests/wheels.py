"""The wheel of this checkout, built from a copy: no build folder is left here, and none is reused."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
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


def environment(site: Path | None = None) -> dict[str, str]:
    """The variables of a process that has nothing of this checkout but its caches. It finds `site`, and then
    runs this JAX; another one may lack a flag of these tests, at which XLA would abort."""
    place = {"PYTHONPATH": "", "XLA_FLAGS": ""} if site is None else {"PYTHONPATH": str(site)}
    return os.environ | place | {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg"}


def found(name: str) -> str | None:
    """The first interpreter of this name that can make a virtual environment, on PATH or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in filter(None, [shutil.which(name), *map(str, sorted(pyenv.glob(f"*/bin/{name}")))]):
        done = subprocess.run(
            [python, "-c", "import ensurepip, venv"], capture_output=True, env=environment()
        )
        if done.returncode == 0:  # a shim of pyenv's may have no such version
            return python
    return None


def virtual(python: str, folder: Path, *packages: str) -> str:
    """The interpreter of a new virtual environment in `folder`, with `packages` as pip finds them."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True, env=environment(), timeout=300)
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *packages], check=True, env=environment(), timeout=1200)
    return inside


def hollow(folder: Path, name: str, version: str, *needs: str, extras: Iterable[str] = ()) -> Path:
    """A wheel in `folder` of a package that is empty but for what it needs."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    told = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}"]
    told += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(told) + "\n")
        archive.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    return wheel
