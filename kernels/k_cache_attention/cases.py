"""The shapes that matter for attention without values: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.mask import visible
from swiftkv_jax.kernels.common.pools import Pool, quantise
from swiftkv_jax.kernels.k_cache_attention import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an implementation of `k_cache_attention`, or with `inputs` of `x_cache_attention`.

    Attributes:
      lengths: keys that the last query of each sequence sees; 0 is a sequence without a query.
      queries: of each block, at the last positions of its sequence.
      heads, width: of the keys. group: as they are stored. page, slots: of the pool.
      inputs: width of a cached row of inputs; 0: rows are keys.
      rope: rotary embedding or none; rotated: stored after it. scaled: 8-bit rows with a scale a token.
      float8_scores: as in the call.
    """

    lengths: tuple[int, ...]
    queries: int = 1
    heads: int = 4
    width: int = 64
    inputs: int = 0
    group: int = 1
    page: int = 32
    slots: int = 4
    rope: bool = True
    rotated: bool = False
    window: int | None = None
    stored: str = "float32"
    computed: str = "float32"
    threshold: float = 0.0
    float8_scores: bool = False

    @property
    def door(self) -> Callable[..., jax.Array]:
        """The operation, with the arguments that its implementations take."""
        return call_inputs if self.inputs else call

    @property
    def scaled(self) -> bool:
        """Whether rows are 8 bits wide and have scales."""
        return jnp.dtype(self.stored).itemsize == 1

    def shapes(self) -> tuple[tuple, dict]:
        """Arguments and array options of an implementation, as `jax.ShapeDtypeStruct`s."""
        blocks, row = len(self.lengths), self.inputs or self.heads * self.width
        pages, integer, dtype = blocks * self.slots, jnp.int32, jnp.dtype(self.computed)
        weight = jax.ShapeDtypeStruct((self.heads, row, self.width), dtype)
        args = (
            jax.ShapeDtypeStruct((blocks, self.queries, self.heads, self.width), dtype),
            jax.ShapeDtypeStruct((2, pages, self.page, row), jnp.dtype(self.stored)),
            *[weight] * (2 if self.inputs else 1),
            jax.ShapeDtypeStruct((blocks, self.slots), integer),
            jax.ShapeDtypeStruct((blocks,), integer),
            jax.ShapeDtypeStruct((blocks, self.queries), integer),
        )
        half, scale = (self.width // 2,), (2, pages, 1, self.page)
        return args, self._arrays(
            jax.ShapeDtypeStruct(half, jnp.float32) if self.rope else None,
            jax.ShapeDtypeStruct(scale, jnp.float32) if self.scaled else None,
        )

    def _arrays(self, frequencies, scale) -> dict:
        if self.inputs:
            return {} if scale is None else {"x_scale": scale}
        return {"frequencies": frequencies, "k_scale": scale}

    @property
    def options(self) -> dict:
        """The other options of the call."""
        both = {"row": 1, "scale": self.width**-0.5, "window": self.window}
        if self.inputs:
            return both
        return both | {
            "group": self.group,
            "rotated": self.rotated,
            "threshold": self.threshold,
            "float8_scores": self.float8_scores,
        }

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """Arguments and array options, random; pages in no order; everything that no query sees is NaN."""
        shapes = self.shapes()[0]
        keys = iter(jax.random.split(jax.random.key(seed), 8))
        q, *weights = (
            jax.random.normal(next(keys), s.shape).astype(s.dtype) for s in (shapes[0], *shapes[2:-3])
        )
        blocks, pages = len(self.lengths), shapes[1].shape[1]
        table = jax.random.permutation(next(keys), pages).reshape(blocks, self.slots).astype(jnp.int32)
        ends = jnp.array(self.lengths)[:, None]
        position = jnp.maximum(ends - self.queries + jnp.arange(self.queries), -1).astype(jnp.int32)
        seen = visible(position, self.slots * self.page, self.window).any(1)
        seen = jnp.zeros((pages, self.page), bool).at[table].set(seen.reshape(blocks, self.slots, -1))
        rows = jax.random.normal(next(keys), shapes[1].shape)
        scale = None
        if self.scaled:
            rows, scale = quantise(rows, shapes[1].dtype)
            scale = jnp.where(seen, scale, jnp.nan)[:, :, None].at[0].set(jnp.nan)
        rows = rows.astype(shapes[1].dtype)
        if rows.dtype != jnp.int8:
            rows = jnp.where(seen[..., None], rows, jnp.nan).at[0].set(jnp.nan)
        frequencies = 1e4 ** (-jnp.arange(0, self.width, 2) / self.width) if self.rope else None
        weights = [(w * rows.shape[-1] ** -0.5).astype(q.dtype) for w in weights]
        sequence = jnp.arange(blocks, dtype=jnp.int32)
        return (q, rows, *weights, table, sequence, position), self._arrays(frequencies, scale)


def call(q, k, w_kv, *where, k_scale=None, **options) -> jax.Array:
    """`api.k_cache_attention`, with the arguments that its implementations take."""
    return api.k_cache_attention(q, (Pool(k, k_scale),), w_kv, *where, **options)


# Relative to the largest value, by the dtype of the computation: rounding of weights and rotated keys.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}

SMALL = {
    "lengths": Case(lengths=(0, 1, 31, 32, 33, 77)),
    "halves": Case(lengths=(33, 96), group=2),
    "all_halves": Case(lengths=(65,), group=4),
    "no_rope": Case(lengths=(1, 70), rope=False),
    "rotated": Case(lengths=(0, 33, 100), rotated=True, group=2),
    "chunk": Case(lengths=(3, 33, 100), queries=5),
    "window": Case(lengths=(20, 128), queries=3, window=40),
    "width80": Case(lengths=(33, 64), width=80),
    "width96": Case(lengths=(33, 64), width=96, group=4),
    "width128": Case(lengths=(40,), width=128, group=2),
    "width256": Case(lengths=(40,), width=256, heads=2),
    "bfloat16": Case(lengths=(1, 40, 100), stored="bfloat16", computed="bfloat16"),
    "int8": Case(lengths=(1, 40, 100), stored="int8"),
    "float8": Case(lengths=(1, 40, 100), stored="float8_e4m3fn", group=2),
    "int8_rotated": Case(lengths=(40, 100), stored="int8", rotated=True),
    "float8_scores": Case(lengths=(1, 40, 100), stored="float8_e4m3fn", group=2, float8_scores=True),
    "float8_scores_rotated": Case(
        lengths=(40, 100), queries=3, stored="float8_e4m3fn", rotated=True, float8_scores=True
    ),
}

# Llama-2-7B (multi-head, arXiv 2307.09288) with 16 sequences of 8192 tokens.
_LLAMA2_7B = Case(
    lengths=(8192,) * 16,
    heads=32,
    width=128,
    group=4,
    page=64,
    slots=128,
    stored="bfloat16",
    computed="bfloat16",
)
# Whisper small's decoder (arXiv 2503.05840, table 1): no rotary embedding.
_WHISPER = Case(
    lengths=(1500,) * 16,
    heads=12,
    width=64,
    page=64,
    slots=24,
    rope=False,
    stored="bfloat16",
    computed="bfloat16",
)

REAL = {
    "llama2_7b": _LLAMA2_7B,
    "llama2_7b_heads": replace(_LLAMA2_7B, group=1),
    "llama2_7b_rotated": replace(_LLAMA2_7B, rotated=True, threshold=1e-4),
    "llama2_7b_int8": replace(_LLAMA2_7B, stored="int8"),
    "llama2_7b_float8": replace(_LLAMA2_7B, stored="float8_e4m3fn"),
    "llama2_7b_float8_scores": replace(_LLAMA2_7B, stored="float8_e4m3fn", float8_scores=True),
    "llama2_7b_rotated_int8": replace(_LLAMA2_7B, stored="int8", rotated=True),
    "llama2_7b_rotated_float8": replace(_LLAMA2_7B, stored="float8_e4m3fn", rotated=True),
    "llama2_7b_rotated_float8_scores": replace(
        _LLAMA2_7B, stored="float8_e4m3fn", rotated=True, float8_scores=True
    ),
    "llama2_7b_chunk": replace(_LLAMA2_7B, lengths=(8192,) * 4, queries=4),
    "whisper_small": _WHISPER,
    "no_rope_int8": replace(_LLAMA2_7B, stored="int8", rope=False),
    "no_rope_float8_scores": replace(_LLAMA2_7B, stored="float8_e4m3fn", rope=False, float8_scores=True),
    "width80": replace(_LLAMA2_7B, lengths=(4096,) * 8, slots=64, width=80, group=1),
    "width80_group4": replace(_LLAMA2_7B, lengths=(4096,) * 8, slots=64, width=80, group=4),
    "width80_float8": replace(
        _LLAMA2_7B, lengths=(4096,) * 8, slots=64, width=80, group=4, stored="float8_e4m3fn"
    ),
    "width80_float8_scores": replace(
        _LLAMA2_7B,
        lengths=(4096,) * 8,
        slots=64,
        width=80,
        group=4,
        stored="float8_e4m3fn",
        float8_scores=True,
    ),
    "width96": replace(_LLAMA2_7B, lengths=(4096,) * 8, slots=64, width=96, group=8),
    "width96_group4": replace(_LLAMA2_7B, lengths=(4096,) * 8, slots=64, width=96, group=4),
    "width256": replace(_LLAMA2_7B, lengths=(4096,) * 8, slots=64, heads=16, width=256, group=1),
}


def call_inputs(q, x, *rest, x_scale=None, **options) -> jax.Array:
    """`api.x_cache_attention`, with the arguments that its implementations take."""
    return api.x_cache_attention(q, (Pool(x, x_scale),), *rest, **options)


_INPUTS = Case(lengths=(0, 33, 64), inputs=40, slots=2, rope=False, stored="bfloat16", computed="bfloat16")
INPUTS_SMALL = {"narrow": _INPUTS}

# Caches of layer inputs (arXiv 2503.05840, section 5): Whisper small's decoder, square weights; T5-3B's
# (arXiv 1910.10683), 4096 columns of keys from 1024 of inputs.
INPUTS_REAL = {
    "whisper_small": replace(_WHISPER, inputs=768),
    "t5_3b": replace(_WHISPER, heads=32, width=128, inputs=1024),
}
