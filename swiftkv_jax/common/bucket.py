"""Files in buckets, gs://BUCKET/PATH, by etils and fsspec, that is gcsfs.

Orbax writes training checkpoints there itself. All else is written to a folder here and sent; a model is
copied here before it is loaded; data are read where they lie.
"""

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

from swiftkv_jax.common.errors import UsageError, first_line, local_path

if typing.TYPE_CHECKING:
    from etils import epath

    Place = Path | epath.Path  # here, or in a bucket
else:
    Place = os.PathLike  # importing etils takes a quarter of a second

SCHEME = "gs://"
_WEIGHTS = "model*.safetensors*"


def is_bucket(place: str | os.PathLike[str]) -> bool:
    return str(place).startswith(SCHEME)


def path_or_url(text: str) -> Path | str:
    """The type of a flag for a folder that may be in a bucket."""
    return text.rstrip("/") if is_bucket(text) else local_path(text)


def at(place: str | os.PathLike[str]) -> Place:
    """A path with the methods of pathlib. Raises UsageError: a bucket, without the packages for it."""
    if not is_bucket(place):
        return Path(place)
    try:
        import fsspec
        from etils import epath
        from google.cloud import storage  # noqa: F401  # pyright: ignore  # Orbax asks it about the bucket

        fsspec.get_filesystem_class("gcs")
    except ImportError as error:
        raise UsageError(f"{place}: {first_line(error)}; pip install 'swiftkv-jax[gcs]'") from None
    return epath.Path(place)


def stamp(path: Place) -> tuple[int, int]:
    """The size in bytes of a file, and the time of its last change."""
    if isinstance(path, Path):
        return path.stat().st_size, path.stat().st_mtime_ns
    return path.stat().length, int(path.stat().mtime)


def listing(url: str | os.PathLike[str]) -> dict[str, list]:
    """The files of a folder, a file, or those that match a pattern: URL -> [size in bytes, the checksum that
    the bucket keeps of it].

    Raises any error of the file system.
    """
    import fsspec

    fs, path = fsspec.core.url_to_fs(str(at(url)), use_listings_cache=False)  # others write there too
    entries = fs.glob(path, detail=True) if set("*?[") & set(path) else fs.find(path, detail=True)
    return {
        SCHEME + name: [info["size"], info.get("crc32c") or ""]
        for name, info in sorted(entries.items())
        if info["type"] == "file"
    }


@contextlib.contextmanager
def reached(doing: str) -> Iterator[None]:
    """Turn any error of a file system into a UsageError: of rights, of the network, of a missing bucket."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # gcsfs and Google's libraries have many classes
        raise UsageError(f"cannot {doing}: {first_line(error) or type(error).__name__}") from error


def fetched(url: str, patterns: Sequence[str]) -> Path:
    """A copy here of a file in a bucket, or of a folder's files whose names match: made once, and again when
    they have changed. Raises UsageError: there are none, or they cannot be read."""
    name = url.rpartition("/")[2]
    with reached(f"read {url}"):
        files = {there.removeprefix(url).strip("/"): entry for there, entry in listing(url).items()}
        files = {
            inner: entry
            for inner, entry in files.items()
            if ".." not in inner and any(fnmatch.fnmatch(inner or name, each) for each in patterns)
        }
        if not files:
            raise UsageError(f"no such folder or file: {url}")
        place = _kept("models", [url, files])
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent, prefix=".part-") as draft:
                for inner in files:
                    _copy(f"{url}/{inner}".rstrip("/"), Path(draft, "whole", name, inner))
                os.rename(Path(draft, "whole"), place)
    return place / name


def sent(folder: Path, url: str) -> None:
    """Copy a folder into a bucket, each config.json after what lies beside it; weights there that new ones
    supersede are deleted. Raises UsageError: it cannot be written."""
    with reached(f"write to {url}"):
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name[0] != "."]
        for path in sorted(files, key=lambda path: path.name == "config.json"):
            _copy(path, f"{url}/{path.relative_to(folder).as_posix()}")
        for home in {path.parent for path in files if path.match(_WEIGHTS)}:
            for old in (at(url) / home.relative_to(folder)).glob(_WEIGHTS):
                if not (home / old.name).exists():
                    old.unlink()


def _copy(source: str | Path, to: str | Path) -> None:
    if isinstance(to, Path):
        to.parent.mkdir(parents=True, exist_ok=True)
    with at(source).open("rb") as read, at(to).open("wb") as written:
        shutil.copyfileobj(read, written, 2**22)


def _kept(kind: str, identity: list) -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME, "swiftkv_jax", kind, hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32])


class Home:
    """The folder that a command writes: here, or one here that is sent into a bucket.

    Attributes:
      place: where the user wants it. here: where it is written.
    """

    def __init__(self, out: str | Path, writes: bool = True):
        """`writes`: this process does, alone among those of its machine."""
        self.place, self.here = at(out), Path(out)
        self._url = str(out) if is_bucket(out) and writes else ""
        if is_bucket(out):
            self.here = _kept("written", [str(out)]) / self.place.name
        if self._url:
            shutil.rmtree(self.here, ignore_errors=True)
            with reached(f"read {self._url}"):
                for name in ("config.json", "metrics.jsonl"):  # of an earlier run or model
                    if (self.place / name).exists():
                        _copy(f"{self._url}/{name}", self.here / name)

    def send(self) -> None:
        if self._url:
            sent(self.here, self._url)
