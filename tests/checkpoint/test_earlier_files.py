"""A student, an adapter and a training run that commit 50b455b wrote are read bit for bit."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax.cli.train import main

WRITTEN = Path(__file__).parent.parent / "written_by_50b455b"


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """A copy of the files, from where their relative paths hold."""
    folder = shutil.copytree(WRITTEN, tmp_path / "written")
    monkeypatch.chdir(folder)
    return folder


def test_a_student_keeps_every_tensor(written, tmp_path):
    model, params = skv.from_pretrained(written / "student", dtype="float32")
    assert model.plan == skv.KVPlan.swiftkv(4, 2, 2)
    skv.save_pretrained(tmp_path / "again", model, params)
    old, new = (
        load_file(folder / "model.safetensors") for folder in (written / "student", tmp_path / "again")
    )
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        np.testing.assert_array_equal(new[name], tensor, err_msg=name)


def test_an_adapter_keeps_its_predictor_and_its_auxiliary(written):
    model, params = skv.from_pretrained(written / "adapter", dtype="float32")
    assert model.prediction.reads == (0, 0, 1, 1)
    (rows,) = params["predictor"]["rows"]
    with np.load(written / "predictor.npz") as wanted:
        for part, leaves in rows.items():
            for name, leaf in leaves.items():
                np.testing.assert_array_equal(np.asarray(leaf), wanted[f"{part}.{name}"])
    _, teacher = skv.from_pretrained(written / "teacher", dtype="float32")
    base, auxiliary = (jax.tree.leaves(params[name]) for name in ("base", "auxiliary"))
    for ours, theirs in zip(base, jax.tree.leaves(teacher), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert sum(leaf.size for leaf in auxiliary) < sum(leaf.size for leaf in base)


def test_a_run_goes_on_where_it_stopped(written):
    """Resumed at its second step, it ends where that commit's own run of all four steps ended."""
    as_then = ["--set", "data.pieces_begin_with_bos=False"]
    assert main(["--config", "config.py", "--out", "run", "--resume", *as_then]) == 0
    lines = [json.loads(line) for line in (written / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    old, new = (load_file(written / place / "model.safetensors") for place in ("student", "run/export"))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        np.testing.assert_allclose(new[name], tensor, rtol=0, atol=1e-6, err_msg=name)
