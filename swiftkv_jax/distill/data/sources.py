"""Documents: where training text comes from, local files and Hugging Face datasets alike."""

import bisect
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from swiftkv_jax.common.bucket import Place, stamp
from swiftkv_jax.common.errors import UsageError, explained, first_line
from swiftkv_jax.distill.data import files
from swiftkv_jax.distill.data.forms import KNOWN, BadRow, Document, check_columns, form_of, parse_row, renamed

IN_MEMORY = 64 * 2**20  # characters of a source; a larger one is kept on disk and memory-mapped
_LOOKED_UP = 2**20  # bytes of a source's files; a smaller one is read again instead of cached on disk
_ROWS_WRITTEN = 100  # documents, of which a text's piece has a MiB, that are written to disk at a time
_VERSION = 2  # of the cached files
PLACE = "swiftkv_jax.place"  # column of our own files of pieces: the file and line of a piece's document
_SHOWN = 10  # broken lines that an error names
# Training splits and id columns of the paper's data (SwiftKV section 4.1), of the published recipe's
# (ArcticTraining) and of other datasets.
HUB = {
    "HuggingFaceH4/ultrachat_200k": ("train_sft", "prompt_id"),
    "teknium/OpenHermes-2.5": ("train", ""),
    "Open-Orca/SlimOrca": ("train", ""),
    "lmsys/lmsys-chat-1m": ("train", "conversation_id"),
    "nvidia/AceMath-Instruct-Training-Data": ("general_sft_stage2", ""),
}
SELF = "self://"  # chats that the model writes itself; teacher_chats.py turns them into files
_HUB = re.compile(
    r"hf://(?P<name>[^\[\]:@]+)(?::(?P<config>[^\[\]:@]+))?"
    r"(?:\[(?P<split>[^\[\]]+(?:\[[^\[\]]*\])?)\])?(?:@(?P<revision>[^\[\]@]+))?"
)


def split_of(document_id: str) -> str:
    """A document's split: 1 in 20 "held_out", 1 in 40 "tuning"; the part of the id after `#` is ignored."""
    bucket = int(sha256(document_id.split("#")[0].encode()).hexdigest()[:8], 16) % 40
    return {0: "held_out", 20: "held_out", 10: "tuning"}.get(bucket, "train")


class HubDocuments(Sequence):
    """The rows of a Hugging Face dataset, read from disk when asked for."""

    def __init__(self, name: str, rows, id_column: str, skip_bad_rows: bool, columns: Sequence[str] = ()):
        self.name, self.rows, self.id_column, self.skip_bad_rows = name, rows, id_column, skip_bad_rows
        self.columns = columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        return self._document(int(index), self.rows[int(index)])

    def _document(self, index: int, row) -> Document:
        place = f"{self.name}, row {index}"
        try:
            return dataclasses.replace(parse_row(row, self.id_column, self.columns), place=place)
        except BadRow as error:
            if self.skip_bad_rows:
                return Document(f"{self.name}:{index}")  # an empty text gives no tokens
            raise UsageError(f"{place}: {error}") from None

    def ids(self) -> Iterator[str]:
        return (self._document(index, row).id for index, row in enumerate(self.rows))


class StoredDocuments(Sequence):
    """Documents that `_store` has written, read from disk when asked for."""

    def __init__(self, path: Path):
        from datasets import Dataset

        self.path = path
        with explained(f"read {path}"):
            self.rows = Dataset.from_file(str(path))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        row = self.rows[int(index)]
        messages = tuple(json.loads(row["messages"])) if row["messages"] else ()
        return Document(row["id"], row["text"], messages, row["place"])

    def ids(self) -> Iterator[str]:
        return iter(self.rows["id"])


OnDisk = HubDocuments | StoredDocuments


class Documents(Sequence):
    """Several sources, concatenated; each is a list, or a sequence on disk."""

    def __init__(self, parts: Sequence[Sequence]):
        self.parts = list(parts)
        self.ends = [0, *itertools.accumulate(map(len, self.parts))]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Document:
        part = bisect.bisect_right(self.ends, index) - 1
        return self.parts[part][index - self.ends[part]]

    def ids(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.ids() if isinstance(part, OnDisk) else (d.id for d in part)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the ids and contents of all documents in memory, and of a sample of those on disk."""
        digest = sha256()
        for part in filter(len, self.parts):
            stride = max(1, len(part) // 64) if isinstance(part, OnDisk) else 1
            digest.update(b"%d;" % len(part))
            for index in range(0, len(part), stride):
                document = part[index]
                for text in (document.id, document.content):
                    digest.update(sha256(text.encode()).digest())
        return digest.hexdigest()[:16]


def open_documents(
    sources: Sequence[str],
    skip_bad_lines: bool = False,
    columns: Sequence[str] = (),
    stream_rows: int | None = None,
) -> Documents:
    """The documents of all sources in order: small ones in memory, others on disk and mapped from there.

    A local source of more than `IN_MEMORY` characters is written once, as an Arrow file, into the cache of
    `datasets` (HF_DATASETS_CACHE). It is found there by the path, size and modification time of its files.

    Args:
      sources: each a file of rows (.jsonl, .json, .csv, .tsv, .parquet; see `forms.FORMS`), a .txt, .md or
        .rst file (one document, or pieces of a MiB), any of these but .parquet packed with .xz, .gz, .bz2
        or .zst, a pattern such as data/*.jsonl, a folder of them, or a hub dataset: `hf://org/name`, or
        `hf://org/name:config[split]@revision`, of which all but the name may be left out.
      skip_bad_lines: leave broken rows out.
      columns: "ours=theirs" each, for rows whose columns are not those of `FORMS`.
      stream_rows: read only this many rows of each hub dataset, over the network, instead of downloading all.
    """
    check_columns(columns)
    parts, bad = [], []
    seen: dict[str, None] = {}
    for source in sources:
        if source.startswith("hf://"):
            parts.append(_open_hub(source, skip_bad_lines, columns, stream_rows, seen))
            continue
        if source.startswith(SELF):
            raise UsageError(f"{source}: only swiftkv train and swiftkv distil write a model's own chats")
        before, paths = len(bad), files.files_of(source)
        with explained(f"read {source}"):
            stamps = [(str(path.resolve()), name, *stamp(path)) for path, name in paths]
        identity = [_VERSION, stamps, list(columns), skip_bad_lines]
        place = _place(identity)
        if sum(size for _, _, size, _ in stamps) >= _LOOKED_UP and place.exists():
            seen |= {part.partition("=")[2]: None for part in columns}  # else it would not have been kept
            parts.append(StoredDocuments(place))
            continue
        parts.append(_listed_or_stored(_read(paths, bad, columns, seen), place, bad, skip_bad_lines))
        if not len(parts[-1]) and len(bad) == before:
            raise UsageError(f"source {source} holds no documents")
    for part in columns:
        theirs = part.partition("=")[2]
        if theirs not in seen:
            for stored in parts:  # nothing is kept on disk that was read with these columns
                if isinstance(stored, StoredDocuments):
                    stored.path.unlink(missing_ok=True)
            have = ", ".join(list(seen)[:_SHOWN])[:300]
            raise UsageError(f"no row has the column {theirs!r} of columns {part!r}; the rows have {have}")
    if bad and not skip_bad_lines:
        shown = _SHOWN
        advice = "Fix them, or let swiftkv train or distil skip them: --set data.skip_bad_lines=True"
        if all("known form" in why for why in bad[:_SHOWN]):
            shown = 1
            advice = f"Rows have columns of one of these forms: {KNOWN}. Others are named by columns: "
            advice += "prompt=question, say"
        more = f" and {len(bad) - shown} more" if len(bad) > shown else ""
        raise UsageError(f"broken lines: {'; '.join(bad[:shown])}{more}. {advice}")
    documents = Documents(parts)
    if not len(documents):
        raise UsageError(f"no usable documents in {', '.join(sources)}: {len(bad)} broken lines")
    return documents


def _see(row, columns: Sequence[str], seen: dict[str, None]) -> None:
    """Add the column names of a row to `seen`: those that `columns` names, and the first few others."""
    if columns and isinstance(row, Mapping):
        wanted = {part.partition("=")[2] for part in columns}
        seen |= {name: None for name in row if len(seen) < _SHOWN or name in wanted}


def _place(identity: list) -> Path:
    """The path, in the cache of `datasets`, of documents with this identity."""
    return kept_at(f"{sha256(json.dumps(identity).encode()).hexdigest()[:32]}.arrow")


def kept_at(name: str) -> Path:
    """The path of one of our files in the cache of `datasets`; where that is not installed, in the place it
    has by default."""
    try:
        from datasets.config import HF_DATASETS_CACHE as home
    except ImportError:
        from huggingface_hub.constants import HF_HOME

        home = Path(HF_HOME) / "datasets"
    return Path(home) / "swiftkv_jax" / name


def _listed_or_stored(documents: Iterator[Document], place: Path, bad: files.Bad, skip: bool) -> Sequence:
    """The documents as a list; or stored, if they are larger than `IN_MEMORY` and `datasets` is installed.

    They are stored atomically; nothing is written if rows are broken and none is skipped.
    """
    first, size = [], 0
    limit = IN_MEMORY if importlib.util.find_spec("datasets") else math.inf
    for document in documents:
        first.append(document)
        size += len(document.content)
        if size > limit:
            break
    else:
        return first
    from datasets import Features, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features({name: Value("large_string") for name in ("id", "text", "messages", "place")})
    with explained(f"write to {place.parent}"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".part-") as folder:
            draft = Path(folder) / place.name
            with ArrowWriter(path=str(draft), features=features, writer_batch_size=_ROWS_WRITTEN) as writer:
                for document in itertools.chain(first, documents):
                    row = {"id": document.id, "text": document.text, "place": document.place, "messages": ""}
                    if document.messages:
                        row["messages"] = json.dumps(document.messages, ensure_ascii=False)
                    writer.write(row)
                writer.finalize()
            if bad and not skip:
                return []
            os.replace(draft, place)
    return StoredDocuments(place)


def _read(
    paths: list[tuple[Place, str]], bad: files.Bad, columns: Sequence[str], seen: dict[str, None]
) -> Iterator[Document]:
    for path, name in paths:
        kind = files.kind_of(path)
        if kind in files.TEXT_SUFFIXES:
            yield from (Document(piece, text, (), str(path)) for piece, text in files.texts(path, name, bad))
        elif kind is not None:
            for number, row in files.rows(path, kind, bad):
                _see(row, columns, seen)
                try:
                    document = parse_row(row, columns=columns)
                    place = row.get(PLACE) if isinstance(row, Mapping) else None
                    yield dataclasses.replace(document, place=place or f"{path}:{number}")
                except BadRow as error:
                    files.note(bad, path, number, error)


def _open_hub(
    source: str, skip_bad_rows: bool, columns: Sequence[str], stream_rows: int | None, seen: dict[str, None]
) -> Sequence:
    match = _HUB.fullmatch(source)
    if not match:
        raise UsageError(f"a hub dataset is written hf://org/name:config[split]@revision, not {source}")
    name = match["name"]
    known_split, id_column = HUB.get(name, ("train", "id"))
    split = match["split"] or known_split
    import datasets

    options = {"split": split, "revision": match["revision"], "streaming": stream_rows is not None}
    try:
        rows = datasets.load_dataset(name, match["config"], **options)
        have = rows.column_names or list(next(iter(rows), {}))
    except Exception as error:  # datasets passes on errors of every library that it uses
        raise UsageError(f"cannot load {source} (split {split}): {first_line(error)}") from error
    _see(dict.fromkeys(have), columns, seen)
    if form_of(list(renamed(dict.fromkeys(have, ""), columns, id_column))) is None:
        advice = "name them by --columns text=body (columns= in a config)"
        raise UsageError(f"{source} has the columns {', '.join(have)}, and none of {KNOWN}: {advice}")
    if stream_rows is not None:
        taken = HubDocuments(source, [], id_column, skip_bad_rows, columns)
        first = itertools.islice(rows, stream_rows)
        documents = (taken._document(i, row) for i, row in enumerate(first))
        place = _place([_VERSION, source, stream_rows, list(columns)])
        return _listed_or_stored(documents, place, [], skip_bad_rows)
    if not len(rows):
        raise UsageError(f"source {source} holds no documents")
    return HubDocuments(source, rows, id_column, skip_bad_rows, columns)
