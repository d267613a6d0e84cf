"""Mixtures of experts: what config.json says of them, read and written."""

import dataclasses
import typing
from collections.abc import Mapping

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError

ROUTERS = ("greedy", "group_limited_greedy", "noaux_tc")
DENSE, EXPERTS = "dense", "experts"  # keys of `layers.MLPS`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of one layer of which each token runs some.

    Attributes:
      count, width: of the experts. per_token: how many of them a token runs.
      router: "greedy", the likeliest by softmax; "group_limited_greedy", of those in the `top_groups` of
        `groups` whose best is likeliest (DeepSeek-V2); "noaux_tc", by sigmoid and a bias that chooses but
        does not weigh, of those in the groups whose two best are likeliest together (DeepSeek-V3).
      normalise: whether a token's weights add up to 1. scale: a factor of them.
      shared: width of an MLP that every token runs too; 0: there is none. shared_gate: whether its output is
        multiplied by the sigmoid of a linear map of the token.
    """

    count: int
    per_token: int
    width: int
    router: str = "greedy"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    shared: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        for name in ("count", "per_token", "width", "groups", "top_groups"):
            checks.integer(f"experts: {name}", getattr(self, name), 1)
        if self.router not in ROUTERS:
            raise UsageError(f"router {self.router!r} is not supported; known: {', '.join(ROUTERS)}")
        if self.count % self.groups or self.top_groups > self.groups:
            raise UsageError(
                f"{self.count} experts in {self.groups} groups, of which {self.top_groups} are chosen: the "
                "groups must divide the experts, and no more can be chosen than there are"
            )
        if self.per_token > (most := self.count // self.groups * self.top_groups):
            raise UsageError(f"a token cannot run {self.per_token} of {most} experts")


_ALSO = {"num_experts": "num_local_experts"}  # as transformers 5 writes it
_PLAIN = ("router", "normalise", "scale")  # fields that are no sizes


def experts_from_hf(said: Mapping, raw: Mapping, layers: int) -> dict:
    """ModelConfig's fields `experts` and `mlps`.

    said: `Family.experts`. raw: the fields of config.json.

    Raises:
      UsageError: a field is missing or wrong.
    """
    if not said:
        return {}
    fields = {}
    for name, place in said.items():
        if not isinstance(place, str):
            fields[name] = place
            continue
        where, value = f"config.json: {place}", raw.get(place, raw.get(_ALSO.get(place, place)))
        fields[name] = value if name in _PLAIN else checks.integer(where, value, 0)
    step = checks.integer("config.json: decoder_sparse_step", raw.get("decoder_sparse_step", 1), 1)
    dense = raw.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) for i in dense):
        raise UsageError(f"config.json: mlp_only_layers must list layers, not {dense!r:.60}")
    has = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    return {"experts": Experts(**fields), "mlps": tuple(EXPERTS if own else DENSE for own in has)}


def experts_written(said: Mapping, reads: tuple[str, ...], config: typing.Any) -> dict:
    """The published fields of a ModelConfig's experts: the inverse of `experts_from_hf`."""
    if config.experts is None:
        return {}
    out = {place: getattr(config.experts, name) for name, place in said.items() if isinstance(place, str)}
    if "mlp_only_layers" in reads:
        out["mlp_only_layers"] = [i for i, kind in enumerate(config.kinds) if kind.mlp == DENSE]
        out["decoder_sparse_step"] = 1
    return out
