"""The choice of a run's training attention: a named kernel, else the result of a check on this machine."""

import json
from pathlib import Path

import jax

from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.common import processes
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.kernels.check import machine as machines
from swiftkv_jax.kernels.check.calls import CANDIDATES
from swiftkv_jax.kernels.check.decide import LIMITS, Limits, decide
from swiftkv_jax.kernels.check.machine import Machine
from swiftkv_jax.kernels.check.supervisor import START
from swiftkv_jax.kernels.common.case import Call

WHOLE_ROWS = ("cudnn",)  # kernels that need whole rows: no sharding over `context`
_LONGEST = 16_384  # tokens of a timed row without windows: longer ones only take a check's time


def choose(
    experiment: Experiment,
    machine: Machine | None = None,
    folder: Path | None = None,
    limits: Limits = LIMITS,
) -> tuple[str | None, str]:
    """The kernel of a run's attention, and a short note of where the choice comes from. Process 0 decides.

    Call this before JAX has its devices: a check runs in another process, and a TPU has no room for both; in
    that case the safe kernels are chosen. They are also chosen if `experiment` names a model that cannot be
    read; the code that loads it reports the error. For training a KV predictor, a kernel must be right and
    fastest for both models; else the safe one is chosen.

    Args:
      machine: the machine to choose for, by default this one. folder: where decisions are kept. limits: of a
        check.
    """
    named = experiment.attention
    if machine is None:
        ours = machines.taken() and jax.default_backend() == "cpu"
        machine = machines.CPU if ours else machines.recognise()
    platform = machine.platform
    if named is not None:
        return named, "named"
    if platform == "cpu":
        return None, "the choice of this platform"
    taken = machines.taken()

    def name_and_how() -> str:
        names, choices = candidates(experiment, platform), []
        safe = names[0], "the safe one"
        options = {"taken": taken, "candidates": {"train": names}, "limits": limits}
        for call in _calls(experiment):
            decision = decide([call], machine, folder, **options)
            choices.append((decision.names["train"], decision.how))
        same = len({name for name, _ in choices}) == 1
        return json.dumps(choices[-1] if same else safe)

    most = 2 * (limits.total + 2 * START)  # of a base and its auxiliary
    name, origin = json.loads(processes.text_from_first("swiftkv/kernels/train", name_and_how, most))
    return name, origin


def candidates(experiment: Experiment, platform: str) -> tuple[str, ...]:
    """The kernels that a check compares for a run, the safe one first and the one expected to win last."""
    whole = experiment.mesh.context == 1
    return tuple(name for name in CANDIDATES[platform]["train"] if whole or name not in WHOLE_ROWS)


def _calls(experiment: Experiment) -> list[Call]:
    """The attention call of one row on one device, for each model that trains or is read, if all can be
    checked (none with a soft cap of scores can, or with latents, whose values are narrower than keys); models
    of equal heads share one."""
    predict = experiment.predict
    try:
        configs = [experiment.architecture or ModelConfig.from_hf(local_folder(experiment.model))]
        if predict is not None and predict.auxiliary:
            configs.append(predict.architecture or ModelConfig.from_hf(local_folder(predict.auxiliary)))
    except UsageError:
        return []
    if any(config.encoder is not None or config.attention_softcap or config.latent for config in configs):
        return []
    calls = []
    for config in configs:
        tokens, shards = experiment.data.seq_len, max(1, experiment.mesh.tensor)
        shards = 1 if config.num_kv_heads % shards else shards
        windows = tuple(dict.fromkeys(None if w >= tokens else w for w in config.windows))
        if windows == (None,):
            tokens = min(tokens, _LONGEST)
        call = Call(
            kind="train",
            operation="causal_attention",
            heads=config.num_heads // shards,
            kv_heads=config.num_kv_heads // shards,
            width=config.head_dim,
            computed=experiment.dtype,
            stored=experiment.dtype,
            page=tokens,
            capacity=tokens,
            lanes=1,
            tokens=tokens,
            windows=windows,
        )
        calls.append(call)
    return list(dict.fromkeys(calls))
