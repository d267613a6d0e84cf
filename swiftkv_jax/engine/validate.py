"""Checks of what callers give an `LLM`: its sizes and settings, its dtype, its defaults, its requests."""

import dataclasses
import os
import re
import subprocess
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, no_type_check

import jax
from jax.sharding import Mesh, NamedSharding

from swiftkv_jax.checkpoint.adapter import local_folder, read_model
from swiftkv_jax.checkpoint.generation import GenerationDefaults
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import UsageError, UsageWarning, suggest
from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.engine import kernels
from swiftkv_jax.engine.kernels import Choice, choose
from swiftkv_jax.engine.request import SamplingParams, encode
from swiftkv_jax.engine.settings import Settings, source_len, usual_page
from swiftkv_jax.kernels.check import machine as machines

AMPERE = (8, 0)  # the first compute capability with bfloat16 matrix units
_ASKED = ("eos_token_ids", "decoder_start_token_id", "speech")  # not for sampling


def sampling_defaults(generation: GenerationDefaults) -> SamplingParams:
    """Sampling defaults from generation_config.json, read as by vLLM: its `do_sample` is ignored. A value
    that no request may have is left out, with a UsageWarning."""
    defaults = {n: value for n, value in vars(generation).items() if value is not None and n not in _ASKED}
    for name, value in list(defaults.items()):
        try:
            SamplingParams(**{name: value})
        except UsageError as error:
            warnings.warn(f"generation_config.json is not followed: {error}", UsageWarning, stacklevel=3)
            del defaults[name]
    return SamplingParams(**defaults)


def context(config: ModelConfig, wanted: int | None, whose: str = "") -> int:
    """The context limit in tokens: the trained length, or what is wanted."""
    if wanted is None:
        return config.max_position_embeddings
    return integer(f"max_model_len{whose}", wanted, 1, config.longest_context)


def check_names(names: Iterable[str], but: str = "") -> None:
    """Raises UsageError: a name of a setting that there is not, or `but`."""
    known = [field.name for field in dataclasses.fields(Settings) if field.name != but]
    for name in names:
        if name not in known:
            raise UsageError(f"unknown setting {name!r}{suggest(name, known)}")


def settings_of(limit: int, fields: dict) -> Settings:
    """Engine settings from keyword arguments; without a page size, the usual one on this machine."""
    check_names(fields, but="max_model_len")
    platform = kernels.this_machine().platform
    if "page_size" not in fields:
        cached_in = fields.get("cache_dtype", Settings.cache_dtype)
        fields = fields | {"page_size": usual_page(cached_in, platform)}
    return Settings(max_model_len=limit, **fields)


def parts_of(mesh: Mesh | None) -> int:
    """Devices that share the heads."""
    return 1 if mesh is None else mesh.shape.get("tensor", 1)


def mesh_of(params: PyTree) -> Mesh | None:
    place = jax.tree.leaves(params)[0].sharding
    return place.mesh if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh) else None


def usual_dtype(
    stored: str,
    platform: str,
    capability: tuple[int, int] | None = None,
    wide: bool = False,
    fits: bool = True,
) -> tuple[str, str]:
    """(The dtype to compute in; why it is not the checkpoint's, "" if it is, or on a CPU, where float32 is
    faster and loses nothing).

    Args:
      stored: the checkpoint's dtype. capability: of a GPU; None: unknown, and taken to be enough.
      wide: whether the model's activations exceed float16's range, see `Family`.
      fits: whether float32 weights fit into a CPU's memory.
    """
    if platform == "cpu" and stored != "float32" and fits:
        return "float32", ""
    if platform == "gpu" and stored == "bfloat16" and capability is not None and capability < AMPERE:
        major, minor = capability
        lacks = f"a GPU of compute capability {major}.{minor} has no bfloat16 units"
        if wide:
            return "float32", f"{lacks}, and activations of this family exceed float16's range"
        return "float16", f"{lacks}; if answers are not finite, take float32"
    if platform == "tpu" and stored == "float16":
        return "bfloat16", "a TPU has no float16 units"
    return stored, ""


def dtype_here(config: ModelConfig, plan: KVPlan) -> tuple[str, str]:
    """`usual_dtype` of a checkpoint on this machine. JAX gets no devices by it."""
    platform = kernels.this_machine().platform
    least = capability() if platform == "gpu" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = 2 * 4 * weights.count(weights.weights(config, plan)) <= memory  # with as much room for the rest
    return usual_dtype(config.dtype, platform, least, FAMILIES[config.family].wide, fits)


def capability() -> tuple[int, int] | None:
    """The least compute capability of this machine's GPUs; None if neither JAX nor nvidia-smi tells."""
    if machines.taken():
        lines = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    else:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        lines = done.stdout.splitlines()
    versions = [re.fullmatch(r"(\d+)\.(\d+)", line.strip()) for line in lines]
    return min(((int(v[1]), int(v[2])) for v in versions if v), default=None)


def computed_in(folder: Path, dtype: str, slim: bool = True, base: str | Path | None = None) -> str:
    """`dtype`, or for "auto" that of a model's folder; a UsageWarning if this machine needs another one."""
    if dtype != "auto":
        return dtype
    config, plan, _ = read_model(folder, slim, base)
    taken, why = dtype_here(config, plan)
    if why:
        message = f"computing in {taken}, not in the checkpoint's {config.dtype}: {why}"
        warnings.warn(message, UsageWarning, stacklevel=3)
    return taken


def choose_kernels(
    path_or_id: str | Path,
    dtype: str = "auto",
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    revision: str | None = None,
    slim: bool = True,
    base: str | Path | None = None,
    **settings,
) -> Choice:
    """Choose the kernels of an LLM with these arguments. Nothing is loaded, and if JAX had no devices before,
    it has none afterwards."""
    config, plan, _ = read_model(local_folder(path_or_id, revision), slim, base)
    sizes = settings_of(context(config, max_model_len), settings)
    parts = integer("tensor_parallel_size", tensor_parallel_size, 1)
    return choose(config, plan, dtype_here(config, plan)[0] if dtype == "auto" else dtype, sizes, parts)


@no_type_check
def for_encoder(llm, prompt, ids: list[int], where: str) -> tuple[list[int], dict]:
    """Return (the decoder's prompt, fields of `Request`) for a prompt whose `ids` an encoder reads."""
    longest = source_len(llm.model.config, llm.settings)
    if len(ids) > longest:
        raise UsageError(f"{where} has {len(ids)} tokens: cut it, or raise max_source_len {longest}")
    opening = prompt.get("decoder_prompt") if isinstance(prompt, Mapping) else None
    if isinstance(opening, str):
        opening = {"prompt": opening, "add_special_tokens": False}
    begun = [] if opening is None else encode(llm.tokenizer, opening, f"{where}: decoder_prompt")[1]
    return [decoder_start(llm), *begun], {"source": tuple(ids), "source_length": len(ids)}


def decoder_start(llm) -> int:
    """The first token of the decoder of a model with an encoder."""
    start = llm.generation.decoder_start_token_id
    if start is None:
        raise UsageError("no decoder_start_token_id in the model's config.json or generation_config.json")
    return start


def check_ids(name: str, ids: Sequence, vocab: int, where: str) -> None:
    """Raises UsageError: an id that is not an integer in [0, vocab)."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return  # fast path: a prompt may have a hundred thousand ids
    for value in ids:
        integer(f"{where}: {name} id", value)
        if not 0 <= value < vocab:
            raise UsageError(f"{where}: {name} id {value} is outside the vocabulary [0, {vocab})")


def room_for(llm, ids: Sequence[int], params: SamplingParams, where: str) -> int:
    """The number of tokens that the context has room for after a prompt's `ids`."""
    limit = llm.settings.max_model_len
    biased: Any = params.logit_bias or ()
    named = {
        "token": ids,
        "stop_token_ids:": params.stop_token_ids,
        "allowed_token_ids:": params.allowed_token_ids or (),
        "logit_bias:": list(dict(biased)),
    }
    for name, values in named.items():
        check_ids(name, values, llm.vocab_size, where)
    if params.stop and llm.tokenizer is None:
        raise UsageError(f"{where}: stop strings need a tokenizer; this LLM has none")
    room = limit - len(ids)
    if room < 1:
        raise UsageError(f"{where} has {len(ids)} tokens; a context of {limit} leaves no room to generate")
    if params.max_tokens is not None and params.max_tokens > room:
        over = (
            f"{where} has {len(ids)} tokens; max_tokens {params.max_tokens} would pass the context of {limit}"
        )
        raise UsageError(f"{over}: lower max_tokens to {room}, or give None to fill the context")
    return room
