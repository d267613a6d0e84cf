"""`benchmarks.slim_engine`: tried out on a CPU; where there is no accelerator its files say not measured."""

import json
import sys

import pytest

from benchmarks import slim_engine


def run(monkeypatch, folder, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["slim_engine", "--output", str(folder), *flags])
    return slim_engine.main()


@pytest.mark.slow
def test_keys_are_served_beside_keys_and_values(monkeypatch, tmp_path):
    tiny = "--shape tiny --layers 1 --workload 64:4 --requests 2 --chunk 64 --rounds 1".split()
    assert run(monkeypatch, tmp_path, *tiny) == 0
    found = json.loads((tmp_path / "slim_engine_tiny.json").read_text())["workloads"]["64:4"]
    assert {name: row["cache_bytes_per_token"] for name, row in found.items()} == {"standard": 512, "k": 256}
    assert all(row["tokens_per_s"] > 0 and row["prompt_share"] > 0 for row in found.values())


def test_without_an_accelerator_nothing_is_measured(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path) == 1
    assert "says not measured" in capsys.readouterr().out
    assert "Not measured: no GPU or TPU was available." in (tmp_path / "slim_engine.md").read_text()
