"""Runs, models and data in gs:// buckets, which lie in memory here: as those of a folder, bit for bit."""

import gzip
import json
import lzma
from pathlib import Path

import jax
import made
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from bucket_made import put, served
from tiny_models import tiny

import swiftkv_jax as skv
from swiftkv_jax.checkpoint.training import Checkpointer
from swiftkv_jax.cli import train as training
from swiftkv_jax.distill.data.loader import DataLoader
from swiftkv_jax.distill.data.sources import open_documents

CONFIG = """
from swiftkv_jax.distill.config import Experiment, PlanConfig
from swiftkv_jax.distill.data.loader import DataConfig

config = Experiment(
    name="small", model={model!r}, plan=PlanConfig(split=2, init="fold"),
    data=DataConfig(sources=({source!r},), seq_len=16, batch_size=2),
    evaluation=DataConfig(sources=({source!r},), seq_len=16, batch_size=2), evaluation_batches=1, answers=0,
    dtype="float32", export_dtype="float32", steps=8, remat=False, checkpoint_every=3,
)
"""
RUN = "gs://bucket/runs/small"

pytestmark = pytest.mark.usefixtures("buckets")


@pytest.fixture
def buckets(monkeypatch, tmp_path):
    with served(monkeypatch, tmp_path / "hub") as objects:
        yield objects


@pytest.fixture
def teacher(tmp_path) -> Path:
    return made.teacher(tmp_path / "teacher")


def equal(one, other) -> bool:
    leaves = jax.tree.leaves((one, other))
    half = len(leaves) // 2
    return all(np.array_equal(a, b) for a, b in zip(leaves[:half], leaves[half:], strict=True))


@pytest.mark.slow
def test_a_run_in_a_bucket_is_that_of_a_folder_and_goes_on_from_there(
    teacher, buckets, tmp_path, monkeypatch
):
    """Its model and its data lie in the bucket too, and its export is loaded from there."""
    texts = made.texts(tmp_path / "rows.jsonl", 60)
    put("bucket/data/rows.jsonl", Path(texts).read_bytes())
    for path in teacher.iterdir():
        put(f"bucket/teacher/{path.name}", path.read_bytes())
    here, there = tmp_path / "here.py", tmp_path / "there.py"
    here.write_text(CONFIG.format(model=str(teacher), source=texts))
    there.write_text(CONFIG.format(model="gs://bucket/teacher", source="gs://bucket/data/rows.jsonl"))
    words = ["--config", str(there), "--out", RUN]
    assert training.main(["--config", str(here), "--out", str(tmp_path / "run")]) == 0
    following = DataLoader.__next__

    def ends(self):
        if self._step == 5:
            raise OSError(5, "the network is gone")
        return following(self)

    def rows(raw: bytes) -> list[dict]:
        return [json.loads(line) for line in raw.splitlines()]

    with monkeypatch.context() as patch:
        patch.setattr(DataLoader, "__next__", ends)
        assert training.main(words) == 1
    assert [row["step"] for row in rows(buckets["bucket/runs/small/metrics.jsonl"][1])] == [1, 2, 3, 4, 5]
    assert Checkpointer(f"{RUN}/checkpoints").steps() == [3, 5]
    assert training.main(words) == 2 == training.main([*words, "--set", "steps=9", "--resume"])
    assert training.main([*words, "--resume"]) == 0
    want, got = (skv.from_pretrained(f"{home}/export") for home in (tmp_path / "run", RUN))
    assert got[0].plan == want[0].plan and equal(got[1], want[1])
    metrics = (
        buckets["bucket/runs/small/metrics.jsonl"][1],
        (tmp_path / "run" / "metrics.jsonl").read_bytes(),
    )
    losses = [{row["step"]: row["loss"] for row in rows(raw) if "loss" in row} for raw in metrics]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    ours = (name.removeprefix("bucket/runs/small/") for name in buckets if "/runs/" in name)
    assert {name.partition("/")[0] for name in ours} == {path.name for path in (tmp_path / "run").iterdir()}


def test_a_damaged_checkpoint_in_a_bucket_is_rejected(buckets):
    state = {"a": jax.numpy.arange(10.0)}
    checkpoints = Checkpointer(f"{RUN}/checkpoints")
    for step in (1, 2):
        checkpoints.save(step, state, {})
        checkpoints.wait()
    (name,) = [n for n in buckets if n.startswith("bucket/runs/small/checkpoints/2/state/d/")]
    put(name, b"x" * len(buckets[name][1]))
    told = []
    found = Checkpointer(f"{RUN}/checkpoints").restore(state, told.append)
    assert found is not None and found[0] == 1 and equal(found[1], state) and len(told) == 1


def test_a_model_is_saved_in_a_bucket_and_read_again_when_it_changes(buckets, tmp_path):
    url, outside = "gs://bucket/student", "bucket/student/../../../escaped.json"
    put(outside, b"{}")
    for seed, most in ((0, 20_000), (1, 2**30)):
        model, params = tiny(made.CONFIG, skv.KVPlan.standard(4), seed)
        skv.save_pretrained(url, model, params, max_shard_bytes=most, dtype="float32")
        assert equal(skv.from_pretrained(url, dtype="float32")[1], params)
    want = ["bucket/student/config.json", "bucket/student/model.safetensors"]
    assert sorted(buckets) == [outside, *want] and not list(tmp_path.rglob("escaped.json"))


def test_documents_in_a_bucket_are_those_of_files(tmp_path):
    rows = [{"id": f"d{i}", "text": f"text {i}"} for i in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "c.txt.xz").write_bytes(lzma.compress(b"one text"))
    (folder / "more" / "d.csv").write_text("text\nfirst\nsecond\n")
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "e.parquet")
    (folder / "f.jsonl.zst").write_bytes(pa.Codec("zstd").compress(lines, asbytes=True))
    (folder / "ignored.bin").write_bytes(b"x")
    (folder / ".hidden.jsonl").write_bytes(lines)
    for path in folder.rglob("*.*"):
        put(f"bucket/data/{path.relative_to(folder).as_posix()}", path.read_bytes())
    for source in ("", "/a.jsonl", "/*.jsonl*", "/more/d.csv", "/c.txt.xz"):
        got, want = (open_documents([f"{home}{source}"]) for home in ("gs://bucket/data", folder))
        assert list(got) == list(want) and got.digest == want.digest, source
        assert [d.place.removeprefix("gs://bucket/data") for d in got] == [
            d.place.removeprefix(str(folder)) for d in want
        ]
