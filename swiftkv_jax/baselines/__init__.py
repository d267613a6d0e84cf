"""The systems that KV prediction is compared with, on a dense cache: definitions for measuring quality.

Random and static pruning of tokens, LazyLLM and FFN-SkipLLM. None of them trains anything, and each keeps the
model's weights. `generate` runs them; FLOPs are counted, time is not saved: see `dense.flops`.
"""

from swiftkv_jax.baselines.ffn_skip import FFNSkip
from swiftkv_jax.baselines.generate import Baseline, generate, read
from swiftkv_jax.baselines.lazy_llm import LazyLLM
from swiftkv_jax.baselines.pruning import RandomPruning, StaticPruning

__all__ = ["Baseline", "FFNSkip", "LazyLLM", "RandomPruning", "StaticPruning", "generate", "read"]
