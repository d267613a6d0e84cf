"""Checks of single values given by users. Each returns the value, or raises a UsageError that names it."""

import dataclasses
import math
from functools import partial
from types import NoneType
from typing import Annotated, get_args

from swiftkv_jax.common.errors import UsageError, suggest


def integer(name: str, value, least: int | float = -math.inf, most: int | float = math.inf) -> int:
    """`value` if it is an integer in [least, most]; True and 1.0 are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be an integer, not {value!r}")
    return _within(name, value, least, most, "[")


def number(name: str, value, least: int | float = -math.inf, most: int | float = math.inf) -> float:
    """`value` as a float when it is a finite number in [least, most]."""
    return _within(name, _finite(name, value), least, most, "[")


def above(name: str, value, least: int | float, most: int | float = math.inf) -> float:
    """`value` as a float when it is a finite number in (least, most]."""
    return _within(name, _finite(name, value), least, most, "(")


def flag(name: str, value) -> bool:
    """`value` when it is True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, not {value!r}")
    return value


def choice(name: str, value, known):
    """`value` when it is one of `known`; the message suggests the nearest."""
    if value not in known:
        words = [str(each) for each in known]
        near = suggest(str(value), words)
        raise UsageError(f"{name} must be one of {', '.join(words)}, not {value!r}{near}")
    return value


def share(name: str, value) -> float:
    """`value` as a float when it is a number in [0, 1)."""
    part = number(name, value, 0)
    if part >= 1:
        raise UsageError(f"{name} is a share, below 1, not {value!r}")
    return part


def one_of(*known):
    """The check of an annotation that a value is one of `known`."""
    return partial(choice, known=known)


def every(check=lambda name, value: value):
    """The check of an annotation that each element passes `check`; they become a tuple."""
    return lambda name, values: tuple(check(name, value) for value in values)


Count = Annotated[int, partial(integer, least=1)]
Natural = Annotated[int, partial(integer, least=0)]
Positive = Annotated[float, partial(above, least=0)]
Amount = Annotated[float, partial(number, least=0)]
Share = Annotated[float, share]
Flag = Annotated[bool, flag]


def type_of(field: dataclasses.Field):
    """A field's type without the check in its annotation."""
    return get_args(field.type)[0] if hasattr(field.type, "__metadata__") else field.type


class Checked:
    """Base of frozen dataclasses: each field is checked, and replaced, by the check in its annotation,
    `Annotated[type, check]`; None passes where the type allows it.

    Attributes:
      section: what precedes a field's name in messages, such as "plan.".
    """

    section = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if value is None and NoneType in get_args(type_of(field)):
                continue
            for check in getattr(field.type, "__metadata__", ()):
                object.__setattr__(self, field.name, check(self.section + field.name, value))


def whole(value):
    """Turn 8.0 into 8, since some files write integers so; return anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _finite(name: str, value) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise UsageError(f"{name} must be a finite number, not {value!r}")


def _within(name: str, value, least: int | float, most: int | float, bracket: str):
    if value < least or value > most or (bracket == "(" and value == least):
        floor = f"at least {least}" if bracket == "[" else f"above {least}"
        bounds = floor if most == math.inf else f"in {bracket}{least}, {most}]"
        raise UsageError(f"{name} must be {bounds}, not {value!r}")
    return value
