"""Layers with parts and sizes of their own, read from config.json and written."""

import math
import typing
from collections.abc import Callable, Mapping
from functools import partial

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError


class Sizes(typing.NamedTuple):
    """What one layer has of its own, 0 of what it lacks; `ModelConfig` has such fields for all layers."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int


def sizes_from_hf(how: str, raw: Mapping) -> dict[str, tuple]:
    """ModelConfig's fields `sizes`, `attentions` and `mlps`, as far as a family's layers differ in them.

    how: `Family.sizes`. raw: the fields of config.json.

    Raises:
      UsageError: a field is missing, or has no number for each layer.
    """
    if not how:
        return {"sizes": ()}
    names = ("num_hidden_layers", "hidden_size")
    layers, width = (checks.integer(f"config.json: {name}", raw.get(name), 1) for name in names)
    return READ[how](raw, layers, width)


def sizes_written(how: str, config: typing.Any) -> dict:
    """The published fields of a ModelConfig's layers: the inverse of `sizes_from_hf`."""
    return WRITTEN[how]([kind.sizes for kind in config.kinds], config) if how else {}


def _listed(raw: Mapping, name: str, layers: int, read: Callable) -> list:
    """A field with one number for each layer."""
    where, values = f"config.json: {name}", raw.get(name)
    if not isinstance(values, list | tuple) or len(values) != layers:
        raise UsageError(f"{where} must list a number for each of {layers} layers, not {values!r:.60}")
    return [read(f"{where}[{i}]", value) for i, value in enumerate(values)]


_positive = partial(checks.integer, least=1)


def _openelm(raw: Mapping, layers: int, width: int) -> dict[str, tuple]:
    """OpenELM's: lists of heads, and of MLP widths as multiples of the model's, rounded."""
    by = checks.integer("config.json: ffn_dim_divisor", raw["ffn_dim_divisor"], 1)

    def ffn(name: str, value) -> int:
        wanted = checks.above(name, value, 0, 1e6) * width
        near = max(by, int(wanted + by / 2) // by * by)
        return near + by if near < 0.9 * wanted else near

    heads = (_listed(raw, name, layers, _positive) for name in ("num_query_heads", "num_kv_heads"))
    return {"sizes": tuple(map(Sizes, *heads, _listed(raw, "ffn_multipliers", layers, ffn)))}


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


_ABSENT = ("no_op", "replace_with_linear")  # fields of a block's part -> the kinds of it that they name
_KINDS = {"attention": ("rows", "none", "linear"), "ffn": ("dense", "none", "linear")}
_OWN = {"attention": "n_heads_in_group", "ffn": "ffn_mult"}


def _blocks(raw: Mapping, layers: int, width: int) -> dict[str, tuple]:
    """Nemotron's: the query heads of each kv head, and the MLP width as a multiple of 2/3 of the model's.
    Either part of a layer may be absent, or one linear map."""
    heads = checks.integer("config.json: num_attention_heads", raw.get("num_attention_heads"), 1)

    def part(where: str, block, name: str) -> tuple[str, float]:
        """(kind, its number, 0 if it has none)."""
        given = block.get(name) if isinstance(block, Mapping) else None
        given, own, where = given if isinstance(given, Mapping) else {}, _OWN[name], f"{where}.{name}"
        kind = next((i for i, field in enumerate(_ABSENT, 1) if given.get(field)), 0)
        known = (own, *_ABSENT)
        if other := next((field for field, value in given.items() if field not in known and value), None):
            raise UsageError(
                f"{where}: {other} is {given[other]!r:.60}; only attention to all tokens and MLPs whose "
                "weights are all there are supported"
            )
        number = 0.0 if kind else checks.above(f"{where}.{own}", given.get(own), 0, 1e6)
        return _KINDS[name][kind], number

    def one(where: str, block) -> tuple[Sizes, str, str]:
        (attention, group), (mlp, multiple) = (part(where, block, name) for name in _KINDS)
        kv_heads = max(1, heads // math.ceil(group)) if group else 0
        ffn = -(-int(2 * multiple * width / 3) // 256) * 256
        return Sizes(heads if group else 0, kv_heads, ffn), attention, mlp

    found = zip(*_listed(raw, "block_configs", layers, one), strict=True)
    return dict(zip(("sizes", "attentions", "mlps"), found, strict=True))


def _blocks_written(sizes: list[Sizes], config: typing.Any) -> dict:
    def part(name: str, kind: str, number: int | float) -> dict:
        absent = {field: kind == said for field, said in zip(_ABSENT, _KINDS[name][1:], strict=True)}
        return {_OWN[name]: number or None, **absent}

    def one(kind) -> dict:
        heads, kv_heads, ffn = kind.sizes
        group, multiple = heads // max(1, kv_heads), round(1.5 * ffn / config.hidden_size, 6)
        return {"attention": part("attention", kind.attention, group), "ffn": part("ffn", kind.mlp, multiple)}

    return {"block_configs": [one(kind) for kind in config.kinds]}


def _kv_heads(raw: Mapping, layers: int, width: int) -> dict[str, tuple]:
    """DeciLM's: kv heads alone."""
    names = ("num_attention_heads", "intermediate_size")
    heads, ffn = (checks.integer(f"config.json: {name}", raw.get(name), 1) for name in names)
    kv_heads = _listed(raw, "num_key_value_heads_per_layer", layers, _positive)
    return {"sizes": tuple(Sizes(heads, each, ffn) for each in kv_heads)}


def _kv_heads_written(sizes: list[Sizes], config: typing.Any) -> dict:
    return {"num_key_value_heads_per_layer": [size.num_kv_heads for size in sizes]}


READ = {"multiples": _openelm, "blocks": _blocks, "kv_heads": _kv_heads}
WRITTEN = {"multiples": _openelm_written, "blocks": _blocks_written, "kv_heads": _kv_heads_written}
