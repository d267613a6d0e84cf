"""The header of a GGUF file: its metadata and the places of its tensors, validated before use.

The format: docs/gguf.md of ggml, versions 2 and 3, little-endian. Nothing here needs the package `gguf`.
"""

import dataclasses
import itertools
import math
import struct
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import inside

SUFFIX = ".gguf"
# How tensors are stored: ggml's number of the type -> (its name, elements of a block, bytes of a block).
KINDS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
# No published file comes near these limits; a hostile one may exceed them.
_MOST_BYTES = 2**26  # of the header
_MOST_VALUES = 2**22  # in its metadata, those in arrays counted one by one
_MOST_TENSORS = 2**16
_MOST_AXES = 4
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor in the file: `shape` with the fastest axis last, `kind` of KINDS, bytes [start, end)."""

    kind: int
    shape: tuple[int, ...]
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The part of a GGUF file before its weights.

    Attributes:
      metadata: by the file's own keys; numbers, truth values, texts, and lists of one of them.
      tensors: by the file's own names. No two overlap, and all lie within the file.
    """

    path: Path
    metadata: Mapping[str, typing.Any]
    tensors: Mapping[str, Stored]

    def floats(self, name: str) -> np.ndarray:
        """A float32 tensor of the file."""
        tensor = self.tensors[name]
        if KINDS[tensor.kind][0] != "F32":
            raise UsageError(f"{self.path}: {name} is {KINDS[tensor.kind][0]}, not F32")
        return self.read(tensor, 0, tensor.end - tensor.start).view("<f4").reshape(tensor.shape)

    def read(self, tensor: Stored, start: int, size: int) -> np.ndarray:
        """`size` bytes of one of the tensors, from its byte `start` on."""
        try:
            out = np.fromfile(self.path, np.uint8, size, offset=tensor.start + start)
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None
        if len(out) < size:
            raise UsageError(f"{self.path} is truncated; fetch it again")
        return out


def gguf_of(path: str | Path) -> Path | None:
    """The GGUF file that `path` is, or that lies in the folder `path` without safetensors beside it."""
    path = Path(path).expanduser()
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or any((path / name).exists() for name in _WEIGHTS):
        return None
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise UsageError(f"{path} holds {len(files)} GGUF files ({names}): give one of them, not the folder")
    return files[0] if files else None


def read_header(path: Path) -> Header:
    """The header of a GGUF file."""
    try:
        with inside(path).open("rb") as file:
            return _Reader(path, file, path.stat().st_size).header()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except _Spoilt as error:
        raise UsageError(f"{path} is no GGUF file that can be read: {error}") from None


class _Spoilt(Exception):
    """A file is invalid; the message says why."""


class _Reader:
    """Reads a header sequentially; every count is checked against the rest of the file."""

    def __init__(self, path: Path, file: typing.BinaryIO, size: int):
        self.path, self.file, self.size = path, file, size
        self.left = min(size, _MOST_BYTES)
        self.values = _MOST_VALUES

    def header(self) -> Header:
        if self.take(4) != b"GGUF":
            raise _Spoilt("it does not begin with GGUF")
        (version,) = self.unpack("I")
        if version not in _VERSIONS:
            raise _Spoilt(f"it is of version {version}, not 2 or 3 (a big-endian file is of another still)")
        tensors, keys = self.unpack("QQ")
        if tensors > _MOST_TENSORS:
            raise _Spoilt(f"it says that it has {tensors} tensors")
        metadata: dict[str, typing.Any] = {}
        for _ in range(self.count(keys, 12)):
            name = self.text()
            if name in metadata:
                raise _Spoilt(f"{name[:60]!r} stands in its metadata twice")
            metadata[name] = self.value(name, *self.unpack("I"))
        if metadata.get("split.count", 0) not in (0, 1):
            raise _Spoilt("it is one part of several; join them by llama.cpp's llama-gguf-split --merge")
        table: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(self.count(tensors, 24)):
            name = self.text()
            if name in table:
                raise _Spoilt(f"it has a tensor {name[:60]!r} twice")
            table[name] = self.tensor(name)
        return Header(self.path, metadata, self.placed(table, metadata.get("general.alignment", _ALIGNMENT)))

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise _Spoilt("it is truncated, or its header says more than it holds")
        self.left -= size
        out = self.file.read(size)
        if len(out) < size:
            raise _Spoilt("it is truncated")
        return out

    def unpack(self, form: str) -> tuple:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def count(self, said: int, least: int) -> int:
        """Check a number of items that take at least `least` bytes each."""
        self.values -= said
        if said * least > self.left or self.values < 0:
            raise _Spoilt("its header says more than it holds")
        return said

    def text(self) -> str:
        try:
            return self.take(*self.unpack("Q")).decode()
        except UnicodeDecodeError:
            raise _Spoilt("a text in it is not UTF-8") from None

    def value(self, name: str, kind: int):
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, said = self.unpack("IQ")
            if inner == _STRING:
                return [self.text() for _ in range(self.count(said, 8))]
            size = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 1
            return self.scalars(name, inner, self.count(said, size))
        (value,) = self.scalars(name, kind, 1)
        # The shortest number with the same bits: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT else value

    def scalars(self, name: str, kind: int, count: int) -> list:
        if kind not in _SCALARS:
            raise _Spoilt(f"{name[:60]!r} is of an unknown type, {kind}")
        return list(self.unpack(f"{count}{_SCALARS[kind]}"))

    def tensor(self, name: str) -> tuple[int, tuple[int, ...], int]:
        """(kind, shape, offset) as in the file."""
        (axes,) = self.unpack("I")
        if not 1 <= axes <= _MOST_AXES:
            raise _Spoilt(f"{name[:60]!r} has {axes} axes")
        shape = self.unpack(f"{axes}Q")[::-1]
        kind, offset = self.unpack("IQ")
        if kind not in KINDS:
            known = ", ".join(each[0] for each in KINDS.values())
            raise _Spoilt(f"{name[:60]!r} is stored in ggml's type {kind}; these are read: {known}")
        return kind, shape, offset

    def placed(self, table: Mapping[str, tuple], alignment) -> dict[str, Stored]:
        """The tensors with their places in the file."""
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise _Spoilt(f"general.alignment is {str(alignment)[:40]}, not a power of two")
        data = -(-self.file.tell() // alignment) * alignment
        out = {}
        for name, (kind, shape, offset) in table.items():
            _, elements, size = KINDS[kind]
            if shape[-1] % elements or not math.prod(shape):
                raise _Spoilt(f"{name[:60]!r} of {list(shape)} is not a number of {KINDS[kind][0]} blocks")
            start = data + offset
            end = start + math.prod(shape) // elements * size
            if offset % alignment or end > self.size:
                raise _Spoilt(f"{name[:60]!r} lies past its end, or between two places; it may be truncated")
            out[name] = Stored(kind, shape, start, end)
        inner = sorted(out.values(), key=lambda tensor: tensor.start)
        if any(b.start < a.end for a, b in itertools.pairwise(inner)):
            raise _Spoilt("two of its tensors overlap")
        return out
