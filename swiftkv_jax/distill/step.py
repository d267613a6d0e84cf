"""What one optimiser step computes: teacher and student from one lower half, and the update."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftkv_jax import params as weights
from swiftkv_jax import sharding
from swiftkv_jax.analysis import flops
from swiftkv_jax.distill import loss as losses
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig
from swiftkv_jax.distill.data import Batch
from swiftkv_jax.kernels.dense import rms_norm
from swiftkv_jax.model import (
    Transformer,
    embed,
    exit_logits,
    fill,
    forward,
    head,
    lower,
    own_rows,
    place,
    upper,
)
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Array, PyTree
from swiftkv_jax.surgery import standard_stacks, to_swiftkv


@pytree
class TrainState:
    """All that changes from step to step; fp32 master copies of what trains."""

    step: Array
    trainable: PyTree
    optimizer: PyTree
    key: Array


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is compiled into a step: hashable, so it is a static argument."""

    student: Transformer
    loss: LossConfig
    optimizer: OptimizerConfig
    steps: int
    trainable: str
    remat: bool

    @property
    def has_teacher(self) -> bool:
        return self.trainable != "all"


def schedule(config: OptimizerConfig, steps: int):
    """Learning rate by step: linear warm-up, then linear, cosine or no decay."""
    warm = max(1, round(config.warmup * steps)) if config.warmup else 0
    rate, end, rest = config.learning_rate, config.learning_rate * config.final_share, max(1, steps - warm)
    decay = {
        "linear": lambda: optax.linear_schedule(rate, end, rest),
        "cosine": lambda: optax.cosine_decay_schedule(rate, rest, config.final_share),
        "constant": lambda: optax.constant_schedule(rate),
    }[config.schedule]()
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warm), decay], [warm]) if warm else decay


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; only matrices (kernels and embeddings) decay."""

    def decays(tree: PyTree) -> PyTree:
        def matrix(path, _):
            return path[-1].key in ("kernel", "embed", "lm_head")

        return jax.tree_util.tree_map_with_path(matrix, tree)

    adamw = optax.adamw(
        schedule(config, steps), config.beta1, config.beta2, weight_decay=config.weight_decay, mask=decays
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def split_trainable(params: PyTree, trainable: str) -> tuple[PyTree, PyTree]:
    """(trained, frozen) of a student's parameters, two trees with disjoint leaves."""
    if trainable == "all":
        return params, {}
    names = set(params["upper"]) if trainable == "upper" else {"q_proj", "q_norm"} & set(params["upper"])
    trained = {n: params[n] for n in ("fill", "exit") if n in params}
    trained["upper"] = {n: params["upper"][n] for n in names}
    rest = {n: p for n, p in params["upper"].items() if n not in names}
    return trained, {n: p for n, p in params.items() if n not in trained} | {"upper": rest}


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
    """The student's parameters again; frozen leaves are the same arrays."""
    both = {"upper": trained["upper"] | frozen["upper"]} if frozen else {}
    return frozen | trained | both


def prepare(
    teacher: Transformer, params: PyTree, plan: KVPlan, init: str, trainable: str, exit_head: bool = False
):
    """(student, trained in fp32, frozen): the frozen tree holds what the student keeps of its teacher, and,
    under "teacher", the teacher's own upper layers, sharing every array the student does not train."""
    if trainable == "all":
        return teacher, _masters(params), {}
    student, student_params = to_swiftkv(teacher, params, plan, init, exit_head)
    trained, frozen = split_trainable(student_params, trainable)
    layers, makers = jax.tree.map(lambda leaf: leaf[plan.depth :], standard_stacks(params))
    shared = {name: student_params["upper"][name] for name in layers}
    return student, _masters(trained), frozen | {"teacher": (shared, makers)}


def _masters(tree: PyTree) -> PyTree:
    """fp32 copies: never the same buffers as the teacher's, because the trained ones are donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), tree)


def init_state(recipe: Recipe, trained: PyTree, seed: int) -> TrainState:
    """The state before the first step."""
    tx = optimizer(recipe.optimizer, recipe.steps)
    return TrainState(jnp.zeros((), jnp.int32), trained, tx.init(trained), jax.random.key(seed))


def weight_trees(student: Transformer, trainable: str) -> tuple[PyTree, PyTree]:
    """(trained, frozen) as trees of `Weight`s, in the shape that `prepare` gives."""
    config, plan = student.config, student.plan
    trained, frozen = split_trainable(weights.weights(config, plan), trainable)
    if trainable == "all":
        return trained, frozen
    count = config.num_layers - plan.depth
    return trained, frozen | {"teacher": (weights.layers(config, count), weights.makers(config, count))}


def abstract_run(recipe: Recipe, mesh: Mesh) -> tuple[TrainState, PyTree]:
    """(state, frozen) as shapes, dtypes and shardings: where everything of a run lies on `mesh`."""

    def place(dtype):
        return lambda w: jax.ShapeDtypeStruct(w.shape, dtype, sharding=sharding.named(mesh, w.axes, w.shape))

    trees = weight_trees(recipe.student, recipe.trainable)
    trained = jax.tree.map(place(jnp.float32), trees[0])
    frozen = jax.tree.map(place(jnp.dtype(recipe.student.dtype)), trees[1])
    state = jax.eval_shape(lambda tree: init_state(recipe, tree, 0), trained)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def whole(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    moments = optax.tree.map_params(
        optimizer(recipe.optimizer, recipe.steps),
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        state.optimizer,
        trained,
        transform_non_params=whole,
    )
    places = {"step": whole(state.step), "trainable": trained, "optimizer": moments, "key": whole(state.key)}
    return dataclasses.replace(state, **places), frozen


def hidden_states(
    recipe: Recipe, trained: PyTree, frozen: PyTree, batch: Batch
) -> tuple[PyTree, PyTree, PyTree]:
    """Normalised hidden states and streams entering the last layer: (student's, teacher's or None); and the
    stream entering the split, None without a teacher.

    The lower half is frozen and the same for both, so it runs once, and no gradient reaches it.
    """
    model = recipe.student
    params = merge(trained, {n: p for n, p in frozen.items() if n != "teacher"})

    def normal(x):
        return rms_norm(x, params["norm"], model.config.rms_norm_eps)

    if not recipe.has_teacher:
        x = forward(model, params, batch.tokens, batch.positions, batch.segments, recipe.remat)
        return (normal(x), x), None, None
    at, segments = place(model, batch.tokens, batch.positions, batch.segments)
    x = sharding.constrain(embed(model, params, batch.tokens), "B T .")
    x = jax.lax.stop_gradient(lower(model, params, x, at, segments))
    got, got_last = upper(model, params, x, fill(model, params, x, at), at, segments, recipe.remat)
    stack = jax.lax.stop_gradient(frozen["teacher"])
    want, want_last = own_rows(model.config, stack, model.plan.depth, x, at, segments)
    return (normal(got), got_last), jax.lax.stop_gradient((normal(want), want_last)), x


def chunk_of(recipe: Recipe, batch: Batch) -> int:
    """Positions per chunk of logits, by what one device holds of the batch."""
    mesh = jax.sharding.get_abstract_mesh()
    shards = 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]
    rows, length = batch.tokens.shape
    return losses.chunk_length(
        -(-rows // shards), length, recipe.student.config.vocab_size, recipe.loss.chunk_mib
    )


def batch_loss(recipe: Recipe, trained: PyTree, frozen: PyTree, batch: Batch, totals) -> tuple[Array, dict]:
    """The loss of one (micro-)batch, already divided by the whole batch's token counts `totals`."""
    config = recipe.loss
    params = merge(trained, {n: p for n, p in frozen.items() if n != "teacher"})
    (h, last), teacher, x = hidden_states(recipe, trained, frozen, batch)
    chunk = chunk_of(recipe, batch)
    counted, real = totals
    parts: dict[str, Array] = {}
    if config.kl_weight:

        def to_logits(h):
            return head(params, h)

        parts["kl"] = (
            losses.kl_sum(to_logits, to_logits, h, teacher[0], batch.mask, config.temperature, chunk)
            / counted
        )
    if config.hidden_weight:
        parts["hidden"] = losses.hidden_sum(last, teacher[1], (batch.segments > 0).astype(jnp.float32)) / real
    if config.lm_weight:
        ce = losses.cross_entropy_sum(lambda h: head(params, h), h, batch.targets, batch.mask, chunk)
        parts["lm"] = ce / counted
    if config.exit_weight:

        def early(kernels, x):
            return exit_logits(recipe.student, {"exit": kernels}, x)

        exits = (early, params["exit"], lambda h: head(params, h), x, teacher[0])
        parts["exit_kl"] = losses.head_kl_sum(*exits, batch.mask, config.temperature, chunk) / counted
    weights = {"kl": config.kl_weight, "hidden": config.hidden_weight, "lm": config.lm_weight}
    weights["exit_kl"] = config.exit_weight
    return sum((weights[name] * value for name, value in parts.items()), jnp.zeros(())), parts


def train_step(recipe: Recipe, frozen: PyTree, state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    """One optimiser step over `optimizer.accumulate` micro-batches; metrics are float32 scalars."""
    pieces = recipe.optimizer.accumulate
    masked = recipe.loss.reduction == "mean"
    counted = jnp.maximum(batch.mask.sum(), 1.0) if masked else jnp.float32(batch.mask.size)
    totals = (counted, jnp.maximum((batch.segments > 0).sum(), 1).astype(jnp.float32))
    grad = jax.value_and_grad(
        lambda trained, piece: batch_loss(recipe, trained, frozen, piece, totals), has_aux=True
    )

    def add(total, piece):
        return jax.tree.map(jnp.add, total, grad(state.trainable, piece)), None

    if pieces == 1:
        (value, parts), grads = grad(state.trainable, batch)
    else:
        cut = jax.tree.map(lambda x: x.reshape(pieces, x.shape[0] // pieces, *x.shape[1:]), batch)
        shapes = jax.eval_shape(grad, state.trainable, jax.tree.map(lambda x: x[0], cut))
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        ((value, parts), grads), _ = jax.lax.scan(add, zero, cut)
    tx = optimizer(recipe.optimizer, recipe.steps)
    updates, opt = tx.update(grads, state.optimizer, state.trainable)
    metrics = {"loss": value, **parts, "grad_norm": optax.tree.norm(grads), "tokens": batch.mask.sum()}
    metrics["lr"] = jnp.asarray(schedule(recipe.optimizer, recipe.steps)(state.step), jnp.float32)
    trained = optax.apply_updates(state.trainable, updates)
    return TrainState(state.step + 1, trained, opt, state.key), metrics


def evaluate_batch(recipe: Recipe, frozen: PyTree, trained: PyTree, batch: Batch) -> dict:
    """Sums over unmasked tokens: student's and teacher's cross-entropy, KL at temperature 1, top-1 agreement.

    Without a teacher, only the student's cross-entropy. With an exit head, its KL to the teacher too, and how
    often its likeliest token is the student's own.
    """
    params = merge(trained, {n: p for n, p in frozen.items() if n != "teacher"})
    (h, _), teacher, x = hidden_states(recipe, trained, frozen, batch)
    want = h if teacher is None else teacher[0]

    def per_chunk(h, want, targets, mask, *x):
        got, ref = head(params, h), head(params, want)
        log_got, log_ref = jax.nn.log_softmax(got), jax.nn.log_softmax(ref)
        sums = {
            "student": losses.cross_entropy(got, targets),
            "teacher": losses.cross_entropy(ref, targets),
            "kl": jnp.sum(jnp.exp(log_ref) * (log_ref - log_got), axis=-1),
            "agree": (jnp.argmax(got, -1) == jnp.argmax(ref, -1)).astype(jnp.float32),
        }
        if x:
            early = exit_logits(recipe.student, params, *x)
            log_early = jax.nn.log_softmax(early)
            sums["exit_kl"] = jnp.sum(jnp.exp(log_ref) * (log_ref - log_early), axis=-1)
            sums["exit_agree"] = (jnp.argmax(early, -1) == jnp.argmax(got, -1)).astype(jnp.float32)
        sums = {name: jnp.sum(x * mask, axis=1) for name, x in sums.items()}
        return sums | {"tokens": jnp.sum(mask, axis=1)}, ()

    arrays = [h, want, batch.targets, batch.mask, *([x] if recipe.student.config.exit_head else [])]
    return losses.over_chunks(per_chunk, chunk_of(recipe, batch), *arrays)[0]


def make_recipe(experiment: Experiment, student: Transformer, steps: int) -> Recipe:
    return Recipe(
        student, experiment.loss, experiment.optimizer, steps, experiment.trainable, experiment.remat
    )


def flops_per_token(recipe: Recipe, seq_len: int) -> float:
    """FLOPs that one step of rows of `seq_len` tokens must do per token: see analysis/flops.py."""
    config, plan = recipe.student.config, recipe.student.plan
    if not recipe.has_teacher:
        return flops.full_training_flops_per_token(config, seq_len)
    return flops.training_flops_per_token(config, plan, seq_len, True, recipe.trainable)
