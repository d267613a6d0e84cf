"""The shapes that matter for paged attention: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.mask import visible
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.paged_attention import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an implementation of `paged_attention`.

    Attributes:
      lengths: keys that the last query of each block sees; 0 is a block without a query.
      queries: of each block, at the last positions of its sequence.
      heads: query heads; kv_heads; width of a key; value: width of a value, that of a key by default.
      page, slots: of the pool. 8-bit rows have a scale for each token and head.
    """

    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    value: int = 0
    page: int = 32
    slots: int = 4
    window: int | None = None
    stored: str = "float32"
    computed: str = "float32"

    @property
    def scaled(self) -> bool:
        """Whether rows are 8 bits wide and have scales."""
        return jnp.dtype(self.stored).itemsize == 1

    @property
    def options(self) -> dict:
        """The static options of the call."""
        return {"row": 1, "scale": self.width**-0.5, "window": self.window}

    def shapes(self) -> tuple[tuple, dict]:
        """Arguments and array options of an implementation, as `jax.ShapeDtypeStruct`s."""
        blocks, kv, make = len(self.lengths), self.kv_heads, jax.ShapeDtypeStruct
        pool, integer = (2, blocks * self.slots), jnp.int32
        args = (
            make((blocks, self.queries, self.heads, self.width), jnp.dtype(self.computed)),
            make((*pool, self.page, kv * self.width), jnp.dtype(self.stored)),
            make((*pool, self.page, kv * (self.value or self.width)), jnp.dtype(self.stored)),
            make((blocks, self.slots), integer),
            make((blocks,), integer),
            make((blocks, self.queries), integer),
        )
        scale = make((*pool, kv, self.page), jnp.float32) if self.scaled else None
        return args, {"k_scale": scale, "v_scale": scale}

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """Arguments and array options, random; pages in no order; everything that no query sees is NaN."""
        shapes = self.shapes()[0]
        keys = iter(jax.random.split(jax.random.key(seed), 4))
        q = jax.random.normal(next(keys), shapes[0].shape).astype(shapes[0].dtype)
        (blocks, slots), pages = shapes[3].shape, shapes[1].shape[1]
        table = jax.random.permutation(next(keys), pages).reshape(blocks, slots).astype(jnp.int32)
        ends = jnp.array(self.lengths)[:, None]
        position = jnp.maximum(ends - self.queries + jnp.arange(self.queries), -1).astype(jnp.int32)
        seen = visible(position, slots * self.page, self.window).any(1)
        seen = jnp.zeros((pages, self.page), bool).at[table].set(seen.reshape(blocks, slots, -1))
        pools, scales = [], []
        for shape in shapes[1:3]:
            rows = jax.random.normal(next(keys), shape.shape)
            if self.scaled:
                heads = rows.reshape(*rows.shape[:3], self.kv_heads, -1)
                scale = jnp.max(jnp.abs(heads), -1, keepdims=True) / 100
                rows = (heads / scale).reshape(rows.shape)
                scale = jnp.where(seen[:, None], jnp.swapaxes(scale[..., 0], 2, 3), jnp.nan)
                scales.append(scale.at[0].set(jnp.nan))
            rows = rows.astype(shape.dtype)
            if rows.dtype != jnp.int8:
                rows = jnp.where(seen[..., None], rows, jnp.nan).at[0].set(jnp.nan)
            pools.append(rows)
        k_scale, v_scale = scales if self.scaled else (None, None)
        sequence = jnp.arange(blocks, dtype=jnp.int32)
        return (q, *pools, table, sequence, position), {"k_scale": k_scale, "v_scale": v_scale}


def call(q, k, v, *where, k_scale=None, v_scale=None, **options) -> jax.Array:
    """`api.paged_attention`, with the arguments that its implementations take."""
    return api.paged_attention(q, (Pool(k, k_scale), Pool(v, v_scale)), *where, **options)


# Relative to the largest value, by the dtype of the computation: rounding of the weights.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

SMALL = {
    "lengths": Case(lengths=(0, 1, 31, 32, 33, 77)),
    "gqa1": Case(lengths=(33, 96), heads=4, kv_heads=4),
    "gqa4": Case(lengths=(40, 96), heads=8, kv_heads=2),
    "gqa8": Case(lengths=(33,), heads=8, kv_heads=1),
    "chunk": Case(lengths=(3, 33, 100), queries=5),
    "long_chunk": Case(lengths=(70, 100), queries=64, heads=8, kv_heads=2),
    "window": Case(lengths=(20, 128), queries=3, window=40),
    "wide_values": Case(lengths=(33, 70), value=128),
    "width80": Case(lengths=(33, 64), width=80),
    "width96": Case(lengths=(33, 64), width=96),
    "width128": Case(lengths=(40,), width=128),
    "width256": Case(lengths=(40,), width=256),
    "bfloat16": Case(lengths=(1, 40, 100), stored="bfloat16", computed="bfloat16"),
    "int8": Case(lengths=(1, 40, 100), stored="int8"),
    "float8": Case(lengths=(1, 40, 100), stored="float8_e4m3fn"),
    "int8_chunk": Case(lengths=(40, 100), stored="int8", queries=5, window=30),
}

# Llama-3.1-8B (arXiv 2407.21783): 64 sequences of 8192 tokens, one row of the pool.
_LLAMA_8B = Case(
    lengths=(8192,) * 64,
    heads=32,
    kv_heads=8,
    width=128,
    page=64,
    slots=128,
    stored="bfloat16",
    computed="bfloat16",
)

REAL = {
    "llama_8b": _LLAMA_8B,
    "llama_8b_int8": replace(_LLAMA_8B, stored="int8", page=128, slots=64),
    "llama_8b_float8": replace(_LLAMA_8B, stored="float8_e4m3fn", page=128, slots=64),
    "llama_8b_few": replace(_LLAMA_8B, lengths=(131072,) * 2, slots=2048),
    "llama_8b_page128": replace(_LLAMA_8B, page=128, slots=64),
    "llama_8b_window": replace(_LLAMA_8B, window=4096),
    "llama_8b_chunks": replace(_LLAMA_8B, lengths=(4096,) * 32, slots=64, queries=64),
    "llama_8b_mixed": replace(_LLAMA_8B, lengths=(2048,) * 48, slots=64, queries=16),
    "llama_8b_mixed_int8": replace(
        _LLAMA_8B, lengths=(8192,) * 16, slots=64, page=128, queries=6, stored="int8"
    ),
    "llama2_7b": replace(_LLAMA_8B, lengths=(8192,) * 16, kv_heads=32),
    "llama_1b": replace(_LLAMA_8B, width=64),
    "qwen_0.5b": replace(_LLAMA_8B, heads=14, kv_heads=2, width=64),
    "width80": replace(_LLAMA_8B, lengths=(4096,) * 8, slots=64, kv_heads=32, width=80),
    "width96": replace(_LLAMA_8B, lengths=(4096,) * 8, slots=64, kv_heads=32, width=96),
    "width256": replace(_LLAMA_8B, lengths=(4096,) * 8, slots=64, heads=8, kv_heads=1, width=256),
}
