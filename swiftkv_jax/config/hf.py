"""Reading of published config.json files: which fields are used, must be neutral, or do not matter."""

import dataclasses
import json
import re
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError, UsageWarning, suggest
from swiftkv_jax.common.folder import read_json
from swiftkv_jax.config import quantization
from swiftkv_jax.config.experts import experts_from_hf, experts_written
from swiftkv_jax.config.families import FAMILIES, OF_SIZES, WRAPPERS, Family
from swiftkv_jax.config.gguf import config_of
from swiftkv_jax.config.gguf_header import gguf_of
from swiftkv_jax.config.latent import latent_from_hf, latent_written
from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.config.sizes import sizes_from_hf, sizes_written

FULL_ATTENTION = 2**30  # a window no sequence fills
OWN_CODE = "modeling_swiftkv"  # the module that a student's folder carries for transformers

_READ = frozenset(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings tie_word_embeddings rope_theta "
    "rope_scaling rope_parameters original_max_position_embeddings torch_dtype dtype attention_bias "
    "mlp_bias sliding_window use_sliding_window max_window_layers layer_types num_key_value_layers "
    "key_value_group_size swiftkv_tail exit_head slim_attention".split()
)
# Fields that change the numbers, with the values at which they do not; any other value is refused.
_SILU = ("silu", "swish", "swiglu", None)
_NEUTRAL: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys("hidden_activation activation activation_function mlp_hidden_act".split(), _SILU),
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False, None),
    "is_decoder": (False, True, None),
    "is_causal": (True, None),
    **dict.fromkeys(
        (
            "partial_rotary_factor rotary_pct rope_ratio embedding_multiplier embedding_scale scale_emb "
            "residual_multiplier logits_scaling logit_scale lm_head_multiplier attention_in_multiplier "
            "attention_out_multiplier key_multiplier attention_value_scale"
        ).split(),
        (1, None),
    ),
    # Parts that only other decoders have: their fields are neutral if absent, off or empty.
    **dict.fromkeys(
        (
            "attn_logit_softcapping final_logit_softcapping logits_soft_cap query_pre_attn_scalar "
            "attention_multiplier scale_depth dim_model_base scale_embedding clip_qkv alibi use_alibi "
            "use_qk_norm qk_norm qk_layernorm qk_layer_norms use_post_norm use_sandwich_norm "
            "use_parallel_residual parallel_attn rotary_dim rope_interleaved rope_interleave "
            "rope_local_base_freq no_rope_layers no_rope_layer_interval use_mrope mrope_section "
            "attention_chunk_size attn_temperature_tuning attention_sink_size use_attention_sinks "
            "use_bidirectional_attention attention_k_eq_v attn_output_gate use_attention_gate "
            "sliding_window_pattern _sliding_window_pattern v_head_dim qk_head_dim qk_rope_head_dim "
            "qk_nope_head_dim q_lora_rank kv_lora_rank num_kv_shared_layers num_experts num_local_experts "
            "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
            "shared_expert_intermediate_size swiglu_limit block_configs text_config vision_config "
            "audio_config add_cross_attention cross_attention_hidden_size tie_encoder_decoder "
            "chunk_size_feed_forward"
        ).split(),
        (None, False, [], {}),  # 0 is False
    ),
}
# Fields that do not touch the numbers of a forward pass: how to train, how to generate, names, bookkeeping.
_INERT = frozenset(
    "architectures use_cache pretraining_tp id2label label2id num_labels problem_type return_dict "
    "output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss task_specific_params "
    "finetuning_task prefix return_dict_in_generate output_scores max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences remove_invalid_values suppress_tokens begin_suppress_tokens "
    "exponential_decay_length_penalty max_sequence_length model_max_length swiftkv is_llama_config "
    "cache_implementation attn_implementation gradient_checkpointing use_reentrant_checkpointing "
    "num_logits_to_keep seq_length auto_map custom_pipelines".split()
)
_INERT_NAMES = re.compile(
    r"_.*|unsloth_.*|transformers.*|initializer_.*|neftune_.*|.*dropout.*|.*pdrop|.*_loss_coef"
    r"|.*_(token|tokens|token_ids?|token_index|path|version)|((base_)?model_|dataset_|run_)?name"
    r"|version|author|date|license|tags|language|chat_template|(tokenizer|processor)_class"
)
_SLIM_FIELDS = ("version", "forms", "cross_forms")
_SHOWN = 60  # characters of a value in a message
# transformers' own defaults, for fields that a published file may leave out.
_QWEN_MAX_WINDOW_LAYERS = 28
_MOST, _MOST_LAYERS = 2**31 - 1, 4096  # no model is larger, but a hostile file may claim to be
_FULL, _SLIDING = _KINDS = ("full_attention", "sliding_attention")
# Families that may omit num_key_value_heads, which then equals the number of query heads.
_MULTI_HEAD = ("llama", "phi3", "olmo", "olmo2", "olmo3", "granite", "gpt2", "opt", "t5", "whisper")
# What a wrapper's own level of config.json says of its text too.
_OF_WRAPPERS = ("tie_word_embeddings", "torch_dtype", "dtype", "slim_attention", *quantization.FIELDS)


def read_config_json(source: Mapping | str | Path) -> Mapping:
    """The dict in config.json; `source` is the dict itself, the file, or its folder. For a GGUF file, alone
    or in a folder without config.json, the dict is made from the file's metadata."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if not (path / "config.json").exists() and (file := gguf_of(path)):
        return config_of(file)
    raw = read_json(path / "config.json" if path.is_dir() else path)
    if "model_type" not in raw and (path / "export" / "config.json").is_file():
        raise UsageError(f"{path} is the folder of a run; its student is in {path / 'export'}")
    return raw


def text_of(raw: Mapping) -> tuple[Mapping, str | None]:
    """The fields of the text model that config.json describes, and the wrapper around it, if there is one:
    the `model_type` of a model of images and text.

    Raises:
      UsageError: the wrapper has no text part, or one that is no family here.
    """
    kind, text = raw.get("model_type"), raw.get("text_config")
    if kind not in WRAPPERS:
        return raw, None
    texts = WRAPPERS[kind].texts
    text = text if isinstance(text, Mapping) else {"model_type": None}
    found = text.get("model_type", next(iter(texts)))
    if found not in texts:
        raise UsageError(
            f"config.json: only the text part of {kind} is read, a text_config of model_type "
            f"{' or '.join(texts)}, not {_shown(found)}"
        )
    own = {name: raw[name] for name in _OF_WRAPPERS if name in raw}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(name), Mapping):  # Qwen3-VL: all positions of a text's token are one
            own[name] = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {**text, **own, "model_type": texts[found]}, kind


def base_family(raw: Mapping) -> str:
    """`model_type` without the SwiftKV suffix."""
    kind = raw.get("model_type")
    family = str(kind).removesuffix("_swiftkv")
    if family not in FAMILIES:
        raise UsageError(f"config.json: model_type {kind!r} is not supported; known: {', '.join(FAMILIES)}")
    return family


def with_llama_names(raw: Mapping) -> Mapping:
    """`raw` with Llama's field names, and with defaults for fields that the family's files may omit."""
    family = FAMILIES[base_family(raw)]
    names = {own: name for name, own in family.spelling.items()}
    own = {names[name]: value for name, value in raw.items() if name in names}
    out = {**family.defaults, **{name: value for name, value in raw.items() if name not in names}, **own}
    if out.get("num_hidden_layers") is None and "num_layers" in family.reads:
        out["num_hidden_layers"] = out.get("num_layers")  # a T5 whose encoder and decoder are equally deep
    if "hidden_size" in out and out.get("intermediate_size") is None and family.spelling:
        out["intermediate_size"] = 4 * integer(out, "hidden_size")
    return out


def is_swiftkv(raw: Mapping) -> bool:
    """Whether the checkpoint is a student: its `model_type` has the suffix."""
    return str(raw.get("model_type")).endswith("_swiftkv")


def check_fields(raw: Mapping) -> None:
    """Refuse what this decoder does not compute; warn of what it does not know.

    Fields that are read are checked where they are read. Of the others, those known to change the numbers
    must be neutral. Those that are null, false or empty, or whose name shows that they do not matter, are
    ignored. The rest are ignored with a warning that names them.
    """
    quantization.block_of(raw)
    family = FAMILIES[base_family(raw)]
    read = {*family.reads, *(name for name, _ in family.numbers.values())}
    for name, allowed in (_NEUTRAL | family.neutral).items():
        if name in raw and name not in read and raw[name] not in allowed:
            values = " or ".join(_shown(value) for value in allowed if value not in ([], {}))
            raise UsageError(f"config.json: {name} is {_shown(raw[name])}; only {values} is supported")
    for message in _doubts(raw):
        warnings.warn(message, UsageWarning, stacklevel=3)


def _doubts(raw: Mapping) -> list[str]:
    """Warnings about fields whose meaning may differ from what is computed."""
    out = []
    family = FAMILIES[base_family(raw)]
    fields = ((str(name), value) for name, value in raw.items())
    unknown = [_unknown(name, value) for name, value in fields if _may_matter(family, name, value)]
    if unknown:
        listed = ", ".join(unknown)
        out.append(f"config.json: unknown fields are ignored, and might change the numbers: {listed}")
    code = raw.get("auto_map")
    named = (
        [text for name, text in code.items() if "AutoModel" in str(name)] if isinstance(code, Mapping) else []
    )
    other = [text for text in named if not (is_swiftkv(raw) and str(text).startswith(f"{OWN_CODE}."))]
    if other and "auto_map" not in family.inert:
        out.append(
            f"config.json: auto_map names a program, {_shown(other[0])}, which is not run: "
            f"the model is read as a plain {raw['model_type']}"
        )
    return out


def _may_matter(family: Family, name: str, value) -> bool:
    """Whether an unknown field could change the numbers."""
    numbers = [field for field, _ in family.numbers.values()]
    known = (
        _READ,
        _NEUTRAL,
        _INERT,
        quantization.FIELDS,
        family.inert,
        family.neutral,
        family.reads,
        numbers,
    )
    off = value is None or value is False or value in ("", [], {})
    return not any(name in names for names in known) and not off and not _INERT_NAMES.fullmatch(name)


def _unknown(name: str, value) -> str:
    hint = suggest(name, [*_READ, *_NEUTRAL], 0.85).removeprefix("; ")
    return f"{_shown(name)[1:-1]}={_shown(value)}" + (f" ({hint})" if hint else "")


def _shown(value) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def integer(raw: Mapping, name: str, default: int | None = None) -> int:
    """A positive integer field; `default` stands in when it is absent or null."""
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise UsageError(f"config.json: field {name!r} is missing")
    return checks.integer(
        f"config.json: {name}", value, 1, _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    )


def flag(raw: Mapping, name: str) -> bool:
    """A true-or-false field, false when absent."""
    value = raw.get(name)
    return value is not None and checks.flag(f"config.json: {name}", value)


def fields_from_hf(family: str, raw: Mapping) -> dict:
    """ModelConfig's fields of a decoder; `raw` as `with_llama_names` gives it."""
    hidden = integer(raw, "hidden_size")
    layers = sizes_from_hf(FAMILIES[family].sizes, raw)
    widest = zip(OF_SIZES, map(max, zip(*layers["sizes"], strict=True)), strict=False)
    raw = {**raw, **dict(widest)}
    heads = integer(raw, "num_attention_heads")
    multi_head = family in _MULTI_HEAD or "num_key_value_heads" in raw  # null: one for each head
    bias, reads = flag(raw, "attention_bias"), FAMILIES[family].reads
    if bias and "attention_bias" not in reads:
        raise UsageError(f"config.json: attention_bias is true, but {family} has no such choice")
    if flag(raw, "mlp_bias") and "mlp_bias" not in reads:
        raise UsageError(f"config.json: mlp_bias is true, but {family} has no MLP biases")
    if flag(raw, "exit_head") and not is_swiftkv(raw):
        raise UsageError(
            f"config.json: exit_head is true, but model_type {raw.get('model_type')!r} is not SwiftKV's"
        )
    width = raw.get("word_embed_proj_dim")
    if width not in (None, hidden):
        raise UsageError(
            f"config.json: word_embed_proj_dim is {_shown(width)}; embeddings of another width than "
            f"hidden_size, {hidden}, are not supported"
        )
    numbers = {}
    for field, (name, power) in FAMILIES[family].numbers.items():
        if raw.get(name):
            numbers[field] = checks.above(f"config.json: {name}", raw[name], 0) ** power
    windows = _windows_from_hf(family, raw)
    ropes = _ropes_from_hf(family, raw, windows)
    latent = latent_from_hf(raw, heads, ropes["rope"]) if FAMILIES[family].latent else {}
    return {
        "family": family,
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size"),
        "num_layers": integer(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(raw, "num_key_value_heads", heads if multi_head else None),
        "head_dim": integer(raw, "head_dim", hidden // heads),
        "rms_norm_eps": checks.above("config.json: rms_norm_eps", raw.get("rms_norm_eps", 1e-6), 0, 1e30),
        "max_position_embeddings": integer(raw, "max_position_embeddings"),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings"),
        "qkv_bias": bias,
        "o_bias": flag(raw, FAMILIES[family].out_bias),
        "mlp_bias": flag(raw, "mlp_bias"),
        "windows": windows,
        **layers,
        **experts_from_hf(FAMILIES[family].experts, raw, integer(raw, "num_hidden_layers")),
        "exit_head": flag(raw, "exit_head"),
        **ropes,
        **numbers,
        **latent,
        **FAMILIES[family].fields,
        "dtype": said_dtype(raw) or "float32",
    }


def said_dtype(raw: Mapping) -> str | None:
    """The dtype in config.json; None if it leaves that to the weights."""
    said = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
    return None if said == "auto" else said


def forms_from_hf(raw: Mapping, rows: int) -> tuple[str, ...]:
    """The forms of a model's rows: all "kv", or those that `slim_attention` lists.

    The field is `{"version": 1, "forms": ["k", "kv", ...]}`, one form for each row. It is ours, and
    transformers ignores it.
    """
    slim, where = raw.get("slim_attention"), "config.json: slim_attention"
    if slim is None:
        return ("kv",) * rows
    if not isinstance(slim, Mapping):
        raise UsageError(f"{where} must be an object with version and forms, not {_shown(slim)}")
    known = ("version", "forms") if FAMILIES[base_family(raw)].encoder is None else _SLIM_FIELDS
    unknown = sorted(str(name) for name in slim.keys() - {*known})
    if unknown:
        raise UsageError(f"{where} has unknown fields {', '.join(unknown)}; known: {', '.join(known)}")
    if slim.get("version") != 1:
        raise UsageError(f"{where}: version is {_shown(slim.get('version'))}; only 1 is read")
    return _listed(slim.get("forms"), f"{where}: forms", rows, "rows")


def cross_forms_from_hf(raw: Mapping, layers: int) -> tuple[str, ...]:
    """The forms of the rows that each layer's cross-attention reads: `cross_forms` of `slim_attention`."""
    slim = raw.get("slim_attention")
    if slim is None or slim.get("cross_forms") is None:
        return ("kv",) * layers
    return _listed(slim["cross_forms"], "config.json: slim_attention: cross_forms", layers, "layers")


def _listed(forms, where: str, count: int, what: str) -> tuple[str, ...]:
    """One form for each of `count` rows or layers."""
    if not isinstance(forms, list) or not all(isinstance(form, str) for form in forms):
        raise UsageError(f"{where} must be a list of the {what}' forms, not {_shown(forms)}")
    if len(forms) != count:
        where = where.rpartition(": ")[0]
        raise UsageError(f"{where}: {len(forms)} forms for {count} {what}; give one for each")
    return tuple(forms)


def _windows_from_hf(family: str, raw: Mapping) -> tuple[int, ...]:
    """Each layer's window, from the flags or from `layer_types` (which wins, as in transformers)."""
    layers, which = integer(raw, "num_hidden_layers"), FAMILIES[family].window
    window = raw.get("sliding_window")
    if which in ("late", "unturned", "switched") and not flag(raw, "use_sliding_window"):
        window = None
    if family == "llama" and raw.get("use_sliding_window") is False:
        window = None  # a Qwen checkpoint converted to a Llama
    if window is not None and not which:
        raise UsageError(f"config.json: {family} has no sliding window, but sliding_window is {window!r}")
    types = raw.get("layer_types")
    if window is not None:
        window = integer({"sliding_window": window}, "sliding_window")
        types = _window_kinds(family, raw, layers) if types is None else types
    if types is None:
        return (FULL_ATTENTION,) * layers
    if not isinstance(types, list | tuple) or len(types) != layers or not set(map(str, types)) <= {*_KINDS}:
        raise UsageError(f"config.json: layer_types must name {' or '.join(_KINDS)} for {layers} layers")
    if window is None and _SLIDING in types:
        raise UsageError("config.json: layer_types has sliding_attention, but no sliding window is in force")
    if window is not None and which == "every" and _FULL in types:
        raise UsageError(
            f"config.json: {family} has its window on every layer; layer_types has full_attention"
        )
    span = FULL_ATTENTION if window is None else window
    return tuple(span if kind == _SLIDING else FULL_ATTENTION for kind in types)


def _window_kinds(family: str, raw: Mapping, layers: int) -> list[str]:
    """`layer_types` of a file that has a window and does not list them."""
    match FAMILIES[family].window:
        case "late":
            first = checks.integer(
                "config.json: max_window_layers", raw.get("max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
            )
            has = [layer >= first for layer in range(layers)]
        case "unturned":
            has = [not turned for turned in _turned(raw, layers)]
        case "pattern":
            names = ("sliding_window_pattern", "_sliding_window_pattern")
            given = next((raw[name] for name in names if raw.get(name)), FAMILIES[family].pattern)
            if isinstance(given, str):  # EXAONE 4: "LLLG", and the last layer sees all
                if not set(given) <= {"L", "G"}:
                    raise UsageError(
                        "config.json: sliding_window_pattern must be a number or made of L and G, not "
                        f"{_shown(given)}"
                    )
                has = [given[layer % len(given)] == "L" for layer in range(layers - 1)] + [False]
            else:
                every = checks.integer("config.json: sliding_window_pattern", given, 1)
                has = [(layer + 1) % every != 0 for layer in range(layers)]
        case _:
            has = [True] * layers
    return [_SLIDING if own else _FULL for own in has]


def _turned(raw: Mapping, layers: int) -> list[bool]:
    """Whether each layer of a SmolLM3 has rotary embedding."""
    said = raw.get("no_rope_layers")
    if said is None:
        every = integer(raw, "no_rope_layer_interval")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if not isinstance(said, list | tuple) or len(said) < layers or not {*map(str, said)} <= {"0", "1"}:
        raise UsageError(f"config.json: no_rope_layers must be 0 or 1 for each of {layers} layers")
    return [bool(turned) for turned in said[:layers]]


def _ropes_from_hf(family: str, raw: Mapping, windows: tuple[int, ...]) -> dict:
    """ModelConfig's fields `rope` and `ropes`."""
    how, said = FAMILIES[family].ropes, raw.get("rope_parameters")
    by_kind = isinstance(said, Mapping) and bool(said.keys() & {*_KINDS})
    if by_kind and how != "window":
        raise UsageError(f"config.json: rope_parameters names kinds of layers, and {family} has one table")
    both = said if by_kind and isinstance(said, Mapping) else {}

    def read(kind: str, **given) -> RopeConfig:
        alone = by_kind or kind == _SLIDING  # a scaling that names no kind is that of full attention
        own = {"rope_parameters": both.get(kind), "rope_scaling": None} if alone else {}
        return dataclasses.replace(RopeConfig.from_hf({**raw, **own, **given}), **FAMILIES[family].rope)

    rope = read(_FULL)
    if rope.partial_rotary_factor != 1 and "partial_rotary_factor" not in FAMILIES[family].reads:
        raise UsageError(f"config.json: {family} has no partial_rotary_factor other than 1.0")
    other, has = RopeConfig(rope_type=NONE), [window != FULL_ATTENTION for window in windows]
    match how:
        case "window":
            other = read(_SLIDING, rope_theta=raw.get("rope_local_base_freq", rope.rope_theta))
        case "unlisted":
            has = [not turned for turned in _turned(raw, len(windows))]
        case "global":
            has = [raw.get("sliding_window") is not None and not window for window in has]
        case _:
            has = []
    return {"rope": rope, "ropes": tuple(other if own else rope for own in has)}


def written_fields(config: typing.Any) -> dict:
    """The published fields of a ModelConfig's windows, rotary tables and numbers: the inverse of the reading
    above."""
    family = FAMILIES[config.family]
    sliding = [window for window in config.windows if window != FULL_ATTENTION]
    window, out = sliding[0] if sliding else None, sizes_written(family.sizes, config)
    types = [_FULL if w == FULL_ATTENTION else _SLIDING for w in config.windows]
    out |= experts_written(family.experts, family.reads, config) | latent_written(config.latent)
    if family.window:
        out["sliding_window"] = window
    if family.window in ("late", "unturned", "switched"):
        out["use_sliding_window"] = bool(sliding)
    if family.window == "late":
        out["max_window_layers"] = next((j for j, w in enumerate(types) if w == _SLIDING), len(types))
    if family.window not in ("", "every"):
        out["layer_types"] = types
    ropes = config.ropes or (config.rope,) * len(types)
    if family.ropes == "unlisted":
        out["no_rope_layers"] = [int(rope == config.rope) for rope in ropes]
    if family.ropes == "window":
        local = next((rope for rope in ropes if rope != config.rope), config.rope)
        tables = {_FULL: config.rope, _SLIDING: local}
        out["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": rope.rope_theta}
            | (rope.to_hf(config.max_position_embeddings) or {})
            for kind, rope in tables.items()
        }
        if "rope_local_base_freq" in family.reads:
            out["rope_local_base_freq"] = local.rope_theta
    for field, (name, power) in family.numbers.items():
        value = getattr(config, field)
        if power != 1:
            value = float(f"{value ** (1 / power):.12g}")
            value = int(value) if value == int(value) else value
        out[name] = value
    return out
