"""Documents out of files, folders and datasets; what is broken is named by its place."""

import gzip
import json
import lzma
from pathlib import Path

import datasets
import pytest

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.config import load_experiment
from swiftkv_jax.distill.data.sources import open_documents, split_of

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHARE = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SHARED = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
)


def write_rows(path: Path, rows: list, opener=open) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return str(path)


def test_folder_json_and_text_files_in_one_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")  # a byte order mark is no text
    with lzma.open(tmp_path / "c.txt.xz", "wt") as file:
        file.write("three")
    (tmp_path / "d.json").write_text(json.dumps([{"text": "four"}, {"conversations": SHARE}]))
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "a-checkpoint.txt").write_text("hidden")
    (tmp_path / "b" / "._two.md").write_bytes(b"\xff")  # what macOS puts beside a file
    documents = open_documents([str(tmp_path), str(tmp_path / "a.txt")])
    assert [d.text for d in documents] == ["one", "two", "three", "four", "", "one"]
    assert [d.id for d in documents][:3] == ["a.txt", "b/two.md", "c.txt.xz"]
    assert documents[4].messages == SHARED


def test_a_split_is_by_document_not_by_piece():
    names = [f"doc{i}.txt" for i in range(4000)]
    splits = [split_of(name) for name in names]
    assert 0.04 < splits.count("held_out") / len(names) < 0.06
    assert 0.015 < splits.count("tuning") / len(names) < 0.035
    assert splits.count("train") == len(names) - splits.count("held_out") - splits.count("tuning")
    assert all(split_of(f"{name}#{piece}") == split_of(name) for name in names[:50] for piece in range(3))
    assert [split_of(x) for x in ("library/json.rst.txt#0", "library/json.rst.txt#1")] == ["train"] * 2


BROKEN = [
    ("{", "not JSON"),
    ('["text"]', "a row is an object, not list"),
    ('{"txt": "x"}', 'neither "text" nor "messages"'),
    ('{"text": 3}', '"text" is int'),
    ('{"instruction": "x", "output": 3}', '"output" is int'),
    ('{"prompt": [], "completion": []}', "at least one"),
    ('{"text": "\\ud800"}', "surrogate"),
    ('{"messages": []}', "at least one"),
    ('{"messages": [{"role": "user"}]}', 'needs "role" and "content"'),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', 'needs "role" and "content"'),
    ('{"conversations": [{"from": "nobody", "value": "x"}]}', 'needs "from"'),
    ("[" * 100_000, "not JSON"),
    ('{"text": "x", "id": ' + "9" * 5000 + "}", "not JSON"),
]


@pytest.mark.parametrize("line, reason", BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_broken_line_is_named_or_left_out(tmp_path, line, reason):
    source = write_rows(tmp_path / "rows.jsonl", [{"text": "good"}, "", line, {"text": "also good"}])
    with pytest.raises(UsageError, match=f"rows.jsonl:3 .*{reason}"):
        open_documents([source])
    assert [d.text for d in open_documents([source], skip_bad_lines=True)] == ["good", "also good"]


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(UsageError, match=r"rows.jsonl:2"):
        open_documents([str(tmp_path / "rows.jsonl")])
    (tmp_path / "x.txt").write_bytes(b"\xff")
    with pytest.raises(UsageError):
        open_documents([str(tmp_path / "x.txt")])
    (tmp_path / "y.txt").write_text("y")
    assert [d.text for d in open_documents([str(tmp_path / "*.txt")], skip_bad_lines=True)] == ["y"]


@pytest.mark.parametrize("suffix, pack", [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_files_cut_short_or_scrambled(tmp_path, suffix, pack):
    path = tmp_path / f"rows.jsonl{suffix}"
    raw = pack(b'{"text": "%s"}\n' % bytes(range(97, 123)) * 50)
    for broken in (raw[:-12], b"no archive", raw[:20] + b"\0\1\2\3\4\5" + raw[26:]):
        path.write_bytes(broken)
        with pytest.raises(UsageError, match=r"rows.jsonl"):
            open_documents([str(path)])


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("absent.jsonl", None, "absent.jsonl does not exist$"),
        ("x.xlsx", "a,b", "x.xlsx is none of .txt"),
        ("x.parquet.gz", "a,b", "x.parquet.gz is none of .txt"),
        ("x.parquet", "a,b", "cannot read .*x.parquet"),
        ("x.csv", "", "x.csv has no first line that names its columns"),
        ("x.csv", "a,b", "x.csv holds no documents"),
        ("no*.jsonl", None, r"no\*.jsonl does not exist$"),
        ("empty.jsonl", "\n\n", "empty.jsonl holds no documents"),
        ("x.json", '{"text": "x"}', "x.json must hold a list"),
        ("x.json", "[", "x.json: not JSON"),
    ],
)
def test_sources_that_cannot_be_used(tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=expected):
        open_documents([str(tmp_path / name)])


def test_suffixes_in_capitals_are_known(tmp_path):
    with gzip.open(tmp_path / "ROWS.JSONL.GZ", "wt") as file:
        file.write('{"text": "one"}\n')
    (tmp_path / "Two.TXT").write_text("two")
    assert [d.text for d in open_documents([str(tmp_path)])] == ["one", "two"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`datasets.load_dataset` finds a local folder of this name before it asks the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()

    def save(name: str, split: str, rows: list[dict]):
        folder = tmp_path / name / "data"
        folder.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}-00000-of-00001.parquet")

    return save


def test_the_sources_of_the_published_recipes_load_together(hub):
    """Rows of the columns that the hub's parquet files have, from the paper's data and the reference's."""
    asked, answer = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    moderation = {"categories": {"hate": False}, "category_scores": {"hate": 1e-5}, "flagged": False}
    ultra = {"prompt": "hi", "prompt_id": "f0e3", "messages": CHAT}
    orca = {"id": "flan.1", "system_prompt": "", "question": "2 + 2?", "response": "4"}
    lmsys = {
        "conversation_id": "ab12",
        "model": "vicuna-13b",
        "conversation": [{"content": turn["content"], "role": turn["role"]} for turn in CHAT],
        "turn": 1,
        "language": "English",
        "openai_moderation": [moderation, moderation],
        "redacted": False,
    }
    hub("HuggingFaceH4/ultrachat_200k", "train_sft", [ultra])
    hub("Open-Orca/OpenOrca", "train", [orca, orca | {"id": "flan.2", "system_prompt": "Be brief."}])
    hub("nvidia/AceMath-Instruct-Training-Data", "general_sft_stage2", [{"messages": [asked], "answer": "4"}])
    hub("lmsys/lmsys-chat-1m", "train", [lmsys, lmsys | {"conversation_id": "cd34"}])
    sources = load_experiment("llama8b_reference").data.sources
    found = open_documents(["hf://HuggingFaceH4/ultrachat_200k", *sources])
    assert [(d.id, d.messages) for d in found] == [
        ("f0e3", tuple(CHAT)),
        ("flan.1", (asked, answer)),
        ("flan.2", ({"role": "system", "content": "Be brief."}, asked, answer)),
        (found[3].id, (asked, answer)),
        ("ab12", tuple(CHAT)),
        ("cd34", tuple(CHAT)),
    ]
    names = ["Open-Orca/OpenOrca", "nvidia/AceMath-Instruct-Training-Data", "lmsys/lmsys-chat-1m"]
    assert [d.messages for d in open_documents([f"hf://{name}" for name in names])] == [
        d.messages for d in list(found)[1:]
    ], "the same splits without naming them"


def test_digest_follows_content_ids_and_order(tmp_path):
    def digest(*rows):
        return open_documents([write_rows(tmp_path / "rows.jsonl", list(rows))]).digest

    one, two = {"id": "1", "text": "x"}, {"id": "2", "text": "y"}
    digests = [
        digest(one, two),
        digest(two, one),
        digest(one),
        digest(one, two | {"text": "z"}),
        digest(one, two | {"id": "3"}),
    ]
    assert len(set(digests)) == 5
    assert digest(one, two) == digests[0]
