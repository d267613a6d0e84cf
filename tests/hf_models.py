"""Small random transformers models of every family, saved as a user would find them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()

# The argument name of a decoder's cache in transformers: `past_key_values` before 5.24.
_NAMES = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"

BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# The fields of BASE that models without rotary embedding have.
BEFORE_ROPE = "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings".split()
GPT2 = {"eos_token_id": None, "bos_token_id": None}  # its own are no tokens of so small a vocabulary
LONGROPE = {
    "pad_token_id": None,  # Phi-3's own is no token of so small a vocabulary
    "sliding_window": None,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.7],
        "long_factor": [1.1, 1.5, 2.5, 4.0, 6.0, 7.5],
    },
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}

MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
TWO_TABLES = {
    "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
MOE = {"num_experts_per_tok": 3}
QWEN_MOE = MOE | {"num_experts": 7, "moe_intermediate_size": 28}
LATENT = {
    **{"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"q_lora_rank": None, "num_key_value_heads": 4},
}
DEEPSEEK_MOE = MOE | {"moe_intermediate_size": 28, "n_routed_experts": 8, "n_shared_experts": 2}
DEEPSEEK_YARN = YARN | {"mscale": 0.9, "mscale_all_dim": 0.6}
SMALL_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 30, "sliding_window": 7}
# name -> (model_type, fields that differ from BASE)
CASES: dict[str, tuple[str, dict]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3_tied_one_kv_head": (
        "llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 5e5},
    ),
    "llama31_rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 5e5, "head_dim": 20}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama_linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama_dynamic_short": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama_dynamic_long": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    ),
    "llama_yarn": ("llama", {"rope_scaling": YARN, "head_dim": 24}),
    "llama_yarn_mscale": (
        "llama",
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama_yarn_untruncated": (
        "llama",
        {"rope_scaling": YARN | {"truncate": False, "attention_factor": 1.3}},
    ),
    "mistral_window": ("mistral", {"sliding_window": 7, "head_dim": 20, "num_key_value_heads": 1}),
    "qwen2_tied": ("qwen2", {"use_sliding_window": False, "sliding_window": 7, "tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", WINDOWED),
    "qwen2_yarn": ("qwen2", {"rope_scaling": YARN, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 20, "rope_theta": 1e6}),
    "qwen3_bias_window": (
        "qwen3",
        {"head_dim": 24, "attention_bias": True, "num_key_value_heads": 1} | WINDOWED,
    ),
    "gemma": ("gemma", {"head_dim": 20, "num_key_value_heads": 4}),  # 80 columns of 48 inputs, as Gemma-7B
    "gemma_one_kv_head": ("gemma", {"head_dim": 24, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", GPT2),
    "gpt2_wide": ("gpt2", GPT2 | {"n_inner": 72, "tie_word_embeddings": False}),
    "olmo": ("olmo", {"num_key_value_heads": 4}),
    "olmo_clipped": ("olmo", {"clip_qkv": 1.5, "tie_word_embeddings": True, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2_multi_head": ("olmo2", {"num_key_value_heads": 4, "head_dim": 20}),
    "opt": ("opt", {"ffn_dim": 80}),
    "opt_untied": ("opt", {"ffn_dim": 72, "tie_word_embeddings": False}),
    "phi3": ("phi3", {"num_key_value_heads": 4, "sliding_window": 7, "pad_token_id": None}),
    "phi3_longrope_short": ("phi3", LONGROPE | {"original_max_position_embeddings": 100}),
    "phi3_longrope_long": ("phi3", LONGROPE | {"original_max_position_embeddings": 40}),
    "phi3_partial": (  # Phi-4-mini's 0.75 of a head
        "phi3",
        {
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
            "rope_scaling": LONGROPE["rope_scaling"] | {"short_factor": [1.0] * 6},
            "pad_token_id": None,
        },
    ),
    # Windows are shorter than the texts, in an order that no default has.
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 0.8, "final_logit_softcapping": 9.0}),
    "gemma2_biases": ("gemma2", GEMMA | {"attention_bias": True, "num_key_value_heads": 1}),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"layer_types": MIXED, "rope_parameters": TWO_TABLES, "final_logit_softcapping": 9.0},
    ),
    "gemma3_default": ("gemma3_text", GEMMA | {"sliding_window_pattern": 3, "rope_theta": 1e5}),
    "ministral3": (
        "ministral3",
        {"head_dim": 20, "rope_parameters": YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.3}},
    ),
    "smollm3": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 1], "attention_bias": True, "mlp_bias": True} | SMALL_IDS,
    ),
    "smollm3_windows": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7} | SMALL_IDS,
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "seed_oss": ("seed_oss", {"head_dim": 20}),
    "seed_oss_out_bias": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "glm4": ("glm4", {"head_dim": 24, "pad_token_id": None}),
    "glm4_bare": (
        "glm4",
        {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0, "pad_token_id": None},
    ),
    "olmo3": (
        "olmo3",
        {"sliding_window": 7, "layer_types": MIXED, "rope_parameters": TWO_TABLES, "attention_bias": True},
    ),
    "olmo3_default": ("olmo3", {"sliding_window": 7, "rope_theta": 5e5}),
    "mixtral": ("mixtral", MOE | {"num_local_experts": 5, "sliding_window": 7, "head_dim": 20}),
    "mixtral_one": ("mixtral", MOE | {"num_local_experts": 4, "num_experts_per_tok": 1}),
    "qwen2_moe": ("qwen2_moe", QWEN_MOE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE | {"head_dim": 20, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", MOE | {"num_experts": 7, "num_key_value_heads": 4} | SMALL_IDS),
    "deepseek_v2_dense": ("deepseek_v2", LATENT | {"first_k_dense_replace": 4}),
    "deepseek_v2": ("deepseek_v2", LATENT | DEEPSEEK_MOE | {"first_k_dense_replace": 1}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        LATENT
        | DEEPSEEK_MOE
        | {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5, "rope_scaling": DEEPSEEK_YARN},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | DEEPSEEK_MOE
        | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2}
        | {"attention_bias": True, "rope_scaling": DEEPSEEK_YARN},
    ),
    "deepseek_v3_as_moonlight": (
        "deepseek_v3",
        LATENT
        | DEEPSEEK_MOE
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"norm_topk_prob": False, "n_shared_experts": 1},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT
        | DEEPSEEK_MOE
        | {"q_lora_rank": 20, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "exaone4": ("exaone4", {"sliding_window": 7, "sliding_window_pattern": 2}),
}


def make(name: str) -> transformers.PreTrainedModel:
    """The model of one case, float32 on the CPU."""
    family, fields = CASES[name]
    return build(family, **fields)


def build(family: str, seed: int = 0, **fields) -> transformers.PreTrainedModel:
    """A random model whose norms and biases are random too, and whose logits differ by several units."""
    base = {name: BASE[name] for name in BEFORE_ROPE} if family in ("gpt2", "opt") else BASE
    config = transformers.AutoConfig.for_model(family, **(base | fields))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return randomised(model, family, config.tie_word_embeddings, seed)


def wrapped(kind: str, text: dict, vision: dict) -> transformers.PreTrainedModel:
    """The same for a model of images and text."""
    config = transformers.AutoConfig.for_model(kind, text_config=BASE | text, vision_config=vision)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = kind == "gemma3"
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    return randomised(model, kind, config.tie_word_embeddings, 0)


def randomised(model: transformers.PreTrainedModel, family: str, tied: bool, seed: int):
    """The model with random weights."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        chosen = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("correction_bias")]
        for key, weight in [*model.named_parameters(), *chosen]:
            noise = torch.randn(weight.shape, generator=random)
            if key.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "norm" in key or "ln_" in key:
                weight.copy_((not family.startswith("gemma")) + 0.3 * noise)  # Gemma stores its gains less 1
            elif "embed" in key or "wte" in key or "wpe" in key:
                weight.copy_(noise * (0.3 if tied else 1.0))
            else:
                inputs = weight.shape[0 if family == "gpt2" and "lm_head" not in key else 1]
                weight.copy_(noise * (3.0 if "lm_head" in key else 1.3) * inputs**-0.5)
    return model


def save(model: transformers.PreTrainedModel, folder: Path, **options) -> Path:
    """Save as transformers does; returns the folder."""
    model.save_pretrained(folder, **options)
    return folder


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file's tensors by the names of transformers' modules, which hold the experts of a layer together."""
    out, experts = {}, {}
    for name, tensor in tensors.items():
        head, mark, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if mark:
            number, part, _ = rest.split(".")
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)
            experts.setdefault(head, {}).setdefault(part, {})[int(number)] = tensor
        else:
            out[head] = tensor
    for head, parts in experts.items():
        whole = {name: torch.stack([each[i] for i in range(len(each))]) for name, each in parts.items()}
        gate_up = torch.cat([whole["gate_proj"], whole["up_proj"]], dim=1)
        out |= {f"{head}.experts.gate_up_proj": gate_up, f"{head}.experts.down_proj": whole["down_proj"]}
    return out


def load(folder: Path, **options) -> transformers.PreTrainedModel:
    """Load as transformers does."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", **options
    ).eval()


def tokens(length: int = 57, batch: int = 2, seed: int = 0) -> np.ndarray:
    """[batch, length] random token ids of BASE's vocabulary."""
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], (batch, length))


def torch_logits(model: transformers.PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    """[B, T, V] float32 logits of token ids [B, T]."""
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def decided(run: Callable[[], np.ndarray], most: float = 0.02) -> tuple[np.ndarray, np.ndarray]:
    """(the logits [B, T, V] that `run` returns, which of its tokens [B, T] can be compared).

    A token whose last chosen and first rejected expert, or group of experts, are within 1e-5 of each other in
    any router may run other experts by rounding, and all tokens behind it in its text read what it stores. Of
    such ties there may be `most` of all tokens.
    """
    topk, near = torch.topk, []

    def watched(scores, k, *args, **kwargs):
        if scores.ndim == 2 and k < scores.shape[1]:
            best = topk(scores, k + 1).values
            near.append((best[:, -2] - best[:, -1] < 1e-5).numpy())
        return topk(scores, k, *args, **kwargs)

    with mock.patch("torch.topk", watched):
        logits = run()
    near = np.any([np.zeros(logits.shape[0] * logits.shape[1]), *near], axis=0)
    assert near.mean() <= most, f"{near.sum()} ties of routers"
    return logits, ~np.logical_or.accumulate(near.reshape(logits.shape[:2]), axis=1)
