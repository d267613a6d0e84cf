"""The shapes that matter for attention inside prompts: small ones to test, real ones to time."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.case import Case as Base
from swiftkv_jax.kernels.common.case import pairs
from swiftkv_jax.kernels.prompt_attention import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Base):
    """One call of `prompt_attention`: prompts of `lengths` tokens, padded to `tokens`."""

    lengths: tuple[int, ...]
    tokens: int = 48
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    window: int | None = None

    @property
    def options(self) -> dict:
        return {"scale": self.width**-0.5, "window": self.window}

    def by(self, implementation: str) -> Callable:
        return functools.partial(api.prompt_attention, **self.options, implementation=implementation)

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """Random arguments; tokens past a prompt's end are NaN."""
        keys = jax.random.split(jax.random.key(seed), 3)
        lengths = jnp.array(self.lengths, jnp.int32)
        dead = (jnp.arange(self.tokens) >= lengths[:, None])[..., None, None]
        shape = (len(self.lengths), self.tokens)
        heads = zip(keys, (self.heads, self.kv_heads, self.kv_heads), strict=True)
        arrays = (jax.random.normal(key, (*shape, n, self.width)).astype(self.computed) for key, n in heads)
        return (*(jnp.where(dead, jnp.nan, x) for x in arrays), lengths), {}

    @property
    def flops(self) -> float:
        """Every seen pair of tokens takes 4 FLOP an element."""
        return 4 * sum(pairs(0, n, self.window) for n in self.lengths) * self.heads * self.width

    @property
    def bytes(self) -> float:
        """q, k, v and the result move once."""
        heads = 2 * self.heads + 2 * self.kv_heads
        return float(sum(self.lengths) * heads * self.width * jnp.dtype(self.computed).itemsize)


SMALL = {
    "lengths": Case(lengths=(0, 1, 31, 48)),
    "gqa1": Case(lengths=(33, 48), kv_heads=4),
    "gqa4": Case(lengths=(40,), kv_heads=1),
    "window": Case(lengths=(20, 48), window=7),
    "width80": Case(lengths=(33,), width=80),
    "bfloat16": Case(lengths=(1, 40), computed="bfloat16"),
}

# Llama-3.1-8B (arXiv 2407.21783).
_LLAMA_8B = Case(lengths=(8192,), tokens=8192, heads=32, kv_heads=8, width=128, computed="bfloat16")

REAL = {
    "llama_8b": _LLAMA_8B,
    "llama_8b_2k": replace(_LLAMA_8B, lengths=(2048,) * 8, tokens=2048),
    "llama_8b_32k": replace(_LLAMA_8B, lengths=(32768,), tokens=32768),
    "llama_8b_ragged": replace(_LLAMA_8B, lengths=(8192, 5000, 1001, 64)),
}
