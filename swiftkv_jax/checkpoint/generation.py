"""The sampling defaults that a checkpoint asks for: generation_config.json, and what config.json adds."""

import dataclasses
import re
import typing
from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax.common.checks import integer, number, whole
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.gguf_header import gguf_of
from swiftkv_jax.config.hf import read_config_json
from swiftkv_jax.text.tokenizer import has_tokenizer, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech:
    """The prompt tokens of a Whisper model, as ids.

    Attributes:
      languages, tasks: (name, id) of each, languages by their codes ("en"); empty if it has only one.
      no_timestamps: None if it has no such token. previous: the token before preceding text.
      language: the code of the one that older fine-tunes force; None: it is detected.
      suppressed: ids never to generate. first_suppressed: ids not to begin with.
    """

    languages: tuple[tuple[str, int], ...] = ()
    tasks: tuple[tuple[str, int], ...] = ()
    no_timestamps: int | None = None
    previous: int | None = None
    language: str | None = None
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()


_LANGUAGE, _TASKS = re.compile(r"<\|[a-z]{2,3}\|>"), ("transcribe", "translate")
_MULTILINGUAL = 51865  # tokens of the smallest vocabulary with languages; the English one has one less
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Generation settings in a checkpoint's files; None for those that are absent.

    `eos_token_ids` holds every id that ends an answer (published files give one id or a list).
    `decoder_start_token_id` is the first token of a decoder with an encoder; `speech` is for Whisper only.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    decoder_start_token_id: int | None = None
    speech: Speech = Speech()


def read_generation_config(folder: str | Path) -> GenerationDefaults:
    """Defaults from `folder`/generation_config.json; the end-of-sequence ids it lacks come from config.json.
    `folder` may be a GGUF file, which has these ids alone."""
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
    known = [integer(f"{place}: eos_token_id", value) for value in ids]
    values["eos_token_ids"] = tuple(value for value in known if value >= 0)  # -1: none
    for place in (model, own):
        if place.get("decoder_start_token_id") is not None:
            name = "decoder_start_token_id"
            values[name] = integer(f"generation_config.json: {name}", place[name], 0)
    if model.get("model_type") == "whisper":
        raw = {**model, **own}
        values["speech"] = _speech(raw if raw.get("lang_to_id") else raw | _older(raw, Path(folder)))
    return GenerationDefaults(**values)


def _older(raw: Mapping, folder: Path) -> dict:
    """The fields that generation_config.json lacks in files of before 2023: from the names of the tokenizer's
    tokens, and from `forced_decoder_ids`, pairs of a place and a token: language, task, no timestamps."""
    pairs = raw.get("forced_decoder_ids") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UsageError("config.json: forced_decoder_ids must be a list of places and token ids")
    forced = [token for _, token in pairs]
    tokens = load_tokenizer(folder).added if has_tokenizer(folder) else {}
    out: dict[str, typing.Any] = {
        "no_timestamps_token_id": tokens.get("<|notimestamps|>", forced[-1] if forced else None),
        "prev_sot_token_id": tokens.get("<|startofprev|>"),
    }
    if raw.get("is_multilingual", len(forced) > 1 or raw["vocab_size"] >= _MULTILINGUAL):
        languages = {name: index for name, index in tokens.items() if _LANGUAGE.fullmatch(name)}
        tasks = {name: tokens[f"<|{name}|>"] for name in _TASKS if f"<|{name}|>" in tokens}
        if not languages or not tasks:
            missing = f"{folder}: no lang_to_id in generation_config.json, and no tokenizer names languages"
            raise UsageError(f"{missing}: copy the former of the model that this one was trained from")
        out |= {"lang_to_id": languages, "task_to_id": tasks}
        out["language"] = next((name for name, index in languages.items() if index in forced[:1]), None)
    return {name: value for name, value in out.items() if raw.get(name) is None}


def _speech(raw: Mapping) -> Speech:
    def named(field: str) -> tuple[tuple[str, int], ...]:
        tokens = raw.get(field) or {}
        if not isinstance(tokens, Mapping):
            raise UsageError(f"generation_config.json: {field} must be an object of token ids")
        return tuple(
            (str(name).strip("<|>"), integer(f"generation_config.json: {field}: {name}", token, 0))
            for name, token in tokens.items()
        )

    def listed(field: str) -> tuple[int, ...]:
        ids = raw.get(field) or []
        if not isinstance(ids, list):
            raise UsageError(f"generation_config.json: {field} must be a list of token ids")
        return tuple(integer(f"generation_config.json: {field}", token) for token in ids if token != -1)

    def optional(field: str) -> int | None:
        value = raw.get(field)
        return None if value is None else integer(f"generation_config.json: {field}", value, 0)

    return Speech(
        languages=named("lang_to_id"),
        tasks=named("task_to_id"),
        no_timestamps=optional("no_timestamps_token_id"),
        previous=optional("prev_sot_token_id"),
        language=None if raw.get("language") is None else str(raw["language"]).strip("<|>"),
        suppressed=listed("suppress_tokens"),
        first_suppressed=listed("begin_suppress_tokens"),
    )
