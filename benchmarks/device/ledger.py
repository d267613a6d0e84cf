"""What was measured, by device, versions and source of what ran; and compiled programs, for the next run."""

import functools
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from swiftkv_jax.common.folder import read_json
from swiftkv_jax.kernels.check.supervisor import Measurement, write_whole

ROOT = Path(__file__).parents[2]
NAME = "ledger.json"
PIECE, PIECES = 16 * 2**20, 3  # bytes of a file with compiled programs, and the most such files
_WHOLE = ("swiftkv_jax", "kernels", "benchmarks/device/shapes.py")
SOURCES = {  # files and folders that a task runs
    "ceilings": ("benchmarks/device/hardware.py",),
    "examine": ("kernels",),
    "engine": (*_WHOLE, "benchmarks/device/engine.py", "benchmarks/device/profile.py"),
    "train": (*_WHOLE, "benchmarks/device/training.py"),
    "teacher": (*_WHOLE, "benchmarks/device/student.py", "benchmarks/device/engine.py"),
    "student": (*_WHOLE, "benchmarks/device/student.py", "benchmarks/device/engine.py", "demo/smollm2.py"),
    "transformers": ("benchmarks/device/peer.py", "benchmarks/device/shapes.py"),
}
_ELSEWHERE = ("folder", "chats", "model", "seconds")  # arguments that do not change what is measured


@functools.cache
def source(task: str) -> str:
    """SHA-256 of the files that a task runs."""
    digest = hashlib.sha256()
    for start in map(ROOT.joinpath, SOURCES[task]):
        walked = os.walk(start) if start.is_dir() else [(start.parent, [], [start.name])]  # not into links
        paths = (Path(folder, name) for folder, _, names in walked for name in names)
        for path in sorted(p for p in paths if p.suffix in (".py", ".cc", ".h")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class Ledger:
    """The lines of every run so far.

    Attributes:
      entries: key -> a line's result, with its `line`, `device`, `versions` and `date`. where: what the task
        "hardware" yields on this machine.
    """

    def __init__(self, folders: Iterable[Path]):
        """The entries of earlier runs in these folders; of two with one key, one that is done stays.

        Raises:
          UsageError: a ledger cannot be read.
        """
        self.entries: dict[str, dict] = {}
        self.where: Mapping = {}
        for path in (folder / NAME for folder in folders):
            for key, entry in (read_json(path) if path.exists() else {}).items():
                if self.entries.get(key, {}).get("status") != "done":
                    self.entries[key] = entry

    def key(self, line: Measurement) -> str:
        """What a line's result depends on."""
        args = {name: value for name, value in line.args.items() if name not in _ELSEWHERE}
        versions, device = self.where["versions"], self.where["device"]
        what = [line.task, args, dict(line.env), device, versions, source(line.task)]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]

    def done(self, line: Measurement) -> dict | None:
        """The result of a line that is done."""
        entry = self.entries.get(self.key(line))
        return entry if entry and entry["status"] == "done" else None

    def earlier(self, line: Measurement) -> dict | None:
        """The newest result of a line that is done, on this kind of device, by any source and versions."""
        found = [e for e in self.entries.values() if (e["line"], e["status"]) == (line.name, "done")]
        found = [e for e in found if e["device"] == self.where["device"]]
        return max(found, key=lambda e: e["date"], default=None)

    def save(self, folder: Path, asked: Iterable[Measurement], lines: Mapping[str, dict], date: str) -> None:
        """Write all entries, those of the `asked` lines too that were begun; `lines`: results by name."""
        about = {"device": self.where["device"], "versions": self.where["versions"], "date": date}
        for line in asked:
            found, key = lines.get(line.name), self.key(line)
            if found and found["status"] != "skipped" and found is not self.entries.get(key):
                self.entries[key] = {"line": line.name, **about, **found}
        text = json.dumps(self.entries, indent=1).replace(f"{ROOT}/", "")  # in tracebacks
        write_whole(folder / NAME, text + "\n")


def pack(programs: Path, folder: Path) -> None:
    """Write what XLA compiled and tuned into pieces `programs.N` of at most `PIECE` bytes, if there is more
    than before; the newest, where not all fit."""
    paths = [path for path in programs.rglob("*") if path.is_file()]
    paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    first = folder / "programs.0"
    if paths and first.exists() and paths[0].stat().st_mtime < first.stat().st_mtime:
        return
    for number in range(PIECES):
        piece = io.BytesIO()
        with tarfile.open(fileobj=piece, mode="w") as tar:
            left, rest = PIECE - 2 * tarfile.RECORDSIZE, []
            for path in paths:
                size = 5 * tarfile.BLOCKSIZE + path.stat().st_size  # with its headers
                if size > left:
                    rest.append(path)
                    continue
                left -= size
                tar.add(path, path.relative_to(programs))
        if len(rest) == len(paths):
            return
        draft = folder / f"programs.{number}.new"
        draft.write_bytes(piece.getvalue())
        draft.replace(folder / f"programs.{number}")
        paths = rest


def unpack(folders: Iterable[Path], programs: Path) -> None:
    """Put the pieces of earlier runs where XLA looks for compiled programs."""
    programs.mkdir(exist_ok=True)
    for path in (path for folder in folders for path in sorted(folder.glob("programs.[0-9]"))):
        with tarfile.open(path) as tar:
            tar.extractall(programs, filter="data")
