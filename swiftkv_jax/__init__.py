"""SwiftKV and its relatives in JAX: cheaper prompts, smaller caches, distilled and served in one place."""

from swiftkv_jax.analysis.flops import cache_bytes_per_token, flops_table
from swiftkv_jax.checkpoint.adapter import from_pretrained, save_pretrained
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction, Row
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.surgery import layer_pruned, to_slim, to_swiftkv, with_tail
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.version import __version__

__all__ = [
    "LLM",
    "Cache",
    "KVPlan",
    "ModelConfig",
    "Predicted",
    "Prediction",
    "RopeConfig",
    "Row",
    "SamplingParams",
    "Transformer",
    "UsageError",
    "UsageWarning",
    "__version__",
    "cache_bytes_per_token",
    "flops_table",
    "from_pretrained",
    "layer_pruned",
    "save_pretrained",
    "step",
    "to_slim",
    "to_swiftkv",
    "with_tail",
]
