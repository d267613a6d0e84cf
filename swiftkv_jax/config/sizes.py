"""Layers with their own numbers of heads and MLP widths: their sizes, read from config.json and written."""

import math
import typing
from collections.abc import Callable, Mapping

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError


class Sizes(typing.NamedTuple):
    """What one layer has of its own; `ModelConfig` has fields of the same names for all layers."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int


def sizes_from_hf(how: str, raw: Mapping, layers: int, width: int) -> tuple[Sizes, ...]:
    """The sizes of each of a model's layers, which is `width` wide; () if its family's layers have the same.

    how: `Family.sizes`. raw: the fields of config.json.

    Raises:
      UsageError: a field is missing, or has no number for each layer.
    """
    return READ[how](raw, layers, width) if how else ()


def sizes_written(how: str, config: typing.Any) -> dict:
    """The published fields of a ModelConfig's sizes: the inverse of `sizes_from_hf`."""
    return WRITTEN[how]([kind.sizes for kind in config.kinds], config) if how else {}


def _listed(raw: Mapping, name: str, layers: int, read: Callable) -> list:
    """A field with one number for each layer."""
    where, values = f"config.json: {name}", raw.get(name)
    if not isinstance(values, list | tuple) or len(values) != layers:
        raise UsageError(f"{where} must list a number for each of {layers} layers, not {values!r:.60}")
    return [read(f"{where}[{i}]", value) for i, value in enumerate(values)]


def _openelm(raw: Mapping, layers: int, width: int) -> tuple[Sizes, ...]:
    """OpenELM's: lists of heads, and of MLP widths as multiples of the model's, rounded."""
    by = checks.integer("config.json: ffn_dim_divisor", raw["ffn_dim_divisor"], 1)

    def ffn(name: str, value) -> int:
        wanted = checks.above(name, value, 0, 1e6) * width
        near = max(by, int(wanted + by / 2) // by * by)
        return near + by if near < 0.9 * wanted else near

    heads = (
        _listed(raw, name, layers, lambda where, value: checks.integer(where, value, 1))
        for name in ("num_query_heads", "num_kv_heads")
    )
    return tuple(map(Sizes, *heads, _listed(raw, "ffn_multipliers", layers, ffn)))


def _openelm_written(sizes: list[Sizes], config: typing.Any) -> dict:
    heads, kv_heads, ffn = map(list, zip(*sizes, strict=True))
    return {
        "num_query_heads": heads,
        "num_kv_heads": kv_heads,
        "num_gqa_groups": config.num_heads // config.num_kv_heads,
        "qkv_multipliers": [n * config.head_dim / config.hidden_size for n in heads],
        "ffn_multipliers": [n / config.hidden_size for n in ffn],
        "ffn_dim_divisor": math.gcd(*ffn),
    }


READ = {"multiples": _openelm}
WRITTEN = {"multiples": _openelm_written}
