"""The shapes that matter for attention inside prompts: small ones to test, real ones to time."""

import dataclasses
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `prompt_attention`: prompts of `lengths` tokens, padded to `tokens`."""

    lengths: tuple[int, ...]
    tokens: int = 48
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    window: int | None = None
    computed: str = "float32"

    @property
    def options(self) -> dict:
        """The static options of the call."""
        return {"scale": self.width**-0.5, "window": self.window}

    def shapes(self) -> tuple:
        """Arguments of the call, as `jax.ShapeDtypeStruct`s."""
        shape, dtype = (len(self.lengths), self.tokens), jnp.dtype(self.computed)
        kv = jax.ShapeDtypeStruct((*shape, self.kv_heads, self.width), dtype)
        q = jax.ShapeDtypeStruct((*shape, self.heads, self.width), dtype)
        return q, kv, kv, jax.ShapeDtypeStruct(shape[:1], jnp.int32)

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple:
        """Random arguments; tokens past a prompt's end are NaN."""
        keys = jax.random.split(jax.random.key(seed), 3)
        lengths = jnp.array(self.lengths, jnp.int32)
        dead = (jnp.arange(self.tokens) >= lengths[:, None])[..., None, None]
        arrays = zip(keys, self.shapes()[:3], strict=True)
        arrays = (jax.random.normal(key, s.shape).astype(s.dtype) for key, s in arrays)
        return *(jnp.where(dead, jnp.nan, x) for x in arrays), lengths


# Relative to the largest value, by the dtype of the computation: rounding of the weights.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

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
