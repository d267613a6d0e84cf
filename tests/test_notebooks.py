"""The notebook, cell by cell, in an empty folder with the wheel installed; and its cell that installs it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import wheels

QUICKSTART = wheels.ROOT / "notebooks" / "quickstart.ipynb"
RUN = """
import json, sys
names = {}
for source in json.load(sys.stdin):
    exec(source, names)
print(json.dumps({"package": names["skv"].__file__, "before": names["before"], "after": names["after"]}))
"""


def code() -> list[str]:
    """The sources of the notebook's cells of code, which are kept without outputs."""
    cells = [
        c for c in json.loads(QUICKSTART.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"
    ]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    return ["".join(cell["source"]) for cell in cells]


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(tmp_path):
    """Thirty steps of distillation bring the student nearer."""
    site, empty = wheels.install(wheels.build(tmp_path / "wheel"), tmp_path / "site"), tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(code()),
        env=wheels.environment(site) | {"STEPS": "30"},
        cwd=empty,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    told = json.loads(last)
    assert Path(told["package"]).is_relative_to(site)
    assert {line.partition(": '")[0] for line in said[-2:]} == {"teacher", "student"}
    assert "done: 30 steps" in done.stdout and [path.name for path in empty.iterdir()] == ["runs"]
    (kl_before, agreed_before), (kl_after, agreed_after) = told["before"], told["after"]
    assert 0 < kl_after < 0.1 and 0.8 < agreed_after < 1
    assert kl_after < 0.8 * kl_before and agreed_after > agreed_before


@pytest.mark.parametrize(
    "place, source, installed",
    [
        ("clone/notebooks", None, ["--editable", "CLONE"]),
        ("empty", "git+https://host/owner/name", ["git+https://host/owner/name"]),
        ("empty", None, None),
    ],
)
def test_a_missing_package_is_installed_or_the_cell_says_from_where(
    place, source, installed, tmp_path, monkeypatch
):
    (tmp_path / "clone" / "swiftkv_jax").mkdir(parents=True)
    (tmp_path / "clone" / "swiftkv_jax" / "version.py").touch()
    (tmp_path / place).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    cell = code()[0]
    placeholder = "git+https://github.com/THIS_REPOSITORY"
    assert (
        placeholder in cell and placeholder.rpartition("/")[2] in QUICKSTART.read_text().split("code", 1)[0]
    )
    cell = cell.replace(placeholder, source or placeholder)
    if installed is None:
        with pytest.raises(SystemExit, match="put its repository"):
            exec(cell, {})
        assert not ran
        return
    exec(cell, {})
    wanted = [str(tmp_path / "clone") if word == "CLONE" else word for word in installed]
    assert ran == [[sys.executable, "-m", "pip", "install", "--quiet", *wanted]]
    assert (sys.path[0] == str(tmp_path / "clone")) == (place != "empty")
