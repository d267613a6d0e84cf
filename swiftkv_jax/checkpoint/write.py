"""Write a model as a Hugging Face folder: staged beside its destination, then moved into place."""

import contextlib
import dataclasses
import functools
import json
import math
import operator
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from swiftkv_jax.audio import PREPROCESSORS
from swiftkv_jax.checkpoint.names import Slot, as_dtype, leaves, names_of, slots
from swiftkv_jax.common.bucket import is_bucket, sent
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.common.folder import inside
from swiftkv_jax.config.gguf_header import gguf_of, read_header
from swiftkv_jax.config.hf import OWN_CODE, read_config_json
from swiftkv_jax.config.model import DTYPES, ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.layers import kernel_of
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.text.gguf_tokenizer import tokenizer_files
from swiftkv_jax.text.tokenizer_files import FILES as TOKENIZER_FILES

_SCALE = "_scale"  # behind a tensor's name
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION_FILES = ("generation_config.json", *PREPROCESSORS)
ADAPTER, PREDICTOR, AUXILIARY = "kv_prediction.json", "predictor.safetensors", "auxiliary"
# PyTorch code that a student's folder carries for transformers; nothing here imports or runs it.
MODELLING = f"{OWN_CODE}.py"
# Families that it does not support.
NOT_CODED = ("olmo", "gpt2", "opt", "openelm", "nemotron-nas", "deci")
# Token ids that ModelConfig does not keep, because no number depends on them.
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def save_pretrained(
    out_dir: str | Path,
    model: Transformer,
    params: PyTree,
    source: str | Path | None = None,
    max_shard_bytes: int = 5 * 2**30,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a folder that transformers loads, as `adapter.save_pretrained` says.

    A UsageWarning is given for SwiftKV models of families without PyTorch code. Rows of other forms (Slim
    attention) keep the plain model's tensors beside their own, and config.json lists them as
    `slim_attention`: transformers reads the plain model.

    Everything is written to a sibling folder first. In an `out_dir` that exists each file is replaced whole,
    config.json last, and weights that the new ones supersede are removed. With several processes each tensor
    is gathered in turn, and process 0 writes.
    """
    described = weights.described(model.config, model.plan, params)
    want = {path: weight.shape for path, weight in leaves(described)}
    have = {path: tuple(leaf.shape) for path, leaf in leaves(params)}
    paths = sorted(want.keys() | have.keys(), key=str)
    if wrong := [".".join(map(str, path)) for path in paths if want.get(path) != have.get(path)]:
        raise UsageError(f"not this model's parameters: {', '.join(wrong[:5])} differ in shape or presence")
    dtype = dtype or str(params["embed"].dtype)
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    config = dataclasses.replace(model.config, dtype=dtype).to_hf(model.plan)
    table = slots(model.config, model.plan, weights.cuts_of(params))
    eight = {name: found for name, slot in table.items() if (found := _eight_bit(params, slot))}
    if eight:
        config["quantization_config"] = _quantization(model.config, table, eight)
        table = {key: each for name, slot in table.items() for key, each in _with_scale(name, slot, eight)}
    wide = {
        path for path, weight in leaves(described) if weight.dtype == "float32"
    }  # whatever the model's is
    dtypes = {
        name: jnp.dtype(eight.get(name) or ("float32" if slot.path in wide else dtype))
        for name, slot in table.items()
    }
    dtypes |= {f"{name}{_SCALE}": jnp.dtype(np.float32) for name in eight}
    sizes = {name: math.prod(slot.shape) * dtypes[name].itemsize for name, slot in table.items()}
    if jax.process_index():
        for name, slot in table.items():
            tensor(params, name, slot, dtypes[name])
        multihost_utils.sync_global_devices("save_pretrained")
        return
    with staged(out_dir) as folder:
        write_extras(folder, extras(model.config.source, source, tokenizer))
        config |= token_ids(source or model.config.source)
        if model.plan.is_swiftkv and model.config.family in NOT_CODED:
            message = f"{out_dir} has no PyTorch code (no {model.config.family} has): it loads here alone"
            warnings.warn(message, UsageWarning, stacklevel=2)
        elif model.plan.is_swiftkv:
            shutil.copyfile(Path(__file__).with_name(MODELLING), folder / MODELLING)
            architecture = config["architectures"][0]
            config["auto_map"] = {
                "AutoConfig": f"{OWN_CODE}.{architecture.replace('ForCausalLM', 'Config')}",
                "AutoModelForCausalLM": f"{OWN_CODE}.{architecture}",
            }
            # Transformers' own class of the family would initialise the tensors that it misses at random,
            # with only a warning. It looks for this file, whose name tells the user what to do.
            code = "use AutoModelForCausalLM with trust_remote_code=True.safetensors"
            config["transformers_weights"] = code
        # Only one file's tensors are in host memory at a time.
        shards, files = _shards(sizes, max_shard_bytes), {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
            tensors = {name: tensor(params, name, table[name], dtypes[name]) for name in names}
            save_file(tensors, folder / file, {"format": "pt"})
            (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors makes it private to its owner
            del tensors
            files |= dict.fromkeys(names, file)
        if len(shards) > 1:
            metadata = {"total_size": sum(sizes.values())}
            write_json(folder / INDEX, {"metadata": metadata, "weight_map": files})
        write_json(folder / "config.json", config)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_pretrained")


def write_extras(folder: Path, files: dict[str, Path | dict]) -> None:
    """Put what `extras` found into `folder`."""
    for name, extra in files.items():
        if isinstance(extra, Path):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(inside(extra), folder / name)
        else:
            write_json(folder / name, extra)


def has_extras(place: Path) -> bool:
    """Whether anything lies beside a model's weights that `save_pretrained` would copy from there.

    place: a folder or a GGUF file.
    """
    return bool(extras(None, place, None) or token_ids(place))


def extras(
    origin: str | None, source: str | Path | None, tokenizer: str | Path | None
) -> dict[str, Path | dict]:
    """The files to put beside the weights, name -> a path or the content: of the tokenizer, of generation
    and of sound.

    `origin` is the folder that the model was read from, if it had such files. It is no error if it is gone.
    """
    for name, place in {"source": source, "tokenizer": tokenizer}.items():
        if place is not None and not _is_place(place):
            raise UsageError(f"{name} {place} is not a folder here, and no GGUF file")
    if source is None and origin is not None and not _is_place(origin):
        message = f"{origin}, where the model was read, is gone: its tokenizer and settings are not copied"
        warnings.warn(message, UsageWarning, stacklevel=2)
    home = source or origin
    out: dict[str, Path | dict] = {}
    for place, patterns in ((home, GENERATION_FILES), (tokenizer or home, TOKENIZER_FILES)):
        if place is None:
            continue
        matches = (path for pattern in patterns for path in sorted(Path(place).glob(pattern)))
        paths = {path.relative_to(place).as_posix(): path for path in matches if path.is_file()}
        out |= paths
        if patterns is TOKENIZER_FILES and not paths and (file := gguf_of(place)):
            out |= tokenizer_files(read_header(file))
    return out


def _is_place(place: str | Path) -> bool:
    return Path(place).is_dir() or gguf_of(place) is not None


def token_ids(place: str | Path | None) -> dict:
    """The token ids of a folder's config.json, or of a GGUF file."""
    if place is None or not (gguf_of(place) or (Path(place) / "config.json").is_file()):
        return {}
    raw = read_config_json(place)
    return {name: raw[name] for name in _CARRIED if name in raw}


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut wherever the next tensor would exceed `limit` bytes."""
    shards, room = [[]], limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards, room = [*shards, []], limit
        shards[-1].append(name)
        room -= size
    return shards


def _eight_bit(params: PyTree, slot: Slot) -> str | None:
    """The dtype of a tensor that is written in 8 bits: all its parts are, and outputs come first in it."""
    parts = [_holder(params, part) for part in slot.parts if part.path[-1] == "kernel" and part.transposed]
    dtypes = {part["kernel"].dtype.name if "scale" in part else "" for part in parts}
    return dtypes.pop() if len(dtypes) == 1 else None


def _with_scale(name: str, slot: Slot, eight: dict[str, str]) -> list[tuple[str, Slot]]:
    """A tensor and, if it is in 8 bits, its scale [outputs, 1]."""
    if name not in eight:
        return [(name, slot)]

    def scale(part: Slot) -> Slot:
        path, shape, rest = (*part.path[:-1], "scale"), (slot.shape[0], 1), tuple(map(scale, part.rest))
        return dataclasses.replace(part, path=path, shape=shape, rest=rest, transposed=True)

    return [(name, slot), (f"{name}{_SCALE}", scale(slot))]


def _quantization(config: ModelConfig, table: dict[str, Slot], eight: dict[str, str]) -> dict:
    """config.json's field for compressed-tensors. Software that multiplies in 8 bits, as vLLM, rounds
    activations too, with a scale for each token."""
    kind = "int" if "int8" in eight.values() else "float"
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": "channel", "dynamic": False},
        "input_activations": common | {"strategy": "token", "dynamic": True},
    }
    wide = [name for name, slot in table.items() if len(slot.shape) == 2 and name not in eight]
    head = names_of(config).top["lm_head",]  # a tied model's too, which has no tensor
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({head, *(name.removesuffix(".weight") for name in wide)}),
    }


def _holder(params: PyTree, slot: Slot) -> PyTree:
    return functools.reduce(operator.getitem, slot.path[:-1], params)


def tensor(params: PyTree, name: str, slot: Slot, dtype: np.dtype) -> np.ndarray:
    def gathered(slot: Slot) -> np.ndarray:
        holder = _holder(params, slot)
        part = slot.part(holder[slot.path[-1]])
        if slot.path[-1] == "kernel" and "scale" in holder and dtype.itemsize > 1:
            part = kernel_of({"kernel": part, "scale": slot.part(holder["scale"])})
        if jax.process_count() > 1:
            part = multihost_utils.process_allgather(part, tiled=True)
        return as_dtype(np.asarray(jax.device_get(part)), dtype, name)

    made = slot.written([gathered(part) for part in slot.parts])
    return np.ascontiguousarray(made).reshape(slot.shape)


@contextlib.contextmanager
def staged(out_dir: str | Path) -> Iterator[Path]:
    """A folder to write into: moved to `out_dir`, or sent into its bucket, on success; removed on failure."""
    if is_bucket(out_dir):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            sent(Path(folder), str(out_dir).rstrip("/"))
        return
    out = Path(out_dir).expanduser().absolute()
    try:
        blocker = next((path for path in (out, *out.parents) if path.is_file()), None)
        if blocker is not None:
            raise UsageError(f"cannot write to {out_dir}: {blocker} is a file, not a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
            folder = Path(beside) / out.name  # with the usual permissions, unlike `beside`
            folder.mkdir()
            yield folder
            _move_in(folder, out)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot write to {out_dir}: {getattr(error, 'strerror', None) or error}") from None


def _move_in(folder: Path, out: Path) -> None:
    """Move files into `out`; files of an earlier model or adapter that the new one lacks are removed."""
    if not out.exists():
        os.rename(folder, out)
        return
    new = sorted(
        (path.name for path in folder.iterdir()), key=lambda name: (name in ("config.json", ADAPTER), name)
    )
    for name in new[:-1]:
        if (folder / name).is_dir():  # a rename cannot replace it
            shutil.rmtree(out / name, ignore_errors=True)
        os.replace(folder / name, out / name)
    if ADAPTER not in new and (out / ADAPTER).exists():
        (out / ADAPTER).unlink()
        (out / PREDICTOR).unlink(missing_ok=True)
        shutil.rmtree(out / AUXILIARY, ignore_errors=True)
    for old in [*out.glob("model*.safetensors"), out / INDEX, out / MODELLING, out / "config.json"]:
        if old.name not in new:
            old.unlink(missing_ok=True)
    os.replace(folder / new[-1], out / new[-1])
