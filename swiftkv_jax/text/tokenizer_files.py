"""A safe copy of a model's folder for transformers: the tokenizer's files, with only known fields.

transformers passes everything in tokenizer_config.json to a constructor, picks the class by name from
hundreds, and follows links. So it gets a staged folder that holds nothing else.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.families import FAMILIES
from swiftkv_jax.folder import bounded, read_json

_LINKED = "tokenizer.json tokenizer.model spiece.model vocab.json merges.txt chat_template.jinja".split()
_CONFIG, _MODEL = "tokenizer_config.json", "config.json"
_SPECIAL, _ADDED = "special_tokens_map.json", "added_tokens.json"
_MORE_TEMPLATES = "additional_chat_templates"
_CLASSES = (
    "PreTrainedTokenizerFast TokenizersBackend LlamaTokenizer LlamaTokenizerFast CodeLlamaTokenizer "
    "CodeLlamaTokenizerFast Qwen2Tokenizer Qwen2TokenizerFast GPT2Tokenizer GPT2TokenizerFast"
).split()
_FLAGS = (
    "add_bos_token add_eos_token add_prefix_space clean_up_tokenization_spaces legacy split_special_tokens "
    "spaces_between_special_tokens use_default_system_prompt"
).split()
_SIDES = ("padding_side", "truncation_side")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_TOKEN_FIELDS = {"content", "lstrip", "normalized", "rstrip", "single_word", "special", "__type"}


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A folder with the files of `folder` that a tokenizer needs; it exists during the `with` block.

    Raises:
      UsageError: a file leaves the folder, is too large, is not JSON, or names an unknown tokenizer class.
    """
    with tempfile.TemporaryDirectory(prefix="swiftkv-tokenizer-") as made:
        out = Path(made)
        for name in _LINKED:
            if _there(folder / name):
                _link(folder / name, out / name)
        if _there(folder / _MORE_TEMPLATES):
            (out / _MORE_TEMPLATES).mkdir()
            for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")):
                _link(path, out / _MORE_TEMPLATES / path.name)
        readers = {_CONFIG: _tokenizer_config, _MODEL: _model_config, _SPECIAL: _tokens, _ADDED: _ids}
        for name, reader in readers.items():
            if _there(folder / name):
                fields = reader(read_json(folder / name), str(folder / name))
                (out / name).write_text(json.dumps(fields), encoding="utf-8")
        yield out


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _link(path: Path, to: Path) -> None:
    to.symlink_to(bounded(path).resolve())


def _model_config(raw: Mapping, _: str) -> dict:
    """The fields that decide between tokenizer classes."""
    texts = ("tokenizer_class", "transformers_version", "_name_or_path")
    out = {name: raw[name] for name in texts if isinstance(raw.get(name), str)}
    if out.get("tokenizer_class") not in _CLASSES:
        out.pop("tokenizer_class", None)
    return out | ({"model_type": raw["model_type"]} if raw.get("model_type") in FAMILIES else {})


def _tokenizer_config(raw: Mapping, where: str) -> dict:
    kind = raw.get("tokenizer_class")
    if kind is not None and kind not in _CLASSES:
        near = suggest(kind, _CLASSES) if isinstance(kind, str) else ""
        raise UsageError(
            f"{where}: tokenizer_class {str(kind)[:60]!r} is not one of {', '.join(_CLASSES)}{near}"
        )
    out: dict = {} if kind is None else {"tokenizer_class": kind}
    out |= {name: raw[name] for name in _FLAGS if isinstance(raw.get(name), bool)}
    out |= {name: raw[name] for name in _SIDES if raw.get(name) in ("left", "right")}
    if isinstance(raw.get("chat_template"), str | list):
        out["chat_template"] = raw["chat_template"]
    if raw.get("added_tokens_decoder") is not None:
        out["added_tokens_decoder"] = _decoder(raw["added_tokens_decoder"], where)
    return out | _tokens(raw, where)


def _tokens(raw: Mapping, where: str) -> dict:
    """`*_token` fields and the two lists of tokens; null fields are ignored."""
    out: dict = {
        name: _token(value, f"{where}: {name}")
        for name, value in raw.items()
        if name.endswith("_token") and not isinstance(value, bool | None)
    }
    for name in _LISTS:
        value = raw.get(name)
        if isinstance(value, Mapping):
            out[name] = {key: _token(each, f"{where}: {name}") for key, each in value.items()}
        elif isinstance(value, list):
            out[name] = [_token(each, f"{where}: {name}") for each in value]
        elif value is not None:
            raise UsageError(f"{where}: {name} must be a list, not {type(value).__name__}")
    return out


def _token(value, where: str):
    """A token: a text, or an object with a text and flags."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        return {name: value[name] for name in value if name in _TOKEN_FIELDS}
    raise UsageError(f"{where} must be a text or an object with content, not {type(value).__name__}")


def _decoder(value, where: str) -> dict:
    if not isinstance(value, Mapping) or not all(key.isdecimal() and len(key) < 10 for key in value):
        raise UsageError(f"{where}: added_tokens_decoder must map token ids to tokens")
    return {key: _token(each, f"{where}: added_tokens_decoder") for key, each in value.items()}


def _ids(raw: Mapping, where: str) -> dict:
    for token, index in raw.items():
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**31:
            raise UsageError(f"{where}: {token[:40]!r} must have a token id, not {str(index)[:40]!r}")
    return dict(raw)
