"""A tokenizer's files: their names, and what they say.

tokenizer.json decides the ids, whatever class is named beside it; the other files name special tokens and
hold chat templates. No class is chosen by its name, and no code of a folder is run.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.folder import bounded, read_json
from swiftkv_jax.text.gguf_tokenizer import from_merges

_JSON, _VOCABULARY, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"
VOCABULARIES = (_JSON, "tokenizer.model", _VOCABULARY, "spiece.model")  # a tokenizer has one of these
CONFIG, _SPECIAL, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_TEMPLATE, _TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
_MORE_TEMPLATES = "additional_chat_templates"
# Patterns of every file that a tokenizer may have. SentencePiece's and normalizer.json are not read here.
FILES = (
    *VOCABULARIES,
    *(_MERGES, CONFIG, _SPECIAL, _ADDED, "normalizer.json", _TEMPLATE, _TEMPLATE_JSON),
    f"{_MORE_TEMPLATES}/*.jinja",
)
# Classes that are published without tokenizer.json: how they split texts, by the names of GGUF files.
_BY_MERGES = {"GPT2Tokenizer": "gpt-2", "WhisperTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class Described:
    """What a tokenizer's files say.

    Attributes:
      rust: the tokenizer of `tokenizers`. named: special tokens by their roles, such as "bos_token".
      templates: chat templates by name; the usual one is "default".
    """

    rust: Tokenizer
    named: dict[str, str]
    templates: dict[str, str]


def read(folder: Path) -> Described:
    """Read the tokenizer of a folder.

    As in transformers 5, `add_bos_token` and `add_eos_token` are read only if there is no tokenizer.json.
    """
    config, old = _fields(folder / CONFIG), {}
    if config.get("added_tokens_decoder") is None:  # files of before 2023
        config, old = config | _fields(folder / _SPECIAL), _fields(folder / _ADDED)
    if _there(folder / _JSON):
        rust = Tokenizer.from_buffer(bounded(folder / _JSON).read_bytes())
    else:
        rust = _by_merges(folder, config)
    for token, index in old.items():
        checks.integer(f"{folder / _ADDED}: {token[:40]!r}", index, 0)
    out = described(rust, config, str(folder / CONFIG), sorted(old, key=old.__getitem__))
    named = out.named
    if not named:  # as in GPT-2's files: config.json has the ids of the tokens
        model, count = _fields(folder / "config.json"), rust.get_vocab_size()
        ids = {role: model.get(f"{role}_id") for role in ("bos_token", "eos_token", "pad_token")}
        known = {role: index for role, index in ids.items() if isinstance(index, int) and 0 <= index < count}
        named = {role: token for role, i in known.items() if (token := rust.id_to_token(i)) is not None}
    # Templates in files of their own go before the one in tokenizer_config.json.
    if (folder / _MORE_TEMPLATES).is_symlink():
        raise UsageError(f"{folder / _MORE_TEMPLATES} is a link; put the folder itself there")
    paths = {path.stem: path for path in sorted(folder.glob(FILES[-1]))}
    if _there(folder / _TEMPLATE):
        paths["default"] = folder / _TEMPLATE
    templates = {name: bounded(path).read_text(encoding="utf-8") for name, path in paths.items()}
    place = folder / _TEMPLATE_JSON
    return Described(rust, named, templates or out.templates or _templates(_fields(place), str(place)))


def described(rust: Tokenizer, config: Mapping, where: str, old: Iterable[str] = ()) -> Described:
    """What tokenizer_config.json says of `rust`, which gets the tokens that it lacks, in transformers' order.

    Args:
      where: opens error messages. old: the tokens of added_tokens.json, in order.
    """
    place = f"{where}: added_tokens_decoder"
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping) or not all(key.isdecimal() and len(key) < 10 for key in decoder):
        raise UsageError(f"{place} must map token ids to tokens")
    numbered = [_token(decoder[key], place) for key in sorted(decoder, key=int)]
    rust.encode_special_tokens = config.get("split_special_tokens") is True
    named = {
        name: _token(value, f"{where}: {name}", special=True)
        for name, value in config.items()
        if name.endswith("_token") and not isinstance(value, bool | None)
    }
    special = [*named.values()]
    for name in _LISTS:  # those without a role
        value = config.get(name) or []
        if not isinstance(value, list | Mapping):
            raise UsageError(f"{where}: {name} must be a list, not {type(value).__name__}")
        values = value.values() if isinstance(value, Mapping) else value
        special += [_token(each, f"{where}: {name}", special=True) for each in values]
    texts = {token.content for token in special}
    present = {repr(token) for token in rust.get_added_tokens_decoder().values()}
    for token in numbered:  # one that is new, and has a role, is special whatever is said of it
        token.special |= token.content in texts and repr(token) not in present
    rust.add_tokens(numbered)
    _add_missing(rust, [AddedToken(t, normalized=t not in texts, special=t in texts) for t in old])
    _add_missing(rust, special)
    return Described(rust, {name: token.content for name, token in named.items()}, _templates(config, where))


def _add_missing(rust: Tokenizer, tokens: Iterable[AddedToken]) -> None:
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    rust.add_tokens([token for token in tokens if token.content not in known])


def _token(value, where: str, **flags) -> AddedToken:
    """A token: a text, or an object with a text and flags."""
    if isinstance(value, str):
        return AddedToken(value, **flags)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        stated = {name: value[name] for name in _FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], **stated | flags)
    raise UsageError(f"{where} must be a text or an object with content, not {type(value).__name__}")


def _by_merges(folder: Path, config: Mapping) -> Tokenizer:
    """GPT-2's vocab.json and merges.txt as a tokenizer; its class says how texts are split."""
    pre = _BY_MERGES.get(str(config.get("tokenizer_class")).removesuffix("Fast"))
    if pre is None or not (_there(folder / _VOCABULARY) and _there(folder / _MERGES)):
        advice = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it with sentencepiece"
        raise UsageError(f"{folder} has no {_JSON}: transformers' {advice}")
    lines = bounded(folder / _MERGES).read_text(encoding="utf-8").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    around = (
        _token(config.get(name), f"{folder / CONFIG}: {name}").content
        if config.get(f"add_{name}") is True
        else None
        for name in ("bos_token", "eos_token")
    )
    return Tokenizer.from_str(json.dumps(from_merges(pre, read_json(folder / _VOCABULARY), merges, *around)))


def _templates(config: Mapping, where: str) -> dict[str, str]:
    """The chat templates in a file's `chat_template`: one, or a list of named ones."""
    templates = config.get("chat_template")
    if templates is None or isinstance(templates, str):
        return {"default": templates} if templates else {}
    try:
        return {str(each["name"]): str(each["template"]) for each in templates}
    except (TypeError, KeyError):
        raise UsageError(f"{where}: chat_template must be a text or a list of name and template") from None


def _fields(path: Path) -> dict:
    """The fields of a JSON file; none if it is not there."""
    return read_json(path) if _there(path) else {}


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()
