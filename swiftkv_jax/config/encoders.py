"""Reading and writing of config.json for families with an encoder: T5 and Whisper."""

import typing
from collections.abc import Mapping

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.hf import integer

# T5's feed_forward_proj -> (activation, gated); its "gelu" is the tanh approximation.
_PROJECTIONS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
    "gated-relu": ("relu", True),
}


def family_fields(family: str, raw: Mapping, shared: Mapping) -> dict[str, dict]:
    """ModelConfig's fields of the "decoder" and of the "encoder".

    raw: as `hf.with_llama_names` returns it. shared: the fields that are read the same way in every
    family.
    """
    return {"t5": _t5, "whisper": _whisper}[family](raw, dict(shared))


def _t5(raw: Mapping, shared: dict) -> dict[str, dict]:
    if (projection := raw.get("feed_forward_proj")) not in _PROJECTIONS:
        supported = ", ".join(_PROJECTIONS)
        raise UsageError(f"config.json: feed_forward_proj is {projection!r}; only {supported} are supported")
    activation, gated = _PROJECTIONS[projection]
    # transformers 5 ties all weights by name; this field says whether the model really does.
    said = raw.get("scale_decoder_outputs")
    tied = shared["tie_word_embeddings"] if said is None else said is True
    both = shared | {
        "activation": activation,
        "gated": gated,
        "relative_buckets": integer(raw, "relative_attention_num_buckets"),
        "relative_distance": integer(raw, "relative_attention_max_distance"),
        "tie_word_embeddings": tied,
    }
    layers = integer(raw, "num_layers") if raw.get("num_layers") is not None else both["num_layers"]
    within = _encoder("t5", both) | {"num_layers": layers}
    return {
        "decoder": both | ({"logits_scale": both["hidden_size"] ** -0.5} if tied else {}),
        "encoder": within,
    }


def _whisper(raw: Mapping, shared: dict) -> dict[str, dict]:
    heads = integer(raw, "encoder_attention_heads")
    within = _encoder("whisper", shared) | {
        "num_layers": integer(raw, "encoder_layers"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": shared["hidden_size"] // heads,
        "intermediate_size": integer(raw, "encoder_ffn_dim"),
        "max_position_embeddings": integer(raw, "max_source_positions"),
        "mels": integer(raw, "num_mel_bins"),
    }
    return {"decoder": shared, "encoder": within}


def _encoder(family: str, shared: Mapping) -> dict:
    return {**shared, **(FAMILIES[family].encoder or {}), "windows": ()}


def family_written(config: typing.Any) -> dict:
    """The config.json fields of a ModelConfig with an encoder: the inverse of `family_fields`."""
    within = config.encoder
    if config.family == "whisper":
        return {
            "encoder_layers": within.num_layers,
            "encoder_attention_heads": within.num_heads,
            "encoder_ffn_dim": within.intermediate_size,
            "max_source_positions": within.max_position_embeddings,
            "num_mel_bins": within.mels,
        }
    projections = {pair: name for name, pair in _PROJECTIONS.items()}
    return {
        "num_layers": within.num_layers,
        "feed_forward_proj": projections.get((config.activation, config.gated)),
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "scale_decoder_outputs": config.logits_scale != 1,
    }
