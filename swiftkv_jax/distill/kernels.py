"""Which attention a run trains by: the one that is named, else what a check found on this machine."""

import dataclasses
import json
from pathlib import Path

import jax

from swiftkv_jax import processes
from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill.config import AttentionConfig, Experiment
from swiftkv_jax.errors import UsageError
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.kernels.check.calls import CANDIDATES, Call
from swiftkv_jax.kernels.check.decide import LIMITS, Limits, decide
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.check.supervisor import START

WHOLE_ROWS = ("cudnn",)  # that no mesh may cut into parts
_MODELS = 2  # of a run, at most: a base and its auxiliary


def choose(
    experiment: Experiment,
    machine: Machine | None = None,
    folder: Path | None = None,
    limits: Limits = LIMITS,
) -> tuple[AttentionConfig, str]:
    """The kernels of a run's attention, and in a few words where they come from. Process 0 decides for all.

    Call it before JAX has its devices: a check runs in another process, for which a TPU has no room beside
    this one. Then the safe ones run. So they do where `experiment` names a model that cannot be read: whoever
    reads it says why. Where a KV predictor is trained, what is right and fastest for both models runs.

    Args:
      machine: what it is for, by default this one. folder: where decisions are kept. limits: of a check.
    """
    named = experiment.attention
    if machine is None:
        ours = machines.taken() and jax.default_backend() == "cpu"
        machine = machines.CPU if ours else machines.recognise()
    platform = machine.platform
    if named.on(platform):
        return named, "named"
    if platform == "cpu":
        return named, "the choice of this platform"
    taken = machines.taken()

    def name_and_how() -> str:
        names, found = CANDIDATES[platform]["train"], []
        safe = names[0], "the safe one"
        if experiment.mesh.context != 1:
            names = tuple(name for name in names if name not in WHOLE_ROWS)
        check = not (taken and platform == "tpu")
        options = {"check": check, "shared": taken, "candidates": {"train": names}, "limits": limits}
        for call in _calls(experiment):
            decision = decide([call], machine, folder, **options)
            found.append((decision.names["train"], decision.how))
        same = len({name for name, _ in found}) == 1
        return json.dumps(found[-1] if same else safe)

    most = _MODELS * (limits.total + 2 * START)
    name, how = json.loads(processes.text_from_first("swiftkv/kernels/train", name_and_how, most))
    return dataclasses.replace(named, **{platform: name}), how


def _calls(experiment: Experiment) -> list[Call]:
    """Of each model that trains or is read, if all can be checked; those of equal heads have one."""
    given = experiment.predict
    try:
        configs = [experiment.architecture or ModelConfig.from_hf(local_folder(experiment.model))]
        if given is not None and given.auxiliary:
            configs.append(given.architecture or ModelConfig.from_hf(local_folder(given.auxiliary)))
    except UsageError:
        return []
    if any(config.encoder is not None for config in configs):
        return []
    return list(dict.fromkeys(_call(experiment, config) for config in configs))


def _call(experiment: Experiment, config: ModelConfig) -> Call:
    """Of one row on one device."""
    tokens, shards = experiment.data.seq_len, max(1, experiment.mesh.tensor)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if kv_heads % shards == 0:
        heads, kv_heads = heads // shards, kv_heads // shards
    return Call(
        kind="train",
        operation="causal_attention",
        heads=heads,
        kv_heads=kv_heads,
        width=config.head_dim,
        computed=experiment.dtype,
        stored=experiment.dtype,
        page=tokens,
        capacity=tokens,
        lanes=1,
        tokens=tokens,
        windows=tuple(dict.fromkeys(None if w >= tokens else w for w in config.windows)),
    )
