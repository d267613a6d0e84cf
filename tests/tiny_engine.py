"""Tiny models with odd shapes, a byte tokenizer, the slow definition of greedy decoding, and engines."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.engine.engine import Engine
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

LAYERS, VOCAB, CONTEXT, EOS = 4, 258, 96, 257
PLANS = {
    "standard": KVPlan.standard(LAYERS),
    "swiftkv": KVPlan.swiftkv(LAYERS, 2),
    "acrosskv": KVPlan.swiftkv(LAYERS, 1, 2),  # the last group is shorter
}
_EXPERTS = Experts(count=6, per_token=2, width=16, normalise=True)
_GROUPS = {"router": "noaux_tc", "groups": 3, "top_groups": 2, "scale": 1.5, "shared": 16}
# As small as can be: Mixtral, and DeepSeek-V3. Other names in the place of a plan, which is "acrosskv".
MODELS = {
    "mixtral": {"experts": _EXPERTS, "mlps": ("experts",) * LAYERS, "exit_head": True},
    "deepseek": {
        **{"num_kv_heads": 4, "head_dim": 20, "qk_norm": False, "exit_head": True, "attention_scale": 0.3},
        "latent": Latent(rank=24, query_rank=20, plain=12, rotary=8, value=12),
        "rope": RopeConfig(interleaved=True),
        "mlps": ("dense", *("experts",) * (LAYERS - 1)),
        "experts": dataclasses.replace(_EXPERTS, **_GROUPS),
    },
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "steps_per_launch": 4,
    "page_size": 8,
}
LENGTHS = (1, 45, 3, 20, 33, 2, 17, 8)


class Bytes:
    """UTF-8 bytes as tokens; EOS is special."""

    bos_id, eos_ids, vocab_size = None, (EOS,), VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages, add_generation_prompt: bool) -> list[int]:
        end = "A:" if add_generation_prompt else ""
        return self.encode("".join(f"{m['role'][0]}:{m['content']}|" for m in messages) + end)

    def token_bytes(self, index: int) -> bytes:
        return bytes([index]) if index < 256 else b"</s>"

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "</s>"
        parts, run = [], bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
            else:
                parts += [run.decode(errors="replace"), special]
                run = bytearray()
        return "".join([*parts, run.decode(errors="replace")])


def make_model(plan: KVPlan, seed: int = 0, **fields) -> tuple[Transformer, dict]:
    """Random float32 weights with logits that differ by units; head_dim 20, one kv head, biases."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 20,
        "max_position_embeddings": CONTEXT,
        "qkv_bias": True,
    }
    config = ModelConfig(**(shape | fields))
    make = functools.partial(_loud, random=np.random.default_rng(seed))
    return Transformer(config, plan), jax.tree.map(make, weights.weights(config, plan))


def _loud(weight: weights.Weight, random: np.random.Generator) -> jax.Array:
    """Gains near 1, small biases, and matrices that keep a stream's size whatever their width."""
    noise = random.standard_normal(weight.shape, np.float32)
    if not weight.std:
        return jnp.asarray(weight.fill + 0.2 * noise, jnp.float32)
    if weight.axes == "V D":
        return jnp.asarray(noise)
    width = weight.shape[weight.axes.split().index("D")] if "D" in weight.axes else weight.shape[-2]
    return jnp.asarray((4.0 if weight.axes == "D V" else 1.3) * width**-0.5 * noise, jnp.float32)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Programs compiled or read from the compilation cache so far in the block, counted by JAX itself."""
    found: list[str] = []

    def heard(event: str, seconds: float, **kwargs) -> None:
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def prompts(lengths, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length).tolist() for length in lengths]


@functools.partial(jax.jit, static_argnums=0)
def full_logits(model: Transformer, params, tokens):
    """[B, T, V] of the full forward pass."""
    return model.apply({"params": params}, tokens)


def greedy(model: Transformer, params, prompt: list[int], count: int) -> list[int]:
    """The argmax of the full forward pass over everything so far, `count` times."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(full_logits(model, params, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@functools.cache
def model(plan: str):
    """The model of a plan, or one of MODELS."""
    if plan not in MODELS:
        return make_model(PLANS[plan])
    form = "latent" if "latent" in MODELS[plan] else "kv"
    return make_model(PLANS["acrosskv"].stored_as(form), **MODELS[plan])


def alone(fill, run, cache, prompt: list[int], tail: int, count: int = 10) -> list[int]:
    """Greedy tokens of one prompt alone, unchunked. `fill(tokens, positions, starts, cache)` caches it up to
    its `tail`; `run`, with the last token's index before the cache, gives logits too."""
    ahead, size = max(0, len(prompt) - tail), 64

    def flat(ids, first: int):
        tokens, at = np.zeros(size, np.int32), np.zeros(size, np.int32)
        tokens[: len(ids)], at[: len(ids)] = ids, range(first, first + len(ids))
        return tokens, at, np.array([0, len(ids)], np.int32)

    if ahead:
        cache = fill(*flat(prompt[:ahead], 0), cache)
    given, read, out = prompt[ahead:], ahead, []
    while len(out) < count:
        logits, cache = run(*flat(given, read), np.array([len(given) - 1]), cache)
        read += len(given)
        out.append(int(np.argmax(logits[0])))
        given = out[-1:]
    return out


def in_any_company(make, definition, tail: int) -> None:
    """Check ragged prompts that often begin alike, of 1 and of `tail` tokens too, under chunks, lanes, pages
    and pools of several sizes over NaN: prefix hits, preemptions, and second turns among them.

    `make(**settings)` makes an engine, `definition(prompt)` says what it must answer.
    """
    random, found, counts = np.random.default_rng(5), [], {"prefix_hits": 0, "preemptions": 0}
    shared = prompts((40,), seed=12)[0]
    asked = [[1], [2] * tail]
    for number in range(98):
        begun = shared[: random.integers(0, 32)] if number % 2 else []
        asked.append([*begun, *random.integers(0, 256, random.integers(1, 18)).tolist()])
    setups = (
        {"max_num_batched_tokens": 7, "num_pages": 22},
        {"page_size": 3, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_pages": 30},
        {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_pages": 20, "steps_per_launch": 8},
        {"prefix_caching": False, "steps_per_launch": 1, "drafts": 3},
    )
    for number, setup in enumerate(setups):
        llm, mine = make(**setup), asked[number::4]
        poison(llm)
        answers = tokens(run(llm, mine))
        turns = [[*prompt, *answer, 3] for prompt, answer in zip(mine[:11], answers, strict=False)]
        found += list(zip(mine, answers, strict=True))
        found += list(zip(turns, tokens(run(llm, turns)), strict=True))
        for name in counts:
            counts[name] += llm.stats[name]
        assert all_free(llm.engine)
    assert len(found) == 144 and all(counts.values()), counts
    wrong = [prompt for prompt, answer in found if answer != definition(prompt)]
    assert not wrong


@functools.cache
def definition(plan: str, count: int = 10) -> list[list[int]]:
    return [greedy(*model(plan), prompt, count) for prompt in prompts(LENGTHS)]


def make(plan: str = "acrosskv", **changes) -> LLM:
    return LLM.from_model(*model(plan), Bytes(), **(SIZES | changes))


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def run(llm: LLM, texts=None, params=GREEDY):
    return llm.generate(texts or prompts(LENGTHS), params, use_tqdm=False)


def all_free(engine: Engine) -> bool:
    return not engine.busy and engine.scheduler.pages.available == engine.scheduler.pages.total


def poison(llm: LLM) -> None:
    """NaN in every page of all pools; of integers in their scales."""
    runner = llm.engine.runner

    def poisoned(cache):
        stores = jax.tree.map(lambda x: (x * jnp.nan).astype(x.dtype), cache.stores)
        return dataclasses.replace(cache, stores=stores)

    runner.cache, runner.auxiliary = poisoned(runner.cache), runner.auxiliary and poisoned(runner.auxiliary)
