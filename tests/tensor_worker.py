"""Run in a process of its own with 4 virtual CPU devices: tokens served by several devices, against one's;
and the communication of one decode step."""

import dataclasses
import json
import re
import sys
import tempfile
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swiftkv_jax as skv
from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import predict, sharding, weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.engine import loop
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "head_dim": 8}
GQA = ModelConfig(**SIZES, num_heads=4, num_kv_heads=2, qk_norm=True, family="qwen3")
MHA = ModelConfig(**SIZES, num_heads=4, num_kv_heads=4, qkv_bias=True, family="qwen2")
OLMO2 = ModelConfig(
    **SIZES,
    num_heads=4,
    num_kv_heads=2,
    qk_norm=True,
    qk_norm_whole=True,
    norm_before=False,
    norm_after=True,
    family="olmo2",
)
DEEPSEEK = ModelConfig(
    **SIZES | {"head_dim": 12},
    num_heads=4,
    num_kv_heads=4,
    latent=Latent(rank=16, query_rank=12, plain=8, rotary=4, value=6),
    experts=Experts(count=4, per_token=2, width=16, shared=8),
    mlps=("dense", "experts", "experts"),
    family="deepseek_v2",
)
GPT2 = ModelConfig(
    **SIZES, **FAMILIES["gpt2"].fields, num_heads=4, num_kv_heads=4, family="gpt2", tie_word_embeddings=True
)
PLANS = {
    "standard": skv.KVPlan.standard(3),
    "swiftkv": skv.KVPlan.swiftkv(3, 1),
    "acrosskv": skv.KVPlan.swiftkv(3, 1, 2),
    "tail": skv.KVPlan.swiftkv(3, 1, tail=4),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [np.random.default_rng(n).integers(1, 64, n).tolist() for n in (5, 23, 1, 9)]
ENGINE: dict[str, Any] = {
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 8,
}


def made(config: ModelConfig, plan: skv.KVPlan, form: str = "kv"):
    """A model with sharp logits, and its parameters."""
    model = Transformer(config, plan)
    params = weights.init(config, plan, jax.random.key(1))

    def sharp(x):
        if x.ndim > 2:
            return x * 8
        return x + 0.3 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)  # of gains and biases no two are alike

    params = jax.tree.map(sharp, params)
    return (model, params) if form == "kv" else skv.to_slim(model, params, form)


def predicted(base: ModelConfig, auxiliary: ModelConfig):
    """A model whose prompts another one reads, with a random predictor."""
    large, own = made(base, skv.KVPlan.swiftkv(3, 2))
    small, theirs = made(auxiliary, skv.KVPlan.standard(3))
    model = skv.Predicted(large, small, skv.Prediction((0, 0, 2)))
    predictor = predict.uniform(model, jax.random.key(2))
    return model, {"base": own, "auxiliary": theirs, "predictor": predictor}


def described(model):
    """The tree of `Weight`s."""
    if isinstance(model, skv.Predicted):
        return predict.described(model)
    return weights.weights(model.config, model.plan)


def served(model, params, tensor: int, **settings) -> LLM:
    mesh = sharding.tensor_mesh(tensor)
    place = jax.tree.map(lambda w: sharding.named(mesh, w.axes, w.shape), described(model))
    return LLM.from_model(model, jax.device_put(params, place), mesh=mesh, **ENGINE, **settings)


def tokens(llm: LLM) -> list:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def answers(llm: LLM) -> tuple[list, list[float]]:
    """Tokens that follow the prompts, and the log probabilities of one."""
    scored = zip(PROMPTS[1], llm.score(PROMPTS[1]), strict=True)
    return tokens(llm), [entry[token].logprob for token, entry in scored if entry]


SMALL = dataclasses.replace(MHA, hidden_size=24, num_kv_heads=1)
CASES = {  # name -> (shape, plan, form, devices, settings); of a pair: base, auxiliary, "pair", ...
    "standard on 4": (GQA, PLANS["standard"], "kv", 4, {}),
    "acrosskv by XLA on 2": (GQA, PLANS["acrosskv"], "kv", 2, {"kernels": "attention=xla,fill=xla"}),
    "int8 rows on 4": (GQA, PLANS["acrosskv"], "kv", 4, {"cache_dtype": "int8"}),
    "a tail on 4": (GQA, PLANS["tail"], "kv", 4, {"kernels": "fill=xla"}),
    "keys alone on 4": (MHA, PLANS["swiftkv"], "k", 4, {}),
    "prediction on 4": (GQA, SMALL, "pair", 4, {}),
    "latents and experts on 4": (DEEPSEEK, DEEPSEEK.plan(1, 2), "kv", 4, {}),
    "a norm over all heads on 4": (OLMO2, PLANS["acrosskv"], "kv", 4, {}),
    "values alone on 4": (GPT2, PLANS["swiftkv"], "v", 4, {}),
    "inputs on 4": (GPT2, PLANS["swiftkv"], "x", 4, {}),
    "drafts on 4": (GQA, PLANS["swiftkv"], "kv", 4, {"drafts": 2}),
    "int8 keys alone on 2": (MHA, PLANS["acrosskv"], "k", 2, {"cache_dtype": "int8"}),
    "prediction with int8 rows on 2": (GQA, MHA, "pair", 2, {"cache_dtype": "int8"}),
}


def collectives(llm: LLM) -> dict[str, int]:
    """Counts of collectives in one decode step, and in the loops inside it."""
    engine = llm.engine.runner
    lanes = loop.Lanes(*[np.zeros(4, np.int32)] * 3, np.ones(4, bool), np.zeros((4, 0), np.int32))
    policy, table = engine.seats.policy([], 4, engine.modes[0]), np.zeros((4, engine.arrays.slots), np.int32)
    fixed = (engine.model, engine.modes[0], 8, engine.params)
    text = loop.decode.lower(*fixed, engine.cache, table, lanes, policy).compile().as_text()
    found = re.compile(r"= \S+ (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(")
    bodies = {part.split(" ", 1)[0]: part for part in re.split(r"\n(?=%|ENTRY)", text)}
    loops = re.findall(r"while\(.*?body=%?([\w.\-]+)", text)
    step, *inner = sorted((bodies.get(f"%{name}", "") for name in loops), key=len, reverse=True)
    return {"step": len(found.findall(step)), "inner": sum(len(found.findall(part)) for part in inner)}


def share(llm: LLM) -> float:
    """The first device's share of the pools' bytes."""
    leaves = jax.tree.leaves(llm.engine.runner.cache.stores)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves) / llm.engine.runner.cache.nbytes


def from_folder(folder: str) -> list:
    """Tokens and fingerprint of a model that one device loads, and two."""
    model, params = made(GQA, PLANS["swiftkv"])
    skv.save_pretrained(folder, model, params)
    warnings.simplefilter("ignore", skv.UsageWarning)  # it has no tokenizer
    llms = [LLM(folder, tensor_parallel_size=n, **ENGINE) for n in (1, 2)]
    return [(tokens(llm), llm.fingerprint) for llm in llms]


def flax_on_a_mesh() -> float:
    """How far `apply` and `apply(method="step")` with weights on 4 devices are from one device's logits."""
    model, params = made(GQA, PLANS["acrosskv"])
    tokens = jnp.asarray([PROMPTS[1]])
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2)
    place = jax.tree.map(lambda w: sharding.named(mesh, w.axes, w.shape), described(model))
    sharded, count = jax.device_put(params, place), tokens.shape[1]
    cache = skv.Cache.dense(model.config, model.plan, 1, count, "float32")
    want = jax.jit(model.apply)({"params": params}, tokens)
    with jax.set_mesh(mesh):
        got = jax.jit(model.apply)({"params": sharded}, tokens)
        step = jax.jit(lambda params, *given: model.apply({"params": params}, *given, method="step"))
        every = jnp.arange(count)
        last, _ = step(sharded, tokens[0], every, jnp.array([0, count]), every, cache)
    return max(np.abs(got - want).max().item(), np.abs(last - want[0]).max().item())


def refusal(tensor: int, auxiliary: ModelConfig | None = None) -> str:
    try:
        served(*(predicted(GQA, auxiliary) if auxiliary else made(GQA, PLANS["standard"])), tensor)
    except skv.UsageError as error:
        return str(error)
    return ""


def main() -> None:
    report, alone = {}, {}
    for name, (config, plan, form, tensor, settings) in CASES.items():
        key = repr((config, plan, form, settings))
        model, params = predicted(config, plan) if form == "pair" else made(config, plan, form)
        if key not in alone:
            alone[key] = answers(LLM.from_model(model, params, **ENGINE, **settings))
        llm = served(model, params, tensor, **settings)
        (wanted, scores), (found, scored) = alone[key], answers(llm)
        report[name] = {"same": found == wanted and np.allclose(scored, scores, rtol=0, atol=1e-4)}
        report[name]["share"] = share(llm)
    report["collectives"] = collectives(served(*made(GQA, PLANS["swiftkv"]), 4))
    with tempfile.TemporaryDirectory() as folder:
        one, two = from_folder(folder)
    report["folder"] = {"same": one == two}
    report["flax"] = flax_on_a_mesh()
    report["refused"] = refusal(3), refusal(8), refusal(4, dataclasses.replace(SMALL, num_heads=3))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
