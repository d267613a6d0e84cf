"""Tiny random models whose norms, biases and logits are all far from trivial."""

import dataclasses

import jax
import numpy as np

from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.config.sizes import Sizes
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer

SIZES = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 40, "num_layers": 4, "num_heads": 4}
PLAIN = ModelConfig(**SIZES, num_kv_heads=2, head_dim=12)
# One kv head, head_dim 20, biases, per-head norms, tied, windows of every size: more than any family has.
ODD = ModelConfig(
    **SIZES,
    num_kv_heads=1,
    head_dim=20,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    tie_word_embeddings=True,
    windows=(3, 2**30, 5, 2**30),
)
# Layers with their own heads and MLP widths. A narrower row ends in heads of zeros, or repeats its heads.
SIZED, REPEATED = (
    dataclasses.replace(PLAIN, qk_norm=True, sizes=tuple(map(Sizes, heads, kv_heads, (24, 40, 40, 16))))
    for heads, kv_heads in (((4, 8, 8, 4), (1, 2, 2, 1)), ((8, 8, 8, 8), (4, 2, 2, 1)))
)
# A dense layer, and experts beside an MLP that all tokens run.
MOE = dataclasses.replace(
    PLAIN,
    mlps=("dense", "experts", "experts", "experts"),
    experts=Experts(count=5, per_token=2, width=28, normalise=True, scale=1.5, shared=20, shared_gate=True),
)
# Attention over latents: more rotary numbers than others, values of another width, scores of another scale.
LATENT = dataclasses.replace(
    PLAIN,
    num_kv_heads=4,
    head_dim=18,
    latent=Latent(rank=20, query_rank=14, plain=8, rotary=10, value=6),
    attention_scale=0.4,
    rope=RopeConfig(interleaved=True),
)


def sized(
    vocab: int, width: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more
) -> ModelConfig:
    """A config of these sizes."""
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": ffn, "num_layers": layers}
    return ModelConfig(**sizes, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **more)


WORDS = sized(300, 16, 24, 4, 2, 1, 8, max_position_embeddings=128)  # for the tokenizer of tokenizers_made.py


def random_params(config: ModelConfig, plan: KVPlan, seed: int = 0):
    """Numpy parameters: kernels keep the scale of the stream, gains spread around 1, biases around 0."""
    random = np.random.default_rng(seed)

    def one(path, w: weights.Weight):
        noise = random.standard_normal(w.shape, np.float32)
        name = path[-1].key
        if w.fill:
            return 1 + 0.3 * noise
        if name == "bias":
            return 0.2 * noise
        return noise * (0.3 if name == "embed" else config.hidden_size**-0.5)

    return jax.tree_util.tree_map_with_path(one, weights.weights(config, plan))


def tiny(config: ModelConfig, plan: KVPlan, seed: int = 0) -> tuple[Transformer, dict]:
    """A float32 model and its parameters on the device."""
    return Transformer(config, plan), jax.device_put(random_params(config, plan, seed))
