"""A model from a Hugging Face folder: safetensors read lazily, each shard into its place on a mesh."""

import contextlib
import re
import typing
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh, SingleDeviceSharding

from swiftkv_jax import params as weights
from swiftkv_jax import sharding
from swiftkv_jax.checkpoint.names import Slot, ignored, leaves, slots
from swiftkv_jax.checkpoint.write import INDEX, SINGLE, save_pretrained
from swiftkv_jax.config import DTYPES, ModelConfig, is_swiftkv, plan_from_hf, read_config_json
from swiftkv_jax.errors import UsageError
from swiftkv_jax.folder import inside
from swiftkv_jax.model import Transformer
from swiftkv_jax.shapes import Array, PyTree

__all__ = ["from_pretrained", "local_folder", "save_pretrained"]

_ON_DISK = ("F32", "BF16", "F16")
# Not `*.safetensors`: some repositories carry the weights twice, in a vendor's own layout.
_DOWNLOAD = ("model*.safetensors", "*.json", "tokenizer*", "*.jinja", "merges.txt")
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".safetensors")
_BARE = re.compile(r"[\w.+-]{1,200}\.safetensors", re.ASCII)  # a file's name, without a folder
_NAMES_SHOWN = 20


def from_pretrained(
    path_or_id: str | Path, dtype: str | None = None, mesh: Mesh | None = None
) -> tuple[Transformer, PyTree]:
    """A model and its parameters from a folder or a hub id: a standard or a SwiftKV checkpoint.

    Each device's shard of each array is read by itself, straight from the files: the whole model never
    exists in host memory.

    Args:
      path_or_id: a folder with config.json and safetensors, or the id of a model on the Hugging Face hub.
      dtype: of the parameters and activations; the checkpoint's own by default.
      mesh: where to place the parameters (see sharding.py); the first device by default.

    Raises:
      UsageError: nothing readable there, an unsupported config.json, or tensors that do not fit it.
    """
    folder = local_folder(path_or_id)
    raw = read_config_json(folder)
    config, plan = ModelConfig.from_hf(raw), plan_from_hf(raw)
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    wanted = slots(config, plan)
    with contextlib.ExitStack() as stack:
        tensors = _open_all(folder, stack)
        _check(folder, tensors, wanted, lambda name: ignored(name, config, plan, is_swiftkv(raw)))
        by_path: dict[tuple[str, ...], list] = {}
        for name, slot in wanted.items():
            by_path.setdefault(slot.path, []).append((slot, tensors[name]))
        tree: dict = {}
        for path, weight in leaves(weights.weights(config, plan)):
            leaf = _load(weight, by_path.get(path, []), jnp.dtype(dtype), mesh)
            _put(tree, path, leaf)
    return Transformer(config, plan, dtype), tree


def local_folder(path_or_id: str | Path) -> Path:
    """The folder itself, or the local copy of a hub model's safetensors, configs and tokenizer.

    Raises:
      UsageError: no such folder, and the hub does not give a model of that name.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    text = str(path_or_id)
    if path.exists():
        raise UsageError(f"{text} is a file; give the folder that holds config.json and the safetensors")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise UsageError(f"no such folder: {text}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=list(_DOWNLOAD)))
    except Exception as error:  # the hub client raises many kinds; to the user they are one: not available
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{text!r} is no folder here, and the Hugging Face hub gives none: {reason}"
        ) from None


def _open_all(folder: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Path, typing.Any]]:
    """Tensor name -> (its file, a lazy slice of it), over all files of the checkpoint."""
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return _open(_single(folder), stack)
    where = _weight_map(folder / INDEX)
    files = {name: _open(folder / name, stack) for name in sorted(set(where.values()))}
    absent = [f"{tensor} (in {name})" for tensor, name in where.items() if tensor not in files[name]]
    if absent:
        raise UsageError(f"{folder / INDEX} places tensors in files that lack them: {_shorten(absent)}")
    out = {tensor: found for opened in files.values() for tensor, found in opened.items()}
    return out | {tensor: files[name][tensor] for tensor, name in where.items()}


def _single(folder: Path) -> Path:
    if (folder / SINGLE).exists():
        return folder / SINGLE
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    if any(not name.endswith(".safetensors") for name in others):
        raise UsageError(
            f"{folder} holds {', '.join(others[:3])} but no {SINGLE}; only safetensors is read "
            "(pickled files can run code): convert it with transformers' save_pretrained"
        )
    only = f", only {', '.join(others[:3])}" if others else ""
    raise UsageError(f"{folder} holds neither {SINGLE} nor {INDEX}{only}")


def _weight_map(path: Path) -> dict[str, str]:
    where = read_config_json(path).get("weight_map")
    if not isinstance(where, Mapping) or not where or not all(isinstance(v, str) for v in where.values()):
        raise UsageError(f"{path}: weight_map must be an object that names a file for each tensor")
    for name in sorted(set(where.values())):
        if not _BARE.fullmatch(name):
            raise UsageError(
                f"{path}: {name[:100]!r} is not the bare name of a safetensors file in this folder"
            )
        if not (path.parent / name).exists():
            raise UsageError(f"{path} names {name}, which is not in {path.parent}; download it again")
    return dict(where)


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Path, typing.Any]]:
    try:
        file = stack.enter_context(safetensors.safe_open(inside(path), framework="numpy"))
        return {name: (path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is truncated or not safetensors ({error}); fetch it again") from None


def _check(folder: Path, tensors: Mapping, wanted: Mapping[str, Slot], may_ignore) -> None:
    """All that does not fit, in one error."""
    bad_shape, bad_dtype = [], []
    for name in wanted.keys() & tensors.keys():
        found = tensors[name][1]
        if tuple(found.get_shape()) != wanted[name].shape:
            bad_shape.append(f"{name} is {list(found.get_shape())}, not {list(wanted[name].shape)}")
        elif found.get_dtype() not in _ON_DISK:
            bad_dtype.append(f"{name} is {found.get_dtype()}")
    problems = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "unexpected": sorted(name for name in tensors.keys() - wanted.keys() if not may_ignore(name)),
        "misshapen": sorted(bad_shape),
        f"not one of {', '.join(_ON_DISK)}": sorted(bad_dtype),
    }
    lines = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UsageError(f"the tensors in {folder} do not fit its config.json; " + "; ".join(lines))


def _shorten(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _load(weight: weights.Weight, parts: list, dtype: np.dtype, mesh: Mesh | None) -> Array:
    """One of our arrays, each shard read from the slices of the tensors it needs."""
    if mesh is None:
        place = SingleDeviceSharding(jax.local_devices()[0])
    else:
        place = sharding.named(mesh, weight.axes, weight.shape)

    def shard(index) -> np.ndarray:
        spans = [slice(*s.indices(size)[:2]) for s, size in zip(index, weight.shape, strict=True)]
        if parts and parts[0][0].axis is None:
            return _read(*parts[0], spans=spans).astype(dtype)
        axis = parts[0][0].axis if parts else 0
        out = np.empty([s.stop - s.start for s in spans], dtype)
        rest = spans[:axis] + spans[axis + 1 :]
        for i, (slot, tensor) in enumerate(parts[spans[axis]]):
            out[(slice(None),) * axis + (i,)] = _read(slot, tensor, rest)
        return out

    return jax.make_array_from_callback(weight.shape, place, shard)


def _read(slot: Slot, tensor: tuple[Path, typing.Any], spans: list[slice]) -> np.ndarray:
    path, found = tensor
    try:
        return found[tuple(spans[::-1])].T if slot.transposed else found[tuple(spans)]
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _put(tree: dict, path: tuple[str, ...], leaf) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf
