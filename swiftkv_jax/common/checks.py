"""Checks of single values given by users. Each returns the value, or raises a UsageError that names it."""

import math

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
