"""SwiftKV and its relatives in JAX: cheaper prompts, smaller caches, distilled and served in one place."""

from swiftkv_jax.analysis.flops import cache_bytes_per_token, flops_table
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.config import ModelConfig, RopeConfig
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model import Transformer
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.surgery import to_swiftkv

__all__ = [
    "LLM",
    "KVPlan",
    "ModelConfig",
    "RopeConfig",
    "SamplingParams",
    "Transformer",
    "UsageError",
    "cache_bytes_per_token",
    "flops_table",
    "from_pretrained",
    "save_pretrained",
    "to_swiftkv",
]
