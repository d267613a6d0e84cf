"""The exit head from surgery to disk: where it starts, what it learns, and that nothing else moves."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import torch
from safetensors.numpy import load_file

from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.ends import embed, logits
from swiftkv_jax.core.scan import angles_and_segments, forward, through
from swiftkv_jax.core.surgery import to_swiftkv
from swiftkv_jax.core.weights import count
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LossConfig, OptimizerConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.distill.loop import summarise
from swiftkv_jax.distill.run_folder import identity

PLAN, TAU = KVPlan.swiftkv(4, 2, 2), 2.0


PUBLISHED = {"qk_norm": False, "windows": (2**30,) * 4}  # what a llama's config.json can say
LOSSES = LossConfig(exit_weight=1.0, temperature=TAU, chunk_mib=0.004)


def batch() -> Batch:
    random = np.random.default_rng(0)
    ids = random.integers(0, 67, (3, 11)).astype(np.int32)
    segments = np.where(np.arange(11) < 9, 1, 0) * np.ones((3, 1), np.int32)
    mask = ((random.random((3, 11)) < 0.7) & (segments > 0)).astype(np.float32)
    rows = (ids, np.roll(ids, -1, 1), np.broadcast_to(np.arange(11), (3, 11)), segments, mask)
    return Batch(*(jnp.asarray(x.astype(x.dtype if x is mask else np.int32)) for x in rows))


def prepared(loss=LOSSES):
    teacher, params = tiny.tiny(tiny.PLAIN, KVPlan.standard(4))
    student, trained, frozen = steps.prepare(
        teacher, params, PLAN, "fold", "swiftkv", exit_head=loss.exit_weight > 0
    )
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=0.0, schedule="constant")
    recipe = steps.Recipe(student, loss, optimizer, 10, "swiftkv", remat=True)
    if loss.exit_weight:  # away from the start, where the head is a copy
        noise = jax.random.normal(jax.random.key(3), (2, *trained["exit"]["lm_head"].shape))
        trained["exit"]["lm_head"] = trained["exit"]["lm_head"] + 0.1 * noise[0]
        trained["exit"]["norm"] = trained["exit"]["norm"] + 0.1 * noise[1, :, 0]
    return teacher, params, recipe, trained, frozen


def entering_split(model, params, b: Batch):
    at, segments = angles_and_segments(model.config, b.tokens, b.positions, b.segments)
    x = embed(model, params, b.tokens, None)
    return through(model, params, x, at, segments, range(model.plan.depth)).x


@pytest.mark.parametrize("config", [tiny.PLAIN, tiny.ODD], ids=["head", "tied"])
def test_an_exit_head_starts_as_the_teachers_final_norm_and_head(config):
    teacher, params = tiny.tiny(config, KVPlan.standard(4))
    student, tree = to_swiftkv(teacher, params, PLAN, exit_head=True)
    kernel = params["embed"].T if config.tie_word_embeddings else params["lm_head"]
    np.testing.assert_array_equal(tree["exit"]["norm"], params["norm"])
    np.testing.assert_array_equal(tree["exit"]["lm_head"], kernel)
    assert student.config == dataclasses.replace(config, exit_head=True)
    bare, without = to_swiftkv(teacher, params, PLAN)

    def trained(model):
        return count(steps.weight_trees(model, "swiftkv")[0])

    assert "exit" not in without and trained(student) - trained(bare) == 48 * 68


@pytest.mark.slow
def test_the_loss_and_its_gradient_are_torchs_and_reach_the_head_alone():
    """KL at temperature 2 in float64, of a norm and a matrix on the frozen stream entering the split."""
    teacher, params, recipe, trained, frozen = prepared()
    b = batch()
    x = entering_split(recipe.student, steps.merge(trained, frozen.student), b)
    want = logits(teacher, params, forward(teacher, params, b.tokens, b.positions, b.segments))

    def wide(array, grad=False):
        return torch.tensor(np.array(array, np.float64), requires_grad=grad)

    norm, kernel = (wide(trained["exit"][name], grad=True) for name in ("norm", "lm_head"))
    stream, mask = wide(x), wide(b.mask)
    normal = stream * (stream.square().mean(-1, keepdim=True) + tiny.PLAIN.rms_norm_eps).rsqrt() * norm
    target = (wide(want) / TAU).log_softmax(-1)
    got = (normal @ kernel / TAU).log_softmax(-1)
    each = torch.nn.functional.kl_div(got, target, log_target=True, reduction="none").sum(-1)
    value = (each * mask).sum() / mask.sum() * TAU**2
    value.backward()

    totals = (b.mask.sum(), 1.0)
    loss = jax.jit(jax.value_and_grad(lambda t: steps.batch_loss(recipe, t, frozen, b, totals), has_aux=True))
    (total, parts), grads = loss(trained)
    np.testing.assert_allclose(parts["exit_kl"], value.item(), rtol=1e-5)
    np.testing.assert_allclose(total, parts["kl"] + parts["exit_kl"], rtol=1e-6)  # simply summed
    np.testing.assert_allclose(grads["exit"]["norm"], norm.grad.numpy(), atol=1e-5)
    np.testing.assert_allclose(grads["exit"]["lm_head"], kernel.grad.numpy(), atol=1e-5)

    alone = dataclasses.replace(recipe, loss=dataclasses.replace(LOSSES, kl_weight=0.0))
    only = jax.jit(jax.grad(lambda t: steps.batch_loss(alone, t, frozen, b, totals)[0]))(trained)
    rest = {n: g for n, g in only.items() if n != "exit"}
    assert not any(np.any(g) for g in jax.tree.leaves(rest))
    without = dataclasses.replace(recipe, loss=dataclasses.replace(LOSSES, exit_weight=0.0))
    other = jax.jit(jax.grad(lambda t: steps.batch_loss(without, t, frozen, b, totals)[0]))(trained)
    assert not any(np.any(g) for g in jax.tree.leaves(other["exit"]))
    for name in rest:  # what else is trained sees none of the head's loss
        jax.tree.map(lambda a, c: np.testing.assert_allclose(a, c, atol=1e-6), grads[name], other[name])


@pytest.mark.slow
def test_a_step_trains_the_head_in_float32_and_evaluation_measures_it():
    _, _, recipe, trained, frozen = prepared()
    b = batch()
    state, metrics = jax.jit(partial(steps.train_step, recipe))(frozen, steps.init_state(recipe, trained), b)
    assert float(metrics["exit_kl"]) > 0
    for name, leaf in state.trainable["exit"].items():
        assert leaf.dtype == jnp.float32 and np.any(leaf != trained["exit"][name])
    sums = jax.device_get(jax.jit(partial(steps.evaluate_batch, recipe))(frozen, trained, b))
    params = steps.merge(trained, frozen.student)
    x = np.array(entering_split(recipe.student, params, b), np.float64)
    early = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.array(trained["exit"]["norm"], np.float64)
    early = early @ np.array(trained["exit"]["lm_head"], np.float64)
    final = logits(recipe.student, params, forward(recipe.student, params, b.tokens, b.positions, b.segments))
    same = (early.argmax(-1) == np.array(final).argmax(-1)) * np.array(b.mask)
    assert 0 < same.sum() < b.mask.sum()
    np.testing.assert_array_equal(sums["exit_agree"], same.sum(1))
    shown = summarise(sums, True)
    assert shown["exit_agreement"] == pytest.approx(same.sum() / float(b.mask.sum()))
    assert shown["exit_kl"] > 0


def test_round_trip_on_disk_and_nothing_else_changes_its_name(tmp_path):
    for head in (True, False):
        config = dataclasses.replace(tiny.ODD, family="llama", exit_head=head, **PUBLISHED)
        model, params = tiny.tiny(config, PLAN)
        save_pretrained(tmp_path / str(head), model, params)
        again, read = from_pretrained(tmp_path / str(head))
        assert (again.config, again.plan) == (model.config, model.plan) and again.config.exit_head is head
        assert jax.tree.structure(read) == jax.tree.structure(params)
        for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    files = {head: load_file(tmp_path / head / "model.safetensors") for head in ("True", "False")}
    new = {"exit.norm.weight": (48,), "exit.lm_head.weight": (67, 48)}
    assert {n: t.shape for n, t in files["True"].items() if n not in files["False"]} == new
    assert files["False"].keys() <= files["True"].keys()
    raw = {head: json.loads((tmp_path / head / "config.json").read_text()) for head in ("True", "False")}
    assert raw["True"] == raw["False"] | {"exit_head": True} and "exit_head" not in raw["False"]


def test_a_run_that_began_before_the_head_existed_can_be_resumed():
    new = {"loss": {"kl_weight": 1.0, "exit_weight": 0.0}, "architecture": {"exit_head": False, "dtype": "x"}}
    old = {"loss": {"kl_weight": 1.0}, "architecture": {"dtype": "x"}}
    assert identity(new) == identity(old)
    new["loss"]["exit_weight"] = 1.0
    assert identity(new) != identity(old)
