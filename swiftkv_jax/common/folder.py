"""Folders: safe reading of model files, private folders, and the folders of the package."""

import json
import os
import stat
from pathlib import Path

from swiftkv_jax.common.errors import UsageError, explained

PACKAGE = Path(__file__).resolve().parent.parent
DEMO = PACKAGE / "demo"  # teacher/, tokenizer/, corpus.jsonl.xz: they come with the wheel
CONFIGS = PACKAGE / "configs"  # NAME.py, one experiment each
MOST_JSON = 2**26  # bytes of one JSON file; the largest published tokenizer.json is a quarter of it


def model_name(folder: str) -> str:
    """A folder's name; for `runs/mine/export`, where training puts a student, that of the run."""
    path = Path(folder)
    return (path.parent.name if path.name == "export" else path.name) or "model"


def inside(path: Path) -> Path:
    """`path`, if it is a plain file whose content lies in its own folder.

    A link may lead elsewhere in the folder, or in a snapshot of Hugging Face's cache, and in a folder of one,
    to its `blobs` folder.
    """
    folder = path.parent.resolve()
    snapshots = [up for up in (folder.parent, folder.parent.parent) if up.name == "snapshots"]
    homes = [folder, *(up.parent / "blobs" for up in snapshots)]
    try:
        with explained(f"read {path}"):
            target = path.resolve(strict=True)
    except RuntimeError:  # Python 3.12 and before: a link to itself
        raise UsageError(f"{path} is a link that leads nowhere") from None
    if not any(target.is_relative_to(home) for home in homes):
        raise UsageError(f"{path} is a link that leaves its folder; put the file itself there")
    if not target.is_file():
        raise UsageError(f"{path} is not a plain file")
    return path


def bounded(path: Path) -> Path:
    """`path`, if it is `inside` its folder and at most `MOST_JSON` bytes long."""
    size = inside(path).stat().st_size
    if size > MOST_JSON:
        raise UsageError(f"{path} has {size} bytes; at most {MOST_JSON} are read")
    return path


def read_text(path: str | Path) -> str:
    """The text of a user's UTF-8 file, without a byte order mark. Raises UsageError: it cannot be read, or is
    not UTF-8."""
    try:
        with explained(f"read {path}"):
            return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: Path) -> dict:
    """The object in a JSON file of a model's folder."""
    with explained(f"read {path}"):
        data = bounded(path).read_bytes()
    try:
        raw = json.loads(data.decode())
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def private(path: Path) -> bool:
    """Whether a folder belongs to this user and nobody else can write to it, or replace it.

    So its parent folder must belong to this user or to the system, and others must not have write access,
    unless a sticky bit, as on /tmp, lets only owners rename their files. Missing folders are created with
    access for this user alone. `path` must be free of links (`Path.resolve`): the owner of a link could
    redirect it later.
    """
    try:
        for folder, owners in ((path.parent, (os.getuid(), 0)), (path, (os.getuid(),))):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            sticky = folder != path and status.st_mode & stat.S_ISVTX
            if status.st_uid not in owners or (status.st_mode & 0o022 and not sticky):
                return False
    except OSError:
        return False
    return True
