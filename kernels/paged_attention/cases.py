"""The shapes that matter for paged attention: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.case import Call, PagedCase
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.paged_attention import api


def call(q, k, v, *where, k_scale=None, v_scale=None, value=None, **options) -> jax.Array:
    """`api.paged_attention`, with the arguments that its implementations take."""
    pools = (Pool(k, k_scale), Pool(v, v_scale))
    return api.paged_attention(q, pools[:1] if value else pools, *where, value=value, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(PagedCase):
    """One call of an implementation of `paged_attention`.

    Attributes:
      kv_heads: of keys and values. value: width of a value, that of a key by default.
      shared: width of values that are the first numbers of their keys, in one pool; 0: they have their own.
    """

    operation = staticmethod(call)

    kv_heads: int = 2
    value: int = 0
    shared: int = 0

    @property
    def options(self) -> dict:
        value = {"value": self.shared} if self.shared else {}
        return {"row": 1, "scale": self.width**-0.5, "window": self.window} | value

    @classmethod
    def checked(cls, call: Call):
        """Also long blocks over expanded rows, where they are."""
        yield from super().checked(call)
        if call.kind == "chunk" and call.expanded:
            width, value = call.expanded
            own = {"kv_heads": call.heads, "width": width, "shared": 0, "stored": call.computed}
            long = replace(call, **own, block=2 * call.block, lanes=1, alone=1)
            *_, (where, case) = super().checked(long)
            yield f"expanded, {where}", replace(case, value=value)

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        widths = {"k": (self.kv_heads, self.width), "v": (self.kv_heads, self.value or self.width)}
        if self.shared:
            del widths["v"]
        q, pools, scales, where = self.arrays(seed, widths)
        pools, scales = ({"k": parts["k"], "v": parts.get("v", parts["k"])} for parts in (pools, scales))
        return (q, *pools.values(), *where), {f"{name}_scale": scale for name, scale in scales.items()}

    @property
    def bytes(self) -> float:
        """Each key and value that is seen is read once."""
        own = 0 if self.shared else self.value or self.width
        scales = 4 * (1 + (own > 0)) if self.scaled else 0
        stored = (self.width + own) * jnp.dtype(self.stored).itemsize
        return float(self.seen * self.kv_heads * (stored + scales))

    @property
    def flops(self) -> float:
        """FLOPs of scores and sums."""
        return 2 * self.pairs * self.heads * (self.width + (self.shared or self.value or self.width))


SMALL = {
    "lengths": Case(lengths=(0, 1, 31, 32, 33, 77)),
    "gqa1": Case(lengths=(33, 96), heads=4, kv_heads=4),
    "gqa4": Case(lengths=(40, 96), heads=8, kv_heads=2),
    "gqa8": Case(lengths=(33,), heads=8, kv_heads=1),
    "chunk": Case(lengths=(3, 33, 100), queries=5),
    "long_chunk": Case(lengths=(70, 100), queries=64, heads=8, kv_heads=2),
    "window": Case(lengths=(20, 128), queries=3, window=40),
    "wide_values": Case(lengths=(33, 70), value=128),
    "latent": Case(lengths=(33, 70), heads=8, kv_heads=1, width=128, shared=96),
    "latent_int8": Case(lengths=(33, 70), queries=3, kv_heads=1, width=128, shared=96, stored="int8"),
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
    lengths=(8192,) * 64, heads=32, kv_heads=8, width=128, page=64, stored="bfloat16", computed="bfloat16"
)
# DeepSeek-V2-Lite's latents, in rows as wide as a TPU stores them.
_LATENT = replace(_LLAMA_8B, lengths=(8192,) * 16, heads=16, kv_heads=1, width=640, shared=512)
_FEWER = replace(_LLAMA_8B, lengths=(4096,) * 8)

REAL = {
    "llama_8b": _LLAMA_8B,
    "llama_8b_int8": replace(_LLAMA_8B, stored="int8", page=128),
    "llama_8b_float8": replace(_LLAMA_8B, stored="float8_e4m3fn", page=128),
    "llama_8b_few": replace(_LLAMA_8B, lengths=(131072,) * 2),
    "llama_8b_page128": replace(_LLAMA_8B, page=128),
    "llama_8b_window": replace(_LLAMA_8B, window=4096),
    "llama_8b_chunks": replace(_LLAMA_8B, lengths=(4096,) * 32, queries=64),
    "llama_8b_mixed": replace(_LLAMA_8B, lengths=(2048,) * 48, slots=64, queries=16),
    "llama_8b_mixed_int8": replace(_LLAMA_8B, lengths=(8192,) * 16, page=128, queries=6, stored="int8"),
    "llama2_7b": replace(_LLAMA_8B, lengths=(8192,) * 16, kv_heads=32),
    "llama_1b": replace(_LLAMA_8B, width=64),
    "qwen_0.5b": replace(_LLAMA_8B, heads=14, kv_heads=2, width=64),
    "latent": _LATENT,
    "latent_int8": replace(_LATENT, page=128, stored="int8"),
    "latent_chunks": replace(_LATENT, queries=64),
    "width80": replace(_FEWER, kv_heads=32, width=80),
    "width96": replace(_FEWER, kv_heads=32, width=96),
    "width256": replace(_FEWER, heads=8, kv_heads=1, width=256),
}
