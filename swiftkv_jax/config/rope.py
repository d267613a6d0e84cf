"""The config of rotary embedding: read from either spelling in config.json, frozen, validated."""

import dataclasses
import math
import typing
from collections.abc import Mapping

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError

NONE = "none"  # no rotary embedding: config.json has no word for it
_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    NONE: frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    ),
    "yarn": frozenset(
        "factor original_max_position_embeddings beta_fast beta_slow attention_factor "
        "mscale mscale_all_dim truncate llama_4_scaling_beta".split()
    ),
    "longrope": frozenset(
        "short_factor long_factor factor original_max_position_embeddings attention_factor".split()
    ),
}
_ALIASES = {"su": "longrope"}  # as the first Phi-3 files call it
_LISTS = ("short_factor", "long_factor")
_TRAINED = ("llama3", "yarn", "longrope")  # types that need original_max_position_embeddings
# Yarn-Llama says whether it was trained with its scaling, and Ministral 3 repeats its context.
_INERT = frozenset({"finetuned", "max_position_embeddings"})
_POSITIVE = "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; field names as in config.json's `rope_parameters`.

    A `rope_type` of "none" means no rotary embedding.
    `attention_factor` multiplies cos and sin (yarn, longrope); it is computed if config.json lacks it.
    `interleaved`: neighbours in a head are rotated together, not its halves (GLM-4). `llama_4_scaling_beta`:
    queries grow with the logarithm of their position over `original_max_position_embeddings` (Ministral 3).
    `partial_rotary_factor` is the share of a head, its first part, that is rotated. `longrope` divides the
    frequencies by `short_factor`, or for lengths over `original_max_position_embeddings` by `long_factor`.
    `mscale_all_dim` (DeepSeek) scales the scores of latent attention; files have it and `mscale` in place of
    `attention_factor`.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    llama_4_scaling_beta: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        if self.rope_type not in _FIELDS:
            raise UsageError(f"rope_type {self.rope_type!r} is not supported; known: {', '.join(_FIELDS)}")
        for name in _POSITIVE:
            checks.above(name, getattr(self, name), 0)
        if not 0 < self.partial_rotary_factor <= 1:
            raise UsageError(
                f"partial_rotary_factor must be above 0, and 1 at most, not {self.partial_rotary_factor!r}"
            )
        if self.rope_type in _TRAINED and self.original_max_position_embeddings < 1:
            raise UsageError(
                f"rope_type {self.rope_type!r} needs original_max_position_embeddings in rope_scaling, "
                f"a positive integer, not {self.original_max_position_embeddings!r}"
            )
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise UsageError(
                f"llama3 rope scaling needs high_freq_factor > low_freq_factor, not "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping) -> "RopeConfig":
        """Read `rope_theta` and `rope_scaling` (as published) or `rope_parameters` (transformers 5).

        Raises:
          UsageError: an unknown type, a field the type does not take, or one it needs and lacks.
        """
        fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(fields, Mapping):
            raise UsageError(f"config.json: rope_scaling must be an object or null, not {fields!r}")
        fields = dict(fields)
        old, kind = fields.pop("type", None), fields.pop("rope_type", None)
        kind = kind or old or "default"
        kind = _ALIASES.get(kind, kind)
        theta = fields.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
        theta = _typed("rope_theta", theta)
        partial = fields.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
        known = [name for name in _FIELDS if name != NONE]
        if kind not in known:
            raise UsageError(f"config.json: rope_type {kind!r} is not supported; known: {', '.join(known)}")
        trained = raw.get(
            "original_max_position_embeddings"
        )  # beside the scaling it wins, as in transformers
        if trained is not None and kind in _TRAINED:
            fields["original_max_position_embeddings"] = trained
        unknown = sorted(name for name in set(fields) - _FIELDS[kind] - _INERT if fields[name] is not None)
        if unknown:
            raise UsageError(f"config.json: rope_type {kind!r} does not take {', '.join(unknown)}")
        typed: dict[str, typing.Any] = {
            name: _typed(name, fields[name]) for name in sorted(_FIELDS[kind]) if fields.get(name) is not None
        }
        try:
            if kind == "yarn":
                typed = _yarn_fields(typed, raw["max_position_embeddings"])
            if kind == "longrope":
                typed = _longrope_fields(typed, raw["max_position_embeddings"])
            if kind != "default" and "factor" not in typed:
                raise UsageError(f"rope_type {kind!r} needs a factor")
            partial = _typed("partial_rotary_factor", partial)
            return cls(rope_type=kind, rope_theta=theta, partial_rotary_factor=partial, **typed)
        except UsageError as error:
            raise UsageError(f"config.json: {error}") from None

    def width(self, head_dim: int) -> int:
        """Width of the first part of each head, which is rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def longest(self, context: int) -> int:
        """The longest sequence that the scaling is meant for.

        context: max_position_embeddings. It includes the scaling of llama3 and longrope, never that of linear
        and dynamic, and in some files that of yarn.
        """
        if self.rope_type in ("linear", "dynamic"):
            return max(context, int(context * self.factor))
        if self.rope_type == "yarn":
            return max(context, int(self.original_max_position_embeddings * self.factor))
        return context

    def to_hf(self, context: int) -> dict | None:
        """The `rope_scaling` dict of a published config.json; None for plain rotary.

        context: max_position_embeddings, from which readers of `longrope` files compute its factors.
        """
        if self.rope_type == "default":
            return None
        values = {name: getattr(self, name, None) for name in sorted(_FIELDS[self.rope_type])}
        if self.mscale_all_dim and self.attention_factor == 1:
            values["mscale"] = self.mscale_all_dim  # other readers expect both
        values |= {name: list(values[name] or ()) for name in _LISTS if name in values}
        set_ones = {name: value for name, value in values.items() if value or name == "truncate"}
        if self.rope_type == "longrope":
            factors = {"factor": self.factor, "attention_factor": self.attention_factor}
            told = {name: set_ones[name] for name in (*_LISTS, "original_max_position_embeddings")}
            set_ones = told if _longrope_fields(told, context) == told | factors else set_ones
        return {"rope_type": self.rope_type} | set_ones


def _typed(name: str, value) -> typing.Any:
    """A JSON value as the type of its field; config.json writes 8 where 8.0 is meant."""
    where = f"config.json: {name}"
    if name == "truncate":
        return checks.flag(where, value)
    if name in _LISTS:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where} must be a list of numbers, not {str(value)[:60]}")
        return tuple(checks.above(f"{where}[{i}]", number, 0) for i, number in enumerate(value))
    whole = name == "original_max_position_embeddings"
    return checks.integer(where, checks.whole(value)) if whole else checks.number(where, value)


def _yarn_fields(fields: dict, context: int) -> dict:
    """Yarn's derived factors (arXiv 2309.00071; `mscale` as DeepSeek publishes it)."""
    original = fields.get("original_max_position_embeddings") or context
    factor = fields.get("factor") or context / original
    mscale, mscale_all = fields.pop("mscale", None), fields.get("mscale_all_dim") or 0.0

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" not in fields:
        both = mscale and mscale_all
        fields["attention_factor"] = scale(mscale) / scale(mscale_all) if both else scale(1.0)
    return fields | {"factor": factor, "original_max_position_embeddings": original}


def _longrope_fields(fields: dict, context: int) -> dict:
    """LongRoPE's derived factor (arXiv 2402.13753; the attention factor as Microsoft publishes it)."""
    original = fields.get("original_max_position_embeddings", 0)
    if original < 2:
        raise UsageError("rope_type 'longrope' needs original_max_position_embeddings, 2 or more")
    missing = [name for name in _LISTS if name not in fields]
    if missing:
        raise UsageError(f"rope_type 'longrope' needs {missing[0]}")
    factor = fields.get("factor") or context / original
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {"attention_factor": scale, **fields, "factor": factor}
