"""Model families as data: how each one's config.json differs from Llama's."""

import dataclasses
import typing

from swiftkv_jax.config.latent import FIELDS as OF_LATENTS
from swiftkv_jax.config.rope import NONE, RopeConfig

_Fields = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The common part of all checkpoints of one `model_type`.

    Attributes:
      architecture: prefix of its class names in transformers. head: suffix of its language model's class.
      fields: fields of ModelConfig that differ from the defaults.
      spelling: Llama's name of a field of config.json -> this family's name.
      neutral: fields of config.json that change the numbers -> the values that this decoder supports; they
        override those in config_json.
      defaults: fields that its files may omit -> transformers' defaults.
      omits: Llama's fields that its config.json does not have.
      reads: fields of config.json that are read for it, and must be neutral for other families.
      inert: fields that do not change the numbers, in addition to those in config_json.
      written: fields that have the same value in all its config.json files.
      encoder: fields of ModelConfig in which its encoder differs from its decoder; None: it has no encoder.
      wide: whether its activations exceed float16's range (65504), in checkpoints trained in bfloat16.
      numbers: field of ModelConfig -> (field of config.json, the power of it that the first is). A field that
        is absent or null leaves the default.
      out_bias: the field that says whether the output projection of attention has a bias; "": it has none.
      window: the layers that have it if config.json lists no `layer_types`: "" none, "every", "late" (from
        `max_window_layers` on, if `use_sliding_window`), "pattern" (all but each `pattern`-th), "unturned"
        (those without rotary embedding, if `use_sliding_window`), "switched" (all, if `use_sliding_window`).
      pattern: the default of `sliding_window_pattern`.
      ropes: the layers whose rotary table differs: "" none; "window": layers with a window have their own,
        without scaling; "unlisted": those whose `no_rope_layers` is 0 have none; "global": those without a
        window have none, if others have one.
      rope: fields of RopeConfig that differ from the defaults.
      experts: field of `Experts` -> the field of config.json that says it, or its value for the whole family;
        empty: the family has none.
      latent: whether its attention has latents, as `Latent` says.
      sizes: how its layers' own numbers of heads and MLP widths are listed, a key of `sizes.READ`; "": all
        layers have the same.
    """

    architecture: str
    head: str = "ForCausalLM"
    fields: _Fields = dataclasses.field(default_factory=dict)
    spelling: dict[str, str] = dataclasses.field(default_factory=dict)
    neutral: dict[str, tuple] = dataclasses.field(default_factory=dict)
    defaults: _Fields = dataclasses.field(default_factory=dict)
    omits: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    written: _Fields = dataclasses.field(default_factory=dict)
    encoder: _Fields | None = None
    wide: bool = False
    numbers: dict[str, tuple[str, int | float]] = dataclasses.field(default_factory=dict)
    out_bias: str = "attention_bias"
    window: str = ""
    pattern: int = 0
    ropes: str = ""
    rope: _Fields = dataclasses.field(default_factory=dict)
    sizes: str = ""
    latent: bool = False
    experts: _Fields = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A model of images and text whose `text_config` is a decoder here.

    Attributes:
      architecture: its class in transformers. texts: `model_type` of `text_config` -> family. prefix:
        the beginning of its text's tensor names. head: what precedes the name of its output head.
    """

    architecture: str
    texts: dict[str, str]
    prefix: str = "language_model.model."
    head: str = "language_model."


WRAPPERS = {
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}),
    "mistral3": Wrapper(
        "Mistral3ForConditionalGeneration", {"mistral": "mistral", "ministral3": "ministral3"}
    ),
    "qwen3_vl": Wrapper(
        "Qwen3VLForConditionalGeneration",
        {"qwen3_vl_text": "qwen3"},
        "model.language_model.",
        "",
    ),
}

_GELU_TANH = "gelu_pytorch_tanh"
# GPT-2 and relatives: LayerNorm, biases, an MLP without a gate, learned positions instead of rotary.
_BEFORE_ROPE = {
    "norm": "layer",
    "rms_norm_eps": 1e-5,
    "gated": False,
    "learned_positions": True,
    "rope": RopeConfig(rope_type=NONE),
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
}
_BIASES = ("attention_bias", "mlp_bias")
_GEMMA = {"norm": "rms_plus_one", "activation": "gelu_tanh"}
_GEMMA_NEUTRAL: dict[str, tuple] = dict.fromkeys(("hidden_act", "hidden_activation"), (_GELU_TANH, None))
_GEMMA_WRITTEN: _Fields = dict.fromkeys(("hidden_act", "hidden_activation"), _GELU_TANH)
# Sizes that a `text_config` may leave out.
_GEMMA_SIZES = {
    "hidden_act": _GELU_TANH,
    "tie_word_embeddings": True,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_ROOT: dict[str, tuple[str, int | float]] = {"embedding_scale": ("hidden_size", 0.5)}
_LOGITS_CAP: dict[str, tuple[str, int | float]] = {"logits_softcap": ("final_logit_softcapping", 1)}
_OLMO2 = {"norm_before": False, "norm_after": True, "qk_norm": True, "qk_norm_whole": True}
# The fields of `Sizes`, by Llama's names.
OF_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
# Mixtures of experts: what was needed to train them.
_OF_ROUTERS = ("output_router_logits", "router_aux_loss_coef")
_OF_QWEN_EXPERTS = (
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
    "decoder_sparse_step mlp_only_layers"
).split()
_QWEN_EXPERTS = {
    "count": "num_experts",
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalise": "norm_topk_prob",
}
# DeepSeek-V2 and its descendants. `head_dim` in a file is that of transformers, the rotary part's width; a
# file's program is what transformers has by now.
_DEEPSEEK_EXPERTS = {
    "count": "n_routed_experts",
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "router": "topk_method",
    "normalise": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "top_groups": "topk_group",
    "shared": "n_shared_experts",
}
_DEEPSEEK: _Fields = {
    "latent": True,
    "rope": {"interleaved": True},
    "omits": ("head_dim",),
    "reads": (
        *("attention_bias", "qk_head_dim", "num_local_experts", "first_k_dense_replace", "moe_layer_freq"),
        *(*OF_LATENTS, *(name for name in _DEEPSEEK_EXPERTS.values() if name != "topk_method")),
    ),
    "inert": tuple("aux_loss_alpha seq_aux ep_size num_nextn_predict_layers auto_map".split()) + _OF_ROUTERS,
}
_GLM_LITE: _Fields = _DEEPSEEK | {"reads": (*_DEEPSEEK["reads"], "mlp_layer_types")}
_BY_SIGMOID: dict[str, tuple] = {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "rope_interleave": (True, None),
}
_LLAMAS_OWN = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling")

FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="Llama", reads=_BIASES),
    "mistral": Family(architecture="Mistral", window="every", defaults={"sliding_window": 4096}),
    "ministral3": Family(architecture="Ministral3", window="every", defaults={"rms_norm_eps": 1e-5}),
    "qwen2": Family(architecture="Qwen2", window="late", fields={"qkv_bias": True}),
    "qwen3": Family(
        architecture="Qwen3",
        window="late",
        fields={"qk_norm": True},
        defaults={"head_dim": 128},
        reads=("attention_bias",),
    ),
    "mixtral": Family(
        architecture="Mixtral",
        window="every",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        reads=("num_local_experts", "num_experts_per_tok"),
        inert=(*_OF_ROUTERS, "router_jitter_noise"),
        experts={
            "count": "num_local_experts",
            "per_token": "num_experts_per_tok",
            "width": "intermediate_size",
            "normalise": True,
        },
    ),
    "qwen2_moe": Family(
        architecture="Qwen2Moe",
        window="switched",
        fields={"qkv_bias": True},
        neutral={"qkv_bias": (True, None), "use_sliding_window": (False, None)},
        defaults={"norm_topk_prob": False},
        reads=(*_OF_QWEN_EXPERTS, "shared_expert_intermediate_size"),
        inert=_OF_ROUTERS,
        experts=_QWEN_EXPERTS | {"shared": "shared_expert_intermediate_size", "shared_gate": True},
    ),
    "qwen3_moe": Family(
        architecture="Qwen3Moe",
        window="switched",
        fields={"qk_norm": True},
        defaults={"norm_topk_prob": False},
        reads=("attention_bias", *_OF_QWEN_EXPERTS),
        inert=_OF_ROUTERS,
        experts=_QWEN_EXPERTS,
    ),
    "olmoe": Family(
        architecture="Olmoe",
        fields={"qk_norm": True, "qk_norm_whole": True},
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        reads=("attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
        inert=_OF_ROUTERS,
        experts=_QWEN_EXPERTS | {"width": "intermediate_size"},
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2",
        neutral={
            "scoring_func": ("softmax", None),
            "topk_method": ("greedy", "group_limited_greedy", None),
        },
        defaults={"topk_method": "greedy", "norm_topk_prob": False},
        experts=_DEEPSEEK_EXPERTS,
        **_DEEPSEEK,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3",
        neutral=_BY_SIGMOID,
        defaults={"topk_method": "noaux_tc", "norm_topk_prob": True, "first_k_dense_replace": 3},
        experts=_DEEPSEEK_EXPERTS,
        written={"scoring_func": "sigmoid"},
        **_DEEPSEEK,
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLite",
        neutral=_BY_SIGMOID,
        defaults={
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
        },
        experts=_DEEPSEEK_EXPERTS,
        **_GLM_LITE,
    ),
    "gemma": Family(
        architecture="Gemma",
        fields=_GEMMA,
        # The first files say "gelu" but mean the tanh approximation.
        neutral={"hidden_act": (_GELU_TANH, "gelu"), "hidden_activation": (_GELU_TANH, None)},
        defaults={"tie_word_embeddings": True, "head_dim": 256},
        reads=("attention_bias",),
        written={"hidden_act": _GELU_TANH},
        wide=True,  # google/gemma_pytorch, issue 10: NaN in float16
        numbers=_ROOT,
    ),
    "gemma2": Family(
        architecture="Gemma2",
        fields=_GEMMA | {"norm_after": True},
        neutral=_GEMMA_NEUTRAL,
        defaults=_GEMMA_SIZES
        | {
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        reads=("attention_bias",),
        inert=("sliding_window_size",),
        written=_GEMMA_WRITTEN,
        wide=True,
        numbers=_ROOT
        | _LOGITS_CAP
        | {
            "attention_scale": ("query_pre_attn_scalar", -0.5),
            "attention_softcap": ("attn_logit_softcapping", 1),
        },
        window="pattern",
        pattern=2,
    ),
    "gemma3_text": Family(
        architecture="Gemma3",
        fields=_GEMMA | {"norm_after": True, "qk_norm": True},
        neutral=_GEMMA_NEUTRAL,
        defaults=_GEMMA_SIZES
        | {
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        reads=("attention_bias", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
        written=_GEMMA_WRITTEN,
        wide=True,
        numbers=_ROOT | _LOGITS_CAP | {"attention_scale": ("query_pre_attn_scalar", -0.5)},
        window="pattern",
        pattern=6,
        ropes="window",
    ),
    "smollm3": Family(
        architecture="SmolLM3",
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
        reads=(*_BIASES, "no_rope_layers", "no_rope_layer_interval"),
        window="unturned",
        ropes="unlisted",
    ),
    "granite": Family(
        architecture="Granite",
        defaults={"attention_multiplier": 1.0},
        reads=_BIASES,
        numbers={
            "embedding_scale": ("embedding_multiplier", 1),
            "attention_scale": ("attention_multiplier", 1),
            "residual_scale": ("residual_multiplier", 1),
            "logits_scale": ("logits_scaling", -1),
        },
    ),
    "seed_oss": Family(
        architecture="SeedOss",
        defaults={"attention_bias": True, "head_dim": 128},
        reads=(*_BIASES, "attention_out_bias"),
        out_bias="attention_out_bias",
    ),
    "glm4": Family(
        architecture="Glm4",
        fields={"norm_after": True},
        defaults={
            "attention_bias": True,
            "rms_norm_eps": 1.5625e-07,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
        },
        reads=("attention_bias", "partial_rotary_factor"),
        out_bias="",
        rope={"interleaved": True},
    ),
    "exaone4": Family(
        architecture="Exaone4",
        fields={"norm_before": False, "norm_after": True, "qk_norm": True},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        reads=("sliding_window_pattern",),
        window="pattern",
        pattern=4,
        ropes="global",
    ),
    "opt": Family(
        architecture="OPT",
        fields=_BEFORE_ROPE | {"activation": "relu", "unused_positions": 2},
        spelling={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        neutral={
            "hidden_act": ("relu",),
            "enable_bias": (True, None),
            "layer_norm_elementwise_affine": (True, None),
            "do_layer_norm_before": (True, None),
            "_remove_final_layer_norm": (False, None),
        },
        defaults={"tie_word_embeddings": True, "hidden_act": "relu", "max_position_embeddings": 2048},
        omits=(*_LLAMAS_OWN, "rms_norm_eps"),
        reads=("word_embed_proj_dim",),
        inert=("init_std", "layerdrop"),
        written={"hidden_act": "relu", "do_layer_norm_before": True},
    ),
    "openelm": Family(
        architecture="OpenELM",
        fields={"qk_norm": True},
        spelling={
            "hidden_size": "model_dim",
            "num_hidden_layers": "num_transformer_layers",
            "max_position_embeddings": "max_context_length",
            "tie_word_embeddings": "share_input_output_layers",
            "rope_theta": "rope_freq_constant",
            "hidden_act": "activation_fn_name",
        },
        neutral={
            "normalize_qk_projections": (True,),
            "ffn_with_glu": (True,),
            "normalization_layer_name": ("rms_norm",),
        },
        defaults={"normalize_qk_projections": False, "head_dim": 128, "ffn_dim_divisor": 256},
        omits=(*OF_SIZES, "rms_norm_eps", "rope_scaling", "attention_dropout"),
        reads=("num_query_heads", "num_kv_heads", "ffn_multipliers", "ffn_dim_divisor"),
        # Heads and widths follow from the lists that are read; the second is the length of a table.
        inert=("qkv_multipliers", "num_gqa_groups", "rope_max_length"),
        written={
            "normalize_qk_projections": True,
            "ffn_with_glu": True,
            "normalization_layer_name": "rms_norm",
        },
        sizes="multiples",
    ),
    "nemotron-nas": Family(
        architecture="DeciLM",
        defaults={"rms_norm_eps": 1e-5},
        omits=("num_key_value_heads", "intermediate_size"),
        reads=(*_BIASES, "block_configs"),
        sizes="blocks",
    ),
    "deci": Family(
        architecture="DeciLM",
        omits=("num_key_value_heads",),
        reads=("attention_bias", "num_key_value_heads_per_layer"),
        sizes="kv_heads",
    ),
    "phi3": Family(
        architecture="Phi3",
        window="every",
        defaults={"rms_norm_eps": 1e-5},
        reads=("partial_rotary_factor",),
    ),
    "gpt2": Family(
        architecture="GPT2",
        head="LMHeadModel",
        fields={name: value for name, value in _BEFORE_ROPE.items() if name != "rms_norm_eps"}
        | {"activation": "gelu_tanh"},
        spelling={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        neutral={
            "hidden_act": ("gelu_new", _GELU_TANH),
            "scale_attn_weights": (True, None),
            "scale_attn_by_inverse_layer_idx": (False, None),
        },
        defaults={
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "scale_attn_weights": True,
            "max_position_embeddings": 1024,
        },
        omits=(*_LLAMAS_OWN, "attention_dropout"),
        inert=tuple(
            "n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation "
            "summary_proj_to_labels".split()
        ),
        written={"hidden_act": "gelu_new"},
    ),
    "olmo": Family(
        architecture="Olmo",
        fields={"norm": "layer_plain", "rms_norm_eps": 1e-5},
        omits=("rms_norm_eps",),
        reads=("attention_bias", "clip_qkv"),
        numbers={"clip_qkv": ("clip_qkv", 1)},
    ),
    "olmo2": Family(
        architecture="Olmo2",
        fields=_OLMO2,
        defaults={"rms_norm_eps": 1e-5},
        reads=("attention_bias",),
    ),
    "olmo3": Family(
        architecture="Olmo3",
        fields=_OLMO2,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        reads=("attention_bias",),
        window="pattern",
        pattern=4,
        ropes="window",
    ),
    "t5": Family(
        architecture="T5",
        head="ForConditionalGeneration",
        fields={"rope": RopeConfig(rope_type=NONE), "attention_scale": 1.0},
        spelling={
            "hidden_size": "d_model",
            "intermediate_size": "d_ff",
            "num_hidden_layers": "num_decoder_layers",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
            "rms_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "n_positions",
        },
        neutral={"is_encoder_decoder": (True, None), "is_decoder": (False, None), "hidden_act": ("silu",)},
        defaults={
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
            "feed_forward_proj": "relu",
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
        },
        omits=("num_key_value_heads", "rope_theta", "rope_scaling", "attention_dropout", "hidden_act"),
        reads=tuple(
            "num_layers feed_forward_proj relative_attention_num_buckets relative_attention_max_distance "
            "scale_decoder_outputs".split()
        ),
        inert=("dense_act_fn", "is_gated_act", "output_past"),  # the first two follow from feed_forward_proj
        written={"is_encoder_decoder": True},
        encoder={"bidirectional": True},
        wide=True,  # transformers computes the output of its MLPs in float32
    ),
    "whisper": Family(
        architecture="Whisper",
        head="ForConditionalGeneration",
        fields=_BEFORE_ROPE | {"activation": "gelu", "k_bias": False},
        spelling={
            "hidden_size": "d_model",
            "intermediate_size": "decoder_ffn_dim",
            "num_hidden_layers": "decoder_layers",
            "num_attention_heads": "decoder_attention_heads",
            "max_position_embeddings": "max_target_positions",
            "hidden_act": "activation_function",
        },
        neutral={
            "hidden_act": ("gelu",),
            "is_encoder_decoder": (True, None),
            "is_decoder": (False, None),
            "scale_embedding": (False, None),
            "use_weighted_layer_sum": (False, None),
        },
        defaults={
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "max_position_embeddings": 448,
            "max_source_positions": 1500,
            "num_mel_bins": 80,
        },
        omits=(*_LLAMAS_OWN, "rms_norm_eps"),
        reads=tuple(
            "encoder_layers encoder_attention_heads encoder_ffn_dim max_source_positions num_mel_bins".split()
        ),
        inert=tuple(
            "init_std encoder_layerdrop decoder_layerdrop classifier_proj_size apply_spec_augment "
            "mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length "
            "mask_feature_min_masks median_filter_width forced_decoder_ids".split()
        ),
        written={"hidden_act": "gelu", "is_encoder_decoder": True},
        encoder={"bidirectional": True, "tie_word_embeddings": False},
    ),
}
