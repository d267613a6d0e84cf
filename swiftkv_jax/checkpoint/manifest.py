"""A checksum for every file of a checkpoint step: written once it is complete, checked before it is read.

`manifest.json` is one canonical JSON object, so that any changed byte of it is detected:
`{"files": {"state/d/0": [size in bytes, sha256 hex], ...}, "sha256": hex, "step": 20}`, where `sha256` is
that of the object without this field. A step without a manifest is not complete.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from swiftkv_jax.common.bucket import Place, listing

NAME = "manifest.json"
_THREADS = 8  # hashing and fsync release the interpreter's lock


def write(folder: Place, step: int) -> None:
    """Sync the files of `folder` to disk, then record them; afterwards the step survives a power cut. In a
    bucket they are recorded with its own checksums."""
    if not isinstance(folder, Path):
        (folder / NAME).write_bytes(_encode(step, _listed(folder)))
        return
    inside = sorted(folder.rglob("*"))
    names = [p.relative_to(folder).as_posix() for p in inside if p.is_file() and p.name != NAME]
    for place in (folder, *(p for p in inside if p.is_dir())):
        _sync(place)
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = pool.map(lambda name: _entry(folder / name, sync=True), names)
        files = dict(zip(names, entries, strict=True))
    draft = folder / (NAME + ".draft")
    with open(draft, "wb") as out:
        out.write(_encode(step, files))
        out.flush()
        os.fsync(out.fileno())
    draft.rename(folder / NAME)
    _sync(folder)
    _sync(folder.parent)


def fault(folder: Place, step: int) -> str | None:
    """`"file: why"` for the first thing wrong with a step, or None when every byte is as written."""
    try:
        files = _read(folder, step)
        if not isinstance(folder, Path):
            listed = _listed(folder)
            bad = [name for name, entry in files.items() if listed.get(name) != entry]
            return f"{bad[0]}: missing, or not as it was written" if bad else None
        for name, (size, _) in files.items():
            if (actual := (folder / name).stat().st_size) != size:
                return f"{name}: {actual} bytes, written with {size}"
        with ThreadPoolExecutor(_THREADS) as pool:
            entries = pool.map(lambda name: _entry(folder / name), files)
            bad = [name for name, entry in zip(files, entries, strict=True) if entry != files[name]]
    except FileNotFoundError as error:
        name = Path(error.filename or folder / NAME).relative_to(folder).as_posix()
        return f"{name}: missing" + (", the save was cut short" if name == NAME else "")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return f"{NAME}: {error}"
    return f"{bad[0]}: checksum differs from the one it was written with" if bad else None


def _listed(folder: Place) -> dict[str, list[Any]]:
    entries = {url.removeprefix(f"{folder}/"): entry for url, entry in listing(folder).items()}
    return {name: entry for name, entry in entries.items() if name != NAME}


def _read(folder: Place, step: int) -> dict[str, list[Any]]:
    """The manifest's table of files, verified by its own checksum.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, of another step, or names files outside the folder.
    """
    raw = (folder / NAME).read_bytes()
    try:
        table = json.loads(raw)
        if raw != _encode(table["step"], table["files"]):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("damaged") from None
    if table["step"] != step:
        raise ValueError(f"it is of step {table['step']}")
    for name in table["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"it names {name!r}, outside the checkpoint")
    return table["files"]


def _encode(step: int, files: dict[str, list[Any]]) -> bytes:
    table = {"files": files, "step": step}
    digest = hashlib.sha256(_canonical(table)).hexdigest()
    return _canonical(table | {"sha256": digest})


def _canonical(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, sort_keys=True, indent=1) + "\n").encode()


def _entry(path: Path, sync: bool = False) -> list[Any]:
    """[size in bytes, sha256] of a file, which `sync` also forces onto the disk."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def _sync(folder: Path) -> None:
    """Force a folder's list of names onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
