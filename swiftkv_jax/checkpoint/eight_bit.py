"""Weights that files store in 8 bits or 4, W = q * s: read as they are, dequantised, or made.

A tensor has one scale s, one of each output, or one of each block of outputs and inputs.
"""

import json
import typing
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from swiftkv_jax.common.errors import UsageError

KEPT = {"I8": "int8", "F8_E4M3": "float8_e4m3fn"}  # dtypes of q, as safetensors and as JAX calls them
_RAW = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}
# Tensors beside a weight: its scale, and what other programs quantise activations or caches by.
_OF_CACHE = (".k_scale", ".v_scale")
_BESIDE = (".input_scale", ".activation_scale", ".activation_scale_ub", ".input_scale_ub", ".weight_shape")
_GROUP = 32  # inputs that share a scale in MXFP4
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Tensors = dict[str, tuple[Path, typing.Any]]


class Raw:
    """A tensor of a dtype that safetensors' NumPy reader lacks, with the interface of its slices."""

    def __init__(self, path: Path, kind: str, shape: list[int], offset: int):
        self._kind, self._shape = kind, shape
        self._where = {"dtype": _RAW[kind], "mode": "r", "offset": offset, "shape": tuple(shape)}
        self._path = path

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._kind

    def __getitem__(self, spans) -> np.ndarray:
        return np.array(np.memmap(self._path, **self._where)[spans])


def with_raw(path: Path, slices: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """The slices of a safetensors file that opened, those of 8-bit floats read from its bytes."""
    raw = [name for name, tensor in slices.items() if tensor.get_dtype() in _RAW]
    if not raw:
        return slices
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    fields = {name: header[name] for name in raw}
    return slices | {
        name: Raw(path, field["dtype"], field["shape"], 8 + length + field["data_offsets"][0])
        for name, field in fields.items()
    }


class Scaled:
    """An 8-bit tensor [outputs, inputs] as float32 numbers q * s, with the interface of safetensors' slices.

    Attributes:
      stored: the slice of q. columns: [outputs] float32, the scale of each; None if scales are of blocks.
    """

    def __init__(self, name: str, path: Path, stored, scale, block: tuple[int, int]):
        self.stored, self._block, self.columns = stored, block, None
        shape = stored.get_shape()
        where = f"{path}: the scale of {name}"
        s = np.asarray(scale[...]).astype(np.float32)
        blocks = [-(-size // of) for size, of in zip(shape, block, strict=True)]
        if s.size == 1:
            self.columns = np.broadcast_to(s.reshape(1), shape[:1])
        elif s.shape in ((shape[0],), (shape[0], 1)):
            self.columns = s.reshape(-1)
        elif list(s.shape) != blocks:
            raise UsageError(
                f"{where}, {shape}, is {list(s.shape)}; it must be a number, one for each of the outputs, or "
                f"one for each block of {block[0]} x {block[1]}"
            )
        if not (np.isfinite(s) & (s > 0)).all():
            raise UsageError(
                f"{where} holds {s[~(s > 0) | ~np.isfinite(s)][0]}: scales are above 0; fetch it again"
            )
        self._scale = s

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, spans: tuple[slice, slice]) -> np.ndarray:
        q = np.asarray(self.stored[spans]).astype(np.float32)
        if self.columns is not None:
            return q * self.columns[spans[0]][:, None]
        s = self._scale
        for axis, (span, of) in enumerate(zip(spans, self._block, strict=True)):
            first, last, _ = span.indices(self.get_shape()[axis])
            s = np.take(s, np.arange(first, last) // of, axis)
        return q * s


class Packed:
    """An MXFP4 tensor [outputs, inputs] as float32 numbers, two of them in a byte, the even one in its lower
    half; groups of 32 inputs share a power of two."""

    def __init__(self, name: str, path: Path, stored, scale):
        self._stored, (outputs, half) = stored, stored.get_shape()
        self._shape, groups = [outputs, 2 * half], [outputs, 2 * half // _GROUP]
        exponents = np.asarray(scale[...]).view(np.uint8)
        if list(exponents.shape) != groups or (exponents == 255).any():
            raise UsageError(f"{path}: the scale of {name} must be {groups} powers of two; fetch it again")
        self._scale = np.exp2(exponents.astype(np.float32) - 127)

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, spans: tuple[slice, slice]) -> np.ndarray:
        first, last, _ = spans[1].indices(self._shape[1])
        packed = np.asarray(self._stored[spans[0], first // 2 : -(-last // 2)])
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        codes = codes[:, first % 2 : first % 2 + last - first]
        return _E2M1[codes] * np.take(self._scale[spans[0]], np.arange(first, last) // _GROUP, 1)


def joined(tensors: Tensors, block: tuple[int, int]) -> tuple[Tensors, list[str]]:
    """(a file's tensors with each quantised weight and its scale as one `Scaled` or `Packed`, the names of
    scales of caches among them, which are left out).

    block: that has one scale, where scales are of blocks.

    Raises:
      UsageError: a scale is missing, misshapen, zero or not finite, or weights are not symmetric.
    """
    out: Tensors = {}
    of_cache = []
    for name, (path, tensor) in tensors.items():
        weight, kind = name.removesuffix("_packed"), tensor.get_dtype()
        matrix = len(tensor.get_shape()) == 2
        packed = matrix and name.endswith(".weight_packed") and kind == "U8"
        if name.endswith(".weight_zero_point"):
            raise UsageError(f"{path} holds {name}: weights that are not symmetric about 0 are not read")
        if packed or (matrix and name.endswith(".weight") and kind in KEPT):
            names = f"{weight}_scale", f"{weight}_scale_inv"
            found = next((tensors[each][1] for each in names if each in tensors), None)
            kinds = ("U8", "F8_E8M0") if packed else _SCALES
            if found is None or found.get_dtype() not in kinds:
                lacks = "no scale" if found is None else f"a scale in {found.get_dtype()}"
                raise UsageError(f"{path}: {name} is {kind} with {lacks} ({names[0]}); fetch it again")
            parts = (weight, path, tensor, found)
            out[weight] = path, Packed(*parts) if packed else Scaled(*parts, block)
        elif name.endswith(_OF_CACHE):
            of_cache.append(name)
        elif not name.endswith((".weight_scale", ".weight_scale_inv", *_BESIDE)):
            out[name] = path, tensor
    return out, of_cache


def quantised(wide: np.ndarray, dtype: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(q [inputs, outputs] in `dtype`, the scale of each output) of a kernel: W = q * s, nearly.

    Scales are rounded up to bfloat16, so that files which store them so hold the same numbers.

    Raises:
      UsageError: a number of the kernel is not finite.
    """
    wide = wide.astype(np.float32)
    peak = np.abs(wide).max(0, initial=0.0)
    if not np.isfinite(peak).all():
        raise UsageError(f"{name} holds numbers that are not finite: such weights are not quantised")
    bits = (peak / _MOST[dtype]).astype(np.float32).view(np.uint32)
    scale = ((bits + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    scale = np.where(scale > 0, scale, np.float32(1))
    q = np.clip(wide / scale, -_MOST[dtype], _MOST[dtype])
    return (np.rint(q) if dtype == "int8" else q).astype(jnp.dtype(dtype)), scale
