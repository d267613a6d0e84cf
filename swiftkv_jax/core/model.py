"""A decoder as a Flax Linen module."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import loop, scan, weights
from swiftkv_jax.core.cache import Cache, Encoded
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.rows import check
from swiftkv_jax.core.shapes import Logits, PyTree, Tokens


class Transformer(nn.Module):
    """A decoder, as a Flax Linen module; its parameters are a plain tree of arrays (see weights.py).

    Attributes:
      config: the layers. plan: where the rows of the cache come from. dtype: of activations, and of the
        parameters that `init` makes.

    Raises:
      UsageError: config and plan do not fit each other.
    """

    config: ModelConfig
    plan: KVPlan
    dtype: str = "float32"

    def __post_init__(self):
        check(self.config, self.plan)
        super().__post_init__()

    def __call__(self, tokens: Tokens, encoded: Encoded | None = None) -> Logits:
        """Logits [B, T, V] in float32 at every position of full, causal sequences [B, T]. A model with an
        encoder also takes its output for each sequence's source (`encoder.encode`)."""
        params = self._params()
        return logits(self, params, scan.forward(self, params, tokens, encoded=encoded))

    def step(self, tokens, positions, query_starts, survivors, cache: Cache):
        """The truncated step on a cache: `loop.step`, by `model.apply(..., method="step")`."""
        return loop.step(self, self._params(), tokens, positions, query_starts, survivors, cache)

    @nn.compact
    def _params(self) -> PyTree:
        """The tree of parameters, in stacks of any length; `init` makes the same as `weights.init`."""
        if not self.is_initializing():
            return self.variables["params"]
        scope: Any = self.scope
        key = scope.rngs["params"].as_jax_rng()  # not `make_rng`, which derives another key
        tree = weights.init(self.config, self.plan, key, jnp.dtype(self.dtype))
        return {name: self.param(name, lambda _, made=made: made) for name, made in tree.items()}
