"""The shapes that matter for the fused fill: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill import api
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an implementation of `fused_kv_fill`.

    Attributes:
      live: tokens of each page that is written. rows: of the pool that are filled, of `of` rows.
      dim: width of the stream. heads, width: of the keys; value: width of a value, that of a key by default.
      pages: of the pool; more than are written.
    """

    live: tuple[int, ...]
    rows: tuple[int, ...] = (1, 2)
    of: int = 3
    pages: int = 8
    page: int = 32
    dim: int = 96
    heads: int = 2
    width: int = 64
    value: int = 0
    bias: bool = False
    k_norm: bool = False
    stored: str = "float32"
    computed: str = "float32"

    @property
    def options(self) -> dict:
        """The static options of the call."""
        return {"rows": self.rows, "eps": 1e-5}

    def shapes(self) -> tuple:
        """Arguments of an implementation, as `jax.ShapeDtypeStruct`s."""
        dtype = jnp.dtype(self.computed)
        make: Any = jax.ShapeDtypeStruct
        tokens, filled = len(self.live) * self.page, len(self.rows)
        k, v = self.heads * self.width, self.heads * (self.value or self.width)
        pool, stored = (self.of, self.pages), jnp.dtype(self.stored)
        scale = make((*pool, self.heads, self.page), jnp.float32) if stored.itemsize == 1 else None
        makers = Makers(
            make((filled, self.dim, k), dtype),
            make((filled, self.dim, v), dtype),
            make((filled, k), dtype) if self.bias else None,
            make((filled, v), dtype) if self.bias else None,
            make((filled, self.width), dtype) if self.k_norm else None,
        )
        pools = Pools(make((*pool, self.page, k), stored), make((*pool, self.page, v), stored), scale, scale)
        angle, names = (
            make((tokens, self.width // 2), jnp.float32),
            make((len(self.live),), jnp.int32),
        )
        return make((tokens, self.dim), dtype), makers, angle, angle, pools, names, names

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple:
        """Random arguments; an empty page is not written, and dead tokens of the stream are NaN."""
        keys = iter(jax.random.split(jax.random.key(seed), 32))

        def fill(shape):
            if shape.dtype == jnp.int8:
                return jax.random.randint(next(keys), shape.shape, -127, 128, jnp.int8)
            return jax.random.normal(next(keys), shape.shape).astype(shape.dtype)

        x, makers, _, _, pools, _, _ = jax.tree.map(fill, self.shapes())
        makers = makers._replace(w_k=makers.w_k * self.dim**-0.5, w_v=makers.w_v * self.dim**-0.5)
        live = jnp.array(self.live, jnp.int32)
        dead = (jnp.arange(self.page) >= live[:, None]).reshape(-1, 1)
        names = jax.random.permutation(next(keys), self.pages)[: len(self.live)].astype(jnp.int32)
        names = jnp.where(live > 0, names, self.pages)
        angle = jnp.arange(len(x))[:, None] * 1e4 ** (-jnp.arange(0, self.width, 2) / self.width)
        return jnp.where(dead, jnp.nan, x), makers, jnp.cos(angle), jnp.sin(angle), pools, names, live


def call(x, makers: Makers, cos, sin, pools: Pools, names, live, **options) -> Pools:
    """`api.fused_kv_fill`, with the arguments and the result of its implementations."""
    both = Pool(pools.k, pools.k_scale), Pool(pools.v, pools.v_scale)
    k, v = api.fused_kv_fill(x, makers, cos, sin, both, names, live, **options)
    return Pools(k.data, v.data, k.scale, v.scale)


# Relative to the largest value, by the dtype of the rows: one rounding, of 8 bits half a step of int8.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2, "float8_e4m3fn": 4e-2}

SMALL = {
    "plain": Case(live=(32, 32, 5)),
    "one_token": Case(live=(1, 0)),
    "nowhere": Case(live=(32, 0, 0, 0, 5, 0, 0, 0)),  # tiles of two pages: in some, neither is written
    "bias": Case(live=(32, 7), bias=True),
    "k_norm": Case(live=(32, 7), k_norm=True, bias=True),
    "one_row": Case(live=(32, 7, 32), rows=(0,)),
    "gqa1": Case(live=(9,), heads=1),
    "wide_values": Case(live=(32, 3), value=128),
    "width80": Case(live=(32, 3), width=80),
    "width96": Case(live=(32, 3), width=96),
    "width128": Case(live=(32, 3), width=128, heads=4),
    "width256": Case(live=(32, 3), width=256),
    "bfloat16": Case(live=(32, 32, 5), stored="bfloat16", computed="bfloat16", k_norm=True),
    "int8": Case(live=(32, 5), stored="int8", heads=8, width=16),
    "float8": Case(live=(32, 5), stored="float8_e4m3fn"),
}

# Llama-3.1-8B (arXiv 2407.21783), SwiftKV at half its layers: 16 rows of 8192 tokens.
_LLAMA_8B = Case(
    live=(64,) * 128,
    rows=tuple(range(16, 32)),
    of=32,
    pages=1024,
    page=64,
    dim=4096,
    heads=8,
    width=128,
    stored="bfloat16",
    computed="bfloat16",
)

REAL = {
    "llama_8b": _LLAMA_8B,
    "llama_8b_share4": replace(_LLAMA_8B, rows=(16, 17, 18, 19), of=20),
    "llama_8b_int8": replace(_LLAMA_8B, stored="int8", page=128, live=(128,) * 64, pages=512),
    "llama_8b_float8": replace(_LLAMA_8B, stored="float8_e4m3fn", page=128, live=(128,) * 64, pages=512),
    "llama_8b_chunk": replace(_LLAMA_8B, live=(64,) * 8),
    "llama2_7b": replace(_LLAMA_8B, heads=32, pages=256),
    "llama_70b": replace(_LLAMA_8B, dim=8192, rows=tuple(range(40, 48)), of=48, pages=512),
    "qwen3_8b": replace(_LLAMA_8B, k_norm=True),
    "qwen2_7b": replace(_LLAMA_8B, dim=3584, heads=4, bias=True),
    "llama_1b": replace(_LLAMA_8B, dim=2048, width=64, rows=tuple(range(8, 16)), of=16),
    "width80": replace(_LLAMA_8B, dim=2560, heads=32, width=80, rows=(8, 9), of=10),
    "width96": replace(_LLAMA_8B, dim=3072, heads=32, width=96, rows=(8, 9), of=10),
    "width256": replace(_LLAMA_8B, dim=2048, heads=1, width=256),
}
