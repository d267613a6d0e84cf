"""A small teacher in a folder, with a tokenizer, and documents in the shapes that people have."""

import json
from pathlib import Path

from tiny_models import tiny
from tokenizers_made import make_tokenizer

import swiftkv_jax as skv

CONFIG = skv.ModelConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    dtype="bfloat16",
)


def teacher(folder: Path, template: str | None = None, config: skv.ModelConfig = CONFIG) -> Path:
    """A random model of four layers."""
    model = tiny(config, skv.KVPlan.standard(4))
    skv.save_pretrained(make_tokenizer(folder, template), *model, dtype=config.dtype)
    return folder


def texts(path: Path, count: int = 400) -> str:
    """A jsonl of so many short texts, about one in twenty of them held out."""
    rows = [{"text": f"the cat {i} sat on the mat and the dog sat on log {i * 7 % 11}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
