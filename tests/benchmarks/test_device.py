"""`benchmarks.device`: the order of its lines, what its figures mean, and what is measured again."""

import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import wheels

from benchmarks.device import engine, ledger, order

ROOT = Path(__file__).parents[2]
WHERE = {"device": "NVIDIA H100 80GB HBM3", "versions": {"jax": "0.11.2"}, "status": "done"}


def lines_of(name="llama8b", results=None, **more) -> list:
    return list(order.order(name, {} if results is None else results, **more))


def timed(kind_and_name: str, **seconds: float) -> dict:
    """Results of a right candidate, whose safe one takes a second at every size."""
    sizes = {
        name: {"seconds": s, "beside": 1.0, "off": 0.0, "bytes": 1e12, "flops": 1e12}
        for name, s in seconds.items()
    }
    return {kind_and_name: {"status": "done", "right": True, "why": "", "error": 0.0, **sizes}}


def test_the_engine_runs_by_the_winners_and_a_wrong_kernel_wins_nothing():
    results: dict = {}
    decode, chunk = "decode, page 64", "chunk, page 64"
    results |= timed(f"{decode}: xla_one_turn", a=1.0) | timed(f"{decode}: pallas_gpu", a=0.5)
    results |= timed(f"{chunk}: xla_one_turn", a=1.0) | timed(f"{chunk}: cudnn", a=0.5)
    results |= timed(f"{chunk}: pallas_gpu", a=0.1)
    results[f"{chunk}: pallas_gpu"] |= {"right": False, "why": "off"}
    engines = [line for line in lines_of(results=results) if line.task == "engine"]
    by = {(line.args["decode"], line.args["chunk"]) for line in engines[:3]}
    assert by == {("pallas_gpu", "cudnn")}
    assert [line.args["plan"] for line in engines[:3]] == list(engine.PLANS)
    wide = [line.args for line in engines if line.args["cache_dtype"] == "auto"]
    safe = [args["plan"] for args in wide if args["decode"] == "xla_one_turn"]
    assert safe == [order.STANDARD, order.HALF]


def of_two(tmp_path, line, where, **changed) -> bool:
    """Whether a line that was done is done for a ledger that reads the first one's folder."""
    first = ledger.Ledger([])
    first.where = WHERE
    done = {"status": "done", "tokens_per_s": 1.0}
    first.save(tmp_path, [line], {line.name: done}, "2026-11-26")
    second = ledger.Ledger([tmp_path])
    second.where = where
    return second.done(dataclasses.replace(line, **changed)) is not None


def test_what_is_done_is_known_by_device_versions_arguments_and_source(tmp_path, monkeypatch):
    line = next(line for line in lines_of() if line.task == "engine")
    assert of_two(tmp_path, line, WHERE)
    assert of_two(tmp_path, line, WHERE, name="another name", limit=1.0)
    assert not of_two(tmp_path, line, WHERE | {"device": "NVIDIA H200"})
    assert not of_two(tmp_path, line, WHERE | {"versions": {"jax": "0.12.0"}})
    assert not of_two(tmp_path, line, WHERE, args={**line.args, "page": 128})
    assert not of_two(tmp_path, line, WHERE, env={"XLA_FLAGS": "--x"})
    folder = tmp_path / "swiftkv_jax"
    folder.mkdir()
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    monkeypatch.setitem(ledger.SOURCES, "engine", ["swiftkv_jax"])
    source, found = ledger.source.__wrapped__, []
    for name, text in (("model.py", "one"), ("model.py", "another"), ("model.md", "no source")):
        (folder / name).write_text(text)
        found.append(source("engine"))
    assert found[0] != found[1] == found[2]


def test_a_line_keeps_its_newest_result_by_earlier_sources_on_this_device(tmp_path, monkeypatch):
    line = next(line for line in lines_of() if line.task == "engine")
    book = ledger.Ledger([])
    for source, date, device in (
        ("a", "2026-11-25", "H"),
        ("b", "2026-11-26", "H"),
        ("c", "2026-11-27", "A"),
    ):
        monkeypatch.setattr(ledger, "source", lambda task, source=source: source)
        book.where = WHERE | {"device": device}
        book.save(tmp_path, [line], {line.name: {"status": "done", "ttft_ms": source}}, date)
    monkeypatch.setattr(ledger, "source", lambda task: "d")
    book.where = WHERE | {"device": "H"}
    assert book.done(line) is None and book.earlier(line)["ttft_ms"] == "b"


def test_what_failed_or_was_cut_is_measured_again_and_keeps_its_parts(tmp_path):
    line = next(line for line in lines_of() if line.task == "engine")
    for status in ("failed", "running"):
        book = ledger.Ledger([])
        book.where = WHERE
        book.save(tmp_path, [line], {line.name: {"status": status, "ttft_ms": 3.0}}, "today")
        again = ledger.Ledger([tmp_path])
        again.where = WHERE
        assert again.done(line) is None and again.entries[book.key(line)]["ttft_ms"] == 3.0


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> str:
    """An interpreter with exactly what a bare CUDA machine has of what the library needs."""
    python = wheels.found("python3.12")
    if python is None:
        pytest.skip("there is no python3.12 that runs")
    packages = ROOT / "benchmarks" / "device" / "packages.txt"
    return wheels.virtual(python, tmp_path_factory.mktemp("bare"), "--requirement", str(packages))


@pytest.mark.soak
def test_a_rehearsal_with_the_packages_of_a_bare_machine_lacks_nothing_and_survives_kill_9(bare, tmp_path):
    flags = ["--shape", "tiny", "--minutes", "20", "--output", str(tmp_path), "--resume", str(tmp_path)]
    run = [bare, "-m", "benchmarks.device", *flags, "--model", "demo/teacher"]
    path, states = tmp_path / "ledger.json", []
    usual = os.environ | {"XLA_FLAGS": ""}  # the machine's JAX lacks the flag of these tests
    with subprocess.Popen(run, cwd=ROOT, env=usual, stdout=subprocess.DEVNULL) as first:
        while states.count("done") < 4 or "running" not in states:
            assert first.poll() is None
            time.sleep(0.05)
            states = [e["status"] for e in json.loads(path.read_text()).values()] if path.exists() else []
        first.kill()
    kept = {e["line"] for e in json.loads(path.read_text()).values() if e["status"] == "done"}
    assert len(kept) >= 4 and all(f"| {name} |" in (tmp_path / "report.md").read_text() for name in kept)
    told = subprocess.run(run, cwd=ROOT, env=usual, check=True, capture_output=True, text=True).stdout
    assert {line.split(": done on ")[0] for line in told.splitlines() if ": done on " in line} == kept
    entries = json.loads(path.read_text()).values()
    assert {e["line"]: e.get("reason") for e in entries if e["status"] != "done"} == {}
    wanted = [
        line.name for line in order.order("tiny", {}, ["MODEL"], torch=False, winner=lambda _, n, __: n[-1])
    ]
    assert {e["line"] for e in entries} >= {name for name in wanted if not name.startswith("engine")}
