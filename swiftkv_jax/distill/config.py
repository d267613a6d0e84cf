"""One experiment as data: what is trained, on what, how, and where it goes."""

import dataclasses
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from swiftkv_jax.common.checks import (
    Amount,
    Checked,
    Count,
    Natural,
    Positive,
    Share,
    every,
    integer,
    number,
    one_of,
)
from swiftkv_jax.common.errors import UsageError, suggest
from swiftkv_jax.common.folder import CONFIGS, PACKAGE
from swiftkv_jax.config.model import DTYPES, ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.config.quantization import CHOICES
from swiftkv_jax.core.surgery import INITS
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.trackers import TRACKERS
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION

LEAST_SQUARES = "least_squares"
STARTS = (LEAST_SQUARES, "identity", "uniform")  # of a predictor
MAPS = ("nearest", "spread")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Checked):
    """The plan of a SwiftKV student: where its rows come from.

    Attributes:
      split: number of layers that prompt tokens run; later layers' keys and values are made from the output
        of these. 0 is the plain transformer (for trainable="all").
      share: AcrossKV: number of later layers that share one row of the cache.
      tail: tokens at a prompt's end that run all layers when the student is served. They and generated tokens
        have keys and values of the later layers' own, by the model's own projections, which do not train.
      init: initialisation of the student: "fold" or "copy" (see `to_swiftkv`), or "least_squares": "fold",
        then fit the later layers' keys and values to the teacher's on training data
        (distill/least_squares.py).
      init_tokens: tokens of training data for that fit; rounded up to whole batches.
    """

    section = "plan."
    split: Natural = 0
    share: Count = 1
    tail: Natural = 0
    init: Annotated[str, one_of(*INITS, LEAST_SQUARES)] = LEAST_SQUARES
    init_tokens: Count = 65_536

    def build(self, config: ModelConfig) -> KVPlan:
        return config.plan(self.split, self.share, self.tail) if self.split else config.plan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig(Checked):
    """KV prediction: the auxiliary model that processes prompts, and the start of the predictor.

    Attributes:
      auxiliary: folder or hub id of a model with the same tokenizer; or empty, with `keep`.
      keep: layers of the model itself to make the auxiliary from.
      architecture: shape of `auxiliary`, for --compile-only.
      map: which row of the auxiliary predicts each row of the model, a method of `Prediction`; by default
        "nearest" with `keep`, else "spread".
      tail: tokens at a prompt's end that the model processes itself when it is served.
      init: initialisation of the predictor: "least_squares" (distill/fit_predictor.py), "identity" (if all
        rows have one width), or "uniform" (random).
      init_tokens: tokens of training data for least squares; rounded up to whole batches.
    """

    section = "predict."
    auxiliary: str = ""
    keep: Annotated[tuple[int, ...], every()] = ()
    architecture: ModelConfig | None = None
    map: Annotated[str | None, one_of(*MAPS)] = None
    tail: Count = 1
    init: Annotated[str, one_of(*STARTS)] = LEAST_SQUARES
    init_tokens: Count = 32_768

    def __post_init__(self):
        super().__post_init__()
        if bool(self.auxiliary) == bool(self.keep):
            given = f"both auxiliary {self.auxiliary!r} and keep {self.keep}" if self.keep else "neither"
            raise UsageError(f"predict has {given}: give auxiliary (a folder or id) or keep (layers)")

    def build(self, base: KVPlan, auxiliary: KVPlan) -> Prediction:
        """The map from the rows of `base` to the rows of `auxiliary` that they are predicted from."""
        if (self.map or ("nearest" if self.keep else "spread")) == "spread":
            return Prediction.spread(base.num_rows, auxiliary.num_rows, self.tail)
        kept = {row for layer in self.keep for row in base.read_by(layer)} or range(auxiliary.num_rows)
        return Prediction.nearest(base.num_rows, sorted(kept), self.tail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(Checked):
    """Forward KL at `temperature` times temperature^2 (Hinton et al.), plus optional terms.

    Attributes:
      temperature: softens both distributions of the KL.
      kl_weight: weight of the KL from teacher to student.
      reduction: "mean" over unmasked tokens, or "reference": over all positions, masked ones counting
        as zeros (ArcticTraining).
      hidden_weight: weight of the mean squared error between the hidden states that enter the last layer,
        over all real tokens.
      lm_weight: weight of the cross-entropy with the data.
      exit_weight: weight of the KL from the teacher to an exit head (SwiftKV paper, B.4, where it is 1);
        above 0 the student gets such a head. The gradient of this term reaches only the head.
      chunk_mib: MiB of float32 logits that exist at a time on one device.
    """

    section = "loss."
    temperature: Positive = 2.0
    kl_weight: Amount = 1.0
    hidden_weight: Amount = 0.0
    lm_weight: Amount = 0.0
    exit_weight: Amount = 0.0
    reduction: Annotated[str, one_of("mean", "reference")] = "mean"
    chunk_mib: Positive = 256.0

    def __post_init__(self):
        super().__post_init__()
        if not (self.kl_weight or self.hidden_weight or self.lm_weight or self.exit_weight):
            raise UsageError("loss: the weights of all terms are 0; nothing would be trained")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionLossConfig(LossConfig):
    """The loss of an auxiliary and a predictor (KV prediction paper, 4.3, whose weights are the defaults).

    Attributes:
      kl_weight: weight of the KL from the base to the base on predicted rows; the paper has no such term.
      lm_weight: weight of the cross-entropy of the base on predicted rows.
      aux_weight: weight of the auxiliary's cross-entropy.
      rows_weight: weight of the prediction error: the sum over the base's rows of the mean absolute
        difference of keys (normed, not rotated) and of values. None: 1 / rows. The published code
        (apple/corenet) has 1.
      z_loss: weight of the mean square of the logits' log-sum-exp, added to each cross-entropy; that code has
        1e-4.
    """

    kl_weight: Amount = 0.0
    lm_weight: Amount = 1.0
    aux_weight: Amount = 1.0
    rows_weight: Annotated[float | None, partial(number, least=0)] = None
    z_loss: Amount = 0.0

    def __post_init__(self):
        Checked.__post_init__(self)
        for name in ("hidden_weight", "exit_weight"):
            if getattr(self, name):
                raise UsageError(f"loss.{name} is of a SwiftKV student, not of a predictor: set it to 0")
        if not (self.kl_weight or self.lm_weight or self.rows_weight is None or self.rows_weight):
            raise UsageError("loss: its weights are all 0; no loss would train the predictor")

    def of_rows(self, rows: int) -> float:
        """The weight of the sum over so many rows."""
        return 1 / rows if self.rows_weight is None else self.rows_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """AdamW with warm-up and decay.

    Attributes:
      learning_rate: peak learning rate.
      warmup: share of the steps in which the rate rises linearly from 0.
      schedule: decay after the warm-up: "linear", "cosine", or "constant" (none).
      final_share: learning rate at the last step, as a share of the peak.
      weight_decay: decoupled weight decay of AdamW.
      beta1, beta2: decay rates of Adam's first and second moments.
      clip: the gradient is clipped to this global norm.
      accumulate: number of micro-batches per step, over which the gradient is accumulated; only one at a
        time takes memory.
    """

    section = "optimizer."
    learning_rate: Positive = 3e-4
    warmup: Share = 0.05
    schedule: Annotated[str, one_of("linear", "cosine", "constant")] = "linear"
    final_share: Amount = 0.0
    weight_decay: Amount = 0.05
    beta1: Share = 0.9  # of 1, a mean takes nothing new: 0 / 0 at the first step
    beta2: Share = 0.999
    clip: Positive = 1.0
    accumulate: Count = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each mesh axis; one of them may be -1, for all remaining devices.

    Attributes:
      data: number of devices to split the rows of a micro-batch over.
      fsdp: number of devices to split the rows of a micro-batch and the weights over.
      tensor: number of devices to split heads, FFN and vocabulary over.
      context: number of devices to split the tokens of a row over, for rows too long for one device.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    context: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """One run of `train.py`.

    Attributes:
      name: name of the run, whose default folder is runs/NAME.
      data: training data.
      evaluation: held-out data, with the fields of `data`; None: the student is not evaluated.
      model: folder or hub id of the teacher, or of the base of KV prediction; or empty, with
        `architecture`, to train from random weights.
      architecture: shape of the model, to train from random weights and for --compile-only.
      keep: layers of `model` to keep, for trainable="all"; empty: all.
      tokenizer: folder or hub id of the tokenizer; empty: the model's.
      plan: where the student's rows come from.
      predict: KV prediction instead of a plan.
      loss: the loss terms and their weights.
      optimizer: the optimiser and its schedule.
      mesh: how the work is split over devices.
      attention: the kernel of attention: "native_cpu" (C++, on CPUs), "cudnn" (on GPUs), "splash" (on TPUs),
        "xla" or "reference"; None: what a check on this machine chooses, on CPUs C++ if there is a compiler.
      trainable: what to train: "swiftkv" (norm_swiftkv, q of the upper layers, k and v of the makers of their
        rows; with plan.tail without q), "upper" (all weights of the upper layers: the paper's ablation),
        "all" (plain language-model training), "predictor" (KV prediction: the auxiliary and the predictor of
        `predict`; it takes loss=PredictionLossConfig(...)).
      quantization: of frozen weights: None (as `model` stores them), "int8", "fp8" or "dequantize", see
        `from_pretrained`. KV prediction, and trainable="all", read all weights in `dtype`.
      dtype: dtype of the computation: float32, bfloat16 or float16; trained weights are kept in float32.
      steps: number of optimiser steps; 0: `epochs` passes over the data.
      epochs: passes over the data, if `steps` is 0.
      seed: seed of random weights; the order of the data has its own, `data.seed`.
      remat: recompute activations in the backward pass instead of storing them: less memory, more time.
      log_every: steps between two lines of progress.
      evaluate_every: steps between two evaluations on the held-out data; 0: only at the end.
      checkpoint_every: steps between two checkpoints; 0: only at the end.
      keep_checkpoints: number of newest checkpoints to keep.
      trackers: where to send metrics as well: "tensorboard", "wandb", "trackio", each a separate package.
      export_dtype: dtype of the exported weights.
      evaluation_batches: most batches of held-out data to evaluate on; 0: all.
      eval_lengths: context lengths to evaluate at. For each, held-out documents are cut into pieces of at
        most that length, in rows of `evaluation.seq_len` tokens. Metrics are then named "2048/kl". A length
        is left out if no document is longer than the next smaller one. Empty: one evaluation, of the rows as
        `evaluation` makes them.
      answers: most held-out prompts that student and teacher answer at the end, greedily; 0: none.
    """

    name: str
    data: DataConfig
    evaluation: DataConfig | None = None
    model: str = ""
    architecture: ModelConfig | None = None
    tokenizer: str = ""
    keep: Annotated[tuple[int, ...], every()] = ()
    plan: PlanConfig = PlanConfig()
    predict: PredictConfig | None = None
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    attention: Annotated[str | None, one_of(*CAUSAL_ATTENTION)] = None
    trainable: Annotated[str, one_of("swiftkv", "upper", "all", "predictor")] = "swiftkv"
    quantization: Annotated[str | None, one_of(*CHOICES[1:])] = None
    dtype: Annotated[str, one_of(*DTYPES)] = "bfloat16"
    steps: Natural = 0
    epochs: Count = 1
    seed: Annotated[int, partial(integer, least=-(2**63), most=2**63 - 1)] = 0
    remat: bool = True
    log_every: Count = 10
    evaluate_every: Natural = 0
    evaluation_batches: Natural = 8
    eval_lengths: Annotated[tuple[int, ...], every()] = ()
    answers: Natural = 16
    checkpoint_every: Natural = 200
    keep_checkpoints: Count = 3
    trackers: Annotated[tuple[str, ...], every(one_of(*TRACKERS))] = ()
    export_dtype: Annotated[str, one_of(*DTYPES)] = "bfloat16"

    def __post_init__(self):
        super().__post_init__()
        if not self.model and self.architecture is None:
            raise UsageError("an experiment needs a model (folder or id), or an architecture to begin from")
        predicts, loss = self.predict is not None, self.loss
        if (self.trainable == "predictor") != predicts:
            given = f"predict with trainable={self.trainable!r}" if predicts else "no predict"
            both = 'trainable="predictor" and predict=PredictConfig(...)'
            raise UsageError(f"an experiment with {given}: KV prediction takes both {both}")
        if isinstance(loss, PredictionLossConfig) != predicts:
            wanted = "PredictionLossConfig" if predicts else "LossConfig"
            given = type(loss).__name__
            raise UsageError(f"trainable={self.trainable!r} takes loss={wanted}(...), not {given}")
        if predicts and (not self.model or self.plan != PlanConfig()):
            given = f"plan.split {self.plan.split}, plan.init {self.plan.init}, model {self.model!r}"
            raise UsageError(f'trainable="predictor" is for a model as it is, not {given}: give model alone')
        if self.trainable == "all" and (loss.kl_weight or loss.hidden_weight or loss.exit_weight):
            weights = "loss.kl_weight=0, loss.hidden_weight=0, loss.exit_weight=0, loss.lm_weight=1"
            raise UsageError(f'trainable="all" trains a language model without a teacher: set {weights}')
        for name, given in (("split", self.plan.split), ("tail", self.plan.tail)):
            if self.trainable == "all" and given:
                raise UsageError(f'plan.{name} {given} is not for trainable="all": set it to 0')
        if self.plan.tail and not predicts and loss.exit_weight:
            raise UsageError(f"plan.tail {self.plan.tail} has no exit head: set it or loss.exit_weight to 0")
        if self.trainable in ("swiftkv", "upper") and (not self.model or not self.plan.split):
            raise UsageError(f"trainable={self.trainable!r} distils a model: give model and plan.split")
        if self.keep and (self.trainable != "all" or not self.model):
            raise UsageError(f'keep {self.keep} is of a model whose layers train: give it, trainable="all"')
        self.held_out()
        if self.data.batch_size % self.optimizer.accumulate:
            batch, pieces = self.data.batch_size, self.optimizer.accumulate
            raise UsageError(f"data.batch_size {batch} is not a multiple of optimizer.accumulate {pieces}")

    @property
    def start(self) -> PlanConfig | PredictConfig:
        """The part with the start of new weights: `init` and `init_tokens`."""
        return self.plan if self.predict is None else self.predict

    @property
    def fits_start(self) -> bool:
        """Whether new weights are fitted by least squares before the first step."""
        makes_rows = self.predict is not None or self.plan.split > 0
        return makes_rows and self.start.init == LEAST_SQUARES

    def held_out(self) -> dict[int, DataConfig]:
        """The held-out data by context length, as `eval_lengths` asks for them."""
        if self.evaluation is None:
            if self.eval_lengths:
                raise UsageError(f"eval_lengths {self.eval_lengths} need held-out data: give evaluation")
            return {}
        longest = self.evaluation.seq_len
        for length in self.eval_lengths:
            if not 2 <= length <= longest:
                raise UsageError(f"eval_lengths are 2 to at most evaluation.seq_len {longest}, not {length}")
        return {
            length: dataclasses.replace(self.evaluation, piece_lengths=(length,))
            for length in self.eval_lengths
        } or {longest: self.evaluation}


def load_experiment(path: str | Path) -> Experiment:
    """The `config` that a Python config file defines; it may import the modules beside it, as a script may.

    Running it runs its code: trust it as you would a script.

    Args:
      path: a file, or the bare name of a config that comes with the package: "tiny".
    """
    path = Path(path)
    if not path.is_file():
        names = sorted(file.stem for file in CONFIGS.glob("*.py"))
        bare = path == Path(path.name) and not path.suffix
        if not bare or path.name not in names:
            known = f"; these come with the package: {', '.join(names)}" if bare else ""
            raise UsageError(f"config file {path} does not exist{suggest(path.stem, names) or known}")
        path = CONFIGS / f"{path.name}.py"
    module_spec = importlib.util.spec_from_file_location(f"swiftkv_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"config file {path} is not Python; its name must end in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:
        raise UsageError(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    experiment = getattr(module, "config", None)
    if not isinstance(experiment, Experiment):
        raise UsageError(f"{path} must define `config = Experiment(...)`")
    return experiment


def from_package(experiment: Experiment) -> Experiment:
    """The experiment, with the package's own files in place of missing paths that begin with `demo/`.

    Thus configs that name the demo's model and corpus run in any folder; in a clone nothing changes.
    """
    data = {
        name: dataclasses.replace(config, sources=tuple(map(_in_package, config.sources)))
        for name in ("data", "evaluation")
        if (config := getattr(experiment, name)) is not None
    }
    model, tokenizer = _in_package(experiment.model), _in_package(experiment.tokenizer)
    if (predict := experiment.predict) is not None:
        predict = dataclasses.replace(predict, auxiliary=_in_package(predict.auxiliary))
    return dataclasses.replace(experiment, model=model, tokenizer=tokenizer, predict=predict, **data)


def _in_package(path: str) -> str:
    ours = PACKAGE / path
    return str(ours) if path.startswith("demo/") and not Path(path).exists() and ours.exists() else path


def resolved(experiment: Experiment) -> str:
    """The whole experiment as JSON, saved with the run and compared on resume."""
    return json.dumps(dataclasses.asdict(experiment), indent=2, sort_keys=True)
