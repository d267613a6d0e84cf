"""config.json as it is published: which fields are read, which must be neutral, which do not matter."""

from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.folder import read_json

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FULL_ATTENTION = 2**30  # a window no sequence fills

# Fields whose value changes the numbers and which this decoder knows only at these values.
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}
# Fields that do not touch the numbers of a forward pass.
_INERT = frozenset(
    "_name_or_path architectures transformers_version use_cache initializer_range pretraining_tp "
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id id2label label2id "
    "problem_type return_dict output_attentions output_hidden_states torchscript use_bfloat16 "
    "tf_legacy_loss task_specific_params finetuning_task tokenizer_class prefix return_dict_in_generate "
    "output_scores max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens begin_suppress_tokens "
    "exponential_decay_length_penalty max_sequence_length _attn_implementation_autoset swiftkv".split()
)
_READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta "
    "rope_scaling rope_parameters torch_dtype dtype attention_bias mlp_bias sliding_window "
    "use_sliding_window max_window_layers layer_types num_key_value_layers key_value_group_size "
    "exit_head".split()
)
# transformers' own defaults, for fields that a published file may leave out.
_QWEN3_HEAD_DIM = 128
_QWEN_MAX_WINDOW_LAYERS = 28
_MISTRAL_WINDOW = 4096
_MOST, _MOST_LAYERS = 2**31 - 1, 4096  # no model is larger; a hostile file may say so
_KINDS = {"full_attention", "sliding_attention"}


def read_config_json(source: Mapping | str | Path) -> Mapping:
    """The dict in config.json; `source` is the dict itself, the file, or the folder it lies in."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    return read_json(path / "config.json" if path.is_dir() else path)


def base_family(raw: Mapping) -> str:
    """`model_type` without the SwiftKV suffix."""
    kind = raw.get("model_type")
    family = str(kind).removesuffix("_swiftkv")
    if family not in FAMILIES:
        raise UsageError(
            f"config.json: model_type {kind!r} is not supported; known: {', '.join(FAMILIES)}, "
            "each also with _swiftkv"
        )
    return family


def is_swiftkv(raw: Mapping) -> bool:
    """Whether the checkpoint is a student: its `model_type` has the suffix."""
    return str(raw.get("model_type")).endswith("_swiftkv")


def check_fields(raw: Mapping) -> None:
    """Refuse a field that is unknown, or that asks for something this decoder does not compute."""
    for name, value in raw.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                allowed = " or ".join(repr(v) for v in _NEUTRAL[name])
                raise UsageError(f"config.json: {name} is {value!r}; only {allowed} is supported")
        elif name not in _READ and name not in _INERT:
            known = [*_READ, *_NEUTRAL, *_INERT]
            hint = suggest(name, known)
            raise UsageError(f"config.json: unknown field {name!r} (it might change the numbers){hint}")


def integer(raw: Mapping, name: str, default: int | None = None) -> int:
    """A positive integer field; `default` stands in when it is absent or null."""
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"config.json: field {name!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"config.json: {name} must be a positive integer, not {value!r}")
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    if value > most:
        raise UsageError(f"config.json: {name} must be at most {most}, not {value}")
    return value


def flag(raw: Mapping, name: str) -> bool:
    """A true-or-false field, false when absent."""
    value = raw.get(name, False)
    if not isinstance(value, bool | None):
        raise UsageError(f"config.json: {name} must be true or false, not {value!r}")
    return bool(value)


def fields_from_hf(family: str, raw: Mapping) -> dict:
    """ModelConfig's fields, all but `rope`."""
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    bias = flag(raw, "attention_bias")
    if bias and family in ("mistral", "qwen2"):
        raise UsageError(f"config.json: attention_bias is true, but {family} has no such choice")
    if flag(raw, "mlp_bias") and family != "llama":
        raise UsageError(f"config.json: mlp_bias is true, but {family} has no MLP biases")
    if flag(raw, "exit_head") and not is_swiftkv(raw):
        raise UsageError(
            f"config.json: exit_head is true, but model_type {raw.get('model_type')!r} is not SwiftKV's"
        )
    eps = raw.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1e30:
        raise UsageError(f"config.json: rms_norm_eps must be a positive number, not {eps!r}")
    return {
        "family": family,
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size"),
        "num_layers": integer(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", heads if family == "llama" else None),
        "head_dim": integer(raw, "head_dim", _QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads),
        "rms_norm_eps": float(eps),
        "max_position_embeddings": integer(raw, "max_position_embeddings"),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings"),
        "qkv_bias": family == "qwen2" or bias,
        "o_bias": bias,
        "mlp_bias": flag(raw, "mlp_bias"),
        "qk_norm": family == "qwen3",
        "windows": _windows_from_hf(family, raw),
        "exit_head": flag(raw, "exit_head"),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    }


def _windows_from_hf(family: str, raw: Mapping) -> tuple[int, ...]:
    """Each layer's window, from the flags or from `layer_types` (which wins, as in transformers)."""
    layers = integer(raw, "num_hidden_layers")
    window = raw.get("sliding_window", _MISTRAL_WINDOW if family == "mistral" else None)
    if family in ("qwen2", "qwen3") and not flag(raw, "use_sliding_window"):
        window = None
    if window is not None and family == "llama":
        raise UsageError(f"config.json: llama has no sliding window, but sliding_window is {window!r}")
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window")
    first = 0 if family == "mistral" else raw.get("max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
    if window is not None and (isinstance(first, bool) or not isinstance(first, int)):
        raise UsageError(f"config.json: max_window_layers must be an integer, not {first!r}")
    types = raw.get("layer_types")
    if types is None:
        return tuple(window if window is not None and j >= first else FULL_ATTENTION for j in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers or not set(map(str, types)) <= _KINDS:
        raise UsageError(
            f"config.json: layer_types must name {' or '.join(sorted(_KINDS))} for {layers} layers"
        )
    if window is None and "sliding_attention" in types:
        raise UsageError("config.json: layer_types has sliding_attention, but no sliding window is in force")
    if window is not None and family == "mistral" and "full_attention" in types:
        raise UsageError("config.json: mistral has its window on every layer; layer_types has full_attention")
    span = FULL_ATTENTION if window is None else window
    return tuple(span if kind == "sliding_attention" else FULL_ATTENTION for kind in types)


def window_fields(family: str, windows: tuple[int, ...]) -> dict:
    """The published fields that describe `windows`; the inverse of the reading above."""
    sliding = [window for window in windows if window != FULL_ATTENTION]
    window = sliding[0] if sliding else None
    if family == "llama":
        return {}
    if family == "mistral":
        return {"sliding_window": window}
    types = ["full_attention" if w == FULL_ATTENTION else "sliding_attention" for w in windows]
    first = next((j for j, kind in enumerate(types) if kind == "sliding_attention"), len(windows))
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": types,
    }
