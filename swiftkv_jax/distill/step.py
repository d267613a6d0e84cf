"""One optimiser step: teacher and student on a shared lower half, and the update."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from swiftkv_jax.analysis import flops
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import scan, sharding, weights
from swiftkv_jax.core.ends import embed, exit_logits, head
from swiftkv_jax.core.layers import dequantised, is_linear, norm
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.pytree import pytree
from swiftkv_jax.core.scan import angles_and_segments, forward, through
from swiftkv_jax.core.shapes import Array, Bool, PyTree
from swiftkv_jax.core.surgery import check_teacher, is_trained, to_swiftkv
from swiftkv_jax.distill import fit_latents, least_squares
from swiftkv_jax.distill import loss as losses
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION, causal_attention
from swiftkv_jax.kernels.common import dispatch


@pytree
class TrainState:
    """Everything that changes from step to step, with fp32 master copies of the trained weights."""

    step: Array
    trainable: PyTree
    optimizer: PyTree


@pytree
class Frozen:
    """The weights that no step changes.

    Attributes:
      student: the student's tree with None in place of trained weights; None when everything trains.
      teacher: {"layers", "rows"}: the teacher's weights where the student trains its own, None where both
        share the student's; and the teacher's rows from the plan's depth on. None without a teacher.
    """

    student: PyTree
    teacher: PyTree


class Method(NamedTuple):
    """The functions that differ between the ways to train; hashable.

    Attributes:
      trees: (student, trainable, made) -> (trained, frozen) as trees of `Weight`s; see `weight_trees`.
      loss: (recipe, trained, frozen, batch, totals) -> (loss, its parts); see `batch_loss`.
      evaluate: (recipe, frozen, trained, batch) -> sums of each row; see `evaluate_batch`.
      fit: (recipe, trained, frozen, batches) -> what trains, with its new rows solved by least squares.
      flops: (recipe, tokens of a row) -> FLOPs a token, and those that remat adds; see `flops_per_token`.
    """

    trees: Callable[..., tuple[PyTree, Frozen]]
    loss: Callable[..., tuple[Array, dict]]
    evaluate: Callable[..., dict]
    fit: Callable[..., PyTree]
    flops: Callable[..., tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The static configuration of a step: hashable, so it can be a static argument of `jit`.

    Attributes:
      student: a Transformer, or a Predicted where the method trains one.
    """

    student: Any
    loss: LossConfig
    optimizer: OptimizerConfig
    steps: int
    trainable: str
    remat: bool
    attention: str | None = None
    method: Method = dataclasses.field(default_factory=lambda: DISTIL)

    @property
    def has_teacher(self) -> bool:
        return self.trainable != "all"


def schedule(config: OptimizerConfig, steps: int):
    """Learning rate by step: linear warm-up, then linear, cosine or no decay."""
    warm = max(1, round(config.warmup * steps)) if config.warmup else 0
    rate, end, rest = config.learning_rate, config.learning_rate * config.final_share, max(1, steps - warm)
    decay = {
        "linear": optax.linear_schedule(rate, end, rest),
        "cosine": optax.cosine_decay_schedule(rate, rest, config.final_share),
        "constant": optax.constant_schedule(rate),
    }[config.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warm), decay], [warm]) if warm else decay


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; only matrices (kernels and embeddings) decay."""
    matrices = ("kernel", "embed", "lm_head")
    adamw = optax.adamw(
        schedule(config, steps),
        config.beta1,
        config.beta2,
        weight_decay=config.weight_decay,
        mask=partial(jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key in matrices),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def split_trainable(model: Transformer, params: PyTree, trainable: str) -> tuple[PyTree, PyTree]:
    """(trained, frozen) of a student's parameters: its tree twice, each None where the other has leaves."""
    chosen = is_trained(model, params, trainable)
    trained = jax.tree.map(lambda leaf, yes: leaf if yes else None, params, chosen)
    return trained, jax.tree.map(lambda leaf, yes: None if yes else leaf, params, chosen)


def merge(first: PyTree, second: PyTree) -> PyTree:
    """Merge two trees of the same parts: each, a projection or another leaf, comes, uncopied, from the tree
    that has it."""
    if second is None:
        return first
    return jax.tree.map(
        lambda a, b: a if jax.tree.leaves(a) else b,
        first,
        second,
        is_leaf=lambda part: part is None or is_linear(part),
    )


def prepare(
    teacher: Transformer, params: PyTree, plan: KVPlan, init: str, trainable: str, exit_head: bool = False
) -> tuple[Transformer, PyTree, Frozen]:
    """(student, trained in fp32, frozen). Every array that the student does not train is the teacher's own,
    if the teacher's stacks are cut at the plan's depth; so 8-bit weights stay so, unless they train."""
    if trainable == "all":
        return teacher, masters(params), Frozen(None, None)
    check_teacher(teacher)
    stacks, _ = weights.partition(
        plan, teacher.config.kinds, {plan.depth, *weights.changes(teacher.plan, params)}
    )
    starts = [run.start for run in stacks]  # the teacher's are cut where the student's are
    layers, rows = weights.partition(plan.full, teacher.config.kinds, starts)
    cut = {"layers": weights.recut(params["layers"], layers), "rows": weights.recut(params["rows"], rows)}
    student, student_params = to_swiftkv(teacher, params | cut, plan, init, exit_head)
    student_params = jax.tree.map(
        lambda p, yes: dequantised(p, jnp.float32) if is_linear(p) and yes["kernel"] else p,
        student_params,
        is_trained(student, student_params, trainable),
        is_leaf=is_linear,
    )
    trained, frozen = split_trainable(student, student_params, trainable)
    return student, masters(trained), Frozen(frozen, _own(student, cut, trainable))


def _own(student: Transformer, tree: PyTree, trainable: str) -> PyTree:
    """The part of the teacher's tree, or of its `Weight`s, that `Frozen.teacher` holds."""
    trained = is_trained(student, {"layers": tree["layers"]}, trainable)
    layers = jax.tree.map(lambda leaf, yes: leaf if yes else None, tree["layers"], trained["layers"])
    rows = zip(weights.ranges(tree["rows"]), tree["rows"], strict=True)
    below = _rows_below(student.plan)
    return {"layers": layers, "rows": [stack for numbers, stack in rows if numbers.start >= below]}


def _rows_below(plan: KVPlan) -> int:
    """How many rows of the teacher the layers below the plan's depth make."""
    return sum(row.maker < plan.depth for row in plan.full.rows)


def masters(tree: PyTree) -> PyTree:
    """fp32 copies. They never share buffers with the teacher, because trained weights are donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), tree)


def init_state(recipe: Recipe, trained: PyTree) -> TrainState:
    """The state before the first step."""
    tx = optimizer(recipe.optimizer, recipe.steps)
    return TrainState(jnp.zeros((), jnp.int32), trained, tx.init(trained))


def fit(recipe: Recipe, trained: PyTree, frozen: Frozen, batches: Iterable[Batch]) -> PyTree:
    """`trained` with the student's upper rows fitted to its teacher's (distill/least_squares.py)."""
    student, params = recipe.student, merge(trained, frozen.student)
    fit = fit_latents.fit if student.config.latent else least_squares.fit
    fitted = fit(student, params, *teacher_of(student, params, frozen), batches)
    return split_trainable(student, fitted, recipe.trainable)[0]


def weight_trees(
    student: Transformer, trainable: str, made: tuple[PyTree, Frozen] | None = None
) -> tuple[PyTree, Frozen]:
    """(trained, frozen) as trees of `Weight`s, in the shape that `prepare` gives, or of what it gave, `made`,
    with its cuts and 8-bit kernels."""
    config, plan = student.config, student.plan
    if trainable == "all":
        return weights.weights(config, plan), Frozen(None, None)
    arrays = None if made is None else merge(made[0], made[1].student)
    if arrays is None:
        tree = weights.weights(config, plan, (plan.depth,))
    else:
        tree = weights.described(config, plan, arrays)
    trained, frozen = split_trainable(student, tree, trainable)
    standard, plain = plan.full, dataclasses.replace(config, exit_head=False)
    teachers = weights.weights(plain, standard, weights.cuts_of(tree))
    if made is None or arrays is None:
        return trained, Frozen(frozen, _own(student, teachers, trainable))
    layers = merge(made[1].teacher["layers"], arrays["layers"])
    own = _own(student, teachers | {"layers": weights.like(teachers["layers"], layers)}, trainable)
    return trained, Frozen(frozen, own | {"rows": weights.like(own["rows"], made[1].teacher["rows"])})


def abstract_run(
    recipe: Recipe, mesh: Mesh, made: tuple[PyTree, Frozen] | None = None, eight_bit: str | None = None
) -> tuple[TrainState, Frozen]:
    """(state, frozen) as shapes, dtypes and shardings: the layout of a run on `mesh`.

    made: what trains and what does not, as `prepare` gave them; the result has their cuts and 8-bit kernels.
    eight_bit: without them, the dtype of frozen kernels, if that is another than the model's.
    """
    trained, kept = recipe.method.trees(recipe.student, recipe.trainable, made)
    kept = Frozen(*(weights.all_in_8_bits(tree, eight_bit) for tree in (kept.student, kept.teacher)))
    trained = weights.shapes(trained, jnp.float32, mesh)
    frozen = weights.shapes(kept, recipe.student.dtype, mesh)
    state = jax.eval_shape(lambda tree: init_state(recipe, tree), trained)
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
    places = {"step": whole(state.step), "trainable": trained, "optimizer": moments}
    return dataclasses.replace(state, **places), frozen


def hidden_states(
    recipe: Recipe, trained: PyTree, frozen: Frozen, batch: Batch, tail: bool = False
) -> tuple[PyTree, PyTree, PyTree]:
    """For the student and for its teacher (None without one), the normalised hidden states and those entering
    the last layer; then the hidden states entering the split, None without a teacher.

    The lower half is frozen and the same for both, so it runs once, and no gradient reaches it. tail: under a
    plan with one, each segment begins with a prompt, see `prompts_of`; else each token ends one.
    """
    model, remat = recipe.student, recipe.remat
    attention = attention_of(recipe)
    params = merge(trained, frozen.student)

    def normal(x):
        return norm(model.config, params, x)

    if not recipe.has_teacher:
        x = forward(model, params, batch.tokens, batch.positions, batch.segments, remat, attention)
        return (normal(x), x), None, None
    angles, segments = angles_and_segments(model.config, batch.tokens, batch.positions, batch.segments)
    x = sharding.constrain(embed(model, params, batch.tokens, batch.positions), "B T .")
    lower, upper = range(model.plan.depth), range(model.plan.depth, model.plan.num_layers)
    ahead = prompts_of(batch) if tail and model.plan.tail else None
    below = jax.lax.stop_gradient(through(model, params, x, angles, segments, lower, attention=attention))
    x = below.x
    student = scan.upper(model, params, below, angles, segments, ahead, remat, attention)
    teacher, own_params = teacher_of(model, params, frozen)
    own_params = jax.lax.stop_gradient(own_params)
    wanted = through(teacher, own_params, x, angles, segments, upper, attention=attention)
    got = normal(student.x), student.entering
    return got, jax.lax.stop_gradient((normal(wanted.x), wanted.entering)), x


def prompts_of(batch: Batch) -> Bool[Array, "B T"]:
    """The tokens of a prompt, with which each segment begins: the share of it that a hash of its tokens
    gives, so that prompts of all lengths occur."""

    def one(tokens, positions, segments):
        total, length = (
            jax.ops.segment_sum(x, segments, segments.shape[0] + 1)
            for x in (tokens.astype(jnp.uint32), jnp.ones_like(segments))
        )
        share = (total * jnp.uint32(2654435769) >> 16).astype(jnp.float32) / 2**16  # Knuth's multiplier
        return positions < (share * length)[segments]

    return jax.vmap(one)(batch.tokens, batch.positions, batch.segments)


def teacher_of(student: Transformer, params: PyTree, frozen: Frozen) -> tuple[Transformer, PyTree]:
    """The teacher from the plan's depth on: it shares the student's weights, except those that train."""
    config, count = dataclasses.replace(student.config, exit_head=False), _rows_below(student.plan)
    below = [{"absent": jnp.zeros((count, 0))}] if count else []  # rows that nothing above them reads
    own_params = {
        "layers": merge(frozen.teacher["layers"], params["layers"]),
        "rows": [*below, *frozen.teacher["rows"]],
    }
    return Transformer(config, config.plan(), student.dtype), own_params


def whole_head(model: Transformer, params: PyTree) -> losses.Head:
    """The function from normalised hidden states to logits, its weights gathered from `fsdp` once for all
    chunks of logits.

    Otherwise the compiler gathers it for each chunk, and all devices' slopes [B, c, V] for its gradient.
    """
    name, axes = ("lm_head", ". V") if "lm_head" in params else ("embed", "V .")
    return partial(head, model.config, {name: sharding.constrain(params[name].astype(model.dtype), axes)})


def attention_of(recipe: Recipe) -> Callable:
    """The attention of every pass: the kernel that is named, sharded as the mesh asks."""
    return partial(causal_attention, implementation=recipe.attention, shards=sharding.SHARDS)


def chunk_of(recipe: Recipe, batch: Batch) -> int:
    """Positions per chunk of logits, from one device's share of the batch."""
    rows, length = batch.tokens.shape
    own = rows // sharding.pieces("B", rows)
    return losses.chunk_length(own, length, recipe.student.config.vocab_size, recipe.loss.chunk_mib)


def batch_loss(recipe: Recipe, trained: PyTree, frozen: Frozen, batch: Batch, totals) -> tuple[Array, dict]:
    """The loss of one (micro-)batch, already divided by the whole batch's token counts `totals`."""
    config = recipe.loss
    params = merge(trained, frozen.student)
    to_logits = whole_head(recipe.student, params)
    (h, last), teacher, x = hidden_states(recipe, trained, frozen, batch, tail=True)
    chunk = chunk_of(recipe, batch)
    counted, real = totals
    parts: dict[str, Array] = {}
    rest = (batch.mask, config.temperature, chunk)
    if config.kl_weight:
        parts["kl"] = losses.kl_sum(to_logits, to_logits, h, teacher[0], *rest) / counted
    if config.hidden_weight:
        parts["hidden"] = losses.hidden_sum(last, teacher[1], (batch.segments > 0).astype(jnp.float32)) / real
    if config.lm_weight:
        (entropy,) = losses.cross_entropy_sums(to_logits, h, batch.targets, batch.mask, chunk)
        parts["lm"] = entropy / counted
    if config.exit_weight:

        def early(kernels, x):
            return exit_logits(recipe.student, {"exit": kernels}, x)

        exit_kl = losses.head_kl_sum(early, params["exit"], to_logits, x, teacher[0], *rest)
        parts["exit_kl"] = exit_kl / counted
    weights = {"kl": config.kl_weight, "hidden": config.hidden_weight, "lm": config.lm_weight}
    weights["exit_kl"] = config.exit_weight
    return sum((weights[name] * value for name, value in parts.items()), jnp.zeros(())), parts


def train_step(recipe: Recipe, frozen: Frozen, state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    """One optimiser step over `optimizer.accumulate` micro-batches; metrics are float32 scalars."""
    pieces = recipe.optimizer.accumulate
    masked = recipe.loss.reduction == "mean"
    counted = jnp.maximum(batch.mask.sum(), 1.0) if masked else jnp.float32(batch.mask.size)
    totals = (counted, jnp.maximum((batch.segments > 0).sum(), 1).astype(jnp.float32))
    grad = jax.value_and_grad(
        lambda trained, piece: recipe.method.loss(recipe, trained, frozen, piece, totals), has_aux=True
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
    return TrainState(state.step + 1, trained, opt), metrics


def evaluate_batch(recipe: Recipe, frozen: Frozen, trained: PyTree, batch: Batch) -> dict:
    """Sums over unmasked tokens: student's and teacher's cross-entropy, KL at temperature 1, top-1 agreement.

    Under a plan with a tail each token is the last of a prompt. Without a teacher the student is compared
    with itself. An exit head adds its KL to the teacher, and how often its likeliest token is the student's.
    """
    params = merge(trained, frozen.student)
    to_logits = whole_head(recipe.student, params)
    (h, _), teacher, x = hidden_states(recipe, trained, frozen, batch)
    want = h if teacher is None else teacher[0]

    def per_chunk(h, want, targets, mask, *x):
        got, ref = to_logits(h), to_logits(want)
        sums = compared(got, ref, targets)
        if x:
            early = exit_logits(recipe.student, params, *x)
            log_early, log_ref = jax.nn.log_softmax(early), jax.nn.log_softmax(ref)
            sums["exit_kl"] = jnp.sum(jnp.exp(log_ref) * (log_ref - log_early), axis=-1)
            sums["exit_agree"] = (jnp.argmax(early, -1) == jnp.argmax(got, -1)).astype(jnp.float32)
        sums = {name: jnp.sum(x * mask, axis=1) for name, x in sums.items()}
        return sums | {"tokens": jnp.sum(mask, axis=1)}, ()

    arrays = [h, want, batch.targets, batch.mask, *([x] if recipe.student.config.exit_head else [])]
    return losses.over_chunks(per_chunk, chunk_of(recipe, batch), *arrays)[0]


def compared(got: Array, ref: Array, targets: Array) -> dict[str, Array]:
    """The evaluation of each token [B, c], from the student's logits `got` and its teacher's `ref`."""
    log_got, log_ref = jax.nn.log_softmax(got), jax.nn.log_softmax(ref)
    return {
        "student": losses.cross_entropy(got, targets),
        "teacher": losses.cross_entropy(ref, targets),
        "kl": jnp.sum(jnp.exp(log_ref) * (log_ref - log_got), axis=-1),
        "agree": (jnp.argmax(got, -1) == jnp.argmax(ref, -1)).astype(jnp.float32),
    }


def check(experiment: Experiment, mesh: Mesh | AbstractMesh) -> None:
    """Check that the mesh (that of `jax.set_mesh`) divides micro-batches evenly and supports the kernel."""
    if (name := experiment.attention) is not None:
        try:
            dispatch.check_name("attention", CAUSAL_ATTENTION, name)
        except dispatch.UnsupportedError as error:
            raise UsageError(str(error)) from None
    rows = experiment.data.batch_size // experiment.optimizer.accumulate
    shards, parts = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["context"]
    if rows % shards:
        micro = f"a micro-batch, data.batch_size / optimizer.accumulate, has {rows} rows"
        raise UsageError(f"{micro}: make it a multiple of {shards}, the mesh's data x fsdp")
    held_out = experiment.evaluation
    if held_out is not None and held_out.batch_size % shards:
        size = held_out.batch_size
        raise UsageError(f"evaluation.batch_size {size} is no multiple of {shards}, the mesh's data x fsdp")
    for data in filter(None, (experiment.data, held_out)):
        if data.seq_len % parts:
            raise UsageError(f"rows of {data.seq_len} tokens are not a multiple of mesh.context {parts}")


def flops_per_token(recipe: Recipe, seq_len: int) -> tuple[float, float]:
    """(FLOPs that one step of rows of `seq_len` tokens must do per token, FLOPs that remat adds): see
    analysis/flops.py."""
    config, plan, trainable = recipe.student.config, recipe.student.plan, recipe.trainable
    again = flops.recomputed_flops_per_token(config, plan, seq_len, trainable) if recipe.remat else 0.0
    if not recipe.has_teacher:
        return flops.full_training_flops_per_token(config, seq_len), again
    return flops.training_flops_per_token(config, plan, seq_len, True, trainable), again


DISTIL = Method(weight_trees, batch_loss, evaluate_batch, fit, flops_per_token)
