"""Files and rows in the shapes that published datasets and people's own files have."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.data import files, sources
from swiftkv_jax.distill.data.sources import StoredDocuments, open_documents

ROOT = Path(__file__).resolve().parents[2]
Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
# The columns of published sets, and what a chat template should see of a row.
PUBLISHED = {
    "ultrachat_200k": ({"prompt": "q", "prompt_id": "x", "messages": [Q, A]}, (Q, A)),
    "lmsys-chat-1m": (
        {"conversation_id": "x", "model": "m", "conversation": [Q, A], "turn": 1, "redacted": False},
        (Q, A),
    ),
    "OpenHermes-2.5": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "source": None},
        (Q, A),
    ),
    "conversations by role": ({"conversations": [Q, A]}, (Q, A)),
    "alpaca": ({"instruction": "q", "input": "", "output": "a", "text": "Below is an ..."}, (Q, A)),
    "alpaca, input": (
        {"instruction": "do", "input": "it", "output": "a"},
        ({"role": "user", "content": "do\n\nit"}, A),
    ),
    "OpenOrca": ({"id": "x", "system_prompt": "s", "question": "q", "response": "a"}, (SYSTEM, Q, A)),
    "GSM8K": ({"id": "x", "question": "q", "answer": "a"}, (Q, A)),
    "OpenOrca, no system": ({"id": "x", "system_prompt": "", "question": "q", "response": "a"}, (Q, A)),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, (Q, A)),
    "TRL": ({"prompt": [SYSTEM, Q], "completion": [A]}, (SYSTEM, Q, A)),
}


def as_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_is_its_chat(tmp_path, name):
    row, chat = PUBLISHED[name]
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), parquet)
    for source in (as_jsonl(tmp_path / "rows.jsonl", [row, row]), str(parquet)):
        assert [document.messages for document in open_documents([source])] == [chat, chat]


SUFFIXES = {bz2: "bz2", gzip: "gz", lzma: "xz"}


def zst(path: Path, raw: bytes) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(raw)


def test_texts_are_the_same_in_every_kind_of_file(tmp_path):
    texts = ["one\u2028two", "NA", 'two, "with" commas', "three\nlines\n", "naïve 雪", "42"]
    rows = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for kind in (bz2, gzip, lzma):
        (tmp_path / f"rows.jsonl.{SUFFIXES[kind]}").write_bytes(kind.compress(raw))
    zst(tmp_path / "rows.jsonl.zst", raw)
    (tmp_path / "rows.json").write_bytes(raw)  # rows a line, as many name such a file
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    quoted = ["id,text", *(f'{row["id"]},"{row["text"].replace(chr(34), chr(34) * 2)}"' for row in rows)]
    (tmp_path / "rows.csv").write_text("\ufeff" + "\r\n".join(quoted), newline="")
    zst(tmp_path / "rows.tsv.zst", "\n".join(quoted).replace(",", "\t").replace("two\t", "two,").encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for path in sorted(tmp_path.iterdir()):
        found = open_documents([str(path)])
        assert [(d.id, d.text) for d in found] == [(row["id"], row["text"]) for row in rows], path.name
    pattern = open_documents([str(tmp_path / "rows.*")])
    assert len(pattern) == 8 * len(rows)


def test_a_line_of_a_table_with_too_many_fields_is_named_or_left_out(tmp_path):
    (tmp_path / "rows.csv").write_text("id,text\n1,a\n2,b,c\n3,d\n")
    with pytest.raises(UsageError, match=r"rows.csv:3 \(3 fields, not 2: 2,b,c\)"):
        open_documents([str(tmp_path / "rows.csv")])
    assert [d.text for d in open_documents([str(tmp_path / "rows.csv")], skip_bad_lines=True)] == ["a", "d"]


@pytest.mark.parametrize("size, quote", [(2**17, ""), (2**20, '"'), (9 * 2**20, '"')])
def test_a_field_of_a_table_may_have_any_length(tmp_path, size, quote):
    long = "x y " * (size // 4)
    (tmp_path / "rows.csv").write_text("text,id\n" + f"{quote}{long}{quote},a\n" * 2 + "short,b\n")
    found = open_documents([str(tmp_path / "rows.csv")])
    assert [d.id for d in found] == ["a", "a", "b"]
    assert found[0].text == found[1].text == long and found[2].text == "short"


def test_a_row_that_is_not_utf_8_costs_that_row(tmp_path):
    """It is named by its line; rows before it have several lines, or none."""
    table = 'id,text\n1,"a\nb"\n\n2,c\n3,\udcff\n4,d\n'.encode(errors="surrogateescape")
    (tmp_path / "rows.csv").write_bytes(table)
    strings = pyarrow.array([b"a\nb", b"c", b"\xff", b"d"]).cast(pyarrow.string(), safe=False)
    rows = pyarrow.table({"text": pyarrow.StringArray.from_buffers(4, *strings.buffers()[1:])})
    pyarrow.parquet.write_table(rows, tmp_path / "rows.parquet")
    for name, place in (("rows.csv", 6), ("rows.parquet", 3)):
        with pytest.raises(UsageError, match=rf"{name}:{place} \(not UTF-8\)\. Fix"):
            open_documents([str(tmp_path / name)])
        found = open_documents([str(tmp_path / name)], skip_bad_lines=True)
        assert [d.text for d in found] == ["a\nb", "c", "d"]


def test_a_quote_that_nothing_closes_is_named_and_swallows_nothing(tmp_path):
    """Even where broken rows are skipped: all rows after it would be lost."""
    (tmp_path / "rows.csv").write_text('id,text\n1,a\n2,"b\n3,c\n')
    with pytest.raises(UsageError, match=r"rows.csv:3 opens a quote"):
        open_documents([str(tmp_path / "rows.csv")], skip_bad_lines=True)


def test_columns_of_other_names(tmp_path):
    rows = [{"id": "1", "q": "q", "a": "a", "text": "noise"}, {"id": "2", "q": "q", "a": "a"}]
    source = as_jsonl(tmp_path / "rows.jsonl", rows)
    found = open_documents([source], columns=("prompt=q", "completion=a"))
    assert [(d.id, d.messages) for d in found] == [("1", (Q, A)), ("2", (Q, A))]
    other = as_jsonl(tmp_path / "other.jsonl", [{"text": "plain"}])
    found = open_documents([other, source], columns=("prompt=q", "completion=a"))
    assert found[0].text == "plain", "has none of them"
    with pytest.raises(UsageError, match=r"rows.jsonl:2"):
        open_documents([source])
    several = as_jsonl(tmp_path / "several.jsonl", [{"q": "q"}] * 40)
    with pytest.raises(UsageError, match=r"several.jsonl:1"):
        open_documents([several])
    for bad in ("prompt", "promt=q", "prompt="):
        with pytest.raises(UsageError, match=f"columns are ours=theirs, .*not '{bad}'"):
            open_documents([source], columns=(bad,))


def test_a_named_column_that_no_row_has_is_an_error(tmp_path, monkeypatch):
    """A misspelt name must not train on another column that happens to be there."""
    source = as_jsonl(tmp_path / "rows.jsonl", [{"text": "noise", "body": "b"}, {"body": "c", "late": "x"}])
    for columns, missing in ((("text=bdoy",), "bdoy"), (("prompt=body", "completion=answr"), "answr")):
        with pytest.raises(
            UsageError, match=f"no row has the column '{missing}' .* the rows have text, body"
        ):
            open_documents([source], columns=columns)
    assert open_documents([source], columns=("text=body", "id=late"))[0].text == "b", "some row has each"
    monkeypatch.setattr(sources, "IN_MEMORY", 10)
    monkeypatch.setattr(sources, "_LOOKED_UP", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for _ in range(2):  # nothing is kept that would hide it
        with pytest.raises(UsageError):
            open_documents([source], columns=("text=bdoy",))
    for _ in range(2):
        assert open_documents([source], columns=("text=body", "id=late"))[0].text == "b"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Two datasets as folders here, of which one has two configs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    names = []
    for config in ("easy", "hard"):
        folder = tmp_path / "some" / "set" / config
        folder.mkdir(parents=True)
        rows = [{"text": f"{config} {i}"} for i in range(9)]
        for split in ("train", "test"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
        names.append(f"- config_name: {config}\n  data_files:\n")
        names[-1] += "".join(f"  - split: {s}\n    path: {config}/{s}.parquet\n" for s in ("train", "test"))
    (tmp_path / "some" / "set" / "README.md").write_text("---\nconfigs:\n" + "".join(names) + "---\n")


def test_a_hub_dataset_by_config_split_and_columns(hub):
    assert [d.text for d in open_documents(["hf://some/set:hard[test[:2]]"])] == ["hard 0", "hard 1"]
    assert open_documents(["hf://some/set:easy"])[8].text == "easy 8"
    assert open_documents(["hf://some/set:easy@main"])[8].text == "easy 8"
    with pytest.raises(UsageError):
        open_documents(["hf://some/set:easy"], columns=("text=body",))
    found = open_documents(["hf://some/set:easy"], columns=("prompt=text", "completion=text"))
    assert found[0].messages[1] == {"role": "assistant", "content": "easy 0"}
    with pytest.raises(UsageError):
        open_documents(["hf://some/set:"])


def test_stream_rows_reads_only_the_first_rows(hub):
    whole = open_documents(["hf://some/set:hard"])
    found = open_documents(["hf://some/set:hard"], stream_rows=4)
    assert [(d.id, d.text) for d in found] == [(d.id, d.text) for d in whole][:4]


def test_a_large_source_is_kept_on_disk_and_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"{i} " * 40} for i in range(400)] + [{"id": "chat", "messages": [SYSTEM, Q, A]}]
    source = as_jsonl(tmp_path / "rows.jsonl", rows)
    plain = list(open_documents([source]))
    for name, size in (("IN_MEMORY", 9000), ("_LOOKED_UP", 100), ("_ROWS_WRITTEN", 4)):
        monkeypatch.setattr(sources, name, size)
    with monkeypatch.context() as without:
        without.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
        for name in ("datasets", "datasets.config"):
            without.setitem(sys.modules, name, None)
        assert open_documents([source]).parts == [plain]
    kept = open_documents([source])
    assert isinstance(kept.parts[0], StoredDocuments)
    assert kept.parts[0].path.is_relative_to(tmp_path / "cache")
    assert list(kept) == plain and list(kept.ids()) == [d.id for d in plain]
    assert kept[7] == plain[7]
    monkeypatch.setattr(files, "rows", None)  # the second time nothing is read but what was kept
    assert list(open_documents([source])) == plain and open_documents([source]).digest == kept.digest
    monkeypatch.undo()


def test_the_disk_cache_is_invalidated_by_changed_files_or_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, size in (("IN_MEMORY", 900), ("_LOOKED_UP", 100)):
        monkeypatch.setattr(sources, name, size)
    rows = [{"text": "x" * 50, "body": f"y{i}" * 30} for i in range(40)]
    source = as_jsonl(tmp_path / "rows.jsonl", rows)
    assert open_documents([source])[0].text == "x" * 50
    assert open_documents([source], columns=("text=body",))[1].text == "y1" * 30
    as_jsonl(tmp_path / "rows.jsonl", [{"text": "z" * 50}] * 41)
    assert len(open_documents([source])) == 41 and open_documents([source])[0].text == "z" * 50
    (tmp_path / "rows.jsonl").write_text((tmp_path / "rows.jsonl").read_text() + "{\n")
    with pytest.raises(UsageError, match=r"rows.jsonl:42"):
        open_documents([source])
    assert len(open_documents([source], skip_bad_lines=True)) == 41
    with pytest.raises(UsageError, match=r"rows.jsonl:42"):
        open_documents([source])
    assert not [path for path in (tmp_path / "cache" / "swiftkv_jax").iterdir() if path.suffix != ".arrow"]


def test_a_long_text_is_pieces_that_end_lines_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 1000)
    text = "".join(f"line {i} of 雪\n" for i in range(300))
    (tmp_path / "long.txt").write_text(text)
    found = open_documents([str(tmp_path / "long.txt")])
    assert len(found) > 3 and "".join(d.text for d in found) == text
    assert [d.id for d in found] == [f"long.txt#{i}" for i in range(len(found))]
    assert all(d.text.endswith("\n") and len(d.text.encode()) < 1100 for d in found)
    assert len({sources.split_of(d.id) for d in found}) == 1, "one document, one split"


CHILD = """
import resource, sys
import datasets
from swiftkv_jax.distill.data.samples import DataConfig, Samples
from swiftkv_jax.text.tokenizer import load_tokenizer

source, folder = sys.argv[1:]
tokenizer = load_tokenizer(folder)
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 250 * 2**20,) * 2)
config = dict(sources=(source,), seq_len=64, batch_size=2)
for split in ("train", "held_out"):
    samples = Samples(DataConfig(split=split, **config), tokenizer)
    print(len(samples), sum(len(samples[i]) for i in range(0, len(samples), len(samples) // 50)))
print(samples.documents[0].text[:8])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """A jsonl of 320 MB is read twice by a process that may take 250 MiB more than when it began, threads'
    stacks included. The file that it makes is mapped, which does not count."""
    from tokenizers_made import make_tokenizer

    with (tmp_path / "rows.jsonl").open("w") as file:
        line = "the cat sat on the mat and the dog sat on the log " * 80
        for i in range(80_000):
            file.write(f'{{"id": "d{i}", "text": "{i:08} {line}"}}\n')
    command = [sys.executable, "-c", CHILD, str(tmp_path / "rows.jsonl"), str(make_tokenizer(tmp_path / "t"))]
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (train, tokens), (held_out, _), (first,) = map(str.split, done.stdout.splitlines())
    assert 0.9 < int(train) / 80_000 < 0.94 and 0.04 < int(held_out) / 80_000 < 0.06 and int(tokens) > 50_000
    assert first == "00000000"
