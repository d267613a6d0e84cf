"""What a decoder is made of: read from a Hugging Face config.json, frozen, validated."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.plan import KVPlan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
FULL_ATTENTION = 2**30  # a window no sequence fills

# Fields whose value changes the numbers and which this decoder knows only at these values.
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "tie_encoder_decoder": (False,),
}
# Fields that do not touch the numbers of a forward pass.
_INERT = frozenset(
    "_name_or_path architectures transformers_version use_cache initializer_range pretraining_tp bos_token_id "
    "eos_token_id pad_token_id sep_token_id decoder_start_token_id id2label label2id problem_type return_dict "
    "output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss task_specific_params "
    "finetuning_task tokenizer_class prefix return_dict_in_generate output_scores max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens "
    "begin_suppress_tokens exponential_decay_length_penalty _attn_implementation_autoset swiftkv".split()
)
_READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta rope_scaling rope_parameters "
    "torch_dtype dtype attention_bias mlp_bias sliding_window use_sliding_window max_window_layers layer_types "
    "num_key_value_layers key_value_group_size".split()
)
_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        "factor original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim truncate".split()
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; field names as in config.json's `rope_parameters`.

    `attention_factor` multiplies cos and sin (yarn), already worked out from `mscale` where those are given.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        if self.rope_type not in _ROPE_FIELDS:
            raise UsageError(f"rope_type {self.rope_type!r} is not supported; known: {', '.join(_ROPE_FIELDS)}")
        for name in ("rope_theta", "factor"):
            value = getattr(self, name)
            if not value > 0 or not math.isfinite(value):
                raise UsageError(f"{name} must be positive and finite, not {value}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings <= 0:
            raise UsageError(f"rope_type {self.rope_type!r} needs original_max_position_embeddings in rope_scaling")
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise UsageError(
                f"llama3 rope scaling needs high_freq_factor > low_freq_factor > 0, not "
                f"{self.high_freq_factor} and {self.low_freq_factor}"
            )

    @classmethod
    def from_hf(cls, raw: Mapping) -> "RopeConfig":
        """From either spelling: `rope_theta` + `rope_scaling` (published), or `rope_parameters` (transformers 5)."""
        fields = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
        fields.pop("type", None)
        theta = float(fields.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
        if fields.pop("partial_rotary_factor", 1.0) not in (1, 1.0, None):
            raise UsageError("config.json: partial_rotary_factor other than 1.0 is not supported")
        if kind not in _ROPE_FIELDS:
            raise UsageError(f"config.json: rope_type {kind!r} is not supported; known: {', '.join(_ROPE_FIELDS)}")
        unknown = sorted(set(fields) - _ROPE_FIELDS[kind])
        if unknown:
            raise UsageError(f"config.json: rope_type {kind!r} does not take {', '.join(unknown)}")
        context = raw.get("max_position_embeddings")
        if kind == "yarn":
            fields = _yarn_fields(fields, context)
        if kind != "default" and not fields.get("factor"):
            raise UsageError(f"config.json: rope_type {kind!r} needs a factor")
        return cls(rope_type=kind, rope_theta=theta, **{k: v for k, v in fields.items() if v is not None})

    def to_hf(self) -> dict | None:
        """The `rope_scaling` dict of a published config.json; None for plain rotary."""
        if self.rope_type == "default":
            return None
        names = _ROPE_FIELDS[self.rope_type] - {"mscale", "mscale_all_dim"}
        return {"rope_type": self.rope_type} | {n: getattr(self, n) for n in sorted(names) if getattr(self, n) or n == "truncate"}


def _yarn_fields(fields: dict, context: int) -> dict:
    """Yarn's derived factors (arXiv 2309.00071; `mscale` as DeepSeek publishes it)."""
    original = fields.get("original_max_position_embeddings") or context
    factor = fields.get("factor") or context / original
    mscale, mscale_all = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if fields.get("attention_factor") is None:
        fields["attention_factor"] = scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
    return fields | {"factor": factor, "original_max_position_embeddings": original}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One Llama-shaped decoder: pre-norm, rotary, grouped-query attention, gated SiLU MLP.

    Attributes:
      family: config.json's `model_type` of the base model, one of FAMILIES.
      windows: tokens each layer's attention sees, itself included; FULL_ATTENTION for all.
      dtype: the checkpoint's dtype, and the default for loading it.
      max_position_embeddings: context length in tokens.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise UsageError(f"model_type {self.family!r} is not supported; known: {', '.join(FAMILIES)}")
        for name in (
            "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim max_position_embeddings"
        ).split():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a positive integer, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UsageError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not supported; known: {', '.join(DTYPES)}")
        windows = self.windows or (FULL_ATTENTION,) * self.num_layers
        if len(windows) != self.num_layers or min(windows) < 1:
            raise UsageError(f"windows needs one positive number for each of {self.num_layers} layers, not {windows}")
        object.__setattr__(self, "windows", windows)

    @classmethod
    def from_hf(cls, source: Mapping | str | Path) -> "ModelConfig":
        """From config.json (a dict, the file, or its folder), of a standard or a SwiftKV model.

        Raises:
          UsageError: the file cannot be read, the model type is unknown, or a field is unknown or
            asks for something this decoder does not compute.
        """
        raw = read_config_json(source)
        family = base_family(raw)
        _check_fields(raw)
        try:
            return cls(**_fields_from_hf(family, raw))
        except KeyError as missing:
            raise UsageError(f"config.json: field {missing} is missing") from None

    def to_hf(self, plan: KVPlan) -> dict:
        """The published spelling of config.json; a SwiftKV plan gets `model_type` `<family>_swiftkv`."""
        out = {
            "model_type": self.family,
            "architectures": [_architecture(self.family, plan.is_swiftkv)],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": self.rope.to_hf(),
            "attention_dropout": 0.0,
            "torch_dtype": self.dtype,
        }
        out |= _window_fields(self)
        if self.family in ("llama", "qwen3"):
            out["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            out["mlp_bias"] = self.mlp_bias
        if plan.is_swiftkv:
            split, share = plan.split_and_share
            out |= {"model_type": f"{self.family}_swiftkv", "swiftkv": True}
            out |= {"num_key_value_layers": split, "key_value_group_size": share}
        return out

    @property
    def kv_width(self) -> int:
        """Width of one token's keys (or values) in one row: kv heads x head_dim."""
        return self.num_kv_heads * self.head_dim


def plan_from_hf(source: Mapping | str | Path) -> KVPlan:
    """The plan that config.json describes: standard, or SwiftKV with its published fields."""
    raw = read_config_json(source)
    layers = raw["num_hidden_layers"]
    if not raw["model_type"].endswith("_swiftkv"):
        return KVPlan.standard(layers)
    return KVPlan.swiftkv(layers, raw.get("num_key_value_layers") or layers, raw.get("key_value_group_size") or 1)


def read_config_json(source: Mapping | str | Path) -> Mapping:
    """The dict in config.json; `source` is the dict itself, the file, or the folder it lies in."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def base_family(raw: Mapping) -> str:
    """`model_type` without the SwiftKV suffix."""
    kind = raw.get("model_type")
    family = str(kind).removesuffix("_swiftkv")
    if family not in FAMILIES:
        raise UsageError(
            f"config.json: model_type {kind!r} is not supported; known: {', '.join(FAMILIES)}, each also with _swiftkv"
        )
    return family


def _architecture(family: str, swiftkv: bool) -> str:
    return {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + (
        "SwiftKVForCausalLM" if swiftkv else "ForCausalLM"
    )


def _check_fields(raw: Mapping) -> None:
    for name, value in raw.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                allowed = " or ".join(repr(v) for v in _NEUTRAL[name])
                raise UsageError(f"config.json: {name} is {value!r}; only {allowed} is supported")
        elif name not in _READ and name not in _INERT:
            known = [*_READ, *_NEUTRAL, *_INERT]
            raise UsageError(f"config.json: unknown field {name!r} (it might change the numbers){suggest(name, known)}")


def _fields_from_hf(family: str, raw: Mapping) -> dict:
    heads = raw["num_attention_heads"]
    bias = bool(raw.get("attention_bias", False))
    if family == "mistral" and bias:
        raise UsageError("config.json: mistral has no attention_bias")
    return {
        "family": family,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": (raw.get("num_key_value_heads") or heads) if family == "llama" else raw["num_key_value_heads"],
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": raw["max_position_embeddings"],
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "rope": RopeConfig.from_hf(raw),
        "qkv_bias": True if family == "qwen2" else bias,
        "o_bias": bias and family in ("llama", "qwen3"),
        "mlp_bias": bool(raw.get("mlp_bias", False)) and family == "llama",
        "qk_norm": family == "qwen3",
        "windows": _windows_from_hf(family, raw),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    }


def _windows_from_hf(family: str, raw: Mapping) -> tuple[int, ...]:
    layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)
    if family == "llama":
        if window is not None or "sliding_attention" in (raw.get("layer_types") or ()):
            raise UsageError(f"config.json: llama has no sliding window, but sliding_window is {window!r}")
        return ()
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        window = None
    if window is not None and window < 1:
        raise UsageError(f"config.json: sliding_window must be positive or null, not {window!r}")
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", layers) if family != "mistral" else 0
        types = ["full_attention" if j < first else "sliding_attention" for j in range(layers)]
    elif window is None and "sliding_attention" in types:
        raise UsageError("config.json: layer_types has sliding_attention, but no sliding window is in force")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != layers:
        raise UsageError(f"config.json: layer_types must name full_attention or sliding_attention for {layers} layers")
    return tuple(window if window is not None and kind == "sliding_attention" else FULL_ATTENTION for kind in types)


def _window_fields(config: ModelConfig) -> dict:
    sliding = [window for window in config.windows if window != FULL_ATTENTION]
    window = sliding[0] if sliding else None
    if config.family == "llama":
        return {}
    if config.family == "mistral":
        return {"sliding_window": window}
    types = ["full_attention" if w == FULL_ATTENTION else "sliding_attention" for w in config.windows]
    first = next((j for j, kind in enumerate(types) if kind == "sliding_attention"), config.num_layers)
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": types,
    }
