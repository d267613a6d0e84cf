"""A model as a Hugging Face folder: staged beside its place, then moved in whole."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.experimental import multihost_utils
from safetensors.numpy import save_file

from swiftkv_jax import params as weights
from swiftkv_jax.checkpoint.names import Slot, leaves, slots
from swiftkv_jax.config import DTYPES, read_config_json
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer
from swiftkv_jax.shapes import PyTree

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Token ids that ModelConfig does not keep, because no number depends on them.
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_pretrained(
    out_dir: str | Path,
    model: Transformer,
    params: PyTree,
    source: str | Path | None = None,
    max_shard_bytes: int = 5 * 2**30,
    dtype: str | None = None,
) -> None:
    """Write a folder that transformers loads (standard plan), or with the published names (SwiftKV plan).

    Everything is written to a sibling folder first. A new `out_dir` appears whole or not at all; in one that
    exists each file is replaced whole, config.json last, and weights that the new ones supersede are removed.

    With several processes all of them call this: each tensor is gathered in turn, and process 0 writes.

    Args:
      source: folder to copy generation_config.json and the tokenizer from, and config.json's token ids.
      max_shard_bytes: more weights than this are spread over several files with an index.
      dtype: of the weights on disk; that of the parameters by default.

    Raises:
      UsageError: the model has no published form, or the folder cannot be written.
    """
    _check_params(model, params)
    dtype = dtype or str(params["embed"].dtype)
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    config = dataclasses.replace(model.config, dtype=dtype).to_hf(model.plan)
    table = slots(model.config, model.plan)
    if jax.process_index():
        for names in _shards(table, jnp.dtype(dtype).itemsize, max_shard_bytes):
            for name in names:
                _tensor(params, table[name], jnp.dtype(dtype))
        multihost_utils.sync_global_devices("save_pretrained")
        return
    with _staged(Path(out_dir)) as folder:
        if source is not None:
            config |= _copy_extras(Path(source), folder)
        _write_weights(folder, params, table, jnp.dtype(dtype), max_shard_bytes)
        _write_json(folder / "config.json", config)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_pretrained")


def _check_params(model: Transformer, params: PyTree) -> None:
    want = {path: weight.shape for path, weight in leaves(weights.weights(model.config, model.plan))}
    have = {path: tuple(leaf.shape) for path, leaf in leaves(params)}
    wrong = [".".join(path) for path in sorted(want.keys() | have.keys()) if want.get(path) != have.get(path)]
    if wrong:
        raise UsageError(f"not this model's parameters: {', '.join(wrong[:5])} differ in shape or presence")


def _copy_extras(source: Path, folder: Path) -> dict:
    """Copy generation_config.json and the tokenizer; the token ids of the source's config.json."""
    for name in ("generation_config.json", *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    raw = read_config_json(source) if (source / "config.json").is_file() else {}
    return {name: raw[name] for name in _CARRIED if name in raw}


def _write_weights(folder: Path, params: PyTree, table: dict[str, Slot], dtype: np.dtype, limit: int) -> None:
    """One file or several with an index; only one file's tensors are in host memory at a time."""
    shards = _shards(table, dtype.itemsize, limit)
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else SINGLE
        tensors = {name: _tensor(params, table[name], dtype) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors gives the owner alone access
        del tensors
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = dtype.itemsize * sum(math.prod(slot.shape) for slot in table.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(folder / INDEX, index)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _shards(table: dict[str, Slot], itemsize: int, limit: int) -> list[list[str]]:
    """Names in order, cut wherever the next tensor would exceed `limit` bytes."""
    shards, room = [[]], limit
    for name, slot in table.items():
        size = math.prod(slot.shape) * itemsize
        if size > room and shards[-1]:
            shards, room = [*shards, []], limit
        shards[-1].append(name)
        room -= size
    return shards


def _tensor(params: PyTree, slot: Slot, dtype: np.dtype) -> np.ndarray:
    leaf = params
    for key in slot.path:
        leaf = leaf[key]
    part = slot.part(leaf)
    if jax.process_count() > 1:
        part = multihost_utils.process_allgather(part, tiled=True)
    part = np.asarray(jax.device_get(part)).astype(dtype)
    return np.ascontiguousarray(part.T if slot.transposed else part)


@contextlib.contextmanager
def _staged(out_dir: Path) -> Iterator[Path]:
    """A folder to write in, moved to `out_dir` when all went well and removed when not."""
    out = out_dir.expanduser().absolute()
    folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        blocker = next((path for path in (out, *out.parents) if path.is_file()), None)
        if blocker is not None:
            raise UsageError(f"cannot write to {out_dir}: {blocker} is a file, not a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        _move_in(folder, out)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot write to {out_dir}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_in(folder: Path, out: Path) -> None:
    if not out.exists():
        os.rename(folder, out)
        return
    new = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == "config.json", name))
    for name in new[:-1]:
        os.replace(folder / name, out / name)
    for old in [*out.glob("model*.safetensors"), out / INDEX]:
        if old.name not in new:
            old.unlink(missing_ok=True)
    os.replace(folder / new[-1], out / new[-1])
