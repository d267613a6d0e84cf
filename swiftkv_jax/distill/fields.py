"""The fields of an experiment: their meaning, from the configs' docstrings, and how --set changes them."""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Sequence

from swiftkv_jax.common.checks import whole
from swiftkv_jax.common.errors import UsageError, suggest
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.distill.config import Experiment

_WIDTH, _COLUMN = 100, 27  # of a line; where meanings begin in --help
_Config = typing.TypeVar("_Config")  # a dataclass


def meanings(config: type) -> dict[str, str]:
    """The text on each field in the section `Attributes:` of a dataclass's docstring, and of its base's."""
    texts = meanings(config.__base__) if dataclasses.is_dataclass(config.__base__) else {}
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    entry: list[str] = []
    for line in [*section.splitlines(), "  end: "]:
        if line.startswith("   "):
            entry.append(line.strip())
            continue
        if entry and (match := re.fullmatch(r"(\w+(?:, \w+)*): (.*)", " ".join(entry))):
            texts |= dict.fromkeys(match[1].split(", "), match[2])
        entry = [line.strip()]
    return texts


def rows(config: type = Experiment, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of every field that --set can change; a part is followed by its
    fields."""
    texts, hints, out = meanings(config), typing.get_type_hints(config), []
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        parts = [kind for kind in kinds if dataclasses.is_dataclass(kind) and kind is not ModelConfig]
        if parts and field.name != "evaluation":
            out += rows(typing.cast(type, parts[0]), f"{prefix}{field.name}.")
            continue
        kind = str(hint).replace("swiftkv_jax.config.model.", "")
        if isinstance(hint, type) and not typing.get_args(hint):
            kind = hint.__name__
        default = "required" if field.default is dataclasses.MISSING else repr(field.default)
        out.append((prefix + field.name, "DataConfig" if parts else kind, default, texts.get(field.name, "")))
    return out


def table(under: str = "") -> str:
    """Every field, or those whose names begin with `under`, with meaning, type and default, as text."""
    chosen = [row for row in rows() if f"{row[0]}.".startswith(f"{under}.") or not under]
    if not chosen:
        known = {part for name, *_ in rows() for part in (name, name.partition(".")[0])}
        raise UsageError(f"no field {under!r}{suggest(under, known)}; --fields alone lists all")
    lines = []
    for name, kind, default, meaning in chosen:
        text = f"{meaning.rstrip('.')} [{kind}, {default}]"
        start = f"  {name}".ljust(_COLUMN)
        lines += textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * _COLUMN)
    return "\n".join(lines)


def override(config: _Config, assignments: Sequence[str], under: str = "") -> _Config:
    """Apply `a.b=value` assignments, in any order; values are Python literals, or plain text for strings.

    Args:
      config: an `Experiment`, or a part of one.
      under: where `config` is such a part, the beginning of its fields' names, such as "data."; other
        assignments are left out.
    """
    changes: dict[str, typing.Any] = {}  # new values by name, and dictionaries of them for parts
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"a setting is key=value, not {assignment!r}")
        if not key.startswith(under):
            continue
        owner, inner, names = typing.cast(typing.Any, config), changes, key.removeprefix(under).split(".")
        for number, name in enumerate(names, 1):
            hints = typing.get_type_hints(type(owner))
            if name not in hints:
                near = suggest(name, hints)
                raise UsageError(f"unknown key {key!r}: {type(owner).__name__} has no {name!r}{near}")
            if number == len(names):
                inner[name] = _parse(text, hints[name], key)
                break
            owner, inner = getattr(owner, name), inner.setdefault(name, {})
            if not dataclasses.is_dataclass(owner) or not isinstance(inner, dict):
                raise UsageError(f"unknown key {key!r}: {name} has no fields")
    return _replaced(config, changes)


def _replaced(value: typing.Any, changes: dict[str, typing.Any]):
    """The config with all changes, so that each part is checked once, as it will be."""
    made = {
        name: _replaced(getattr(value, name), new) if isinstance(new, dict) else new
        for name, new in changes.items()
    }
    return dataclasses.replace(value, **made)


def _parse(text: str, annotation, key: str):
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # as ast lists them
        value = text
    if annotation is str:
        return text
    optional = annotation == float | None
    if (annotation is float or optional) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if annotation is int:
        value = whole(value)
    if typing.get_origin(annotation) is tuple and isinstance(value, list | str):
        value = (value,) if isinstance(value, str) else tuple(value)
    if annotation == tuple[float, ...] and isinstance(value, tuple):
        value = tuple(float(each) if type(each) is int else each for each in value)
    if not _matches(value, annotation):
        wanted = getattr(annotation, "__name__", str(annotation))
        raise UsageError(f"{key} must be {wanted}, not {text!r}")
    return value


def _matches(value, annotation) -> bool:
    origin = typing.get_origin(annotation)
    if origin is tuple:
        inner = typing.get_args(annotation)[0]
        return isinstance(value, tuple) and all(_matches(v, inner) for v in value)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in typing.get_args(annotation))
    return isinstance(value, annotation) and not (annotation is int and isinstance(value, bool))
