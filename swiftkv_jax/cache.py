"""The cache as a value: rows in pages, written and read by token position.

A dense cache is a page table whose pages lie in order. There is no length: a query at position p reads the
keys at positions [0, p], all of which were written before it or with it.
"""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax import sharding
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.kernels.page_write.api import page_write
from swiftkv_jax.kernels.paged_attention.api import paged_attention
from swiftkv_jax.kernels.pools import Pools
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.pytree import pytree, static
from swiftkv_jax.shapes import Array, Int, KeyValues, Queries

EIGHT_BIT = ("float8_e4m3fn", "int8")  # the rounding forms: rows with a scale for each token and head
_DENSE_PAGE = 64  # largest page of a dense cache, in tokens
_BLOCK = 128  # queries of one sequence in a block, at most


@pytree
class Batch:
    """A flat ragged batch cut into blocks of at most C tokens of one sequence each.

    Attributes:
      sequence: [T] the sequence of each token. position: [T] its position. valid: [T] not padding.
      block_token: [b, C] the tokens of each block, clamped into [0, T).
      block_sequence: [b]. block_position: [b, C], -1 where a block has no token.
      place: [T] where each token lies in the flattened [b * C].
      chunks: whether it may hold chunks of prompts, not only tokens that decode.
    """

    sequence: Int[Array, " T"]
    position: Int[Array, " T"]
    valid: Int[Array, " T"]
    block_token: Int[Array, "b C"]
    block_sequence: Int[Array, " b"]
    block_position: Int[Array, "b C"]
    place: Int[Array, " T"]
    chunks: bool = static(default=False)


def make_batch(starts: Int[Array, " Q1"] | None, position: Int[Array, " T"], each: int = 1) -> Batch:
    """Sequence s owns tokens [starts[s], starts[s+1]); tokens from starts[-1] on are padding.

    None: it owns the `each` tokens from s * each on. Saying so spares the work of finding it out for every
    score that is masked.
    """
    if starts is None:
        token = jnp.arange(position.shape[0])
        whole = jnp.ones(position.shape, bool)
        block = token.reshape(-1, each)
        own = jnp.arange(block.shape[0])
        sequence = jnp.repeat(own, each) if each > 1 else own
        return Batch(sequence, position, whole, block, own, position.reshape(-1, each), token)
    tokens, sequences = position.shape[0], starts.shape[0] - 1
    size = _block_size(tokens, sequences)
    count = min(tokens, -(-tokens // size) + sequences)
    blocks = -(-jnp.diff(starts) // size)
    first = jnp.concatenate([jnp.zeros(1, blocks.dtype), jnp.cumsum(blocks)])

    def owner(edges, index):
        return jnp.clip(jnp.searchsorted(edges, index, side="right") - 1, 0, sequences - 1)

    index = jnp.arange(tokens)
    sequence = owner(starts, index)
    turn = index - starts[sequence]
    place = (first[sequence] + turn // size) * size + turn % size
    number = jnp.arange(count)
    block_sequence = owner(first, number)
    token = starts[block_sequence, None] + (number - first[block_sequence])[:, None] * size + jnp.arange(size)
    real = (token < starts[block_sequence + 1, None]) & (number < first[-1])[:, None]
    token = jnp.clip(token, 0, tokens - 1)
    return Batch(
        sequence=sequence,
        position=position,
        valid=index < starts[-1],
        block_token=token,
        block_sequence=block_sequence,
        block_position=jnp.where(real, position[token], -1),
        place=jnp.clip(place, 0, count * size - 1),
        chunks=True,
    )


def _block_size(tokens: int, sequences: int) -> int:
    """About the mean tokens of a sequence, as a power of two: 1 when every sequence decodes."""
    mean = max(1, tokens // max(1, sequences))
    return min(_BLOCK, 1 << (mean - 1).bit_length())


@pytree
class Cache:
    """Rows of keys and values, flat: `[rows, pages, page, kv_heads * head_dim]`, K and V apart.

    Flat because other layouts make XLA copy the pool. `table[s]` names the pages of sequence s in order.
    Page 0 is scratch: padding and dead lanes write there, and a table is filled up with it.

    Attributes:
      k_scale, v_scale: [rows, pages, kv_heads, page] float32 beside a pool of fp8 or int8, else None.
      capacity: tokens that one sequence may hold.
      implementation: of paged attention, by name; None: the platform's.
      fill: of the fused fill, by name; None: rows are made by XLA's composition and written token by token.
    """

    k: Array
    v: Array
    k_scale: Array | None
    v_scale: Array | None
    table: Int[Array, "Q slots"]
    kv_heads: int = static()
    capacity: int = static()
    implementation: str | None = static(default=None)
    fill: str | None = static(default=None)

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        plan: KVPlan,
        table: Int[Array, "Q slots"],
        pages: int,
        page: int,
        dtype,
        capacity: int | None = None,
    ) -> "Cache":
        """An empty pool of `pages` pages (scratch included) of `page` tokens under the page table `table`.

        `dtype` is a float type, or float8_e4m3fn or int8 with a scale per token and head.
        """

        def scales():
            shape = (plan.num_rows, pages, config.num_kv_heads, page)
            return jnp.zeros(shape, jnp.float32) if jnp.dtype(dtype).name in EIGHT_BIT else None

        k, v = (jnp.zeros((plan.num_rows, pages, page, config.kv_width), dtype) for _ in range(2))
        capacity = table.shape[1] * page if capacity is None else capacity
        return cls(k, v, scales(), scales(), table, config.num_kv_heads, capacity)

    @classmethod
    def dense(cls, config: ModelConfig, plan: KVPlan, sequences: int, capacity: int, dtype) -> "Cache":
        """`capacity` tokens per sequence, whose pages lie one after the other."""
        page = min(_DENSE_PAGE, capacity)
        slots = -(-capacity // page)
        table = 1 + jnp.arange(sequences * slots, dtype=jnp.int32).reshape(sequences, slots)
        return cls.create(config, plan, table, 1 + sequences * slots, page, dtype, capacity)

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, of arrays or of their shapes."""
        pools = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(x.size * x.dtype.itemsize for x in pools if x is not None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all rows, read from the arrays."""
        return self.nbytes // (self.k.shape[1] * self.page)

    def write(self, rows, k: KeyValues, v: KeyValues, batch: Batch) -> "Cache":
        """Store a flat batch's keys and values in one row ([T, K, H]) or in several ([T, rows, K, H])."""
        if isinstance(rows, int):
            rows, k, v = (rows,), k[:, None], v[:, None]
        slot = batch.position % self.page
        return self.holding(page_write(self.pools, k, v, self.names(batch), slot, rows=rows))

    @property
    def pools(self) -> Pools:
        """The arrays that rows lie in, without the table."""
        return Pools(self.k, self.v, self.k_scale, self.v_scale)

    def holding(self, pools: Pools) -> "Cache":
        """This cache with other pools."""
        return dataclasses.replace(self, **pools._asdict())

    def names(self, batch: Batch) -> Int[Array, " T"]:
        """The page that each token of a flat batch belongs in; scratch for padding."""
        number = jnp.clip(batch.position // self.page, 0, self.table.shape[1] - 1)
        return jnp.where(batch.valid, self.table[batch.sequence, number], 0)

    def clear(self, pages: Int[Array, " n"]) -> "Cache":
        """Zeros in these pages of every row."""
        pools = {name: getattr(self, name) for name in ("k", "v", "k_scale", "v_scale")}
        return dataclasses.replace(
            self, **{n: None if x is None else x.at[:, pages].set(0) for n, x in pools.items()}
        )

    def attend(self, row: int, q: Queries, batch: Batch, window: int) -> Queries:
        """What each query of the flat batch reads from `row`: [T, N, H] -> [T, N, H]."""
        blocks = q[batch.block_token]
        mixed = paged_attention(
            blocks,
            self.k,
            self.v,
            self.table,
            batch.block_sequence,
            batch.block_position,
            row=row,
            window=window,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            implementation=self.implementation,
        )
        return mixed.reshape(-1, *mixed.shape[2:])[batch.place]


def cache_shardings(cache: Cache, mesh: Mesh) -> Cache:
    """Where each array of a cache lies on `mesh`: kv heads over `tensor`, the table on every device."""

    def place(x, axes):
        return None if x is None else sharding.named(mesh, axes, x.shape)

    return dataclasses.replace(
        cache,
        k=place(cache.k, ". . . E"),
        v=place(cache.v, ". . . E"),
        k_scale=place(cache.k_scale, ". . K ."),
        v_scale=place(cache.v_scale, ". . K ."),
        table=place(cache.table, ". ."),
    )
