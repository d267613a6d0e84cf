"""Mixtures of experts: what config.json says of them, read and written."""

import dataclasses
import typing
from collections.abc import Mapping
from functools import partial

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
# Fields that are no sizes; what is known of routers, `Experts` says.
_CHECKS = {"router": lambda _, value: value, "normalise": checks.flag, "scale": checks.number}
_OPTIONAL = ("router", "groups", "top_groups", "shared")  # fields that a file may leave out, or say null
_COUNTED = "n_shared_experts"  # as wide together as so many experts


def experts_from_hf(said: Mapping, raw: Mapping, layers: int) -> dict:
    """ModelConfig's fields `experts` and `mlps`.

    said: `Family.experts`. raw: the fields of config.json.

    Raises:
      UsageError: a field is missing or wrong.
    """
    if not said or not any(has := _having(raw, layers)):
        return {}
    fields = {}
    for name, place in said.items():
        where, value = f"config.json: {place}", raw.get(place, raw.get(_ALSO.get(place, place)))
        if not isinstance(place, str):
            fields[name] = place
        elif name not in _OPTIONAL or value is not None:
            fields[name] = _CHECKS.get(name, partial(checks.integer, least=0))(where, value)
    if said.get("shared") == _COUNTED and "shared" in fields:
        fields["shared"] *= fields["width"]
    if fields.get("router") in ("greedy", "group_limited_greedy") and fields["normalise"]:
        fields["scale"] = 1.0  # DeepSeek-V2's own code does one or the other
    return {"experts": Experts(**fields), "mlps": tuple(EXPERTS if own else DENSE for own in has)}


def _having(raw: Mapping, layers: int) -> list[bool]:
    """Whether each layer has experts: by its kind, by a list of those without, or by their distance."""
    kinds, dense = raw.get("mlp_layer_types"), raw.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) for i in dense):
        raise UsageError(f"config.json: mlp_only_layers must list layers, not {dense!r:.60}")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
            raise UsageError(
                f"config.json: mlp_layer_types must be dense or sparse for each of {layers} layers, not "
                f"{kinds!r:.60}"
            )
        return [kind == "sparse" for kind in kinds]

    def number(name: str, least: int) -> int:
        value = raw.get(name)
        return checks.integer(f"config.json: {name}", least if value is None else value, least)

    first, step = number("first_k_dense_replace", 0), number("decoder_sparse_step", 1)
    every = number("moe_layer_freq", 1)
    return [i >= first and i % every == 0 and i not in dense and (i + 1) % step == 0 for i in range(layers)]


def experts_written(said: Mapping, reads: tuple[str, ...], config: typing.Any) -> dict:
    """The published fields of a ModelConfig's experts: the inverse of `experts_from_hf`."""
    has, out = [kind.mlp == EXPERTS for kind in config.kinds], {}
    if config.experts is not None:
        out = {place: getattr(config.experts, name) for name, place in said.items() if isinstance(place, str)}
        if _COUNTED in out:
            out[_COUNTED] //= config.experts.width
    if "mlp_only_layers" in reads:
        out["mlp_only_layers"] = [i for i, own in enumerate(has) if not own]
        out["decoder_sparse_step"] = 1
    if "mlp_layer_types" in reads:
        out["mlp_layer_types"] = ["sparse" if own else "dense" for own in has]
    if "first_k_dense_replace" in reads:
        every = range(len(has))
        first = has.index(True) if True in has else len(has)
        fits = (
            step for step in range(1, len(has) + 1) if has == [i >= first and i % step == 0 for i in every]
        )
        out |= {"first_k_dense_replace": first, "moe_layer_freq": next(fits, 1)}
    return out
