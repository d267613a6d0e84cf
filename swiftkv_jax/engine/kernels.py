"""The choice of an engine's kernels: those that are named, else those that a check found on this machine."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import jax

from swiftkv_jax.common import processes
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import NONE
from swiftkv_jax.core import cache
from swiftkv_jax.core.form import PAGED
from swiftkv_jax.core.latent import expanded_widths
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.engine.settings import AUTO, OPERATIONS, SAFE, Settings, named
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.kernels.check.calls import CANDIDATES, UNFUSED, known, preferred
from swiftkv_jax.kernels.check.decide import LIMITS, Decision, Limits, decide
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.check.supervisor import START
from swiftkv_jax.kernels.common.case import Call
from swiftkv_jax.kernels.common.dispatch import ByKind

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernels that an engine uses.

    Attributes:
      settings: with the names in `kernels`. how: where these come from, in a few words.
      decision: the check's result for each candidate, if there was anything to check.
    """

    settings: Settings
    how: str
    decision: Decision | None = None


def choose(
    config: ModelConfig,
    plan: KVPlan,
    dtype: str,
    settings: Settings,
    shards: int = 1,
    machine: Machine | None = None,
    folder: Path | None = None,
    limits: Limits = LIMITS,
) -> Choice:
    """Choose the kernels of an engine with these settings. Implementations that these name are kept.

    Call it before JAX has its devices: a check runs in another process, and a TPU and most GPUs have no room
    for both. Once JAX has them, a TPU is not checked any more.

    Args:
      dtype: of the model. shards: devices that share the heads; a check uses the heads of one device.
      machine: the target machine, by default this one. folder: where decisions are kept. limits: of a check.
    """
    machine = machine or this_machine()
    fixed, own = ({}, {}) if settings.kernels == SAFE else named(settings.kernels)
    if not (plan.has_fill and config.fused_fill) and "fill" not in own:  # no row for it to make
        fixed.pop("fill", None)

    def chosen(names: Mapping[str, str], how: str, decision: Decision | None = None) -> Choice:
        """These names for the operations that have none."""
        names = {**names, **fixed}
        parts = [f"{kind}={names[kind]}" for kind in OPERATIONS if names.get(kind, UNFUSED) != UNFUSED]
        return Choice(dataclasses.replace(settings, kernels=",".join(parts) or AUTO), how, decision)

    every = calls_of(config, plan, dtype, settings, shards)
    calls = [call for call in every if call.kind in CANDIDATES[machine.platform] and call.kind not in fixed]
    if every and not calls:
        return chosen({}, "named")
    if machine.platform == "cpu" and settings.kernels != SAFE:
        return chosen({}, "named, or this platform's" if {*fixed} - {"scoring"} else "this platform's")
    safe = {kind: names[0] for kind, names in CANDIDATES[machine.platform].items()}
    safe |= {call.kind: known(call, CANDIDATES[machine.platform][call.kind])[0] for call in calls}
    if settings.kernels == SAFE or not calls:
        return chosen(safe, "the safe ones")
    taken = machines.taken()
    decisions: list[Decision] = []

    def names_and_how() -> str:
        decisions.append(decide(calls, machine, folder, taken=taken, limits=limits))
        return json.dumps([dict(decisions[0].names), decisions[0].how])

    title = hashlib.sha256(repr(calls).encode()).hexdigest()[:16]
    answer = processes.text_from_first(f"swiftkv/kernels/{title}", names_and_how, limits.total + 2 * START)
    names, how = json.loads(answer)
    if taken and machine.platform == "tpu" and decisions and not decisions[0].kept:
        advice = "`serve.py --model DIR --kernels report`, with the same sizes, checks and keeps them"
        _LOG.warning("kernels run as %s, unchecked, as this process has the TPU: %s", how, advice)
    return chosen(safe | names, how, decisions[0] if decisions else None)


def this_machine() -> Machine:
    """The machine that an LLM made now runs on."""
    if machines.taken() and jax.default_backend() == "cpu":
        return machines.CPU
    return machines.recognise()


def calls_of(
    config: ModelConfig, plan: KVPlan, dtype: str, settings: Settings, shards: int = 1
) -> list[Call]:
    """The kernel calls of such an engine, by kind; `shards`: devices that share the heads.

    The list is empty for a model with rows of several forms or with an encoder: one name would have to be
    right for all of them. So it is where scores have a soft cap, which no checked kernel computes.
    """
    if len(plan.forms) != 1 or config.encoder is not None or config.attention_softcap:
        return []
    form = FORMS[plan.forms[0]]
    array = form.arrays(config)[0]  # its others are like it
    whole = form.operation != PAGED
    shards = 1 if whole else shards  # such a row has one head, which every device has
    capacity = settings.pages_per_sequence * settings.page_size
    tokens, lanes = settings.max_num_batched_tokens, settings.max_num_seqs
    alone = lanes if settings.batch_invariant else 1
    common = {
        "heads": max(1, config.num_heads // shards),
        "kv_heads": max(1, config.num_kv_heads // shards),
        "width": config.head_dim,
        "computed": dtype,
        "stored": dtype if settings.cache_dtype == "auto" else settings.cache_dtype,
        "page": settings.page_size,
        "capacity": capacity,
        "lanes": lanes,
        "tokens": tokens,
        "alone": alone,
        "block": max(2 * ByKind.FEW, cache.block_size(tokens, alone)),
        "spread": (cache.block_size(tokens, lanes), cache.block_count(tokens, lanes)),
        "windows": tuple(dict.fromkeys(None if w >= capacity else w for w in config.windows)),
    }
    rows = {"row": array.width, "rope": config.rope.rope_type != NONE} if whole else {}
    if config.latent:
        rows = {"row": array.width}
        common |= {"kv_heads": 1, "width": array.width, "shared": config.latent.rank}
        common |= {"expanded": expanded_widths(config.latent)}
    calls = [Call(kind=kind, operation=form.operation, **rows, **common) for kind in ("decode", "chunk")]
    heads = array.heads // shards if array.heads % shards == 0 else array.heads
    write = Call(kind="write", operation="page_write", **common)
    write = dataclasses.replace(write, kv_heads=heads, width=array.width)
    if not (plan.has_fill and config.fused_fill):
        return [*calls, write]
    makers = {"dim": config.hidden_size, "bias": config.qkv_bias, "k_norm": config.qk_norm}
    rows = sum(row.shared_norm for row in plan.rows)
    fill = Call(kind="fill", operation="fused_kv_fill", rows=rows, **makers, **common)
    return [*calls, fill, write]


def in_force(
    config: ModelConfig, plan: KVPlan, dtype: str, settings: Settings, shards: int = 1
) -> dict[str, str]:
    """The implementation of each kind of call, for settings that `choose` and `resolve` have completed."""
    names, chosen = settings.implementations, {}
    for call in calls_of(config, plan, dtype, settings, shards):
        name = names.get(call.kind)
        chosen[call.kind] = name if name and known(call, (name,)) else preferred(call)
    return chosen | {kind: name for kind, name in names.items() if kind == "scoring"}
