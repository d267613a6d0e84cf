"""The notebook's cells, run in order as one program: distillation in it must bring the student nearer."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setenv("STEPS", "30")
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    cells = json.loads((NOTEBOOKS / "quickstart.ipynb").read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            exec("".join(cell["source"]), names)
    assert names["after"][0] < 0.8 * names["before"][0] and names["after"][1] > names["before"][1]
    printed = capsys.readouterr().out
    assert "teacher: '" in printed and "student: '" in printed
