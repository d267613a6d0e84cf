"""The file of a batch: answers as they come, in the order of the input in the end."""

import json
from pathlib import Path

from swiftkv_jax.engine.request import Request, SamplingParams
from swiftkv_jax.server import jobs
from swiftkv_jax.server.jobs import Job, Output
from swiftkv_jax.server.main import main

CAME = [2, 0, 3, 1]


def make(count: int) -> list[Job]:
    work = Request(prompt=None, token_ids=(7,), params=SamplingParams(), root=b"")
    return [Job(i, None, {}, work, f"key{i}") for i in range(count)]


def row(index: int) -> dict:
    return {"index": index, "key": f"key{index}", "text": f"é{index}\n" * (index + 1)}


def order(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_saved_as_they_come_and_sorted_in_the_end(tmp_path):
    """A run that stops after two, and one that finishes it."""
    path = tmp_path / "out.jsonl"
    for end, resume in (2, False), (4, True):
        output = Output(str(path), resume, make(4))
        for index in CAME[end - 2 : end]:
            output.write(row(index))
            assert order(path)[-1] == index
        output.close()
    output.sort()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == [row(index) for index in range(4)] and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_the_file_keeps_its_rights(tmp_path):
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    output = Output(str(link), False, make(2))
    output.write(row(1))
    output.write(row(0))
    path.chmod(0o640)
    output.sort()
    output.close()
    assert link.is_symlink() and order(path) == [0, 1] and path.stat().st_mode & 0o777 == 0o640


def test_no_room_for_a_second_copy_leaves_the_answers_and_says_so(tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(28, "No space left on device")

    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = [40, 1, 1, 1]
    source.write_text("".join(json.dumps({"prompt": "def", "max_tokens": n}) + "\n" for n in lengths))
    flags = ["--input", str(source), "--max-num-seqs", "2", "--steps-per-launch", "1", "--temperature", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(jobs.os, "fsync", full)
        assert main([*flags, "--output", str(out), "--max-model-len", "128"]) == 0
    said = capsys.readouterr().err
    assert "No space left" in said and order(out)[-1] == 0 and sorted(order(out)) == [0, 1, 2, 3]
    assert not list(tmp_path.glob(".*"))
    assert main([*flags, "--output", str(out), "--max-model-len", "128", "--resume", "--quiet"]) == 0
    assert order(out) == [0, 1, 2, 3]
