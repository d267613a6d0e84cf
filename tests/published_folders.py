"""Checkpoints' folders as others publish them, but for the weights: small, random, with a small tokenizer.

published_folders/NAME.json holds the files beside the weights. `said` tells where their fields were read, or
that they are from memory. Chat templates are written anew, with the turns of the published ones. config.json
is that of published_configs/, or changes to one there (`config_of`). tokenizer.json is trained here, of the
family's kind, and ids in the files are mapped to its own.
"""

import json
from pathlib import Path

import encoder_models
import hf_models
import transformers
from tokenizers_made import trained

HERE = Path(__file__).parent
FOLDERS = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "published_folders").iterdir())}
_SIZES = {
    "hidden_size": 48, "n_embd": 48, "d_model": 48, "intermediate_size": 80, "ffn_dim": 80, "d_ff": 80,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 80, "word_embed_proj_dim": 48, "num_hidden_layers": 2,
    "n_layer": 2, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "d_kv": 16, "head_dim": 12, "num_mel_bins": 20, "max_source_positions": 50,
    "max_target_positions": 64, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128,
    "original_max_position_embeddings": 128, "sliding_window": 24,
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "moe_intermediate_size": 28, "n_routed_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip


def raw_config(name: str) -> dict:
    """The published config.json."""
    known = FOLDERS[name]
    changes = known["files"].get("config.json", {})
    base = HERE / "published_configs" / f"{known.get('config_of', name)}.json"
    return (json.loads(base.read_text()) if base.exists() else {}) | changes


def _mapped(fields: dict, ids: dict[int, int]) -> dict:
    """Fields of a config with the small tokenizer's ids instead of the published."""
    out = {}
    for name, value in fields.items():
        if name.endswith("_token_id") and value is not None:
            value = [ids[i] for i in value] if isinstance(value, list) else ids.get(value)
        elif name.endswith("suppress_tokens"):
            value = [ids[i] for i in value if i in ids]
        elif name == "forced_decoder_ids":
            value = [[place, None if i is None else ids[i]] for place, i in value]
        elif name in ("lang_to_id", "task_to_id"):
            value = {key: ids[i] for key, i in value.items()}
        elif name == "added_tokens_decoder":
            value = {str(ids[int(key)]): token for key, token in value.items()}
        out[name] = value
    return out


def make(name: str, folder: Path) -> Path:
    """The folder of a checkpoint, made small."""
    known, raw = FOLDERS[name], raw_config(name)
    kind, before, after, has = known["tokenizer"].values()
    published = {int(index): token for index, token in known["special_tokens"].items()}
    rust = trained(kind, [published[index] for index in sorted(published)], (before, after))
    ids = {index: rust.token_to_id(token) for index, token in published.items()}
    heads, keys = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    raw = _mapped(raw, ids) | {size: small for size, small in _SIZES.items() if raw.get(size) is not None}
    raw |= {name: raw[name][:2] for name in ("layer_types", "no_rope_layers") if raw.get(name)}
    if keys is not None:
        raw["num_key_value_heads"] = 4 if keys == heads else min(keys, 2)
    if "factor" in (raw.get("rope_scaling") or {}):
        raw["rope_scaling"] = raw["rope_scaling"] | {"original_max_position_embeddings": 32}
    raw |= {"vocab_size": rust.get_vocab_size() + 3, "torch_dtype": "float32"}  # padded, as many are
    sizes = {name: raw[name] for name in raw.keys() - {"model_type", "auto_map", "torch_dtype"}}
    if raw["model_type"] in ("t5", "whisper"):
        encoder_models.save(raw["model_type"], folder, **sizes)
    else:
        sizes["num_hidden_layers"] = 2  # by the name that `build` gives it, too
        hf_models.save(hf_models.build(raw["model_type"], **sizes), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for file, content in (known["files"] | {"config.json": raw}).items():
        if file == "preprocessor_config.json":
            content = content | {
                "chunk_length": 1,
                "feature_size": 20,
                "n_samples": 16000,
                "nb_max_frames": 100,
            }
        if not isinstance(content, str):
            content = json.dumps(content if content is raw else _mapped(content, ids), indent=2)
        (folder / file).write_text(content)
    if has == "tokenizer.json":
        rust.save(str(folder / has))
    else:
        rust.model.save(str(folder))
    return folder


def theirs(folder: Path):
    """(tokenizer, model) as transformers loads them."""
    kind = transformers.AutoConfig.from_pretrained(folder).model_type
    load = encoder_models.load if kind in ("t5", "whisper") else hf_models.load
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True), load(folder)
