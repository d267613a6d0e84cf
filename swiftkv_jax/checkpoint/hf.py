"""Load a model from a Hugging Face folder or a GGUF file lazily, each shard straight to its device."""

import contextlib
import dataclasses
import math
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh, SingleDeviceSharding

from swiftkv_jax.checkpoint import eight_bit, gguf
from swiftkv_jax.checkpoint.names import Slot, as_dtype, bare_names, ignored, slots
from swiftkv_jax.checkpoint.write import ADAPTER, AUXILIARY, INDEX, SINGLE, has_extras, save_pretrained
from swiftkv_jax.common.bucket import fetched, is_bucket
from swiftkv_jax.common.errors import UsageError, UsageWarning, explained, first_line
from swiftkv_jax.common.folder import inside, read_json
from swiftkv_jax.config.gguf_header import SUFFIX, gguf_of, read_header
from swiftkv_jax.config.hf import is_swiftkv, read_config_json, said_dtype, text_of
from swiftkv_jax.config.model import DTYPES, ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.quantization import DTYPES as QUANTISED
from swiftkv_jax.config.quantization import FIELDS, block_of, checked
from swiftkv_jax.core import sharding, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Array, PyTree, Weight
from swiftkv_jax.core.weights import Keys
from swiftkv_jax.text.tokenizer_files import FILES as TOKENIZER_FILES

__all__ = ["from_pretrained", "local_folder", "save_pretrained"]

_MODELOPT = "hf_quant_config.json"  # of NVIDIA's files whose config.json says nothing
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
    slim: bool = True,
    quantization: str | None = "auto",
) -> tuple[Transformer, PyTree]:
    """A model and its parameters, as `adapter.from_pretrained` gives them: standard, SwiftKV or Slim.

    Each device's shard of each array is read by itself, straight from the files: the whole model never
    exists in host memory, and 8-bit weights never in another dtype on a device. Stacks are also cut where
    the dtype of a kernel changes.
    """
    quantization = checked(quantization)
    folder = local_folder(path_or_id)
    config, plan, raw = read_model(folder, slim)
    if has_extras(folder):
        config = dataclasses.replace(config, source=str(folder.absolute()))
    dtype = dtype or config.dtype
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    wanted = slots(config, plan, cuts)
    with contextlib.ExitStack() as stack:
        block = block_of(text_of(raw)[0])
        tensors, of_cache = eight_bit.joined(open_all(folder, stack), block)
        if of_cache:
            message = f"{folder} has scales of a cache, as {of_cache[0]}: a cache here has scales of its own"
            warnings.warn(message, UsageWarning, stacklevel=3)
        renamed = bare_names(config, tensors)
        tensors = {renamed[name]: tensor for name, tensor in tensors.items() if name in renamed}
        unused = (config, plan, is_swiftkv(raw), raw.get("slim_attention") is not None)
        check_tensors(folder, tensors, wanted, lambda name: ignored(name, *unused))
        alone = _described(config, plan, None, folder, tensors, quantization)
        if cuts is not None:
            cuts = {*cuts, *weights.changes(plan, alone)}
            wanted = slots(config, plan, cuts)
        found = [(tensors[name][1], slot) for name, slot in wanted.items()]
        blocks = [t.get_shape() for t, slot in found if _is_quantised(t) and _kept(t, slot) is None]
        if quantization == "auto" and blocks:
            size = sum(map(math.prod, blocks)) * jnp.dtype(dtype).itemsize / 2**30
            message = (
                f"{folder}: {len(blocks)} weights with scales of blocks are read in {dtype}, {size:,.2f} GiB"
            )
            message += "; quantization='int8' keeps them in 8 bits, rounded once more"
            warnings.warn(message, UsageWarning, stacklevel=3)
        by_path: dict[Keys, list] = {}
        for name, slot in wanted.items():
            for part in slot.parts:
                by_path.setdefault(part.path, []).append((part, name, *tensors[name]))

        def array(path: Keys, weight: Weight) -> Array:
            parts = by_path[path] if math.prod(weight.shape) else []
            return load(weight, parts, jnp.dtype(weight.dtype or dtype), mesh)

        def leaf(path, weight: Weight | PyTree) -> Array | PyTree:
            path = weights.keys(path)
            if not isinstance(weight, dict):
                return array(path, weight)
            rest = {name: array((*path, name), weight[name]) for name in weight.keys() - {"kernel", "scale"}}
            return rest | _load_8_bit(weight["kernel"], by_path[*path, "kernel"], mesh)

        tree = _described(config, plan, cuts, folder, tensors, quantization)
        tree = jax.tree_util.tree_map_with_path(
            leaf, tree, is_leaf=lambda each: isinstance(each, dict) and "scale" in each
        )
    return Transformer(config, plan, dtype), tree


def _described(
    config: ModelConfig, plan: KVPlan, cuts: weights.Cuts, folder: Path, tensors, quantization: str
) -> PyTree:
    """The tree of `Weight`s to load, with the kernels in 8 bits that `quantization` asks for or leaves."""
    eight: dict[Keys, str] = {}
    wanted = slots(config, plan, cuts)
    has = any(_is_quantised(tensors[name][1]) for name in wanted)  # then what it leaves wide stays so
    for name, slot in wanted.items() if quantization != "dequantize" else ():
        own = _kept(tensors[name][1], slot)
        made = QUANTISED.get(quantization) if _is_quantised(tensors[name][1]) or not has else None
        if own and made and own != made:
            raise UsageError(
                f"quantization={quantization!r}, and the weights in {folder} are in {own} already: 'auto' "
                "keeps them, 'dequantize' reads them in the model's dtype"
            )
        if dtype := own or made:
            eight |= {p.path[:-1]: dtype for p in slot.parts if p.path[-1] == "kernel"}

    every = weights.weights(config, plan, cuts)
    return weights.in_8_bits(every, lambda path, k: eight.get(path) if weights.is_rounded(path, k) else None)


def _kept(tensor, slot: Slot) -> str | None:
    """The dtype of a tensor that can stay in 8 bits; None of others."""
    has = isinstance(tensor, eight_bit.Scaled) and tensor.columns is not None and slot.transposed
    return eight_bit.KEPT[tensor.get_dtype()] if has else None


def _is_quantised(tensor) -> bool:
    return isinstance(tensor, eight_bit.Scaled | eight_bit.Packed)


def read_model(folder: Path, slim: bool = True) -> tuple[ModelConfig, KVPlan, Mapping]:
    """The model that a folder's config.json describes, and the file's fields; slim=False: rows of keys and
    values."""
    if (folder / ADAPTER).is_file() and not (folder / "config.json").exists():
        raise UsageError(f"{folder} is an adapter: give its base's folder, or {folder / AUXILIARY}")
    raw = read_config_json(folder)
    if not any(raw.get(name) for name in FIELDS) and (folder / _MODELOPT).is_file():
        said = read_json(folder / _MODELOPT).get("quantization")
        raw = {**raw, FIELDS[0]: {**(said if isinstance(said, Mapping) else {}), "quant_method": "modelopt"}}
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
    out = {name: tensor for opened in files.values() for name, tensor in opened.items()}
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
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {name: (path, tensor) for name, tensor in eight_bit.with_raw(path, slices).items()}
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
        elif tensor.get_dtype() not in _ON_DISK and not isinstance(tensor, eight_bit.Scaled):
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

    def shard(index) -> np.ndarray:
        spans = _spans(index, weight)
        if not parts:  # an empty array (`rows.NOTHING`)
            return np.zeros([s.stop - s.start for s in spans], dtype)
        stacked = len(parts[0][0].index)
        out = np.empty([s.stop - s.start for s in spans], dtype)
        for place, part in _within(parts, spans[:stacked]):
            out[place] = _read(*part, spans=spans[stacked:], dtype=dtype)
        return out

    return jax.make_array_from_callback(weight.shape, _place(weight, mesh), shard)


def _within(parts: list, stack: list[slice]) -> Iterator[tuple[tuple[int, ...], tuple]]:
    """(place in a shard, part) of the tensors that a shard of a stack has; () is the place of one alone."""
    for part in parts:
        if all(i in range(span.start, span.stop) for i, span in zip(part[0].index, stack, strict=True)):
            yield tuple(i - span.start for i, span in zip(part[0].index, stack, strict=True)), part


def _load_8_bit(kernel: Weight, parts: list, mesh: Mesh | None) -> PyTree:
    """Load a kernel, in a stack or alone, and its scale. All inputs of a shard's outputs are read, for their
    scales, where the file has none."""
    scale, scales = kernel.scale, {}
    assert scale is not None  # `kernel` is in 8 bits

    def shard(index) -> np.ndarray:
        *stack, inputs, outputs = _spans(index, kernel)
        out = np.empty(
            [span.stop - span.start for span in (*stack, inputs, outputs)], jnp.dtype(kernel.dtype)
        )
        s = np.empty([span.stop - span.start for span in (*stack, outputs)], np.float32)
        for place, part in _within(parts, stack):
            out[place], s[place] = _read_8_bit(part, inputs, outputs, kernel)
        scales[str([*stack, outputs])] = s
        return out

    def scale_shard(index) -> np.ndarray:
        return scales[str(_spans(index, scale))]

    values = jax.make_array_from_callback(kernel.shape, _place(kernel, mesh), shard)
    return {
        "kernel": values,
        "scale": jax.make_array_from_callback(scale.shape, _place(scale, mesh), scale_shard),
    }


def _read_8_bit(part: tuple, inputs: slice, outputs: slice, kernel: Weight) -> tuple[np.ndarray, np.ndarray]:
    """Some numbers of a kernel in its 8-bit dtype, and the scales of these outputs."""
    slot, name, path, tensor = part
    if _kept(tensor, slot) is None:
        spans = [slice(0, kernel.shape[-2]), outputs]
        wide = _read(slot, name, path, tensor, spans, np.dtype(np.float32))
        q, s = eight_bit.quantised(wide, kernel.dtype or "", name)
        return q[inputs], s
    q = _read(slot, name, path, tensor.stored, [inputs, outputs], jnp.dtype(kernel.dtype))
    return q, tensor.columns[slot.start + outputs.start : slot.start + outputs.stop]


def _place(weight: Weight, mesh: Mesh | None) -> jax.sharding.Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return sharding.named(mesh, weight.axes, weight.shape)


def _spans(index: tuple[slice, ...], weight: Weight) -> list[slice]:
    return [slice(*s.indices(size)[:2]) for s, size in zip(index, weight.shape, strict=True)]


def _read(slot: Slot, name: str, path: Path, tensor, spans: list[slice], dtype: np.dtype) -> np.ndarray:
    try:
        return as_dtype(slot.read(tensor, spans), dtype, name)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
