"""Folders of any model: weights (hf.py), or an adapter that names a base model (KV prediction).

kv_prediction.json      format, base (a folder, or a hub id), base_fingerprint, reads, tail
auxiliary/              a model's folder, which transformers loads
predictor.safetensors   rows.N.k.weight [base's width, auxiliary's width], rows.N.k.bias, and so for v
tokenizer files         the base's
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from safetensors.numpy import save_file

from swiftkv_jax.checkpoint import hf, write
from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.checkpoint.names import Slot
from swiftkv_jax.checkpoint.write import ADAPTER, AUXILIARY, PREDICTOR
from swiftkv_jax.common.checks import choice, integer
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import read_json
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.text.tokenizer import has_tokenizer, load_tokenizer

_FORMAT = 2
_SEEN = 64  # numbers of each tensor that a fingerprint is made of
_INERT = ("family", "dtype", "source", "exit_head", "wrapper")  # fields that change no number of the model
_LONGEST = 4096  # characters of a base's name


def from_pretrained(
    path_or_id: str | Path,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    cuts: weights.Cuts = (),
    revision: str | None = None,
    base: str | Path | None = None,
    slim: bool = True,
    quantization: str | None = "auto",
) -> tuple[Transformer | Predicted, PyTree]:
    """Load a model and its parameters from a folder, a GGUF file or a hub id; also a KV prediction adapter.

    Args:
      path_or_id: a folder with config.json and safetensors, a GGUF file (Llama, Mistral, Qwen2, Qwen3), an
        adapter's folder, or the id of a model on the Hugging Face hub.
      dtype: of the parameters and activations; by default the checkpoint's own, the base's for an adapter,
        and bfloat16 for GGUF files.
      mesh: where to place the parameters (see sharding.py); the first device by default.
      cuts: layers before which stacks are cut (see `weights.partition`); None: before every layer, as
        serving needs them.
      revision: branch, tag or commit of a hub model; its main branch by default.
      base: an adapter's base model, if it is not where the adapter says.
      slim: False loads a Slim attention checkpoint as the plain model, with rows of keys and values.
      quantization: "int8" or "fp8" (e4m3) rounds the projections of attention and MLPs to 8 bits, each output
        with a scale; embeddings, heads and norms stay in `dtype`. "auto" (or None) reads weights as they are
        stored: in 8 bits if they have a scale for each tensor or output, in `dtype` if scales are of blocks.
        "dequantize" reads all in `dtype`.

    Returns:
      (model, params): a `Transformer`, or a `Predicted` for an adapter, and its tree of arrays in `dtype`,
      for `model.apply({"params": params}, tokens)`.

    Raises:
      UsageError: no such model, or one that is not supported; an adapter's base is missing, or is not the
        model it was made for.
    """
    folder = local_folder(path_or_id, revision)
    if not (folder / ADAPTER).exists():
        if base is not None:
            raise UsageError(f"{folder} has no {ADAPTER}: only adapters have a base, so leave it out")
        return hf.from_pretrained(folder, dtype, mesh, cuts, slim=slim, quantization=quantization)
    version, named, stored, prediction = _read(folder / ADAPTER)
    home = _base_folder(folder, named, base)
    options = {"slim": False, "quantization": quantization}  # it predicts keys and values
    base_model, base_params = hf.from_pretrained(home, dtype, mesh, cuts, **options)
    if fingerprint(home, version) != stored:
        raise UsageError(f"{home} is not the model that {folder} was made for: give it by --base (base=)")
    check_tokenizers(home, folder / AUXILIARY)
    auxiliary, aux_params = hf.from_pretrained(folder / AUXILIARY, base_model.dtype, mesh, cuts, **options)
    model = Predicted(base_model, auxiliary, prediction)
    predictor = _load_predictor(folder, model, mesh, cuts)
    return model, {"base": base_params, "auxiliary": aux_params, "predictor": predictor}


def read_model(
    folder: Path, slim: bool = True, base: str | Path | None = None
) -> tuple[ModelConfig, KVPlan, Mapping]:
    """The model that a folder's config.json (an adapter's: its base's) describes, and the file's fields."""
    if not (folder / ADAPTER).exists():
        return hf.read_model(folder, slim)
    return hf.read_model(_base_folder(folder, _read(folder / ADAPTER)[1], base), slim=False)


def save_pretrained(out_dir: str | Path, model: Transformer | Predicted, params: PyTree, **options) -> None:
    """Write a Hugging Face folder that `from_pretrained` reads.

    A SwiftKV model gets the published tensor names, and PyTorch code that transformers runs with
    `trust_remote_code=True`. A new folder appears whole or not at all. With several processes, all of them
    must call this.

    Args:
      out_dir: the folder to write.
      model: a `Transformer`, or a `Predicted` to write an adapter, which does not contain its base.
      params: the model's parameters.
      **options: dtype, of the weights on disk (by default that of the parameters). tokenizer, a folder or
        GGUF file to copy the tokenizer from. For a `Transformer`: source, a folder or GGUF file to copy the
        tokenizer, generation_config.json and token ids from (by default the one that the model was read
        from), and max_shard_bytes, above which weights are split into several files. For a `Predicted`:
        base, the base's folder or hub id (by default the folder that it was read from).

    Raises:
      UsageError: config.json cannot express the model, or a folder cannot be read or written.
      TypeError: an option of the other kind of model.
    """
    if isinstance(model, Predicted):
        return save_adapter(out_dir, model, params, **options)
    return write.save_pretrained(out_dir, model, params, **options)


def save_adapter(
    out_dir: str | Path,
    model: Predicted,
    params: PyTree,
    base: str | Path | None = None,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write the auxiliary and the predictor, in float32, and which base they are for, as `save_pretrained`
    says. A path of the base that leads there from the adapter's folder is kept relative."""
    source = base or model.base.config.source
    if source is None:
        raise UsageError("an adapter names its base's folder, and this base was read from none: give base")
    out = Path(out_dir).expanduser().absolute()
    named = str(source if (out / source).exists() or not Path(source).exists() else Path(source).absolute())
    home = _base_folder(out, named, None)
    lacks = model.auxiliary.config.source is None and has_tokenizer(home)
    theirs = tokenizer or (home if lacks else None)
    tensors = {
        name: write.tensor(params["predictor"], name, slot, np.dtype(np.float32))
        for name, slot in _slots(model, params["predictor"]).items()
    }
    auxiliary = (model.auxiliary, params["auxiliary"])
    if jax.process_index():
        write.save_pretrained(out / AUXILIARY, *auxiliary, dtype=dtype, tokenizer=theirs)
    else:
        fields = {
            "format": _FORMAT,
            "base": named,
            "base_fingerprint": fingerprint(home),
            "reads": list(model.prediction.reads),
            "tail": model.prediction.tail,
        }
        extras, name = write.extras(None, home, tokenizer), "generation_config.json"
        generation = extras.get(name, {})
        generation = read_json(generation) if isinstance(generation, Path) else generation
        ids = write.token_ids(home)  # of the base's config.json; an adapter has none
        if ids.keys() - generation.keys():
            extras[name] = ids | generation
        with write.staged(out) as folder:
            write.save_pretrained(folder / AUXILIARY, *auxiliary, dtype=dtype, tokenizer=theirs)
            write.write_extras(folder, extras)
            save_file(tensors, folder / PREDICTOR, {"format": "pt"})
            (folder / PREDICTOR).chmod(folder.stat().st_mode & 0o666)
            write.write_json(folder / ADAPTER, fields)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_adapter")


def fingerprint(folder: Path, version: int = _FORMAT) -> str:
    """A hash that changes with the names, shapes or first numbers of a checkpoint's tensors, and with the
    fields of its config that change numbers. `version` is the format of the adapter that has it."""
    digest = hashlib.sha256()
    if version > 1:
        config, plan, _ = hf.read_model(folder, slim=False)
        digest.update(_description(config, plan).encode())
    with contextlib.ExitStack() as stack:
        tensors = hf.open_all(folder, stack)
        for name, (_, tensor) in sorted(tensors.items()):
            shape = tuple(tensor.get_shape())
            first = (*(slice(0, 1) for _ in shape[:-1]), *(slice(0, min(n, _SEEN)) for n in shape[-1:]))
            some = tensor[first or ...]
            digest.update(f"{name} {shape} ".encode())
            digest.update(np.ascontiguousarray(np.asarray(some).astype(np.float32)).tobytes())
    return digest.hexdigest()[:16]


def _description(config: ModelConfig, plan: KVPlan) -> str:
    """The parts of a config and plan that change a model's numbers. Fields at their defaults are left out, so
    that a new one changes no fingerprint."""
    length = () if config.rope.rope_type == "dynamic" else ("max_position_embeddings",)

    def changed(part):
        if not dataclasses.is_dataclass(part):
            return [changed(each) for each in part] if isinstance(part, tuple) else part
        fields = [f for f in dataclasses.fields(part) if f.name not in _INERT + length]
        return {f.name: changed(value) for f in fields if (value := getattr(part, f.name)) != f.default}

    rows = [(row.source, row.maker, row.shared_norm) for row in plan.rows]
    return json.dumps([changed(config), rows, plan.reads], sort_keys=True)


def check_tokenizers(base: Path, auxiliary: Path) -> None:
    """Check that two folders have the same tokenizer; a folder without one passes.

    Their vocabularies may be padded to different sizes.
    """
    if not all(map(has_tokenizer, (base, auxiliary))):
        return
    files = [folder / "tokenizer.json" for folder in (base, auxiliary)]
    same = all(file.is_file() for file in files) and read_json(files[0]) == read_json(files[1])
    if not same and len({load_tokenizer(folder).rust.to_str() for folder in (base, auxiliary)}) > 1:
        raise UsageError(f"{base} and {auxiliary} have different tokenizers: they must read the same tokens")
    most, known = (hf.read_model(folder)[0].vocab_size for folder in (base, auxiliary))
    if most > known and (count := load_tokenizer(base).vocab_size) > known:
        raise UsageError(f"the tokenizer of {base} has {count} tokens, its reader {auxiliary} only {known}")


def _read(path: Path) -> tuple[int, str, str, Prediction]:
    """(format, base, its fingerprint, prediction) of an adapter's JSON."""
    raw = read_json(path)
    choice(f"{path}: format", raw.get("format"), (1, _FORMAT))
    for name in ("base", "base_fingerprint"):
        if not isinstance(raw.get(name), str) or not 0 < len(raw[name]) <= _LONGEST:
            raise UsageError(f"{path}: {name} must be a string of 1 to {_LONGEST} characters")
    reads = raw.get("reads")
    try:
        if not isinstance(reads, list):
            raise UsageError(f"reads must be a list of rows, not {type(reads).__name__}")
        prediction = Prediction(tuple(reads), integer("tail", raw.get("tail")))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return raw["format"], raw["base"], raw["base_fingerprint"], prediction


def _base_folder(folder: Path, named: str, given: str | Path | None) -> Path:
    """The folder of an adapter's base model: `given`, or the one that the adapter in `folder` names."""
    if given is not None:
        return local_folder(given)
    try:
        return local_folder(folder / named if (folder / named).exists() else named)
    except UsageError as error:
        raise UsageError(f"base model of {folder} is not where it says ({error}): give --base DIR") from None


def _slots(model: Predicted, predictor: PyTree) -> dict[str, Slot]:
    """Name of each of the predictor's tensors -> its place in the parameter tree."""
    out = {}
    for number, rows in enumerate(weights.ranges(predictor["rows"])):
        inside, outside = predict.row_widths(model)[rows.start]
        for (index, row), name in itertools.product(enumerate(rows), ("k", "v")):
            for leaf, stored, shape in (
                ("kernel", "weight", (outside, inside)),
                ("bias", "bias", (outside,)),
            ):
                path = ("rows", number, f"{name}_proj", leaf)
                slot = Slot(path=path, index=(index,), transposed=leaf == "kernel", shape=shape)
                out[f"rows.{row}.{name}.{stored}"] = slot
    return out


def _load_predictor(folder: Path, model: Predicted, mesh: Mesh | None, cuts: weights.Cuts) -> PyTree:
    described = predict.described(model, cuts)["predictor"]
    wanted = _slots(model, described)
    with contextlib.ExitStack() as stack:
        tensors = hf.open_one(folder / PREDICTOR, stack)
        hf.check_tensors(folder, tensors, wanted, lambda name: False, ADAPTER)
        bad = [name for name, (_, tensor) in tensors.items() if not np.isfinite(tensor[...]).all()]
        if bad:
            raise UsageError(f"{folder / PREDICTOR}: {sorted(bad)[0]} holds numbers that are not finite")
        by_path: dict[tuple, list[tuple]] = {}
        for name, slot in wanted.items():
            by_path.setdefault(slot.path, []).append((slot, name, *tensors[name]))
        dtype = jnp.dtype(model.dtype)

        def loaded(path, weight):
            return hf.load(weight, by_path[weights.keys(path)], dtype, mesh)

        return jax.tree_util.tree_map_with_path(loaded, described)
