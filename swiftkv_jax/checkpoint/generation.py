"""The sampling defaults that a checkpoint asks for: generation_config.json, and what config.json adds."""

import dataclasses
import typing
from pathlib import Path

from swiftkv_jax.config import read_config_json
from swiftkv_jax.errors import UsageError

_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_NUMBERS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint's files say about generation; None where they say nothing.

    `eos_token_ids` holds every id that ends an answer (published files give one id or a list).
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def describe(self) -> str:
        """The defaults in force, as `name=value` pairs on one line."""
        pairs = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        return ", ".join(f"{name}={value}" for name, value in pairs if value not in (None, ()))


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """Defaults from `folder`/generation_config.json; token ids it lacks come from config.json.

    Raises:
      UsageError: a file is there but is not JSON, or a field has the wrong type.
    """
    files = (Path(folder) / name for name in ("generation_config.json", "config.json"))
    own, model = (read_config_json(file) if file.exists() else {} for file in files)
    fields = {name: own.get(name) if own.get(name) is not None else model.get(name) for name in _IDS}
    eos = fields.pop("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    values: dict[str, typing.Any] = {"eos_token_ids": tuple(_integer("eos_token_id", value) for value in eos)}
    values |= {name: None if value is None else _integer(name, value) for name, value in fields.items()}
    for name, kind in _NUMBERS.items():
        value = own.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is(kind, value):
            wanted = "an integer" if kind is int else "a number"
            raise UsageError(f"generation_config.json: {name} must be {wanted}, not {value!r}")
        values[name] = kind(value)
    sample = own.get("do_sample")
    if sample not in (None, True, False):
        raise UsageError(f"generation_config.json: do_sample must be true or false, not {sample!r}")
    return GenerationDefaults(do_sample=sample, **values)


def _is(kind: type[int] | type[float], value: int | float) -> bool:
    try:
        return kind(value) == value
    except OverflowError:  # infinity as an int; an int beyond every float
        return False


def _integer(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"generation_config.json: {name} must be an integer or a list, not {value!r}")
    return value
