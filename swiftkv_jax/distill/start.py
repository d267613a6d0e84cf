"""The initial models of a run: from folders, or from shapes alone."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax.checkpoint.adapter import check_tokenizers, save_pretrained
from swiftkv_jax.checkpoint.hf import from_pretrained, local_folder
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.core import predict, surgery, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LEAST_SQUARES, Experiment
from swiftkv_jax.distill.predict_step import PREDICT, split
from swiftkv_jax.text.tokenizer import Tokenizer

Loaded = tuple[Transformer, PyTree]
Student = Transformer | Predicted


def load(experiment: Experiment, folder: Path | None, tokenizer: Tokenizer, mesh: Mesh) -> list[Loaded]:
    """Load the model that is trained, distilled or predicted for, then the auxiliary, if there is one.

    The auxiliary, which reads prompts for the base, is some of its layers, or another model.
    """
    loaded = [load_teacher(experiment, folder, mesh)]
    if (predict := experiment.predict) is not None and predict.keep:
        loaded.append(surgery.layer_pruned(*loaded[0], predict.keep))
    elif predict is not None:
        place = local_folder(predict.auxiliary)
        check_tokenizers(tokenizer.folder, place)
        loaded.append(from_pretrained(place, experiment.dtype, mesh, quantization="dequantize"))
    for name, (model, _) in zip(("model", "auxiliary"), loaded, strict=False):
        check_vocabulary(tokenizer, model.config, name)
        most = model.config.max_position_embeddings
        for part, data in (("data", experiment.data), ("evaluation", experiment.evaluation)):
            if data is not None and model.config.learned_positions and data.seq_len > most:
                raise UsageError(f"{part}.seq_len {data.seq_len} is more than the {name}'s {most} positions")
    return loaded


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, name: str = "model") -> None:
    """Raises UsageError: the tokenizer has tokens without an embedding in the model."""
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, the {name} only {config.vocab_size}"
        raise UsageError(f"the tokenizer has {sizes}: take the model's own (tokenizer= in a config)")


def load_teacher(experiment: Experiment, folder: Path | None, mesh: Mesh) -> Loaded:
    """The model that is trained or distilled: from its folder, or random under `architecture`.

    Its stacks are cut at the plan's depth, so that student and teacher share their arrays.
    """
    if folder is not None:
        stored_plan = plan_from_hf(folder)
        if not stored_plan.is_plain:
            stored = f"{folder} stores rows as {', '.join(stored_plan.forms)} (Slim attention)"
            raise UsageError(f"{stored}, which cannot train: train the plain model, then swiftkv slim")
        config = ModelConfig.from_hf(folder)
        surgery.check_experts(config, mesh.shape["tensor"])
        plan = experiment.plan.build(config)
        cuts = (plan.depth,) if plan.has_shared_norm else ()
        reading = experiment.quantization if experiment.trainable in ("swiftkv", "upper") else "dequantize"
        model, params = from_pretrained(folder, experiment.dtype, mesh, cuts, quantization=reading)
        return surgery.layer_pruned(model, params, experiment.keep) if experiment.keep else (model, params)
    config = experiment.architecture
    assert config is not None  # an Experiment without a model has an architecture
    model = Transformer(config, config.plan(), experiment.dtype)
    tree = weights.abstract(config, model.plan, jnp.float32, mesh)
    make = jax.jit(
        lambda key: weights.init(config, model.plan, key),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, tree),
    )
    return model, make(jax.random.key(experiment.seed))


def prepare(experiment: Experiment, loaded: list[Loaded]) -> tuple[Student, PyTree, steps.Frozen]:
    """(student, trained in fp32, frozen) before any fit."""
    (teacher, params), *auxiliary = loaded
    if experiment.predict is not None:
        config, ((small, theirs),) = experiment.predict, auxiliary
        model = Predicted(teacher, small, config.build(teacher.plan, small.plan))
        same, key = config.init == "identity", jax.random.key(experiment.seed)
        made = predict.identity(model) if same else predict.uniform(model, key)
        trained, frozen = split({"base": params, "auxiliary": theirs, "predictor": made})
        return model, steps.masters(trained), frozen
    plan, init = experiment.plan.build(teacher.config), experiment.plan.init
    if experiment.fits_start and not plan.has_shared_norm:
        raise UsageError(f"plan.split {plan.split} of {plan.num_layers} layers leaves no rows to fit")
    init = "fold" if init == LEAST_SQUARES else init
    exit_head = experiment.loss.exit_weight > 0
    return steps.prepare(teacher, params, plan, init, experiment.trainable, exit_head=exit_head)


def abstract_student(experiment: Experiment) -> Student:
    """The student that `prepare` gives, from configs alone."""
    config = experiment.architecture or ModelConfig.from_hf(experiment.model)
    plan = experiment.plan.build(config)
    config = dataclasses.replace(config, exit_head=experiment.loss.exit_weight > 0)
    model, predict = Transformer(config, plan, experiment.dtype), experiment.predict
    if predict is None:
        return surgery.pruned(model, experiment.keep) if experiment.keep else model
    if predict.keep:
        auxiliary = surgery.pruned(model, predict.keep)
    else:
        config = predict.architecture or ModelConfig.from_hf(predict.auxiliary)
        auxiliary = Transformer(config, config.plan(), experiment.dtype)
    return Predicted(model, auxiliary, predict.build(model.plan, auxiliary.plan))


def make_recipe(experiment: Experiment, student: Student, total: int) -> steps.Recipe:
    """The static part of each of `total` steps."""
    e, method = experiment, steps.DISTIL if experiment.predict is None else PREDICT
    return steps.Recipe(student, e.loss, e.optimizer, total, e.trainable, e.remat, e.attention, method)


def export(
    folder: Path, model: Student, params: PyTree, dtype: str, base: Path | None, tokenizer: Path
) -> None:
    """Save a student in `dtype`: a model's folder, or an adapter to the model in `base`."""
    of_base = {"base": base} if isinstance(model, Predicted) else {}
    save_pretrained(folder, model, params, dtype=dtype, tokenizer=tokenizer, **of_base)
