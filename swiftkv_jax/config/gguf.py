"""The metadata of a GGUF file as the dict that a published config.json would hold.

The keys: docs/gguf.md of ggml, and what llama.cpp's convert_hf_to_gguf.py writes.
"""

import math
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.gguf_header import KINDS, Header, read_header

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")  # llama.cpp calls a Mistral a llama
ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = {"F32": "float32", "F16": "float16"}  # by the commonest form; bfloat16 for all others
# Key, without the architecture's name -> field of config.json.
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}
_OPTIONAL = ("attention.head_count_kv", "attention.key_length")
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_DEEPEST_GEMMA3 = 62  # layers of the 27B, whose scores alone are scaled by another width than a head's
# Features that only other decoders have, under the names that config.json would use.
_FOREIGN = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attention.max_alibi_bias": "alibi",
    "expert_count": "num_experts",
}
_READ_ELSEWHERE = ("attention.value_length", "attention.sliding_window", "rope.dimension_count")
_IGNORED = ("expert_used_count", "tensor_data_layout", "rope.scaling.finetuned")
_SCALING = "rope.scaling."
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_IDS = {"bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}
_CONTROL = 3  # tokenizer.ggml.token_type
# Control tokens that end an answer whatever the keys say, as in llama.cpp.
_ENDS = (
    "<|eot_id|> <|eom_id|> <|end_of_text|> <|im_end|> <|endoftext|> <|end|> <end_of_turn> <EOT> <|EOT|> "
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
).split()
# The published Llama 3.1 to 3.3 differ in `factor` alone.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config_of(path: Path) -> dict:
    """The config.json of the model in a GGUF file."""
    header = read_header(path)
    try:
        return config_dict(header)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def config_dict(header: Header) -> dict:
    """`config_of` for a header; messages lack the file's name."""
    data = header.metadata
    architecture = data.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UsageError(
            f"general.architecture {str(architecture)[:60]!r} is not supported; "
            f"known: {', '.join(ARCHITECTURES)} (mistral is a llama there)"
        )
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in data.items()
        if key.startswith(f"{architecture}.")
    }
    out: dict = {
        "model_type": _family(architecture, data),
        **_sizes(architecture, own, header),
    }
    if architecture == "gemma3":
        width = out["hidden_size"] // out["num_attention_heads"]
        deepest = out["num_hidden_layers"] == _DEEPEST_GEMMA3
        out["query_pre_attn_scalar"] = width if deepest else out["head_dim"]
    else:
        out["hidden_act"] = "silu"
    out |= {field: own[key] for key, field in _FOREIGN.items() if own.get(key)}
    out |= _window(out["model_type"], own)
    out["rope_scaling"] = _scaling(own) or _llama3(header, out)
    out["tie_word_embeddings"] = "output.weight" not in header.tensors
    if architecture in ("llama", "qwen3") and out["model_type"] != "mistral":
        out["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if out["model_type"] == "llama":
        out["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    out["torch_dtype"] = _DTYPES.get(_commonest(header), "bfloat16")
    out |= _token_ids(data)
    known = {*_SIZES, *_NUMBERS, *_FOREIGN, *_READ_ELSEWHERE, *_IGNORED}
    rest = {key: own[key] for key in own if key not in known and not key.startswith("rope.scal")}
    return out | {f"{architecture}.{key}": value for key, value in rest.items()}  # `from_hf` warns of them


def _sizes(architecture: str, own: Mapping, header: Header) -> dict:
    """The fields of _SIZES and _NUMBERS."""
    out = {
        field: checks.integer(f"{architecture}.{key}", own[key], 1)
        for key, field in _SIZES.items()
        if key in own
    }
    out |= {field: own[key] for key, field in _NUMBERS.items() if key in own}
    if "token_embd.weight" not in header.tensors:
        raise UsageError(
            "it has no tensor token_embd.weight; give a whole model, not an adapter or a projector"
        )
    out.setdefault("vocab_size", header.tensors["token_embd.weight"].shape[0])
    needed = [*_SIZES.items(), ("attention.layer_norm_rms_epsilon", "rms_norm_eps")]
    missing = [key for key, field in needed if field not in out and key not in _OPTIONAL]
    if missing:
        raise UsageError(f"{architecture}.{missing[0]} is missing in its metadata")
    out.setdefault("num_key_value_heads", out["num_attention_heads"])
    width = out.setdefault("head_dim", out["hidden_size"] // out["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, width) != width:
            raise UsageError(f"{architecture}.{key} is {own[key]!r}, not the {width} of a head's keys")
    return out


def _window(family: str, own: Mapping) -> dict:
    window = own.get("attention.sliding_window") or None
    if window and family in ("qwen2", "qwen3"):
        raise UsageError(f"{family}.attention.sliding_window does not say which layers have it")
    return {"sliding_window": window} if window or family == "mistral" else {}


def _family(architecture: str, data: Mapping) -> str:
    """`model_type`. Only its name tells a Mistral from a Llama; the computation is the same."""
    if architecture == "gemma3":
        return "gemma3_text"
    names = (str(data.get(f"general.{key}", "")).lower() for key in ("name", "basename"))
    return "mistral" if architecture == "llama" and any("mistral" in name for name in names) else architecture


def _commonest(header: Header) -> str:
    """The form that most elements are stored in."""
    sums: dict[int, int] = {}
    for tensor in header.tensors.values():
        sums[tensor.kind] = sums.get(tensor.kind, 0) + math.prod(tensor.shape)
    return KINDS[max(sums, key=lambda kind: sums[kind])][0]


def _scaling(own: Mapping) -> dict | None:
    """`rope_scaling` from the metadata's keys."""
    given = {key.removeprefix(_SCALING): value for key, value in own.items() if key.startswith(_SCALING)}
    kind, old = given.pop("type", "none"), own.get("rope.scale_linear", 1.0)
    if kind == "none":
        return {"rope_type": "linear", "factor": old} if old != 1.0 else None
    out = {"rope_type": kind, "factor": given.pop("factor", None)}
    given.pop("finetuned", None)
    if kind == "yarn":
        out["original_max_position_embeddings"] = given.pop("original_context_length", None)
        out |= {field: given.pop(key) for key, field in _YARN.items() if key in given}
    else:
        given.pop("original_context_length", None)
    return out | given  # `RopeConfig.from_hf` refuses what it does not know


def _llama3(header: Header, fields: Mapping) -> dict | None:
    """Llama 3.1's scaling, recovered from the factors that its frequencies are divided by."""
    if ROPE_FACTORS not in header.tensors:
        return None
    found = header.floats(ROPE_FACTORS)
    if found.shape != (fields["head_dim"] // 2,) or not (np.isfinite(found).all() and (found > 0.999).all()):
        raise UsageError(f"{ROPE_FACTORS} holds no factors of {fields['head_dim'] // 2} frequencies")
    if (found == 1).all():
        return None
    theta = checks.above("rope.freq_base", fields.get("rope_theta", 10000.0), 0)
    factor = round(float(found.max()), 4)
    if not np.allclose(found, _llama3_factors(theta, fields["head_dim"], factor), rtol=1e-4):
        raise UsageError(
            f"{ROPE_FACTORS} are not Llama 3.1's: only its rope scaling (from {_LLAMA3}) is read from them"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factors(theta: float, width: int, factor: float) -> np.ndarray:
    """Divisors of the frequencies of `width // 2` pairs (transformers, `rope_type` "llama3")."""
    length = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)  # tokens of one turn
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / length - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _token_ids(data: Mapping) -> dict:
    """The ids that end and begin texts, as config.json has them."""
    out: dict[str, typing.Any] = {}
    for key, field in _IDS.items():
        if (value := data.get(f"tokenizer.ggml.{key}")) is not None:
            out[field] = checks.integer(f"tokenizer.ggml.{key}", value, 0)
    names = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
    ends = [checks.integer(name, data[name], 0) for name in names if data.get(name) is not None]
    tokens, kinds = (data.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ends += [index for index, (token, kind) in pairs if kind == _CONTROL and token in _ENDS]
    ends = list(dict.fromkeys(ends))
    if ends:
        out["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return out
