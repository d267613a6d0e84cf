"""The training step against separate models, naive losses and itself cut into micro-batches."""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import MOE, sized, tiny

from swiftkv_jax.checkpoint.eight_bit import quantised
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core import sharding, weights
from swiftkv_jax.core.cache import Cache, make_batch
from swiftkv_jax.core.ends import embed, logits
from swiftkv_jax.core.layers import dequantised, is_linear, norm
from swiftkv_jax.core.loop import fill, run
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import forward
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import Experiment, LossConfig, OptimizerConfig, PlanConfig
from swiftkv_jax.distill.data.loader import Batch, DataConfig
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common.dispatch import Implementation

CONFIG = sized(61, 32, 40, 5, 4, 2, 12, qkv_bias=True)

# One AcrossKV group mixes layers of two rotary tables and windows; norms on both sides, scales, soft caps.
_LOCAL = RopeConfig(rope_theta=50.0)
MIXED = dataclasses.replace(
    CONFIG,
    norm_after=True,
    windows=(2**30, 7, 7, 2**30, 7),
    ropes=(CONFIG.rope, _LOCAL, _LOCAL, CONFIG.rope, _LOCAL),
    embedding_scale=2.0,
    residual_scale=0.7,
    logits_scale=0.5,
    attention_softcap=2.0,
    logits_softcap=3.0,
)


def teacher_of(seed: int = 0, config: ModelConfig = CONFIG):
    return tiny(config, KVPlan.standard(config.num_layers), seed)


def packed_batch(rows: int = 4, length: int = 21) -> Batch:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 61, (rows, length)).astype(np.int32)
    cut = rng.integers(5, length - 5, rows)
    index = np.arange(length)
    second = index >= cut[:, None]
    segments = np.where(second, 2, 1).astype(np.int32)
    segments[:, -3:] = 0
    positions = np.where(second, index - cut[:, None], index).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    same = np.roll(segments, -1, axis=1) == segments
    mask = (same & (segments > 0) & (rng.random((rows, length)) < 0.8)).astype(np.float32)
    return Batch(*map(jnp.asarray, (tokens, targets, positions, segments, mask)))


def recipe_of(student, trainable="swiftkv", loss=None, **changes):
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0.0, schedule="constant", **changes)
    return steps.Recipe(student, loss or LossConfig(), optimizer, 10, trainable, remat=True)


def prepared(trainable="swiftkv", split=2, share=2, loss=None, config=CONFIG, **changes):
    teacher, params = teacher_of(config=config)
    plan = KVPlan.swiftkv(5, split, share)
    student, trained, frozen = steps.prepare(teacher, params, plan, "fold", trainable)
    return teacher, params, recipe_of(student, trainable, loss, **changes), trained, frozen


def naive(teacher, params, recipe, trained, frozen, batch):
    """Loss from two whole, separate forward passes with all logits at once."""
    merged = steps.merge(trained, frozen.student)

    def full(model, params):
        return logits(model, params, forward(model, params, batch.tokens, batch.positions, batch.segments))

    tau = recipe.loss.temperature
    want = jax.nn.log_softmax(full(teacher, params) / tau)
    got = jax.nn.log_softmax(full(recipe.student, merged) / tau)
    kl = jnp.sum(jnp.exp(want) * (want - got), -1) * batch.mask
    return tau**2 * kl.sum() / batch.mask.sum()


@pytest.mark.slow("upper-1-3", "mixed-1-3")
@pytest.mark.parametrize(
    "trainable, split, share",
    [
        ("swiftkv", 2, 2),
        ("upper", 1, 3),
        ("mixed", 1, 3),
    ],
)
def test_shared_lower_half_gives_the_loss_and_gradients_of_two_models(trainable, split, share):
    mixed = {"trainable": "swiftkv", "config": MIXED} if trainable == "mixed" else {"trainable": trainable}
    teacher, params, recipe, trained, frozen = prepared(split=split, share=share, **mixed)
    batch = packed_batch()
    totals = (batch.mask.sum(), 1.0)
    ours = jax.jit(jax.value_and_grad(lambda t: steps.batch_loss(recipe, t, frozen, batch, totals)[0]))
    plain = jax.jit(jax.value_and_grad(lambda t: naive(teacher, params, recipe, t, frozen, batch)))
    (got, grads), (want, expected) = ours(trained), plain(trained)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, expected)


@pytest.mark.slow("config1")
@pytest.mark.parametrize("config", [CONFIG, MIXED])
def test_with_a_tail_training_computes_what_is_served(config):
    """Each segment alone: what `prompts_of` takes for its prompt is read by `fill`, the rest by the teacher.
    Its own logits, and those of the prompt by rows made at the split."""
    teacher, params = teacher_of(config=config)
    plan, batch = KVPlan.swiftkv(5, 2, tail=1), packed_batch()
    student, trained, frozen = steps.prepare(teacher, params, plan, "copy", "swiftkv")
    trained = jax.tree.map(lambda x: x + 0.1, trained)
    merged, recipe = steps.merge(trained, frozen.student), recipe_of(student)
    paper = Transformer(config, KVPlan.swiftkv(5, 2))
    got = jax.jit(lambda t: steps.hidden_states(recipe, t, frozen, batch, tail=True)[0][0])(trained)
    own, own_params = weights.of_tail(student, merged)
    parts = {weights.keys(path)[0] for path, _ in jax.tree_util.tree_flatten_with_path(trained)[0]}
    assert parts == {"rows", "shared_norm"}, "the queries are the teacher's"

    @partial(jax.jit, static_argnums=1)
    def served(tokens, prompt):
        whole = forward(paper, merged, tokens[None])[0, :prompt]
        if prompt == len(tokens):
            return whole
        cache, at = Cache.dense(config, own.plan, 1, 32, jnp.float32), jnp.arange(len(tokens))
        starts = jnp.array([0, prompt]), jnp.array([0, len(tokens) - prompt])
        cache = fill(student, merged, tokens[:prompt], at[:prompt], starts[0], cache)[-1]
        x = embed(own, own_params, tokens[prompt:], at[prompt:])
        batched = make_batch(starts[1], at[prompt:])
        x = run(own, own_params, x, cache.angles.at(at[prompt:]), batched, cache).x
        return jnp.concatenate([whole, x])

    ahead, lengths = np.asarray(steps.prompts_of(batch)), []
    for row, number in itertools.product(range(4), (1, 2)):
        segment = batch.segments[row] == number
        tokens, prompt = batch.tokens[row][segment], int(ahead[row][segment].sum())
        assert ahead[row][segment][:prompt].all()
        lengths.append(prompt / len(tokens))
        want = norm(config, merged, served(tokens, prompt))
        np.testing.assert_allclose(got[row][segment], want, atol=2e-4)
    assert min(lengths) < 0.3 and max(lengths) > 0.7 and np.std(lengths) > 0.2


@pytest.mark.slow
def test_frozen_weights_in_8_bits():
    """Layers 1 to 3 are in 8 bits, as are rows: what trains starts from q * s, what does not is the teacher's
    own arrays, and the loss is that of the teacher with q * s."""
    teacher, params = teacher_of()
    held = [range(1), range(1, 4), range(4, 5)]

    def eight(p):
        pairs = [quantised(np.asarray(kernel), "int8", "") for kernel in p["kernel"]]
        q, s = (jnp.stack(each) for each in zip(*pairs, strict=True))
        return p | {"kernel": q, "scale": s}

    def cut(stacks):
        first, inner, last = weights.recut(stacks, held)
        part = jax.tree.map(lambda p: eight(p) if is_linear(p) else p, inner, is_leaf=is_linear)
        return [first, part, last]

    params = params | {name: cut(params[name]) for name in ("layers", "rows")}
    plan, batch = KVPlan.swiftkv(5, 2, 2), packed_batch()
    wide = dequantised(params, jnp.float32)
    student, trained, frozen = steps.prepare(teacher, params, plan, "fold", "swiftkv")
    assert not any(path[-1].key == "scale" for path, _ in jax.tree_util.tree_flatten_with_path(trained)[0])
    for tree in (frozen.student, frozen.teacher):
        assert any(x.dtype == jnp.int8 for x in jax.tree.leaves(tree))
    recipe = recipe_of(student)
    _, same, plain = steps.prepare(teacher, wide, plan, "fold", "swiftkv")
    totals = (batch.mask.sum(), 1.0)
    got, want = (
        jax.jit(partial(steps.batch_loss, recipe))(*each, batch, totals)[0]
        for each in ((trained, frozen), (same, plain))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    merged = steps.merge(trained, frozen.student), steps.merge(same, plain.student)
    for layer in range(5):
        mine, theirs = (dequantised(weights.layer(tree, layer), jnp.float32) for tree in merged)
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    state, described = steps.abstract_run(recipe, mesh, (trained, frozen))
    for shapes, arrays in ((state.trainable, trained), (described, frozen)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
            lambda x: (x.shape, x.dtype), arrays
        )


@pytest.mark.slow
def test_reference_reduction_counts_masked_positions():
    *_, recipe, trained, frozen = prepared(loss=LossConfig(reduction="reference"))
    batch = packed_batch()
    state = steps.init_state(recipe, trained)
    _, metrics = jax.jit(partial(steps.train_step, recipe))(frozen, state, batch)
    mean = dataclasses.replace(recipe, loss=LossConfig())
    _, other = jax.jit(partial(steps.train_step, mean))(frozen, state, batch)
    np.testing.assert_allclose(metrics["loss"] * batch.mask.size, other["loss"] * batch.mask.sum(), rtol=1e-5)


@pytest.mark.slow
def test_hidden_loss_compares_the_streams_entering_the_last_layer():
    """Hugging Face's `hidden_states[-2]`: what layer L-1 reads, not what it writes."""
    _, params, recipe, trained, frozen = prepared(loss=LossConfig(kl_weight=0.0, hidden_weight=1.0))
    batch = packed_batch()
    short = dataclasses.replace(CONFIG, num_layers=4, windows=())
    model = Transformer(short, KVPlan.standard(4))
    cut = {name: weights.recut(params[name], [range(4)]) for name in ("layers", "rows")}
    want = forward(model, params | cut, batch.tokens, batch.positions, batch.segments)
    (_, got), (_, teachers), _ = jax.jit(partial(steps.hidden_states, recipe))(trained, frozen, batch)
    np.testing.assert_allclose(teachers, want, atol=1e-5)
    real = (batch.segments > 0)[..., None]
    mse = ((np.asarray(got - want) ** 2) * real).sum() / (real.sum() * CONFIG.hidden_size)
    totals = (batch.mask.sum(), (batch.segments > 0).sum())
    value, _ = jax.jit(partial(steps.batch_loss, recipe))(trained, frozen, batch, totals)
    np.testing.assert_allclose(value, mse, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["swiftkv", "all"])
def test_micro_batches_add_up_to_the_batch(trainable):
    loss = (
        LossConfig(kl_weight=0.0, lm_weight=1.0)
        if trainable == "all"
        else LossConfig(hidden_weight=0.5, lm_weight=0.5)
    )
    *_, recipe, trained, frozen = prepared(trainable, loss=loss)
    batch = packed_batch()
    state = steps.init_state(recipe, trained)
    cut = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, accumulate=2))
    one, metrics = jax.jit(partial(steps.train_step, recipe))(frozen, state, batch)
    two, again = jax.jit(partial(steps.train_step, cut))(frozen, state, batch)
    np.testing.assert_allclose(metrics["loss"], again["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], again["grad_norm"], rtol=1e-4)
    moments = jax.tree.leaves(one.optimizer), jax.tree.leaves(two.optimizer)
    for a, b in zip(*moments, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_training_brings_a_student_nearer_to_any_teacher():
    """One batch again and again, so that no other batch's loss hides it."""
    batch = packed_batch()
    student, *_ = steps.prepare(*teacher_of(), KVPlan.swiftkv(5, 2, 2), "fold", "swiftkv")
    step = jax.jit(partial(steps.train_step, recipe_of(student)))
    for seed in range(3):
        _, trained, frozen = steps.prepare(*teacher_of(seed), KVPlan.swiftkv(5, 2, 2), "fold", "swiftkv")
        state, losses = steps.init_state(recipe_of(student), trained), []
        for _ in range(30):
            state, metrics = step(frozen, state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.5 * losses[0], (seed, losses[::5])


def test_trained_weights_are_exactly_the_papers_list():
    *_, recipe, trained, frozen = prepared()
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(trained)[0]]
    assert {jax.tree_util.keystr(path, simple=True, separator="/") for path in paths} == {
        "shared_norm",
        *(f"rows/1/{m}_proj/{leaf}" for m in "kv" for leaf in ("kernel", "bias")),
        "layers/1/attentions/0/q_proj/kernel",
        "layers/1/attentions/0/q_proj/bias",
    }
    assert recipe.student.plan.depth == weights.ranges(frozen.student["layers"])[1].start
    before = [np.asarray(x).copy() for x in jax.tree.leaves(frozen)]
    state, _ = jax.jit(partial(steps.train_step, recipe))(
        frozen, steps.init_state(recipe, trained), packed_batch()
    )
    assert all(np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(frozen), strict=True))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.trainable))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.trainable, trained)
    still = [path for path, m in jax.tree_util.tree_flatten_with_path(moved)[0] if not m]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in still]
    assert names in ([], ["rows/1/k_proj/bias"])  # a key bias shifts all scores of a query alike


def test_experts_and_routers_stay_as_they_are():
    plan = KVPlan.swiftkv(4, 2)
    student, trained, frozen = steps.prepare(*tiny(MOE, KVPlan.standard(4)), plan, "fold", "swiftkv")
    paths = [weights.keys(path) for path, _ in jax.tree_util.tree_flatten_with_path(trained)[0]]
    assert {path[-2] for path in paths if len(path) > 1} == {"q_proj", "k_proj", "v_proj"}
    assert {path[:2] for path in paths if path[0] == "layers"} == {("layers", 2)}
    recipe = recipe_of(student)
    state, metrics = jax.jit(partial(steps.train_step, recipe))(
        frozen, steps.init_state(recipe, trained), packed_batch()
    )
    assert metrics["grad_norm"] > 0
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), state.trainable, trained)
    assert all(jax.tree.leaves(moved))


def test_student_shares_the_teachers_arrays():
    """Weights that teacher and student share exist once, as the teacher's arrays where its stacks fit."""
    teacher, params = teacher_of()
    plan = KVPlan.swiftkv(5, 2, 2)
    params |= {name: weights.recut(params[name], [range(2), range(2, 5)]) for name in ("layers", "rows")}
    _, trained, frozen = steps.prepare(teacher, params, plan, "fold", "swiftkv")
    kept = {id(leaf) for leaf in jax.tree.leaves((frozen.student, frozen.teacher))}
    assert kept == {id(leaf) for leaf in jax.tree.leaves(params)}
    assert not kept & {id(leaf) for leaf in jax.tree.leaves(trained)}
    once = [leaf.shape for leaf in jax.tree.leaves((frozen.student, frozen.teacher))]
    assert len(once) == len(kept)


def test_evaluation_is_the_models_own():
    teacher, params, recipe, trained, frozen = prepared(split=3)
    batch = packed_batch()
    merged = steps.merge(trained, frozen.student)
    sums = jax.jit(partial(steps.evaluate_batch, recipe))(frozen, trained, batch)

    @partial(jax.jit, static_argnums=0)
    def ce(model, params):
        lg = logits(model, params, forward(model, params, batch.tokens, batch.positions, batch.segments))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(lg), batch.targets[..., None], -1)[..., 0]
        return -(chosen * batch.mask).sum(1), jnp.argmax(lg, -1)

    teachers, best = ce(teacher, params)
    students, chosen = ce(recipe.student, merged)
    np.testing.assert_allclose(sums["teacher"], teachers, rtol=1e-5)
    np.testing.assert_allclose(sums["student"], students, rtol=1e-5)
    np.testing.assert_allclose(sums["agree"], ((best == chosen) * batch.mask).sum(1))


def test_schedule_warms_up_and_decays():
    linear = steps.schedule(OptimizerConfig(learning_rate=1.0, warmup=0.1, schedule="linear"), 100)
    np.testing.assert_allclose(
        [linear(0), linear(5), linear(10), linear(55), linear(100)], [0, 0.5, 1, 0.5, 0], atol=1e-6
    )
    cosine = steps.schedule(
        OptimizerConfig(learning_rate=1.0, warmup=0.0, schedule="cosine", final_share=0.1), 100
    )
    np.testing.assert_allclose([cosine(0), cosine(50), cosine(100)], [1, 0.55, 0.1], atol=1e-6)


def test_every_layer_of_teacher_and_student_runs_the_kernel_that_is_named(monkeypatch):
    """The lower half, the student and the teacher: three runs of layers, each traced once."""
    _, _, recipe, trained, frozen = prepared()
    recipe = dataclasses.replace(recipe, attention="reference")
    called = []

    def counted(*args, **options):
        called.append(options["shards"])
        return CAUSAL_ATTENTION["xla"].run(*args, **options)

    monkeypatch.setitem(CAUSAL_ATTENTION, "reference", Implementation(counted))
    totals = (jnp.float32(1), jnp.float32(1))
    jax.eval_shape(partial(steps.batch_loss, recipe), trained, frozen, packed_batch(), totals)
    assert called == [sharding.SHARDS] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"batch_size": 6}}, "batch_size"),
        ({"data": {"seq_len": 130}}, "rows of 130 tokens are not a multiple of mesh.context 4"),
        ({"evaluation": {"seq_len": 66}}, "rows of 66 tokens are not a multiple of mesh.context 4"),
        ({"attention": "cudnn"}, "attention: cudnn needs a gpu, this is cpu"),
    ],
)
def test_a_mesh_or_a_kernel_that_does_not_fit_is_one_line(changes, message):
    data = DataConfig(sources=("x",), seq_len=128, batch_size=8)
    parts = {"data": data, "evaluation": data, "attention": changes.get("attention")}
    sizes = {name: fields for name, fields in changes.items() if name != "attention"}
    parts |= {name: dataclasses.replace(data, **fields) for name, fields in sizes.items()}
    experiment = Experiment(name="x", model="x", plan=PlanConfig(split=2), **parts)
    with pytest.raises(UsageError, match=message):
        steps.check(experiment, jax.sharding.AbstractMesh((2, 2, 4, 1), sharding.MESH_AXES))
