"""GGUF files of small transformers models, in the names and keys that llama.cpp's converter gives them."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch

KIND = gguf.GGMLQuantizationType
_ARCHITECTURES = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}


def write(path: Path, model, kind: str = "F32", metadata: dict | None = None, tensors: dict | None = None):
    """Write `model` with its matrices stored as `kind`; the path.

    metadata: more keys, or others; None leaves one out. tensors: more tensors, float32, by llama.cpp's names.
    """
    config = model.config
    family = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = {f"{family}.{key}": getattr(config, name) for name, key in _KEYS.items()}
    keys |= {f"{family}.attention.key_length": width, f"{family}.rope.dimension_count": width}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys |= {f"{family}.rope.freq_base": float(rope["rope_theta"])}
    keys |= {f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    keys |= {"general.name": f"Tiny {config.model_type.title()}"} | (metadata or {})
    names, values = gguf.get_tensor_name_map(_ARCHITECTURES[family], config.num_hidden_layers), {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        projection = name.split(".")[-2]
        value = weight.detach().float().numpy()
        if family == "llama" and projection in _HEADS:
            heads = getattr(config, _HEADS[projection])
            value = value.reshape(heads, 2, width // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if family == "gemma3" and name.endswith("norm.weight"):
            value = value + 1
        values[names.get_name(name, (".weight", ".bias"))] = np.ascontiguousarray(value)
    return raw(path, family, keys, values | (tensors or {}), KIND[kind])


def raw(path: Path, family: str, keys: dict, values: dict, kind) -> Path:
    """Write a file with these keys and these tensors, the matrices among them stored as `kind`."""
    writer = gguf.GGUFWriter(str(path), family)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if value is not None:
            kinds.get(type(value), writer.add_array)(key, value)
    for name, value in values.items():
        if value.ndim < 2 or kind == KIND.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, stored(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(value: np.ndarray, kind) -> np.ndarray:
    """`value` as blocks. The package cannot make those of the K kinds: they get random bytes, and scales that
    give values of about the same size."""
    try:
        return gguf.quants.quantize(value, kind)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(value.size)
        blocks = random.integers(0, 256, (*value.shape[:-1], value.shape[-1] // elements, size), np.uint8)
        scale = np.full((*blocks.shape[:-1], 1), value.std() / 500, np.float16).view(np.uint8)
        places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
        for place in places[kind.name]:
            blocks[..., place : place + 2] = scale
        return blocks.reshape(*value.shape[:-1], -1)


def demo_tokenizer() -> tuple[dict, int]:
    """(The keys of the demo's tokenizer, its number of tokens)."""
    path = Path(__file__).parents[1] / "demo" / "tokenizer" / "tokenizer.json"
    raw = json.loads(path.read_text())
    vocab = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in raw["added_tokens"]}
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]],
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}, len(tokens)


def build(family: str, **fields):
    """A random model whose rows are whole blocks of every kind but the K ones."""
    from hf_models import build

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= (
        {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1} if family == "qwen3" else {}
    )
    if family == "gemma3_text":  # transformers' reader takes this scalar to be 256
        sizes |= {"head_dim": 256, "query_pre_attn_scalar": 256}
    return build(family, **(sizes | fields))


def logits(model, ids: np.ndarray) -> np.ndarray:
    """[B, T, V] float32 of token ids [B, T]."""
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def exact_logits(model, ids: np.ndarray) -> np.ndarray:
    """[T, V] of token ids [T]: the equations of a Llama on the weights of `model`, all in float64.

    transformers' own modules stay in float32 where it matters, whatever the weights are in: norms, softmax
    and the angles of rotary embedding.
    """
    config, count = model.config, len(ids)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}
    steps = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = torch.arange(count)[:, None] / config.rope_parameters["rope_theta"] ** steps
    later = torch.ones(count, count, dtype=torch.bool).triu(1)

    def norm(x, name: str):
        return (
            x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]
        )

    def heads(x, name: str, number: int):
        own = (x @ weights[f"{name}.weight"].T).view(count, number, width).transpose(0, 1)
        return own.repeat_interleave(config.num_attention_heads // number, 0)

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(config.num_hidden_layers):
        part = f"model.layers.{layer}"
        h = norm(x, f"{part}.input_layernorm")
        q = turned(heads(h, f"{part}.self_attn.q_proj", config.num_attention_heads))
        k = turned(heads(h, f"{part}.self_attn.k_proj", config.num_key_value_heads))
        v = heads(h, f"{part}.self_attn.v_proj", config.num_key_value_heads)
        shares = (q @ k.mT / width**0.5).masked_fill(later, -torch.inf).softmax(-1)
        mixed = (shares @ v).transpose(0, 1).reshape(count, -1)
        x = x + mixed @ weights[f"{part}.self_attn.o_proj.weight"].T
        h = norm(x, f"{part}.post_attention_layernorm")
        gate, up = (h @ weights[f"{part}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{part}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return (norm(x, "model.norm") @ weights[f"{head}.weight"].T).numpy()
