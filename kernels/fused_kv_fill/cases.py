"""The shapes that matter for the fused fill: small ones to test, real ones to compile and time."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.case import TOLERANCE, Call, Results, decode, same_bits, untuned
from swiftkv_jax.kernels.common.case import Case as Base
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill import api
from swiftkv_jax.kernels.fused_kv_fill.pages import Tokens, fill_pages
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools

UNFUSED = "unfused"  # rows made by XLA and written token by token


def call(x, makers: Makers, cos, sin, pools: Pools, names, live, **options) -> Pools:
    """`api.fused_kv_fill`, with the arguments and the result of its implementations."""
    both = Pool(pools.k, pools.k_scale), Pool(pools.v, pools.v_scale)
    k, v = api.fused_kv_fill(x, makers, cos, sin, both, names, live, **options)
    return Pools(k.data, v.data, k.scale, v.scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Base):
    """One call of an implementation of `fused_kv_fill`.

    Attributes:
      live: tokens of each page that is written. rows: of the pool that are filled, of `of` rows.
      dim: width of the stream. heads, width: of the keys; value: width of a value, that of a key by default.
      pages: of the pool; more than are written. lanes: sequences of the step that is timed.
    """

    operation, donated, compared = staticmethod(call), (4,), False

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
    lanes: int = 1
    stored: str = "float32"

    @property
    def options(self) -> dict:
        return {"rows": self.rows, "eps": 1e-5}

    @functools.partial(jax.jit, static_argnums=(0, 1))  # one compilation, not one for each operation
    def make(self, seed: int = 0) -> tuple[tuple, dict]:
        """Random arguments; an empty page is not written, and dead tokens of the stream are NaN."""
        keys = iter(jax.random.split(jax.random.key(seed), 32))
        filled, stored = len(self.rows), jnp.dtype(self.stored)
        widths = (self.heads * self.width, self.heads * (self.value or self.width))

        def drawn(*shape, dtype: Any = self.computed):
            if dtype == jnp.int8:
                return jax.random.randint(next(keys), shape, -127, 128, jnp.int8)
            return jax.random.normal(next(keys), shape).astype(dtype)

        x = drawn(len(self.live) * self.page, self.dim)
        w_k, w_v = (drawn(filled, self.dim, n) * self.dim**-0.5 for n in widths)
        b_k, b_v = (drawn(filled, n) if self.bias else None for n in widths)
        makers = Makers(w_k, w_v, b_k, b_v, drawn(filled, self.width) if self.k_norm else None)
        pool = self.of, self.pages
        rows = (drawn(*pool, self.page, n, dtype=stored) for n in widths)
        scaled = stored.itemsize == 1
        scales = (drawn(*pool, self.heads, self.page, dtype="float32") if scaled else None for _ in widths)
        live = jnp.array(self.live, jnp.int32)
        dead = (jnp.arange(self.page) >= live[:, None]).reshape(-1, 1)
        names = jax.random.permutation(next(keys), self.pages)[: len(self.live)].astype(jnp.int32)
        names = jnp.where(live > 0, names, self.pages)
        angle = jnp.arange(len(x))[:, None] * 1e4 ** (-jnp.arange(0, self.width, 2) / self.width)
        pools = Pools(*rows, *scales)
        return (jnp.where(dead, jnp.nan, x), makers, jnp.cos(angle), jnp.sin(angle), pools, names, live), {}

    @property
    def tolerances(self) -> Mapping[str, float]:
        most = max(TOLERANCE[self.stored], self.tolerance)
        return {"keys": most, "values": most}

    def results(self, run: Callable) -> Results:
        """The rows of the pages that are named; pages that are not must be as they were."""
        (*_, before, names, _), _ = self.make()
        named = jnp.zeros(self.pages, bool).at[names].set(True, mode="drop")
        after = run(*self.make()[0])
        pairs = jax.tree.map(same_bits, after, before)
        intact = all(same[:, ~named].all() for same in jax.tree.leaves(pairs))
        pools = {"keys": Pool(after.k, after.k_scale), "values": Pool(after.v, after.v_scale)}
        rows = {name: decode(pool)[jnp.array(self.rows)][:, named] for name, pool in pools.items()}
        return Results(rows, bool(intact))

    def expected(self) -> dict[str, jax.Array]:
        return self.results(untuned(self.by("reference"))).parts

    @classmethod
    def of_call(cls, call: Call, live: tuple[int, ...], rows: int) -> Base:
        """A fill of the call's model: of `rows` rows, `live` tokens of each page."""
        sizes = {"heads": call.kv_heads, "lanes": call.alone, "pages": 2 * len(live)}
        return cls.of_model(call, live=live, rows=tuple(range(rows)), of=rows, **sizes)

    @classmethod
    def checked(cls, call: Call) -> Iterator[tuple[str, Base]]:
        page = call.page
        live = (page, 1, page - 1, 0, page, min(5, page))
        yield "ragged pages", cls.of_call(call, live, min(2, call.rows))

    @classmethod
    def sizes(cls, call: Call) -> Iterator[tuple[str, Base]]:
        pages = max(1, call.tokens // call.page)
        yield f"{pages * call.page} tokens", cls.of_call(call, (call.page,) * pages, call.rows)

    def timed(self, implementation: str) -> Callable[[], Any]:
        """A chunk of a prompt that begins at a page: as pages by the fused fill, or token by token."""
        (x, makers, cos, sin, pools, *_), _ = self.make()
        x, count, pages = jnp.nan_to_num(x), len(x), len(self.live)
        tokens = Tokens(x, cos, sin, jnp.zeros(count, jnp.int32), jnp.arange(count), jnp.ones(count, bool))
        # As many rows as in the step: the tokens that may continue a page are as many as these allow.
        table = jnp.zeros((self.lanes, pages), jnp.int32).at[0].set(jnp.arange(pages))
        fused = None if implementation == UNFUSED else implementation
        fill = functools.partial(fill_pages, **self.options, chunks=fused is not None, implementation=fused)
        run = jax.jit(fill, donate_argnums=2)
        held = [jax.tree.map(jnp.copy, (Pool(pools.k, pools.k_scale), Pool(pools.v, pools.v_scale)))]

        def once():
            held[0] = run(tokens, makers, held[0], table)
            return held[0][:1]

        return once

    @property
    def _columns(self) -> int:
        return len(self.rows) * self.heads * (self.width + (self.value or self.width))

    @property
    def flops(self) -> float:
        """FLOPs of the projections."""
        return 2.0 * len(self.live) * self.page * self.dim * self._columns

    @property
    def bytes(self) -> float:
        """The stream and the weights are read once, the rows written once."""
        tokens, computed = len(self.live) * self.page, jnp.dtype(self.computed).itemsize
        moved = (tokens + self._columns) * self.dim * computed
        return float(moved + tokens * self._columns * jnp.dtype(self.stored).itemsize)


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
_ROWS = {"rows": tuple(range(16, 32)), "of": 32, "pages": 1024, "page": 64, "live": (64,) * 128}
_LLAMA_8B = Case(**_ROWS, dim=4096, heads=8, width=128, stored="bfloat16", computed="bfloat16")

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
