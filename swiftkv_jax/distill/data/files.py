"""Rows and texts from local files, read one by one: no file is in memory as a whole."""

import bz2
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from swiftkv_jax.common.bucket import Place, at, is_bucket, listing, reached
from swiftkv_jax.common.errors import UsageError, first_line
from swiftkv_jax.distill.data.forms import BadRow

TEXT_SUFFIXES = (".txt", ".md", ".rst")
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PIECE = 2**20  # bytes; a longer text is several documents, NAME#0, NAME#1, ...
_END = "\0 end of the table \0"


def _zstd(file, mode: str) -> io.BufferedReader:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))  # pyright: ignore


_OPENERS = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open, ".zst": _zstd}
KNOWN = f"{', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}, plain or with {', '.join(_OPENERS)}"
# (place, row or line) of rows; (place, why) of broken ones.
Bad = list[str]


def files_of(source: str) -> list[tuple[Place, str]]:
    """(path, name) of the files of a source: a file, a pattern, or a folder and what lies in it that is not
    hidden."""
    if is_bucket(source):
        with reached(f"read {source}"):
            urls = {
                at(url): url.removeprefix(f"{source.rstrip('/')}/") for url in listing(source.rstrip("/"))
            }
        named = [(path, path.name if name == str(path) else name) for path, name in urls.items()]
        named = [(path, name) for path, name in named if kind_of(path) and "/." not in f"/{name}"]
        if not named:
            raise UsageError(f"source {source} does not exist, or holds none of {KNOWN}")
        return named
    root = Path(source).expanduser()
    if root.is_dir():
        lying = (path for path in root.rglob("*") if path.is_file() and kind_of(path) is not None)
        paths = sorted(p for p in lying if not any(n.startswith(".") for n in p.relative_to(root).parts))
        if not paths:
            raise UsageError(f"no {', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)} files in folder {source}")
        return [(path, path.relative_to(root).as_posix()) for path in paths]
    names = [str(root)] if root.is_file() else sorted(glob.glob(str(root), recursive=True))
    paths = [path for path in map(Path, names) if path.is_file()]
    if not paths:
        of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and kind_of(root) is None
        hint = f"; a hub dataset is written hf://{source}" if of_hub else ""
        raise UsageError(f"source {source} does not exist{hint}")
    for path in paths:
        if kind_of(path) is None:
            raise UsageError(f"source {path} is none of {KNOWN}")
    return [(path, path.name) for path in paths]


def kind_of(path: Place) -> str | None:
    """The suffix that says what a file holds, in small letters; None if the kind is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in _OPENERS
    suffixes = suffixes[:-1] if packed else suffixes
    known = suffixes and suffixes[-1] in TEXT_SUFFIXES + ROW_SUFFIXES
    return suffixes[-1] if known and not (packed and suffixes[-1] == ".parquet") else None


@contextmanager
def _opened(path: Place) -> Iterator[Any]:
    """The file's decompressed bytes; errors become a UsageError that names the file."""
    unpacked = _OPENERS.get(path.suffix.lower(), lambda file, _mode: nullcontext(file))
    try:
        with path.open("rb") as raw, unpacked(raw, "rb") as file:
            yield file
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def texts(path: Place, name: str, bad: Bad) -> Iterator[tuple[str, str]]:
    """(name, text) of the documents of a text file: one, or pieces of about `PIECE` bytes that end lines. A
    piece that is not UTF-8 is noted in `bad` by its first line."""
    with _opened(path) as file:
        lines, number, line = file.readlines(PIECE), 0, 1
        more = file.readlines(PIECE)
        while lines:
            try:
                yield (f"{name}#{number}" if more or number else name), b"".join(lines).decode("utf-8-sig")
            except UnicodeDecodeError:
                note(bad, path, line, BadRow("not UTF-8"))
            line += len(lines)
            lines, more, number = more, file.readlines(PIECE) if more else [], number + 1
        if not number:
            yield name, ""


def rows(path: Place, kind: str, bad: Bad) -> Iterator[tuple[int, object]]:
    """(number from 1, row) of a file of rows; the place of each broken row is noted in `bad`.

    .jsonl has a row a line, as has a .json that does not begin with a bracket; any other .json is a list, and
    is read as a whole.
    """
    yield from {
        ".jsonl": _lines,
        ".json": _json,
        ".csv": lambda path, bad: _table(path, bad, ","),
        ".tsv": lambda path, bad: _table(path, bad, "\t"),
        ".parquet": _parquet,
    }[kind](path, bad)


def _lines(path: Place, bad: Bad) -> Iterator[tuple[int, object]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, _loads(line)
            except BadRow as error:
                note(bad, path, number, error)


def note(bad: Bad, path: Place, number: int, error: BadRow) -> None:
    """Record a broken row's place and the error; after the first ones only its existence."""
    bad.append(f"{path}:{number} ({error})" if len(bad) < 100 else "")


def _json(path: Place, bad: Bad) -> Iterator[tuple[int, object]]:
    with _opened(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, b""), next(lines, b"")
    if first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and second:
        with suppress(BadRow):
            if isinstance(_loads(first), dict):
                yield from _lines(path, bad)
                return
    with _opened(path) as file:
        raw = file.read()
    try:
        value = _loads(raw)
    except BadRow as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(value, list):
        raise UsageError(f"{path} must hold a list of rows, not {type(value).__name__}")
    yield from enumerate(value, 1)


def _loads(raw: bytes):
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BadRow("not UTF-8") from None
    except (ValueError, RecursionError) as error:  # a number may have more digits than Python takes
        raise BadRow(f"not JSON: {getattr(error, 'msg', error)}") from error


def _table(path: Place, bad: Bad, delimiter: str) -> Iterator[tuple[int, object]]:
    """Rows of a table, with the column names in its first line. A field in quotes may hold line breaks; rows
    are numbered by the line that they begin in."""
    csv.field_size_limit(2**28)  # of the whole process; Python's own is 131,072
    with _opened(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
        # A line of our own after the last shows whether a quote is open there.
        reader = csv.reader(itertools.chain(text, ["\n", _END]), delimiter=delimiter)
        line = 1
        try:
            names = next(reader)
            if not names or names == [_END] or not _is_text(names):
                raise UsageError(f"{path} has no first line that names its columns")
            line = reader.line_num + 1
            for row in reader:
                if row and _END in row[-1] and row != [_END]:
                    raise UsageError(f"{path}:{line} opens a quote that nothing closes")
                if row and row != [_END]:
                    if len(row) != len(names):
                        shown = delimiter.join(row)[:200].encode(errors="replace").decode()
                        note(bad, path, line, BadRow(f"{len(row)} fields, not {len(names)}: {shown}"))
                    elif not _is_text(row):
                        note(bad, path, line, BadRow("not UTF-8"))
                    else:
                        yield line, dict(zip(names, row, strict=True))
                line = reader.line_num + 1
        except csv.Error as error:
            raise UsageError(f"cannot read {path}:{line}: {error}") from None


def _is_text(fields: list[str]) -> bool:
    """Whether fields hold no bytes that are not UTF-8."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(path: Place, bad: Bad) -> Iterator[tuple[int, object]]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    number = 0
    with _opened(path) as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
                for index in range(batch.num_rows):
                    number += 1
                    try:
                        (row,) = batch.slice(index, 1).to_pylist()
                    except UnicodeDecodeError:
                        note(bad, path, number, BadRow("not UTF-8"))
                    else:
                        yield number, row
        except ArrowException as error:
            raise UsageError(f"cannot read {path}: {first_line(error)}") from None
