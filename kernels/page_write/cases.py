"""The calls that matter for writing tokens into pages: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.case import MOST_ROWS, TOLERANCE, Call, Results, decode, same_bits
from swiftkv_jax.kernels.common.case import Case as Base
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.page_write import api


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Base):
    """One call of an implementation of `page_write`.

    Attributes:
      sequences: (cached, new) tokens of each. padding: tokens behind theirs.
      rows: of the pool that are written, of `of` rows. spare: pages that no sequence has, scratch included.
      heads, width: of a row. stored, computed: dtypes of the pool and of what is written.
    """

    operation, donated, compared = staticmethod(api.page_write), (0,), False

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
        return {"rows": self.rows}

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.sequences) + self.padding

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.spare + sum(-(-(cached + new) // self.page) for cached, new in self.sequences)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """Random arguments; the pool has random bits, NaNs included, and pages are in random order."""
        keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 4))

        def bits(*shape, dtype):
            drawn = jax.random.bits(next(keys), shape, jnp.dtype(f"uint{8 * dtype.itemsize}"))
            made = jax.lax.bitcast_convert_type(drawn, dtype)
            if dtype.itemsize != 2:
                return made
            return jnp.where(jnp.isnan(made), jnp.asarray(jnp.nan, made.dtype), made)  # a CPU keeps no other

        stored, pool = jnp.dtype(self.stored), (self.of, self.pages)
        data = bits(*pool, self.page, self.heads * self.width, dtype=stored)
        scaled = stored.itemsize == 1
        scale = bits(*pool, self.heads, self.page, dtype=jnp.dtype("float32")) if scaled else None
        names = 1 + jax.random.permutation(next(keys), self.pages - 1).astype(jnp.int32)
        number, slot, held = [], [0] * self.tokens, 0
        for cached, count in self.sequences:
            for position in range(cached, cached + count):
                slot[len(number)] = position % self.page
                number.append(held + position // self.page)
            held += -(-(cached + count) // self.page)
        page = jnp.pad(names[jnp.array(number, jnp.int32)], (0, self.padding))
        shape = (self.tokens, len(self.rows), self.heads, self.width)
        new = jax.random.normal(next(keys), shape).astype(self.computed)
        return (Pool(data, scale), new, page, jnp.array(slot, jnp.int32)), {}

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.stored]

    def results(self, run: Callable) -> Results:
        """The rows of the tokens [F, T, E]; all other places must be as they were, any NaN included."""
        (before, _, page, slot), _ = self.make()
        rows = jnp.array(self.rows)[:, None]
        after = run(*self.make()[0])
        put = jnp.zeros((self.of, self.pages, self.page), bool).at[rows, page, slot].set(True)
        put = put.at[:, 0].set(True)[..., None]  # scratch, whatever is there
        intact = jnp.all(put | same_bits(before.data, after.data))
        if before.scale is not None:
            intact &= jnp.all(jnp.swapaxes(put, 2, 3) | same_bits(before.scale, after.scale))
        written = jnp.where(page[:, None] > 0, decode(after)[rows, page, slot], 0)
        return Results({"": written}, bool(intact))

    def expected(self) -> dict[str, jax.Array]:
        (_, new, page, _), _ = self.make()
        rows = jnp.swapaxes(new, 0, 1).reshape(len(self.rows), self.tokens, -1)
        return {"": jnp.where(page[:, None] > 0, rows, 0)}

    @classmethod
    def of_call(cls, call: Call, sequences: tuple[tuple[int, int], ...], of: int, padding: int = 0) -> Base:
        """A write of the call's model into the last of `of` rows."""
        sizes = {"rows": (of - 1,), "of": of, "padding": padding, "heads": call.kv_heads}
        return cls.of_model(call, sequences=sequences, **sizes)

    @classmethod
    def checked(cls, call: Call) -> Iterator[tuple[str, Base]]:
        yield "ragged sequences", cls.of_call(call, ragged(call.page), 2, padding=3)

    @classmethod
    def sizes(cls, call: Call) -> Iterator[tuple[str, Base]]:
        inside = call.page // 2  # a chunk begins where the one before has ended
        yield f"{call.tokens} tokens", cls.of_call(call, ((inside, call.tokens),), MOST_ROWS)
        yield f"{call.lanes} x 1", cls.of_call(call, ((inside, 1),) * call.lanes, MOST_ROWS)

    @property
    def repeats(self) -> int:
        return self.of if len(self.rows) == 1 else 1

    def timed(self, implementation: str) -> Callable[[], Any]:
        """Writing of one array of some rows, one row after the other; or of several rows together."""
        (pool, *rest), _ = self.make()
        writes = [(row,) for row in range(self.of)] if len(self.rows) == 1 else [self.rows]

        @functools.partial(jax.jit, donate_argnums=0)
        def run(pool, *rest):
            for rows in writes:
                pool = api.page_write(pool, *rest, rows=rows, implementation=implementation)
            return pool

        held = [jax.tree.map(jnp.copy, pool)]

        def once():
            held[0] = run(held[0], *rest)
            return (held[0],)

        return once

    @property
    def bytes(self) -> float:
        """Each number is read once and written once."""
        numbers = self.tokens * len(self.rows) * self.heads * self.width
        return float(numbers * (jnp.dtype(self.computed).itemsize + jnp.dtype(self.stored).itemsize))


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
_LLAMA_8B = Case(sequences=((0, 2048),), rows=(7,), of=32, spare=1024, page=64, heads=8, width=128)
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
