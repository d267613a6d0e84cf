"""One experiment as data: what is trained, on what, how, and where it goes."""

import ast
import dataclasses
import importlib.util
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path

from swiftkv_jax.config import DTYPES, ModelConfig
from swiftkv_jax.distill.data import DataConfig
from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.surgery import INITS

TRAINABLE = ("swiftkv", "upper", "all")
SCHEDULES = ("linear", "cosine", "constant")
REDUCTIONS = ("mean", "reference")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}{suggest(value, known)}")


def _positive(owner: str, **values: float | int) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{owner}.{name} must be positive, not {value}")


def _not_negative(owner: str, **values: float | int) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise UsageError(f"{owner}.{name} must not be negative, not {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Where the student's rows come from. `split` 0 is the plain transformer (for `trainable="all"`)."""

    split: int = 0
    share: int = 1
    init: str = "fold"

    def __post_init__(self):
        _one_of("plan.init", self.init, INITS)

    def build(self, num_layers: int) -> KVPlan:
        return (
            KVPlan.swiftkv(num_layers, self.split, self.share) if self.split else KVPlan.standard(num_layers)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Forward KL at `temperature` times temperature^2 (Hinton et al.), plus optional terms.

    Attributes:
      reduction: "mean" over unmasked tokens, or "reference": over all positions, masked ones counting
        as zeros (ArcticTraining).
      hidden_weight: of the mean squared error between the streams entering the last layer, over all real
      tokens.
      lm_weight: of the cross-entropy with the data.
      exit_weight: of an exit head's KL to the teacher (SwiftKV paper, B.4, where it is 1); above 0 the
        student gets that head. Its gradient reaches the head alone.
      chunk_mib: MiB of float32 logits that exist at a time on one device.
    """

    temperature: float = 2.0
    kl_weight: float = 1.0
    hidden_weight: float = 0.0
    lm_weight: float = 0.0
    exit_weight: float = 0.0
    reduction: str = "mean"
    chunk_mib: float = 256.0

    def __post_init__(self):
        _positive("loss", temperature=self.temperature, chunk_mib=self.chunk_mib)
        names = ("kl_weight", "hidden_weight", "lm_weight", "exit_weight")
        weights: dict[str, float] = {name: getattr(self, name) for name in names}
        _not_negative("loss", **weights)
        _one_of("loss.reduction", self.reduction, REDUCTIONS)
        if not any(weights.values()):
            raise UsageError(
                "loss: kl_weight, hidden_weight, lm_weight and exit_weight are all 0; "
                "nothing would be trained"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and decay; `warmup` is a share of the steps, `clip` a global gradient norm."""

    learning_rate: float = 3e-4
    warmup: float = 0.05
    schedule: str = "linear"
    final_share: float = 0.0
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 1.0
    accumulate: int = 1

    def __post_init__(self):
        _positive("optimizer", learning_rate=self.learning_rate, clip=self.clip, accumulate=self.accumulate)
        _not_negative(
            "optimizer", weight_decay=self.weight_decay, warmup=self.warmup, final_share=self.final_share
        )
        _one_of("optimizer.schedule", self.schedule, SCHEDULES)
        if self.warmup >= 1:
            raise UsageError(f"optimizer.warmup is a share of the steps, below 1, not {self.warmup}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, "whatever is left"."""

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run of `train.py`.

    Attributes:
      model: folder or hub id of the teacher; or empty, with `architecture`, to train from random weights.
      tokenizer: folder or hub id; empty means the model's.
      trainable: "swiftkv" (norm_swiftkv, q of upper layers, k and v of row owners), "upper" (all of the upper
        layers: the paper's ablation), "all" (plain language-model training).
      steps: optimiser steps; 0 means `epochs` passes over the data.
      evaluate_every, checkpoint_every: steps; 0 means only at the end.
      evaluation_batches: of the held-out data, at most so many; 0 means all.
    """

    name: str
    data: DataConfig
    evaluation: DataConfig | None = None
    model: str = ""
    architecture: ModelConfig | None = None
    tokenizer: str = ""
    plan: PlanConfig = PlanConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    trainable: str = "swiftkv"
    dtype: str = "bfloat16"
    steps: int = 0
    epochs: int = 1
    seed: int = 0
    remat: bool = True
    log_every: int = 10
    evaluate_every: int = 0
    evaluation_batches: int = 8
    checkpoint_every: int = 200
    keep_checkpoints: int = 3
    tensorboard: bool = False
    export_dtype: str = "bfloat16"

    def __post_init__(self):
        _one_of("trainable", self.trainable, TRAINABLE)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("export_dtype", self.export_dtype, DTYPES)
        if not self.model and self.architecture is None:
            raise UsageError(
                "an experiment needs a model (folder or id), or an architecture to train from random weights"
            )
        if self.trainable == "all" and (self.loss.kl_weight or self.loss.hidden_weight):
            raise UsageError(
                'trainable="all" is plain language-model training: '
                "set loss.kl_weight=0, loss.hidden_weight=0, loss.lm_weight=1"
            )
        if self.trainable == "all" and self.loss.exit_weight:
            raise UsageError(
                'loss.exit_weight is of a student\'s exit head; trainable="all" has no student: set it to 0'
            )
        if self.trainable != "all" and (not self.model or not self.plan.split):
            raise UsageError(
                f"trainable={self.trainable!r} distils a model under a plan: give model and plan.split"
            )
        if self.steps < 0 or self.epochs < 1 or self.log_every < 1 or self.keep_checkpoints < 1:
            raise UsageError("steps must be 0 or more; epochs, log_every and keep_checkpoints at least 1")
        if self.data.batch_size % self.optimizer.accumulate:
            raise UsageError(
                f"data.batch_size {self.data.batch_size} is not a multiple of "
                f"optimizer.accumulate {self.optimizer.accumulate}"
            )


def load_experiment(path: str | Path) -> Experiment:
    """The `config` that a Python config file defines. Running it runs its code: trust it as you would a
    script."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"config file {path} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"swiftkv_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"config file {path} is not Python; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error
    experiment = getattr(module, "config", None)
    if not isinstance(experiment, Experiment):
        raise UsageError(f"{path} must define `config = Experiment(...)`")
    return experiment


def override(experiment: Experiment, assignments: Sequence[str]) -> Experiment:
    """Apply `a.b=value` assignments; values are Python literals, or plain text for strings.

    Raises:
      UsageError: an unknown key (the nearest is named), a value of the wrong type, or an invalid result.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, not {assignment!r}")
        experiment = _replace(experiment, key.split("."), text, key)
    return experiment


def _replace(value, path: list[str], text: str, key: str):
    fields = {f.name: f for f in dataclasses.fields(value)}
    name = path[0]
    if name not in fields:
        raise UsageError(
            f"unknown key {key!r}: {type(value).__name__} has no {name!r}{suggest(name, fields)}"
        )
    if len(path) == 1:
        new = _parse(text, typing.get_type_hints(type(value))[name], key)
    elif dataclasses.is_dataclass(getattr(value, name)):
        new = _replace(getattr(value, name), path[1:], text, key)
    else:
        raise UsageError(f"unknown key {key!r}: {name} has no fields")
    return dataclasses.replace(value, **{name: new})


def _parse(text: str, annotation, key: str):
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if annotation is str:
        return text
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if annotation is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if typing.get_origin(annotation) is tuple and isinstance(value, list | str):
        value = (value,) if isinstance(value, str) else tuple(value)
    if not _matches(value, annotation):
        wanted = getattr(annotation, "__name__", str(annotation))
        raise UsageError(f"{key} must be {wanted}, not {text!r}")
    return value


def _matches(value, annotation) -> bool:
    origin = typing.get_origin(annotation)
    if origin is tuple:
        inner = typing.get_args(annotation)[0]
        return isinstance(value, tuple) and all(_matches(v, inner) for v in value)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arg) for arg in typing.get_args(annotation))
    return isinstance(value, annotation) and not (annotation is int and isinstance(value, bool))


def resolved(experiment: Experiment) -> str:
    """The whole experiment as JSON: saved with the run, compared on resume."""
    return json.dumps(dataclasses.asdict(experiment), indent=2, sort_keys=True)


def paper_recipe(name: str, model: str, architecture: ModelConfig, split: int, **changes) -> Experiment:
    """The SwiftKV paper's distillation (appendix A.1): its data, 2 epochs, lr 3e-4, weight decay 0.05,
    5 % warm-up, 8192 tokens with separated packing, temperature 2.
    """
    return Experiment(
        **{
            "name": name,
            "model": model,
            "architecture": architecture,
            "plan": PlanConfig(split=split),
            "data": DataConfig(
                sources=PAPER_DATA, split="train", seq_len=8192, batch_size=16, mask="assistant"
            ),
            "evaluation": DataConfig(
                sources=PAPER_DATA,
                split="held_out",
                seq_len=8192,
                batch_size=16,
                mask="assistant",
                limit=2000,
            ),
            "evaluate_every": 500,
            "optimizer": OptimizerConfig(learning_rate=3e-4, weight_decay=0.05, warmup=0.05),
            "epochs": 2,
            **changes,
        }
    )


PAPER_DATA = ("hf://HuggingFaceH4/ultrachat_200k", "hf://teknium/OpenHermes-2.5", "hf://Open-Orca/SlimOrca")
