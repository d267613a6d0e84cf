"""Layers with their own numbers of heads and MLP widths: their sizes, read from config.json and written."""

import math
import typing
from collections.abc import Callable, Mapping
from functools import partial

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


_positive = partial(checks.integer, least=1)


def _openelm(raw: Mapping, layers: int, width: int) -> tuple[Sizes, ...]:
    """OpenELM's: lists of heads, and of MLP widths as multiples of the model's, rounded."""
    by = checks.integer("config.json: ffn_dim_divisor", raw["ffn_dim_divisor"], 1)

    def ffn(name: str, value) -> int:
        wanted = checks.above(name, value, 0, 1e6) * width
        near = max(by, int(wanted + by / 2) // by * by)
        return near + by if near < 0.9 * wanted else near

    heads = (_listed(raw, name, layers, _positive) for name in ("num_query_heads", "num_kv_heads"))
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


def _blocks(raw: Mapping, layers: int, width: int) -> tuple[Sizes, ...]:
    """Nemotron's: the query heads of each kv head, and the MLP width as a multiple of 2/3 of the model's."""
    heads = checks.integer("config.json: num_attention_heads", raw.get("num_attention_heads"), 1)

    def one(where: str, block) -> Sizes:
        said = {}
        for part, own in (("attention", "n_heads_in_group"), ("ffn", "ffn_mult")):
            given = block.get(part) if isinstance(block, Mapping) else None
            given = given if isinstance(given, Mapping) else {}
            if other := next((name for name, value in given.items() if name != own and value), None):
                raise UsageError(
                    f"{where}.{part}: {other} is {given[other]!r:.60}; only layers with an attention to "
                    "all tokens and an MLP are supported"
                )
            said[own] = checks.above(f"{where}.{part}.{own}", given.get(own), 0, 1e6)
        ffn = int(2 * said["ffn_mult"] * width / 3)
        return Sizes(heads, max(1, heads // math.ceil(said["n_heads_in_group"])), -(-ffn // 256) * 256)

    return tuple(_listed(raw, "block_configs", layers, one))


def _blocks_written(sizes: list[Sizes], config: typing.Any) -> dict:
    def one(size: Sizes) -> dict:
        multiple = round(1.5 * size.intermediate_size / config.hidden_size, 6)
        return {
            "attention": {"n_heads_in_group": size.num_heads // size.num_kv_heads},
            "ffn": {"ffn_mult": multiple},
        }

    return {"block_configs": [one(size) for size in sizes]}


def _kv_heads(raw: Mapping, layers: int, width: int) -> tuple[Sizes, ...]:
    """DeciLM's: kv heads alone."""
    names = ("num_attention_heads", "intermediate_size")
    heads, ffn = (checks.integer(f"config.json: {name}", raw.get(name), 1) for name in names)
    kv_heads = _listed(raw, "num_key_value_heads_per_layer", layers, _positive)
    return tuple(Sizes(heads, each, ffn) for each in kv_heads)


def _kv_heads_written(sizes: list[Sizes], config: typing.Any) -> dict:
    return {"num_key_value_heads_per_layer": [size.num_kv_heads for size in sizes]}


READ = {"multiples": _openelm, "blocks": _blocks, "kv_heads": _kv_heads}
WRITTEN = {"multiples": _openelm_written, "blocks": _blocks_written, "kv_heads": _kv_heads_written}
