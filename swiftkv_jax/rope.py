"""Which rotary embedding a model uses: read from either spelling of config.json, frozen, validated."""

import dataclasses
import math
import typing
from collections.abc import Mapping

from swiftkv_jax.errors import UsageError

_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    ),
    "yarn": frozenset(
        "factor original_max_position_embeddings beta_fast beta_slow attention_factor "
        "mscale mscale_all_dim truncate".split()
    ),
}
_POSITIVE = "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; field names as in config.json's `rope_parameters`.

    `attention_factor` multiplies cos and sin (yarn), already worked out from `mscale` where those are given.
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

    def __post_init__(self):
        if self.rope_type not in _FIELDS:
            raise UsageError(f"rope_type {self.rope_type!r} is not supported; known: {', '.join(_FIELDS)}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not value > 0 or not math.isfinite(value):
                raise UsageError(f"{name} must be positive and finite, not {value!r}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
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
        """From `rope_theta` and `rope_scaling` (as published) or `rope_parameters` (transformers 5).

        Raises:
          UsageError: an unknown type, a field the type does not take, or one it needs and lacks.
        """
        fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(fields, Mapping):
            raise UsageError(f"config.json: rope_scaling must be an object or null, not {fields!r}")
        fields = dict(fields)
        old, kind = fields.pop("type", None), fields.pop("rope_type", None)
        kind = kind or old or "default"
        theta = fields.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
        theta = _typed("rope_theta", theta)
        if fields.pop("partial_rotary_factor", 1.0) not in (1, 1.0, None):
            raise UsageError("config.json: partial_rotary_factor other than 1.0 is not supported")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise UsageError(f"config.json: rope_type {kind!r} is not supported; known: {', '.join(_FIELDS)}")
        unknown = sorted(set(fields) - _FIELDS[kind])
        if unknown:
            raise UsageError(f"config.json: rope_type {kind!r} does not take {', '.join(unknown)}")
        typed: dict[str, typing.Any] = {
            name: _typed(name, value) for name, value in fields.items() if value is not None
        }
        try:
            if kind == "yarn":
                typed = _yarn_fields(typed, raw["max_position_embeddings"])
            if kind != "default" and "factor" not in typed:
                raise UsageError(f"rope_type {kind!r} needs a factor")
            return cls(rope_type=kind, rope_theta=theta, **typed)
        except UsageError as error:
            raise UsageError(f"config.json: {error}") from None

    def to_hf(self) -> dict | None:
        """The `rope_scaling` dict of a published config.json; None for plain rotary."""
        if self.rope_type == "default":
            return None
        values = {name: getattr(self, name, None) for name in sorted(_FIELDS[self.rope_type])}
        set_ones = {name: value for name, value in values.items() if value or name == "truncate"}
        return {"rope_type": self.rope_type} | set_ones


def _typed(name: str, value) -> float | int | bool:
    """A JSON value as the type of its field; config.json writes 8 where 8.0 is meant."""
    if name == "truncate":
        if not isinstance(value, bool):
            raise UsageError(f"config.json: truncate must be true or false, not {value!r}")
        return value
    kind = int if name == "original_max_position_embeddings" else float
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is(kind, value):
        wanted = "an integer" if kind is int else "a number"
        raise UsageError(f"config.json: {name} must be {wanted}, not {value!r}")
    return kind(value)


def _is(kind: type[int] | type[float], value: int | float) -> bool:
    try:
        return kind(value) == value
    except OverflowError:  # infinity as an int; an int beyond every float
        return False


def _yarn_fields(fields: dict, context: int) -> dict:
    """Yarn's derived factors (arXiv 2309.00071; `mscale` as DeepSeek publishes it)."""
    original = fields.get("original_max_position_embeddings") or context
    factor = fields.get("factor") or context / original
    mscale, mscale_all = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" not in fields:
        both = mscale and mscale_all
        fields["attention_factor"] = scale(mscale) / scale(mscale_all) if both else scale(1.0)
    return fields | {"factor": factor, "original_max_position_embeddings": original}
