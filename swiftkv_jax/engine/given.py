"""Checks of what callers give an `LLM`: its sizes and settings, its devices, its defaults."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding

from swiftkv_jax.checkpoint.adapter import local_folder, read_model
from swiftkv_jax.checkpoint.generation import GenerationDefaults
from swiftkv_jax.checks import integer
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.engine import kernels
from swiftkv_jax.engine.kernels import Choice, choose
from swiftkv_jax.engine.request import SamplingParams, encode
from swiftkv_jax.engine.settings import Settings, model_encoder, source_len, usual_page
from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.model import Transformer
from swiftkv_jax.predict import Predicted
from swiftkv_jax.shapes import PyTree

if typing.TYPE_CHECKING:
    from swiftkv_jax.engine.llm import LLM

_ASKED = ("eos_token_ids", "decoder_start_token_id", "speech")  # not for sampling
_FAR = 2**20  # tokens: the limit of models with a relative position bias


def sampling_defaults(generation: GenerationDefaults) -> SamplingParams:
    """Sampling defaults from generation_config.json, read as by vLLM: its `do_sample` is ignored."""
    found = {n: value for n, value in vars(generation).items() if value is not None and n not in _ASKED}
    return SamplingParams(**found)


def context(config: ModelConfig, wanted: int | None, whose: str = "") -> int:
    """The context limit in tokens. With `dynamic` rotary scaling it may exceed the trained length; a relative
    position bias sets no limit of its own."""
    trained, rope = config.max_position_embeddings, config.rope
    most = int(trained * rope.factor) if rope.rope_type == "dynamic" else trained
    most = _FAR if config.relative_buckets else most
    return integer(f"max_model_len{whose}", wanted, 1, most) if wanted is not None else trained


def check_names(given: Iterable[str], but: str = "") -> None:
    """Raises UsageError: a name of a setting that there is not, or `but`."""
    known = [field.name for field in dataclasses.fields(Settings) if field.name != but]
    for name in given:
        if name not in known:
            raise UsageError(f"unknown setting {name!r}{suggest(name, known)}")


def settings_of(limit: int, given: dict) -> Settings:
    """Engine settings from keyword arguments; without a page size, the usual one on this machine."""
    check_names(given, but="max_model_len")
    platform = kernels.this_machine().platform
    if "page_size" not in given:
        given = given | {"page_size": usual_page(given.get("cache_dtype", Settings.cache_dtype), platform)}
    return Settings(max_model_len=limit, **given)


def parts_of(mesh: Mesh | None) -> int:
    """Devices that share the heads."""
    return 1 if mesh is None else mesh.shape.get("tensor", 1)


def mesh_of(params: PyTree) -> Mesh | None:
    place = jax.tree.leaves(params)[0].sharding
    return place.mesh if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh) else None


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
    it has none afterwards.

    Raises:
      UsageError: as LLM.
    """
    config, plan, _ = read_model(local_folder(path_or_id, revision), slim, base)
    sizes = settings_of(context(config, max_model_len), settings)
    parts = integer("tensor_parallel_size", tensor_parallel_size, 1)
    return choose(config, plan, config.dtype if dtype == "auto" else dtype, sizes, parts)


def check_devices(model: Transformer | Predicted, mesh: Mesh | None) -> None:
    """Check that a model can be placed on the devices of `mesh`.

    Raises:
      UsageError: it has an encoder, and there are several devices.
    """
    if mesh is not None and mesh.size > 1 and model_encoder(model) is not None:
        raise UsageError(f"{model.config.family} has an encoder: such models run on one device")


@typing.no_type_check  # user input: checked here, by name
def check_kind(llm: "LLM", prompt, where: str) -> None:
    """Check that a prompt is of a kind that the model reads.

    Raises:
      UsageError: it is text for a speech model, or has a decoder prompt for a model without an encoder.
    """
    encoder = model_encoder(llm.model)
    if encoder is not None and encoder.mels:
        raise UsageError(f"{where} is text, and {encoder.family} takes audio: pass it to transcribe")
    if encoder is None and isinstance(prompt, Mapping) and "decoder_prompt" in prompt:
        raise UsageError(f"{where}: decoder_prompt has no place, as {llm.model.config.family} has no encoder")


@typing.no_type_check
def for_encoder(llm: "LLM", prompt, ids: list[int], where: str) -> tuple[list[int], dict]:
    """Return (the decoder's prompt, fields of `Request`) for a prompt whose `ids` an encoder reads.

    Raises:
      UsageError: there are too many for it.
    """
    longest = source_len(llm.model.config, llm.settings)
    if len(ids) > longest:
        raise UsageError(
            f"{where} has {len(ids)} tokens, and the encoder reads {longest}: cut it, or raise max_source_len"
        )
    given = prompt.get("decoder_prompt") if isinstance(prompt, Mapping) else None
    if isinstance(given, str):
        given = {"prompt": given, "add_special_tokens": False}
    begun = [] if given is None else encode(llm.tokenizer, given, f"{where}: decoder_prompt")[1]
    return [decoder_start(llm), *begun], {"source": tuple(ids), "source_length": len(ids)}


def decoder_start(llm: "LLM") -> int:
    """The first token of the decoder of a model with an encoder.

    Raises:
      UsageError: the model's files do not name it.
    """
    start = llm.generation.decoder_start_token_id
    if start is None:
        raise UsageError("no decoder_start_token_id in the model's config.json or generation_config.json")
    return start
