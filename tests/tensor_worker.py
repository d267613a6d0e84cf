"""Run in a process of its own with 4 virtual CPU devices: tokens served by several devices, against one's;
and the communication of one decode step."""

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
from swiftkv_jax import sharding, weights
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.engine import loop, runner
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.model import Transformer

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "head_dim": 8}
GQA = ModelConfig(**SIZES, num_heads=4, num_kv_heads=2, qk_norm=True, family="qwen3")
MHA = ModelConfig(**SIZES, num_heads=4, num_kv_heads=4, qkv_bias=True, family="qwen2")
PLANS = {
    "standard": skv.KVPlan.standard(3),
    "swiftkv": skv.KVPlan.swiftkv(3, 1),
    "acrosskv": skv.KVPlan.swiftkv(3, 1, 2),
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
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, params)
    return skv.to_slim(model, params) if form == "k" else (model, params)


def served(model, params, tensor: int, **settings) -> LLM:
    mesh = sharding.tensor_mesh(tensor)
    place = weights.abstract(model.config, model.plan, jnp.float32, mesh)
    params = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, place))
    return LLM.from_model(model, params, mesh=mesh, **ENGINE, **settings)


def tokens(llm: LLM) -> list:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


CASES = {  # name -> (shape, plan, form, devices, settings)
    "standard on 4": (GQA, PLANS["standard"], "kv", 4, {}),
    "acrosskv by XLA and pages on 2": (GQA, PLANS["acrosskv"], "kv", 2, {"attention": "xla", "fill": "xla"}),
    "int8 rows on 4": (GQA, PLANS["acrosskv"], "kv", 4, {"cache_dtype": "int8"}),
    "keys alone on 4": (MHA, PLANS["swiftkv"], "k", 4, {}),
}
MORE = {
    **{f"{name} on {n}": (GQA, plan, "kv", n, {}) for name, plan in PLANS.items() for n in (2, 4)},
    "keys alone, standard, on 2": (MHA, PLANS["standard"], "k", 2, {}),
    "int8 keys alone on 2": (MHA, PLANS["acrosskv"], "k", 2, {"cache_dtype": "int8"}),
    "drafts on 4": (GQA, PLANS["swiftkv"], "kv", 4, {"drafts": 2}),
}


def collectives(llm: LLM) -> dict[str, int]:
    """Of one decode step, and how many of these stand in a loop inside it."""
    engine = llm.engine.runner
    lanes = loop.Lanes(*[np.zeros(4, np.int32)] * 3, np.ones(4, bool), np.zeros((4, 0), np.int32))
    policy, table = runner._idle_policy(4), np.zeros((4, engine.slots), np.int32)
    fixed = (engine.model, engine.modes[0], 8, engine.params)
    text = loop.decode.lower(*fixed, engine.cache, table, lanes, policy).compile().as_text()
    found = re.compile(r"= \S+ (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(")
    bodies = {part.split(" ", 1)[0]: part for part in re.split(r"\n(?=%|ENTRY)", text)}
    loops = re.findall(r"while\(.*?body=%?([\w.\-]+)", text)
    step, *inner = sorted((bodies.get(f"%{name}", "") for name in loops), key=len, reverse=True)
    return {"step": len(found.findall(step)), "inner": sum(len(found.findall(part)) for part in inner)}


def share(llm: LLM) -> float:
    """Of the pools, what the first device holds."""
    leaves = jax.tree.leaves(llm.engine.runner.cache.stores)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves) / llm.engine.runner.cache.nbytes


def from_folder(folder: str) -> list:
    """Tokens of a model that two devices load."""
    model, params = made(GQA, PLANS["swiftkv"])
    skv.save_pretrained(folder, model, params)
    warnings.simplefilter("ignore", skv.UsageWarning)  # it has no tokenizer
    return [tokens(LLM(folder, tensor_parallel_size=n, **ENGINE)) for n in (1, 2)]


def refusal(tensor: int) -> str:
    try:
        served(*made(GQA, PLANS["standard"]), tensor)
    except skv.UsageError as error:
        return str(error)
    return ""


def main() -> None:
    report, alone = {}, {}
    for name, (config, plan, form, tensor, settings) in (MORE if sys.argv[1:] == ["more"] else CASES).items():
        key = repr((config, plan, form, settings))
        model, params = made(config, plan, form)
        if key not in alone:
            alone[key] = tokens(LLM.from_model(model, params, **ENGINE, **settings))
        llm = served(model, params, tensor, **settings)
        report[name] = {"same": tokens(llm) == alone[key]}
        report[name]["share"] = share(llm)
    if sys.argv[1:] != ["more"]:
        report["collectives"] = collectives(served(*made(GQA, PLANS["swiftkv"]), 4))
        with tempfile.TemporaryDirectory() as folder:
            one, two = from_folder(folder)
        report["folder"] = {"same": one == two}
        report["refused"] = refusal(3), refusal(8)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
