"""Load a model from a Hugging Face folder or a GGUF file lazily, each shard straight to its device."""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh, SingleDeviceSharding

from swiftkv_jax.checkpoint import gguf
from swiftkv_jax.checkpoint.names import Slot, as_dtype, bare_names, ignored, slots
from swiftkv_jax.checkpoint.write import ADAPTER, AUXILIARY, INDEX, SINGLE, has_extras, save_pretrained
from swiftkv_jax.common.bucket import fetched, is_bucket
from swiftkv_jax.common.errors import UsageError, explained, first_line
from swiftkv_jax.common.folder import inside
from swiftkv_jax.config.gguf_header import SUFFIX, gguf_of, read_header
from swiftkv_jax.config.hf import is_swiftkv, read_config_json, said_dtype
from swiftkv_jax.config.model import DTYPES, ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import sharding, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Array, PyTree, Weight
from swiftkv_jax.text.tokenizer_files import FILES as TOKENIZER_FILES

__all__ = ["from_pretrained", "local_folder", "save_pretrained"]

_ON_DISK = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Not `*.safetensors`: some repositories carry the weights twice, in a vendor's own layout.
_DOWNLOAD = ("model*.safetensors", "*.json", *TOKENIZER_FILES)
_DOWNLOAD += ("predictor.safetensors", "auxiliary/*.safetensors")  # see adapter.py
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")
_BARE = re.compile(r"[\w.+-]{1,200}\.safetensors", re.ASCII)  # a file's name, without a folder
_NAMES_SHOWN = 20


def from_pretrained(
    path_or_id: str | Path,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    cuts: weights.Cuts = (),
    revision: str | None = None,
    slim: bool = True,
) -> tuple[Transformer, PyTree]:
    """A model and its parameters, as `adapter.from_pretrained` gives them: standard, SwiftKV or Slim.

    Each device's shard of each array is read by itself, straight from the files: the whole model never
    exists in host memory.
    """
    folder = local_folder(path_or_id, revision)
    config, plan, raw = read_model(folder, slim)
    if has_extras(folder):
        config = dataclasses.replace(config, source=str(folder.absolute()))
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    wanted = slots(config, plan, cuts)
    with contextlib.ExitStack() as stack:
        tensors = open_all(folder, stack)
        renamed = bare_names(config, tensors)
        tensors = {renamed[name]: tensor for name, tensor in tensors.items() if name in renamed}
        unused = (config, plan, is_swiftkv(raw), raw.get("slim_attention") is not None)
        check_tensors(folder, tensors, wanted, lambda name: ignored(name, *unused))
        by_path: dict[tuple[str | int, ...], list] = {}
        for name, slot in wanted.items():
            for part in slot.parts:
                by_path.setdefault(part.path, []).append((part, name, *tensors[name]))

        def one(path, weight: Weight) -> Array:
            if not math.prod(weight.shape):
                return load(weight, [], jnp.dtype(dtype), mesh)
            return load(weight, by_path[weights.keys(path)], jnp.dtype(dtype), mesh)

        tree = jax.tree_util.tree_map_with_path(one, weights.weights(config, plan, cuts))
    return Transformer(config, plan, dtype), tree


def read_model(folder: Path, slim: bool = True) -> tuple[ModelConfig, KVPlan, Mapping]:
    """The model that a folder's config.json describes, and the file's fields; slim=False: rows of keys and
    values."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").exists():
        raise UsageError(f"{folder} is an adapter: give its base's folder, or {folder / AUXILIARY}")
    raw = read_config_json(folder)
    config = ModelConfig.from_hf(raw)
    if said_dtype(raw) is None and ((folder / SINGLE).exists() or (folder / INDEX).exists()):
        config = dataclasses.replace(config, dtype=_stored_dtype(folder))
    return config, plan_from_hf(raw, slim), raw


def _stored_dtype(folder: Path) -> str:
    """The dtype that most numbers of a folder's weights are stored in."""
    sums = dict.fromkeys(_ON_DISK, 0)
    with contextlib.ExitStack() as stack:
        for _, tensor in open_all(folder, stack).values():
            if (kind := tensor.get_dtype()) in sums:
                sums[kind] += math.prod(tensor.get_shape())
    return _ON_DISK[max(sums, key=lambda kind: sums[kind])]


def local_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The local path of a model: the folder itself, a GGUF file (given, or in a folder without safetensors),
    or the downloaded safetensors, configs and tokenizer of a hub model, or of a folder in a bucket."""
    text = str(path_or_id)
    path = fetched(text.rstrip("/"), _DOWNLOAD) if is_bucket(text) else Path(path_or_id).expanduser()
    if path.is_dir() or (path.suffix == SUFFIX and path.is_file()):
        if revision is not None:
            raise UsageError(f"{text} is a folder here: revision {revision!r} is of models on the hub")
        return gguf_of(path) or path
    if path.exists():
        raise UsageError(f"{text} is a file; give a folder of config.json and safetensors, or a GGUF file")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or path.suffix == SUFFIX:
        raise UsageError(f"no such {'file' if path.suffix == SUFFIX else 'folder'}: {text}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=list(_DOWNLOAD)))
    except Exception as error:  # the hub client raises many types; to the user they all mean: not available
        raise UsageError(f"{text!r} is no folder here, and the hub gives none: {first_line(error)}") from None


def open_all(folder: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Path, typing.Any]]:
    """Tensor name -> (its file, a lazy slice of it), over all files of the checkpoint, or of a GGUF file."""
    if folder.suffix == SUFFIX:
        return gguf.open_tensors(read_header(folder), read_config_json(folder))
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        return open_one(_single(folder), stack)
    where = _weight_map(folder / INDEX)
    files = {name: open_one(folder / name, stack) for name in sorted(set(where.values()))}
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
        advice = "pickled files can run code: convert it with transformers' save_pretrained"
        raise UsageError(f"{folder} holds {', '.join(others[:3])}, no {SINGLE} and no GGUF; {advice}")
    only = f", only {', '.join(others[:3])}" if others else ""
    raise UsageError(f"{folder} holds neither {SINGLE} nor {INDEX}{only}")


def _weight_map(path: Path) -> dict[str, str]:
    where = read_config_json(path).get("weight_map")
    if not isinstance(where, Mapping) or not where or not all(isinstance(v, str) for v in where.values()):
        raise UsageError(f"{path}: weight_map must be an object that names a file for each tensor")
    for name in sorted(set(where.values())):
        if not _BARE.fullmatch(name):
            raise UsageError(f"{path}: {name[:100]!r} is not the bare name of a safetensors file")
        if not (path.parent / name).exists():
            raise UsageError(f"{path} names {name}, which is not in {path.parent}; download it again")
    return dict(where)


def open_one(path: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Path, typing.Any]]:
    """Tensor name -> (the file, a lazy slice of it), of one file."""
    try:
        with explained(f"read {path}"):
            file = stack.enter_context(safetensors.safe_open(inside(path), framework="numpy"))
            return {name: (path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except safetensors.SafetensorError as error:
        raise UsageError(f"{path} is truncated or not safetensors ({error}); fetch it again") from None


def check_tensors(
    folder: Path, tensors: Mapping, wanted: Mapping[str, Slot], may_ignore: Callable, said_by="config.json"
) -> None:
    """Check a checkpoint's tensors and report all mismatches in one error."""
    bad_shape, bad_dtype = [], []
    for name in wanted.keys() & tensors.keys():
        tensor = tensors[name][1]
        if tuple(tensor.get_shape()) != wanted[name].shape:
            bad_shape.append(f"{name} is {list(tensor.get_shape())}, not {list(wanted[name].shape)}")
        elif tensor.get_dtype() not in _ON_DISK:
            bad_dtype.append(f"{name} is {tensor.get_dtype()}")
    problems = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "unexpected": sorted(name for name in tensors.keys() - wanted.keys() if not may_ignore(name)),
        "misshapen": sorted(bad_shape),
        f"not one of {', '.join(_ON_DISK)}": sorted(bad_dtype),
    }
    lines = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in problems.items() if names]
    if lines:
        raise UsageError(f"the tensors in {folder} do not fit its {said_by}; " + "; ".join(lines))


def _shorten(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def load(weight: Weight, parts: list, dtype: np.dtype, mesh: Mesh | None) -> Array:
    """Load one parameter array; each shard is read from only the parts of the tensors that it needs."""
    if mesh is None:
        place = SingleDeviceSharding(jax.local_devices()[0])
    else:
        place = sharding.named(mesh, weight.axes, weight.shape)

    def shard(index) -> np.ndarray:
        spans = [slice(*s.indices(size)[:2]) for s, size in zip(index, weight.shape, strict=True)]
        if not parts:  # an empty array (`rows.NOTHING`)
            return np.zeros([s.stop - s.start for s in spans], dtype)
        stacked = len(parts[0][0].index)
        out = np.empty([s.stop - s.start for s in spans], dtype)
        for slot, *where in parts:
            index = [i - s.start for i, s in zip(slot.index, spans, strict=False)]
            if all(0 <= i < size for i, size in zip(index, out.shape, strict=False)):
                out[tuple(index)] = _read(slot, *where, spans=spans[stacked:], dtype=dtype)
        return out

    return jax.make_array_from_callback(weight.shape, place, shard)


def _read(slot: Slot, name: str, path: Path, tensor, spans: list[slice], dtype: np.dtype) -> np.ndarray:
    try:
        return as_dtype(slot.read(tensor, spans), dtype, name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
