"""Documents: where training text comes from, local files and Hugging Face datasets alike."""

import bisect
import functools
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from swiftkv_jax.errors import UsageError, first_line

TEXT_SUFFIXES = (".txt", ".md", ".rst")
ROW_SUFFIXES = (".jsonl", ".json")
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_SHOWN = 10  # broken lines that an error names
_SAMPLED = 64  # rows of a hub dataset that its digest covers
# Who speaks in ShareGPT's format, and what chat templates call them.
_SPEAKERS = {"system": "system", "human": "user", "gpt": "assistant"}
# The splits to train on of the paper's data (SwiftKV section 4.1), and the column that names a row.
HUB = {
    "HuggingFaceH4/ultrachat_200k": ("train_sft", "prompt_id"),
    "teknium/OpenHermes-2.5": ("train", ""),
    "Open-Orca/SlimOrca": ("train", ""),
}


@dataclass(frozen=True)
class Document:
    """A text, or a chat (then `text` is empty). `id` names it for the held-out rule and in messages."""

    id: str
    text: str = ""
    messages: tuple[dict, ...] = ()

    @property
    def content(self) -> str:
        """What identifies it: the text, or the messages as JSON."""
        return json.dumps(self.messages, ensure_ascii=False, sort_keys=True) if self.messages else self.text


class BadRow(ValueError):
    """A row that is neither a text nor a chat; says why."""


def split_of(document_id: str) -> str:
    """A document's split: 1 in 20 "held_out", 1 in 40 "tuning"; what stands behind `#` does not count."""
    bucket = int(sha256(document_id.split("#")[0].encode()).hexdigest()[:8], 16) % 40
    return {0: "held_out", 20: "held_out", 10: "tuning"}.get(bucket, "train")


def parse_row(row, id_column: str = "id") -> Document:
    """A row with `text`, with `messages` (role, content) or with `conversations` (from, value).

    Without an id of its own a document is named by the sha256 of its content.

    Raises:
      BadRow: none of these, or something in it that is no text.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a row is an object, not {type(row).__name__}")
    if row.get("messages") is not None:
        document = Document("", messages=tuple(_message(m) for m in _turns(row["messages"])))
    elif row.get("conversations") is not None:
        document = Document("", messages=tuple(_speech(m) for m in _turns(row["conversations"])))
    elif isinstance(row.get("text"), str):
        document = Document("", row["text"])
    else:
        raise BadRow('neither "text" nor "messages"')
    name = row.get(id_column)
    try:
        digest = sha256(document.content.encode()).hexdigest()
        name = digest if name is None or name == "" else str(name)
        name.encode()
    except UnicodeEncodeError as error:
        raise BadRow("half of a surrogate pair") from error
    return Document(name, document.text, document.messages)


def _turns(value) -> list:
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("the messages of a chat are a list of objects, at least one")
    return value


def _message(turn: dict) -> dict:
    if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
        raise BadRow('a message needs "role" and "content", both texts')
    return {name: value for name, value in turn.items() if value is not None}


def _speech(turn: dict) -> dict:
    if turn.get("from") not in _SPEAKERS or not isinstance(turn.get("value"), str):
        raise BadRow(f'a turn needs "from" (one of {", ".join(_SPEAKERS)}) and "value"')
    return {"role": _SPEAKERS[turn["from"]], "content": turn["value"]}


class HubDocuments(Sequence):
    """The rows of a Hugging Face dataset, read from disk when asked for."""

    def __init__(self, name: str, rows, id_column: str, skip_bad_rows: bool):
        self.name, self.rows, self.id_column, self.skip_bad_rows = name, rows, id_column, skip_bad_rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        try:
            return parse_row(self.rows[index], self.id_column)
        except BadRow as error:
            if self.skip_bad_rows:
                return Document(f"{self.name}:{index}")  # an empty text gives no tokens
            raise UsageError(f"{self.name}, row {index}: {error}") from None


class Documents(Sequence):
    """Several sources one after the other."""

    def __init__(self, parts: Sequence[Sequence]):
        self.parts = [part for part in parts if len(part)]
        self.ends = [0, *itertools.accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Document:
        part = bisect.bisect_right(self.ends, index) - 1
        return self.parts[part][index - self.ends[part]]

    @functools.cached_property
    def digest(self) -> str:
        """Of the ids and contents of all local documents, and of a sample of each hub dataset's."""
        digest = sha256()
        for part in self.parts:
            stride = max(1, len(part) // _SAMPLED) if isinstance(part, HubDocuments) else 1
            digest.update(b"%d;" % len(part))
            for index in range(0, len(part), stride):
                document = part[index]
                for text in (document.id, document.content):
                    digest.update(sha256(text.encode()).digest())
        return digest.hexdigest()[:16]


def open_documents(sources: Sequence[str], skip_bad_lines: bool = False) -> Documents:
    """The documents of all sources in order: local ones in memory, hub datasets on disk.

    Args:
      sources: each a .jsonl or .json file (rows of `parse_row`), a .txt, .md or .rst file (one document),
        any of these packed with .xz or .gz, a folder of them, or `hf://org/name`, `hf://org/name[split]`.
      skip_bad_lines: leave broken rows out.

    Raises:
      UsageError: a source that is missing, of another kind, unreadable or empty; broken rows, by place.
    """
    parts, bad = [], []
    for source in sources:
        if source.startswith("hf://"):
            parts.append(_open_hub(source, skip_bad_lines))
            continue
        found = list(_read_local(source, bad))
        if not found and not bad:
            raise UsageError(f"source {source} holds no documents")
        parts.append(found)
    if bad and not skip_bad_lines:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise UsageError(f"broken lines: {'; '.join(bad[:_SHOWN])}{more}. Mend them or set skip_bad_lines")
    documents = Documents(parts)
    if not len(documents):
        raise UsageError(f"no usable documents in {', '.join(sources)}: {len(bad)} broken lines")
    return documents


def _read_local(source: str, bad: list[str]) -> Iterator[Document]:
    root = Path(source).expanduser()
    if root.is_dir():
        paths = sorted(path for path in root.rglob("*") if path.is_file() and _kind(path) is not None)
        if not paths:
            raise UsageError(f"no {', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)} files in folder {source}")
        names = [path.relative_to(root).as_posix() for path in paths]
    elif root.is_file():
        paths, names = [root], [root.name]
    else:
        hint = f"; a hub dataset is written hf://{source}" if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else ""
        raise UsageError(f"source {source} does not exist{hint}")
    for path, name in zip(paths, names, strict=True):
        kind = _kind(path)
        if kind is None:
            known = ", ".join(TEXT_SUFFIXES + ROW_SUFFIXES)
            raise UsageError(f"source {source} is none of {known}, plain or with .xz or .gz")
        raw = _read(path)
        if kind in TEXT_SUFFIXES:
            text = _decode(raw)
            if text is None:
                raise UsageError(f"{path} is not UTF-8 text")
            yield Document(name, text)
        else:
            yield from _rows(path, raw, kind, bad)


def _kind(path: Path) -> str | None:
    suffixes = path.suffixes[:-1] if path.suffix in _OPENERS else path.suffixes
    return suffixes[-1] if suffixes and suffixes[-1] in TEXT_SUFFIXES + ROW_SUFFIXES else None


def _read(path: Path) -> bytes:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _rows(path: Path, raw: bytes, kind: str, bad: list[str]) -> Iterator[Document]:
    """Documents of a .jsonl (a row a line) or a .json (a list of rows); notes the place of what is broken."""
    if kind == ".jsonl":
        rows = [(number, line) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]
    else:
        rows = list(enumerate(_json_list(path, raw), 1))
    for number, row in rows:
        try:
            yield parse_row(_loads(row) if kind == ".jsonl" else row)
        except BadRow as error:
            bad.append(f"{path}:{number} ({error})")


def _json_list(path: Path, raw: bytes) -> list:
    try:
        rows = _loads(raw)
    except BadRow as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(rows, list):
        raise UsageError(f"{path} must hold a list of rows, not {type(rows).__name__}")
    return rows


def _loads(raw: bytes):
    text = _decode(raw)
    if text is None:
        raise BadRow("not UTF-8")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number may have more digits than Python takes
        raise BadRow(f"not JSON: {getattr(error, 'msg', error)}") from error


def _open_hub(source: str, skip_bad_rows: bool) -> HubDocuments:
    match = re.fullmatch(r"hf://([^\[\]]+?)(?:\[([^\[\]]+(?:\[[^\[\]]*\])?)\])?", source)
    if not match:
        raise UsageError(f"a hub dataset is written hf://org/name or hf://org/name[split], not {source}")
    name = match[1]
    known_split, id_column = HUB.get(name, ("train", "id"))
    split = match[2] or known_split
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # datasets lets errors of every library below it through
        raise UsageError(f"cannot load {source} (split {split}): {first_line(error)}") from error
    if not {"text", "messages", "conversations"} & set(rows.column_names):
        columns = ", ".join(rows.column_names)
        raise UsageError(f"{source} has no column text, messages or conversations; its columns are {columns}")
    if not len(rows):
        raise UsageError(f"source {source} holds no documents")
    return HubDocuments(source, rows, id_column, skip_bad_rows)
