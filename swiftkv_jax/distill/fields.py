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
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")


def meanings(config: type) -> dict[str, str]:
    """The text on each field in the section `Attributes:` of a dataclass's docstring, and of its base's."""
    texts = meanings(config.__base__) if dataclasses.is_dataclass(config.__base__) else {}
    _, _, section = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")
    entry: list[str] = []
    for line in [*section.splitlines(), "  end: "]:
        if line.startswith("   "):
            entry.append(line.strip())
            continue
        if entry and (match := _ENTRY.fullmatch(" ".join(entry))):
            texts |= dict.fromkeys(match[1].split(", "), match[2])
        entry = [line.strip()]
    return texts


def rows(config: type = Experiment, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(name, type, default, meaning) of every field that --set can change; a part is followed by its
    fields."""
    told, hints, out = meanings(config), typing.get_type_hints(config), []
    for field in dataclasses.fields(config):
        part = _part(hints[field.name])
        if part is None or field.name == "evaluation":
            kind = "DataConfig" if part else _name(hints[field.name])
            default = "required" if field.default is dataclasses.MISSING else repr(field.default)
            out.append((prefix + field.name, kind, default, told.get(field.name, "")))
        else:
            out += rows(part, f"{prefix}{field.name}.")
    return out


def _part(hint) -> type | None:
    """The config class that a field holds, or None."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    classes = [k for k in kinds if dataclasses.is_dataclass(k) and k is not ModelConfig]
    return typing.cast(type, classes[0]) if classes else None


def _name(hint) -> str:
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("swiftkv_jax.config.model.", "")


def table(under: str = "") -> str:
    """Every field, or those whose names begin with `under`, with type, default and meaning, as text."""
    chosen = [row for row in rows() if f"{row[0]}.".startswith(f"{under}.") or not under]
    if not chosen:
        known = {part for name, *_ in rows() for part in (name, name.partition(".")[0])}
        raise UsageError(f"no field {under!r}{suggest(under, known)}; --fields alone lists all")
    lines = []
    for name, kind, default, meaning in chosen:
        lines.append(f"{name}  {kind}, {default if default == 'required' else f'default {default}'}")
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def summary() -> str:
    """Every field with its meaning and default, for --help."""
    lines = ["fields of the config, with defaults; change one by --set NAME=VALUE:"]
    for name, _, default, meaning in rows():
        text = f"{meaning.rstrip('.')} [{default}]"
        start = f"  {name}".ljust(_COLUMN)
        lines += textwrap.wrap(text, _WIDTH, initial_indent=start, subsequent_indent=" " * _COLUMN)
    return "\n".join(lines) + "\n"


def override(config: _Config, assignments: Sequence[str], under: str = "") -> _Config:
    """Apply `a.b=value` assignments, in any order; values are Python literals, or plain text for strings.

    Args:
      config: an `Experiment`, or a part of one.
      under: where `config` is such a part, the beginning of its fields' names, such as "data."; other
        assignments are left out.
    """
    changes: dict[str, typing.Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, not {assignment!r}")
        if key.startswith(under):
            _note(changes, config, key.removeprefix(under).split("."), text, key)
    return _replaced(config, changes)


def _note(changes: dict[str, typing.Any], value: typing.Any, path: list[str], text: str, key: str) -> None:
    """Add an assignment to `changes`: new values by name, and dictionaries of them for parts."""
    fields = {f.name: f for f in dataclasses.fields(value)}
    name = path[0]
    if name not in fields:
        raise UsageError(
            f"unknown key {key!r}: {type(value).__name__} has no {name!r}{suggest(name, fields)}"
        )
    if len(path) == 1:
        changes[name] = _parse(text, typing.get_type_hints(type(value))[name], key)
    elif dataclasses.is_dataclass(getattr(value, name)) and isinstance(changes.get(name, {}), dict):
        _note(changes.setdefault(name, {}), getattr(value, name), path[1:], text, key)
    else:
        raise UsageError(f"unknown key {key!r}: {name} has no fields")


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
