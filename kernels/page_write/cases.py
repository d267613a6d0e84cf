"""The calls that matter for writing tokens into pages: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.pools import Pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an implementation of `page_write`.

    Attributes:
      sequences: (cached, new) tokens of each. padding: tokens behind theirs.
      rows: of the pool that are written, of `of` rows. spare: pages that no sequence has, scratch included.
      heads, width: of a row. stored, computed: dtypes of the pool and of what is written.
    """

    sequences: tuple[tuple[int, int], ...]
    padding: int = 0
    rows: tuple[int, ...] = (2, 0)
    of: int = 3
    spare: int = 2
    page: int = 32
    heads: int = 2
    width: int = 64
    stored: str = "bfloat16"
    computed: str = "bfloat16"

    @property
    def options(self) -> dict:
        """The static options of the call."""
        return {"rows": self.rows}

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.sequences) + self.padding

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.spare + sum(-(-(cached + new) // self.page) for cached, new in self.sequences)

    def shapes(self) -> tuple:
        """Arguments of an implementation, as `jax.ShapeDtypeStruct`s."""
        make: Any = jax.ShapeDtypeStruct
        stored, pool = jnp.dtype(self.stored), (self.of, self.pages)
        scale = make((*pool, self.heads, self.page), jnp.float32) if stored.itemsize == 1 else None
        data = make((*pool, self.page, self.heads * self.width), stored)
        new = make((self.tokens, len(self.rows), self.heads, self.width), jnp.dtype(self.computed))
        at = make((self.tokens,), jnp.int32)
        return Pool(data, scale), new, at, at

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def make(self, seed: int = 0) -> tuple:
        """Random arguments; the pool has random bits, NaNs included, and pages are in random order."""
        pool, new, *_ = self.shapes()
        keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 4))

        def bits(shape):
            unsigned = jnp.dtype(f"uint{8 * shape.dtype.itemsize}")
            drawn = jax.random.bits(next(keys), shape.shape, unsigned)
            made = jax.lax.bitcast_convert_type(drawn, shape.dtype)
            if shape.dtype.itemsize != 2:
                return made
            return jnp.where(jnp.isnan(made), jnp.asarray(jnp.nan, made.dtype), made)  # a CPU keeps no other

        names = 1 + jax.random.permutation(next(keys), self.pages - 1).astype(jnp.int32)
        number, slot, held = [], [0] * self.tokens, 0
        for cached, count in self.sequences:
            for position in range(cached, cached + count):
                slot[len(number)] = position % self.page
                number.append(held + position // self.page)
            held += -(-(cached + count) // self.page)
        page = jnp.pad(names[jnp.array(number, jnp.int32)], (0, self.padding))
        drawn = jax.random.normal(next(keys), new.shape).astype(new.dtype)
        return jax.tree.map(bits, pool), drawn, page, jnp.array(slot, jnp.int32)


def ragged(page: int) -> tuple[tuple[int, int], ...]:
    """Sequences of every length that matters, from the start of a page and from inside one."""
    lengths = (0, 1, page - 1, page, page + 1, 3 * page + 5)
    return tuple((cached, new) for cached in (0, page + 5, page - 1) for new in lengths)


SMALL = {
    "float32": Case(sequences=ragged(16), page=16, padding=5, stored="float32", computed="float32"),
    "bfloat16": Case(sequences=ragged(32), padding=5),
    "int8": Case(sequences=ragged(128), page=128, padding=5, stored="int8", rows=(1,), of=2),
    "float8": Case(sequences=((0, 128), (77, 60), (130, 1)), page=128, stored="float8_e4m3fn"),
    "decode": Case(sequences=tuple(((37 * i + i // 2) % 64, 1) for i in range(40)), page=64, rows=(1,), of=2),
    "one_row_of_four": Case(sequences=((3, 90),), rows=(3,), of=4, stored="float32"),
}

# Llama-3.1-8B (arXiv 2407.21783): one array of one layer's row, in a pool of 32 rows.
_LLAMA_8B = Case(
    sequences=((0, 2048),),
    rows=(7,),
    of=32,
    spare=1024,
    page=64,
    heads=8,
    width=128,
)
_DECODE = tuple((100 * i, 1) for i in range(32))
_WIDE = {"page": 128, "spare": 512}

REAL = {
    "llama_8b": _LLAMA_8B,
    "llama_8b_decode": dataclasses.replace(_LLAMA_8B, sequences=_DECODE),
    "llama_8b_page128": dataclasses.replace(_LLAMA_8B, **_WIDE),
    "llama_8b_page128_decode": dataclasses.replace(_LLAMA_8B, sequences=_DECODE, **_WIDE),
    "llama_8b_float32": dataclasses.replace(_LLAMA_8B, stored="float32"),
    "llama_8b_float32_decode": dataclasses.replace(_LLAMA_8B, sequences=_DECODE, stored="float32"),
    "llama_8b_int8": dataclasses.replace(_LLAMA_8B, stored="int8", **_WIDE),
    "llama_8b_int8_decode": dataclasses.replace(_LLAMA_8B, sequences=_DECODE, stored="int8", **_WIDE),
    "llama_8b_float8": dataclasses.replace(_LLAMA_8B, stored="float8_e4m3fn", **_WIDE),
    "llama_8b_upper_rows": dataclasses.replace(_LLAMA_8B, rows=tuple(range(16, 32))),
    "llama2_7b": dataclasses.replace(_LLAMA_8B, heads=32, spare=256),
    "width80": dataclasses.replace(_LLAMA_8B, heads=32, width=80, spare=256),
}
