"""A wheel contains every package on disk, with the kernels under the library's name."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_is_packaged():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {
        path.parent.resolve().relative_to(ROOT)
        for top in ("swiftkv_jax", "kernels")
        for path in (ROOT / top).rglob("__init__.py")
    }
    names = {}
    for folder in folders:
        parts = folder.parts if folder.parts[0] == "swiftkv_jax" else ("swiftkv_jax", *folder.parts)
        names[".".join(parts)] = str(folder)
    assert set(setuptools["packages"]) == set(names)
    placed = setuptools["package-dir"]
    assert {name: placed[name] for name in names if "kernels" in name} == {
        name: folder.removeprefix("swiftkv_jax/") for name, folder in names.items() if "kernels" in name
    }


@pytest.mark.parametrize("kind", ["cc", "h"])
def test_every_c_file_is_packaged(kind):
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {path.parent.relative_to(ROOT) for path in (ROOT / "kernels").rglob(f"*.{kind}")}
    names = {".".join(("swiftkv_jax", *folder.parts)) for folder in found}
    assert names and all(f"*.{kind}" in setuptools["package-data"][name] for name in names)
