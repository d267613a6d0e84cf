"""Run in a process of its own with 8 virtual CPU devices: training and generation on meshes against one
device.

    python sharded_worker.py NAME ...

Prints one JSON object with what each name asks for: "swiftkv MESH", "tail MESH" (with a tail), "all MESH" or
"predictor MESH" (training), "generate MESH", "guess MESH", "experts MESH" (the kernel), where MESH is (data,
fsdp, tensor). "moe-NAME MESH" is the same of a model with experts.
"""

import ast
import dataclasses
import json
import re
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict, sharding, surgery, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import predict_step
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LossConfig, OptimizerConfig, PredictionLossConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.kernels.causal_attention import reference, splash
from swiftkv_jax.kernels.expert_mlp import cases

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
)
MOE = dataclasses.replace(
    CONFIG,
    mlps=("dense", "experts", "experts", "experts"),
    experts=Experts(count=4, per_token=2, width=24, normalise=True, shared=20, shared_gate=True),
)
PLAN, TAIL = KVPlan.swiftkv(4, 2, 2), KVPlan.swiftkv(4, 2, tail=1)


def teacher(config: ModelConfig = CONFIG):
    model = Transformer(config, KVPlan.standard(4))
    params = weights.init(config, model.plan, jax.random.key(0))
    return model, jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, params)


def batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (8, 24)).astype(np.int32)
    segments = np.where(np.arange(24) < rng.integers(6, 20, (8, 1)), 1, 2).astype(np.int32)
    starts = np.argmax(segments == 2, axis=1)[:, None]
    positions = np.where(segments == 2, np.arange(24) - starts, np.arange(24)).astype(np.int32)
    mask = (rng.random((8, 24)) < 0.7).astype(np.float32)
    return Batch(
        tokens=tokens, targets=np.roll(tokens, -1, 1), positions=positions, segments=segments, mask=mask
    )


def predicted():
    """(model, trained, frozen) of KV prediction: two layers of the teacher read for it."""
    base, params = teacher()
    auxiliary, kept = surgery.layer_pruned(base, params, (0, 2))
    model = predict.Predicted(base, auxiliary, Prediction.nearest(4, (0, 2)))
    parts = {"base": params, "auxiliary": kept, "predictor": predict.uniform(model, jax.random.key(1))}
    tree, frozen = predict_step.split(parts)
    return model, steps.masters(tree), frozen


def trained(mesh, trainable: str, config: ModelConfig = CONFIG):
    """Parameters after three steps, their gradients' means (Adam's), and metrics."""
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup=0.0)
    if trainable == "predictor":
        student, tree, frozen = predicted()
        loss = PredictionLossConfig(kl_weight=1.0, chunk_mib=0.01)
    else:
        plan, trainable = (TAIL, "swiftkv") if trainable == "tail" else (PLAN, trainable)
        student, tree, frozen = steps.prepare(*teacher(config), plan, "fold", trainable)
        loss = LossConfig(hidden_weight=0.3, chunk_mib=0.01)
    if trainable == "all":
        loss = LossConfig(kl_weight=0.0, lm_weight=1.0)
    method = predict_step.PREDICT if trainable == "predictor" else steps.DISTIL
    recipe = steps.Recipe(student, loss, optimizer, 10, trainable, remat=True, method=method)
    with jax.set_mesh(mesh):
        places = jax.tree.map(lambda leaf: leaf.sharding, steps.abstract_run(recipe, mesh))
        state = jax.device_put(steps.init_state(recipe, tree), places[0])
        frozen = jax.device_put(frozen, places[1])
        rows = jax.sharding.NamedSharding(mesh, sharding.spec("B ."))
        data = jax.tree.map(partial(jax.device_put, device=rows), batch())
        step = jax.jit(partial(steps.train_step, recipe), out_shardings=(places[0], None))
        for _ in range(3):
            state, metrics = step(frozen, state, data)
    split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.trainable))
    means = optax.tree_utils.tree_get(state.optimizer, "mu")
    return jax.device_get((state.trainable, means, metrics)), split


def generated(mesh, drafts: int = 0, config: ModelConfig = CONFIG):
    """Greedy tokens; `drafts` of them guessed at a time by an exit head, the model's own final one."""
    student, tree, frozen = steps.prepare(*teacher(config), PLAN, "fold", "swiftkv")
    params = steps.merge(tree, frozen.student)
    params["exit"] = {"norm": params["norm"], "lm_head": params["lm_head"]}
    student = dataclasses.replace(student, config=dataclasses.replace(config, exit_head=True))
    place = weights.abstract(student.config, PLAN, jnp.float32, mesh)
    place = jax.tree.map(lambda leaf: leaf.sharding, place)
    llm = LLM.from_model(
        student,
        jax.device_put(params, place),
        mesh=mesh,
        drafts=drafts,
        drafter="exit" if drafts else "prompt",
    )
    prompts = [list(range(1, n)) for n in (5, 17, 2, 9)]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
    )
    assert (llm.stats["accepted_tokens"] > 0) == (drafts > 0)
    return [o.outputs[0].token_ids for o in outputs]


def splash_on_a_mesh(window: int) -> float:
    """The largest difference from the definition, of outputs and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (4, 2, 2, 4)
    q, k, v, slope = (jax.random.normal(key, (2, 512, n, 16)) for key, n in zip(keys, heads, strict=True))
    segments = jnp.stack([jnp.arange(512) // 300, jnp.arange(512) // 70 % 3])

    def both(attend):
        def run(q, k, v, slope):
            out, back = jax.vjp(lambda *x: attend(*x, segments, window, scale=0.25), q, k, v)
            return out, *back(slope)

        return jax.jit(run)(q, k, v, slope)

    want = both(reference.causal_attention)
    with jax.set_mesh(sharding.make_mesh(fsdp=2, tensor=2, context=2)):
        got = both(partial(splash.causal_attention, shards=sharding.SHARDS, interpret=True))
    split = got[0].sharding.shard_shape(got[0].shape)
    assert split == (1, 256, 2, 16), split
    return max(float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True))


def experts_on(mesh) -> dict:
    """The largest difference from the definition, of sums and gradients, relative to the largest number; and
    the all-reduces of the sums."""
    case = dataclasses.replace(cases.SMALL["larger_tiles"], tokens=400)
    args = case.make()[0]
    want = case.expected()
    with jax.set_mesh(mesh):
        run = jax.jit(case.by("xla", sharding.SHARDS))
        got = case.results(run).parts
        alone = dataclasses.replace(case, gradient=False)
        text = jax.jit(alone.by("xla", sharding.SHARDS)).lower(*args).compile().as_text()
    off = {name: float(np.abs(got[name] - y).max() / np.abs(y).max()) for name, y in want.items()}
    return {"worst": max(off.values()), "reduced": len(re.findall(r" all-reduce(?:-start)?\(", text))}


@cache
def alone(what: str, config: ModelConfig):
    """The same on one device; guesses change no token."""
    one = sharding.make_mesh(devices=jax.devices()[:1])
    if what in ("swiftkv", "tail", "all", "predictor"):
        return trained(one, what, config)[0]
    return generated(one, config=config)


def found(what: str, mesh) -> dict:
    config = MOE if what.startswith("moe-") else CONFIG
    what = what.removeprefix("moe-")
    if what == "experts":
        return experts_on(mesh)
    if what in ("generate", "guess"):
        tokens = generated(mesh, 2 * (what == "guess"), config)
        return {"same": tokens == alone("generate", config)}
    if what.startswith("splash"):
        return {"worst": splash_on_a_mesh(int(what.removeprefix("splash")))}
    got, split = trained(mesh, what, config)
    parts = [jax.tree.map(np.subtract, *pair) for pair in zip(got, alone(what, config), strict=True)]
    # For a gradient near 0, rounding decides the sign of Adam's step: parameters are compared by each array's
    # root mean square, which no single number moves; the largest difference has a bound of its own.
    moved = max(float(np.sqrt(np.mean(x**2))) for x in jax.tree.leaves(parts[0]))
    furthest, worst = (
        max(float(np.abs(x).max()) for x in jax.tree.leaves(part)) for part in (parts[0], parts[1:])
    )
    loss = float(np.abs(parts[2]["loss"]))
    return {"moved": moved, "furthest": furthest, "worst": worst, "split": split, "loss": loss}


def main(names: list[str]) -> None:
    asked = {name: name.split(" ", 1) for name in names}
    meshes = {shape: sharding.make_mesh(*ast.literal_eval(shape)) for _, shape in asked.values()}
    json.dump({name: found(what, meshes[shape]) for name, (what, shape) in asked.items()}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
