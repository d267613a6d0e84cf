"""The shapes that matter for attention without values: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.case import Call, PagedCase, normals
from swiftkv_jax.kernels.common.case import Case as Base
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.k_cache_attention import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(PagedCase):
    """One call of an implementation of `k_cache_attention`, or with `inputs` of `x_cache_attention`.

    Attributes:
      inputs: width of a cached row of inputs; 0: rows are keys.
      rope: rotary embedding or none; rotated: stored after it.
      threshold: as in the call.
    """

    inputs: int = 0
    rope: bool = True
    rotated: bool = False
    threshold: float = 0.0

    @classmethod
    def of_model(cls, call: Call, **sizes) -> Base:
        inputs = call.row if call.operation == "x_cache_attention" else 0
        return super().of_model(call, inputs=inputs, **sizes)

    @property
    def options(self) -> dict:
        names = () if self.inputs else ("rotated", "threshold")
        own = {name: getattr(self, name) for name in names}
        return {"row": 1, "scale": self.width**-0.5, "window": self.window} | own

    @property
    def operation(self) -> Callable:
        return call_inputs if self.inputs else call

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        row = self.inputs or self.heads * self.width
        q, pools, scales, where = self.arrays(seed, {"": (1, row)})
        shape = (2 if self.inputs else 1, self.heads, row, self.width)
        (weights,) = normals(seed + 1, shape)
        args = (q, pools[""], *(weights * row**-0.5).astype(q.dtype), *where)
        if self.inputs:
            return args, {"x_scale": scales[""]} if self.scaled else {}
        frequencies = 1e4 ** (-jnp.arange(0, self.width, 2) / self.width) if self.rope else None
        return args, {"frequencies": frequencies, "k_scale": scales[""]}

    @property
    def bytes(self) -> float:
        """Each row that is seen and the weights are read once."""
        row, weights = self.inputs or self.heads * self.width, 2 if self.inputs else 1
        weights *= self.heads * row * self.width * jnp.dtype(self.computed).itemsize
        return float(
            self.seen * (row * jnp.dtype(self.stored).itemsize + (4 if self.scaled else 0)) + weights
        )

    @property
    def flops(self) -> float:
        """FLOPs of scores and of sums of whole rows."""
        row = self.inputs or self.heads * self.width
        return 2 * self.pairs * self.heads * (row + (self.inputs or self.width))


def call(q, k, w_kv, *where, k_scale=None, **options) -> jax.Array:
    """`api.k_cache_attention`, with the arguments that its implementations take."""
    return api.k_cache_attention(q, (Pool(k, k_scale),), w_kv, *where, **options)


SMALL = {
    "lengths": Case(lengths=(0, 1, 31, 32, 33, 77)),
    "no_rope": Case(lengths=(1, 70), rope=False),
    "rotated": Case(lengths=(0, 33, 100), rotated=True),
    "chunk": Case(lengths=(3, 33, 100), queries=5),
    "window": Case(lengths=(20, 128), queries=3, window=40),
    "width80": Case(lengths=(33, 64), width=80),
    "width96": Case(lengths=(33, 64), width=96),
    "width128": Case(lengths=(40,), width=128),
    "width256": Case(lengths=(40,), width=256, heads=2),
    "bfloat16": Case(lengths=(1, 40, 100), stored="bfloat16", computed="bfloat16"),
    "int8": Case(lengths=(1, 40, 100), stored="int8"),
    "float8": Case(lengths=(1, 40, 100), stored="float8_e4m3fn"),
    "int8_rotated": Case(lengths=(40, 100), stored="int8", rotated=True),
}

_BFLOAT16: dict[str, Any] = {"stored": "bfloat16", "computed": "bfloat16", "page": 64}
_FLOAT8 = {"stored": "float8_e4m3fn"}
# Llama-2-7B (multi-head, arXiv 2307.09288) with 16 sequences of 8192 tokens, and heads of other widths.
_LLAMA2_7B = Case(lengths=(8192,) * 16, heads=32, width=128, **_BFLOAT16)
_WIDTH80 = replace(_LLAMA2_7B, lengths=(4096,) * 8, width=80)
# Whisper small's decoder (arXiv 2503.05840, table 1): no rotary embedding.
_WHISPER = Case(lengths=(1500,) * 16, heads=12, width=64, rope=False, **_BFLOAT16)

REAL = {
    "llama2_7b": _LLAMA2_7B,
    "llama2_7b_rotated": replace(_LLAMA2_7B, rotated=True, threshold=1e-4),
    "llama2_7b_int8": replace(_LLAMA2_7B, stored="int8"),
    "llama2_7b_float8": replace(_LLAMA2_7B, **_FLOAT8),
    "llama2_7b_rotated_int8": replace(_LLAMA2_7B, stored="int8", rotated=True),
    "llama2_7b_rotated_float8": replace(_LLAMA2_7B, **_FLOAT8, rotated=True),
    "llama2_7b_chunk": replace(_LLAMA2_7B, lengths=(8192,) * 4, queries=4),
    "whisper_small": _WHISPER,
    "no_rope_int8": replace(_LLAMA2_7B, stored="int8", rope=False),
    "width80": _WIDTH80,
    "width80_float8": replace(_WIDTH80, **_FLOAT8),
    "width96": replace(_WIDTH80, width=96),
    "width256": replace(_WIDTH80, heads=16, width=256),
}


def call_inputs(q, x, *rest, x_scale=None, **options) -> jax.Array:
    """`api.x_cache_attention`, with the arguments that its implementations take."""
    return api.x_cache_attention(q, (Pool(x, x_scale),), *rest, **options)


INPUTS_SMALL = {"narrow": replace(_WHISPER, lengths=(0, 33, 64), heads=4, inputs=40, page=32)}

# Caches of layer inputs (arXiv 2503.05840, section 5): Whisper small's decoder, square weights; T5-3B's
# (arXiv 1910.10683), 4096 columns of keys from 1024 of inputs.
INPUTS_REAL = {
    "whisper_small": replace(_WHISPER, inputs=768),
    "t5_3b": replace(_WHISPER, heads=32, width=128, inputs=1024),
}
