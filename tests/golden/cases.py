"""The golden cases: models, plans, inputs, and what is written down of each.

Everything is a function of names: a tensor's values follow from its name, a batch's tokens from its size,
so a case is the same on every machine and needs no torch. What the library changes most often is reached
through a few functions only: `plan_of`, `rewired`, `logits_of`, `serve`, `stored_tensors`, `training_step`.
"""

import dataclasses
import json
import tempfile
import zlib
from pathlib import Path

import jax
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LossConfig, OptimizerConfig
from swiftkv_jax.distill.data.loader import Batch

GOLDEN = Path(__file__).with_name("golden.npz")
VOCAB, LAYERS, CONTEXT = 61, 4, 96

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 3e-3,  # large, so that another value shows
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# config.json of each family; windows are shorter than the prompts.
FAMILIES = {
    "llama": {"model_type": "llama", "head_dim": 12},
    "llama_bias_tied": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
    },
    "mistral": {"model_type": "mistral", "hidden_size": 40, "sliding_window": 7, "rms_norm_eps": 1e-2},
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 48,
        "num_key_value_heads": 4,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_theta": 2000.0,
    },
}
# Fields of config.json; contexts shorter than the prompts, so that every kind of scaling is in force.
ROPES: dict[str, dict] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 24},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 2.0,
            "beta_slow": 0.5,
        }
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 0.5,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 24,
        }
    },
}
SAVABLE = ("standard", "swiftkv", "across", "uneven")  # config.json can say these plans
PLANS = (*SAVABLE, "merge_all", "rows", "rows_split")


def plan_of(name: str) -> skv.KVPlan:
    """A plan of LAYERS layers."""
    plan = skv.KVPlan
    match name:
        case "standard":
            return plan.standard(LAYERS)
        case "swiftkv":
            return plan.swiftkv(LAYERS, 2)
        case "across":
            return plan.swiftkv(LAYERS, 2, share=2)
        case "uneven":
            return plan.swiftkv(LAYERS, 1, share=2)  # groups of two layers and of one
        case "merge_all":
            return plan.merge_all(LAYERS)
        case "rows":
            return plan.from_rows((0, 1, 0, 2))  # shared, each row from its first reader's own stream
        case "rows_split":
            return plan.from_rows((0, 1, 1, 2), 2)  # a layer above the split reads a row from below it
    raise ValueError(name)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model under one plan; what else a kind of record needs has a default."""

    family: str
    plan: str
    rope: str = "default"
    cache_dtype: str = "float32"
    trainable: str = "swiftkv"
    init: str = "fold"
    exit_head: bool = False
    accumulate: int = 1

    def __str__(self) -> str:
        odd = [f for f in dataclasses.fields(self)[2:] if getattr(self, f.name) != f.default]
        values = [f"{f.name}={getattr(self, f.name)}" for f in odd if f.name != "rope"]
        return " ".join([self.family, self.plan, self.rope, *values])


# Every family under every plan; the ropes go round, so that each meets every family and every plan.
LOGITS = [
    Case(family, plan, list(ROPES)[(i + j) % len(ROPES)])
    for i, family in enumerate(FAMILIES)
    for j, plan in enumerate(PLANS)
]
# Every family, plan and rope, and each way of storing a row.
SERVED = [
    Case("llama", "standard", "llama3"),
    Case("llama_bias_tied", "swiftkv", "yarn"),
    Case("mistral", "across", "default"),
    Case("qwen2", "uneven", "linear"),
    Case("qwen3", "rows", "dynamic"),
    Case("qwen2", "rows_split", "default"),
    Case("llama", "merge_all", "default"),
    Case("llama", "across", "dynamic", cache_dtype="int8"),
    Case("qwen3", "swiftkv", "llama3", cache_dtype="float8_e4m3fn"),
]
TRAINED = [
    Case("llama", "swiftkv", "default", init="copy"),
    Case("llama_bias_tied", "uneven", "llama3", trainable="upper", exit_head=True),
    Case("mistral", "across", "linear"),
    Case("qwen2", "uneven", "yarn", accumulate=2),
    Case("qwen3", "across", "dynamic"),
    Case("qwen3", "standard", "default", trainable="all"),
]
SAVED = [Case(family, plan) for family in FAMILIES for plan in SAVABLE]
SAVED += [Case(family, "swiftkv", exit_head=True) for family in ("llama_bias_tied", "qwen3")]


def config_json(case: Case) -> dict:
    """The published description of the standard model of a case."""
    return _COMMON | FAMILIES[case.family] | ROPES[case.rope]


def published_tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a standard checkpoint, as transformers writes them."""
    family, d, f = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", d // heads)
    attention_bias = config.get("attention_bias", False)
    linear = {
        "self_attn.q_proj": (heads * head, d, attention_bias or family == "qwen2"),
        "self_attn.k_proj": (kv * head, d, attention_bias or family == "qwen2"),
        "self_attn.v_proj": (kv * head, d, attention_bias or family == "qwen2"),
        "self_attn.o_proj": (d, heads * head, attention_bias),
        "mlp.gate_proj": (f, d, config.get("mlp_bias", False)),
        "mlp.up_proj": (f, d, config.get("mlp_bias", False)),
        "mlp.down_proj": (d, f, config.get("mlp_bias", False)),
    }
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    if family == "qwen3":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (VOCAB, d)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        out |= {f"{stem}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, bias) in linear.items():
            out[f"{stem}{name}.weight"] = (rows, columns)
            if bias:
                out[f"{stem}{name}.bias"] = (rows,)
    return out


def _uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of mean 0 and deviation 1 that follow from `name`: numpy promises Philox's raw bits."""
    raw = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return ((unit - 0.5) * 12**0.5).astype(np.float32).reshape(shape)


def tensor(name: str, shape: tuple[int, ...], tied: bool) -> np.ndarray:
    """Gains spread around 1, biases that count, and matrices that give logits of a few units."""
    noise = _uniform(name, shape)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.3) * noise
    if name.endswith(".bias"):
        return np.float32(0.3) * noise
    if name == "model.embed_tokens.weight":
        return np.float32(0.3 if tied else 0.7) * noise
    loud = 2.0 if name == "lm_head.weight" else 1.2
    return np.float32(loud * shape[1] ** -0.5) * noise


def write_folder(case: Case, folder: Path) -> Path:
    """The standard model of a case as a Hugging Face folder."""
    config = config_json(case)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tied = config["tie_word_embeddings"]
    tensors = {n: tensor(n, s, tied) for n, s in published_tensors(config).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def rewired(case: Case):
    """(model, params) of a case, from a folder on disk."""
    with tempfile.TemporaryDirectory() as folder:
        model, params = skv.from_pretrained(write_folder(case, Path(folder)))
    if case.plan == "standard":
        return model, params
    return skv.to_swiftkv(model, params, plan_of(case.plan), init=case.init, exit_head=case.exit_head)


# Logits of whole sequences.

LENGTH = 40
_SEEN = np.array([0, 1, 6, 9, 17, 24, 33, 39])  # positions that are written down
_IDS = np.array([0, 3, 7, 12, 18, 23, 29, 33, 38, 41, 47, 52, 55, 58, 59, 60])


def tokens_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Token ids that follow from `name`."""
    raw = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return (raw % np.uint64(VOCAB)).astype(np.int32).reshape(shape)


def logits_of(case: Case) -> np.ndarray:
    """Logits [2, 8, 16] of two sequences, at some positions, of some ids."""
    model, params = rewired(case)
    apply = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))
    out = np.asarray(apply(params, tokens_of("logits", (2, LENGTH))))
    return out[:, _SEEN][:, :, _IDS]


# Greedy generation.

OUTPUT = 8
_LENGTHS = (1, 21, 6, 13, 17, 3)
_SIZES = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,  # less than a prompt: chunks
    "max_model_len": 40,
    "steps_per_launch": 4,
    "page_size": 4,
    "num_pages": 14,  # less than three sequences want: preemption
}
# With one row for all layers, a prompt's chunks are not the prompt: each layer finds what the last one left.
_WHOLE = {"max_num_batched_tokens": 64, "num_pages": 30, "prefix_caching": False}


def prompts_of(seed: int) -> list[list[int]]:
    """Ragged prompts; the last two begin with two and with three pages of the second."""
    made = [tokens_of(f"prompt {seed} {i}", (n,)).tolist() for i, n in enumerate(_LENGTHS)]
    return [*made, made[1][:8] + made[2], made[1][:12] + made[5]]


def serve(case: Case, seed: int, logprobs: int | None = None):
    """Greedy completions of `prompts_of(seed)`, OUTPUT tokens each."""
    model, params = rewired(case)
    sizes = _SIZES | {"cache_dtype": case.cache_dtype} | (_WHOLE if case.plan == "merge_all" else {})
    llm = skv.LLM.from_model(model, params, **sizes)
    greedy = skv.SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=logprobs)
    return llm.generate(prompts_of(seed), greedy, use_tqdm=False)


def tokens_served(case: Case, seed: int) -> np.ndarray:
    """Token ids [prompts, OUTPUT]."""
    return np.array([answer.outputs[0].token_ids for answer in serve(case, seed)], np.int32)


# Saved students.


def stored_tensors(case: Case) -> tuple[list[str], bool]:
    """("name shape" of every tensor of a saved student, sorted; whether it loads with the same values)."""
    model, params = rewired(case)
    with tempfile.TemporaryDirectory() as folder:
        skv.save_pretrained(Path(folder) / "saved", model, params)
        written = Path(folder) / "saved" / "model.safetensors"
        before = load_file(written)
        skv.save_pretrained(Path(folder) / "again", *skv.from_pretrained(Path(folder) / "saved"))
        after = load_file(Path(folder) / "again" / "model.safetensors")
    same = before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before)
    return sorted(f"{name} {list(array.shape)}" for name, array in before.items()), same


# One training step.

_ROWS = 4


def packed_batch() -> Batch:
    """Rows of two segments and padding, with one prediction in five masked."""
    shape = (_ROWS, LENGTH // 2)
    tokens, index = tokens_of("batch", shape), np.arange(shape[1])
    cut = np.array([5, 9, 12, 14])[:, None]
    segments = np.where(index >= cut, 2, 1).astype(np.int32)
    segments[:, -2:] = 0
    inside = (np.roll(segments, -1, axis=1) == segments) & (segments > 0)
    learned = tokens_of("mask", shape) % 5 > 0
    arrays = {
        "tokens": tokens,
        "targets": np.where(inside, np.roll(tokens, -1, axis=1), 0),
        "positions": np.where(index >= cut, index - cut, index).astype(np.int32),
        "segments": segments,
        "mask": (inside & learned).astype(np.float32),
    }
    return Batch(**{name: jax.numpy.asarray(array) for name, array in arrays.items()})


def training_step(case: Case) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(loss, norm and parts, gradients by published tensor name) of the first optimiser step.

    The gradient is Adam's first moment after that step, over 1 - beta1. It is named by saving it in the place
    of the parameters; frozen parameters are saved as NaN and left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        teacher, params = skv.from_pretrained(write_folder(case, Path(folder)))
    whole = case.trainable == "all"
    loss = LossConfig(
        kl_weight=0.0 if whole else 1.0,
        hidden_weight=0.0 if whole else 0.5,
        lm_weight=1.0 if whole else 0.25,
        exit_weight=float(case.exit_head),
        chunk_mib=0.01,
    )
    optimizer = OptimizerConfig(
        learning_rate=1e-3, warmup=0.0, schedule="constant", clip=1e9, accumulate=case.accumulate
    )
    student, trained, frozen = steps.prepare(
        teacher, params, plan_of(case.plan), case.init, case.trainable, case.exit_head
    )
    recipe = steps.Recipe(student, loss, optimizer, 10, case.trainable, remat=True)
    state, metrics = jax.jit(steps.train_step, static_argnums=0)(
        recipe, frozen, steps.init_state(recipe, trained), packed_batch()
    )
    moments = optax.tree.get(state.optimizer, "mu")
    grads = jax.tree.map(lambda leaf: np.asarray(leaf) / (1 - optimizer.beta1), moments)
    absent = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), frozen.student)
    with tempfile.TemporaryDirectory() as folder:
        skv.save_pretrained(Path(folder) / "grads", student, steps.merge(grads, absent), dtype="float32")
        named = load_file(Path(folder) / "grads" / "model.safetensors")
    return (
        {name: float(value) for name, value in metrics.items()},
        {name: array for name, array in named.items() if not np.isnan(array).any()},
    )


SAMPLES = 6


def summary(name: str, gradient: np.ndarray) -> np.ndarray:
    """Norm, sum and SAMPLES entries of a gradient, float32."""
    flat = gradient.astype(np.float64).ravel()
    chosen = tokens_of(name, (SAMPLES,)).astype(np.int64) * 7919 % flat.size
    return np.array([np.linalg.norm(flat), flat.sum(), *flat[chosen]], np.float32)
