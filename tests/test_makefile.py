"""The Makefile's environments: the first is .venv; another version of Python does not get it."""

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def python(path: Path, version: str) -> Path:
    """An interpreter that says that it is of this version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("first", "asked", "environment"),
    [(None, "3.12", ".venv"), ("3.12", "3.12", ".venv"), ("3.11", "3.12", ".venv-3.12")],
)
def test_an_environment_is_never_another_versions(first, asked, environment, tmp_path):
    if first:
        python(tmp_path / ".venv/bin/python", first)
    asked = python(tmp_path / "asked", asked)
    (tmp_path / "pyproject.toml").touch()
    command = ["make", "--file", str(MAKEFILE), "--dry-run", f"PYTHON={asked}", "test"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f" {environment}/bin/python -m pytest" in done.stdout
    assert (f"-m venv {environment}\n" in done.stdout) == (first != "3.12")
