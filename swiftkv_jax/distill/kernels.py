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


def choose(
    experiment: Experiment,
    machine: Machine | None = None,
    folder: Path | None = None,
    limits: Limits = LIMITS,
) -> tuple[AttentionConfig, str]:
    """The kernels of a run's attention, and in a few words where they come from. Process 0 decides for all.

    Call it before JAX has its devices: a check runs in another process, for which a TPU has no room beside
    this one. Then the safe ones run. So they do where a KV predictor is trained, whose two models would both
    have to be checked, and where `experiment` names no model that can be read: whoever reads it says why.

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
    if platform == "cpu" or experiment.predict is not None:
        return named, "the choice of this platform"
    taken = machines.taken()

    def name_and_how() -> str:
        call = _call(experiment)
        if call is None:
            return json.dumps([CANDIDATES[platform]["train"][0], "the safe one"])
        names = CANDIDATES[platform]["train"]
        if experiment.mesh.context != 1:
            names = tuple(name for name in names if name not in WHOLE_ROWS)
        check = not (taken and platform == "tpu")
        found = decide(
            [call], machine, folder, check=check, shared=taken, candidates={"train": names}, limits=limits
        )
        return json.dumps([found.names["train"], found.how])

    said = processes.text_from_first("swiftkv/kernels/train", name_and_how, limits.total + 2 * START)
    name, how = json.loads(said)
    return dataclasses.replace(named, **{platform: name}), how


def _call(experiment: Experiment) -> Call | None:
    """Of one row on one device."""
    try:
        config = experiment.architecture or ModelConfig.from_hf(local_folder(experiment.model))
    except UsageError:
        return None
    if config.encoder is not None:
        return None
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
