"""The sampling defaults that a checkpoint asks for: generation_config.json, and what config.json adds."""

import dataclasses
import typing
from pathlib import Path

from swiftkv_jax.checks import integer, number, whole
from swiftkv_jax.config_json import read_config_json
from swiftkv_jax.gguf_header import gguf_of

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint's files say about generation; None where they say nothing.

    `eos_token_ids` holds every id that ends an answer (published files give one id or a list).
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """Defaults from `folder`/generation_config.json; the end-of-sequence ids it lacks come from config.json.
    `folder` may be a GGUF file, which has these ids alone.

    Raises:
      UsageError: a file is there but is not JSON, or a field has the wrong type.
    """
    files = [Path(folder) / name for name in ("generation_config.json", "config.json")]
    files[1] = gguf_of(folder) or files[1]
    own, model = (read_config_json(file) if file.exists() else {} for file in files)
    place, eos = files[0].name, own.get("eos_token_id")
    if eos is None:
        place, eos = files[1].name, model.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    where = f"{files[0].name}: "
    values: dict[str, typing.Any] = {name: own[name] for name in _NUMBERS if own.get(name) is not None}
    for name, value in values.items():
        whole_number = name == "top_k"
        values[name] = integer(where + name, whole(value)) if whole_number else number(where + name, value)
    values["eos_token_ids"] = tuple(integer(f"{place}: eos_token_id", value) for value in ids)
    return GenerationDefaults(**values)
