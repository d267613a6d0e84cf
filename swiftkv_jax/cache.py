"""The cache as a value: rows in pages, written and read by token position.

A dense cache is a page table with one page per sequence. There is no length: a query at position p
reads the keys at positions [0, p], all of which were written before it or with it.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from swiftkv_jax import sharding
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.layers import MASKED
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.pytree import pytree, static
from swiftkv_jax.shapes import Array, Float, Int, KeyValues, Queries

_TURN_KEYS = 4096  # of all blocks together, that one turn of the blockwise softmax reads: they stay in caches
_DENSE_PAGE = 64  # largest page of a dense cache, in tokens
_TURN_SCORES = 65536  # of all blocks together, per head


@pytree
class Batch:
    """A flat ragged batch cut into blocks of at most C tokens of one sequence each.

    Attributes:
      sequence: [T] the sequence of each token. position: [T] its position. valid: [T] not padding.
      block_token: [b, C] the tokens of each block, clamped into [0, T).
      block_sequence: [b]. block_position: [b, C], -1 where a block has no token.
      place: [T] where each token lies in the flattened [b * C].
    """

    sequence: Int[Array, " T"]
    position: Int[Array, " T"]
    valid: Int[Array, " T"]
    block_token: Int[Array, "b C"]
    block_sequence: Int[Array, " b"]
    block_position: Int[Array, "b C"]
    place: Int[Array, " T"]


def make_batch(starts: Int[Array, " Q1"], position: Int[Array, " T"]) -> Batch:
    """Sequence s owns tokens [starts[s], starts[s+1]); tokens from starts[-1] on are padding."""
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
    )


def _block_size(tokens: int, sequences: int) -> int:
    """About the mean tokens of a sequence, as a power of two: 1 when every sequence decodes."""
    mean = max(1, tokens // max(1, sequences))
    return min(128, 1 << (mean - 1).bit_length())


@pytree
class Cache:
    """Rows of keys and values, flat: `[rows, pages, page, kv_heads * head_dim]`, K and V apart.

    Flat because other layouts make XLA copy the pool. `table[s]` names the pages of sequence s in order;
    an entry of `pages` (one past the last) is nowhere: writes to it are dropped.
    """

    k: Float[Array, "R P Z E"]
    v: Float[Array, "R P Z E"]
    table: Int[Array, "Q slots"]
    kv_heads: int = static()

    @classmethod
    def create(
        cls, config: ModelConfig, plan: KVPlan, table: Int[Array, "Q slots"], pages: int, page: int, dtype
    ):
        """An empty pool of `pages` pages of `page` tokens under the page table `table`."""
        shape = (plan.num_rows, pages, page, config.kv_width)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), table, config.num_kv_heads)

    @classmethod
    def dense(cls, config: ModelConfig, plan: KVPlan, sequences: int, capacity: int, dtype) -> "Cache":
        """`capacity` tokens per sequence, whose pages lie one after the other."""
        page = next(size for size in range(min(_DENSE_PAGE, capacity), 0, -1) if capacity % size == 0)
        slots = capacity // page
        table = jnp.arange(sequences * slots, dtype=jnp.int32).reshape(sequences, slots)
        return cls.create(config, plan, table, sequences * slots, page, dtype)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can hold."""
        return self.table.shape[1] * self.k.shape[2]

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all rows, read from the arrays."""
        tokens = self.k.shape[1] * self.k.shape[2]
        return (self.k.nbytes + self.v.nbytes) // tokens

    def write(self, rows, k: KeyValues, v: KeyValues, batch: Batch) -> "Cache":
        """Store a flat batch's keys and values in one row ([T, K, H]) or in several ([rows, T, K, H])."""
        page, slot = batch.position // self.k.shape[2], batch.position % self.k.shape[2]
        page = self.table[batch.sequence, jnp.clip(page, 0, self.table.shape[1] - 1)]
        page = jnp.where(batch.valid, page, self.k.shape[1])  # one past the last: dropped

        def put(pool, new):
            new = new.reshape(*new.shape[:-2], -1).astype(pool.dtype)
            for row, one in [(rows, new)] if new.ndim == 2 else zip(rows, new, strict=True):
                pool = pool.at[row, page, slot].set(one, mode="drop")  # one scatter for all rows is slower
            return pool

        return Cache(put(self.k, k), put(self.v, v), self.table, self.kv_heads)

    def attend(self, row: int, q: Queries, batch: Batch, window: int) -> Queries:
        """What each query of the flat batch reads from `row`: [T, N, H] -> [T, N, H]."""
        blocks = (q[batch.block_token], batch.block_sequence, batch.block_position)
        if batch.block_token.shape[1] == 1:  # every sequence decodes: all at once
            mixed = self._attend_blocks(row, *blocks, window=window)
        else:
            one = lambda block: self._attend_blocks(row, *(x[None] for x in block), window=window)[0]  # noqa: E731
            mixed = lax.map(one, blocks)
        return mixed.reshape(-1, *mixed.shape[2:])[batch.place]

    def _attend_blocks(self, row, q, sequence, position, window):
        """Blocks of C queries, one sequence each, against their keys: a few pages a turn, as far as any sees.

        q [b, C, N, H], sequence [b], position [b, C] -> [b, C, N, H]. Softmax in float32, rescaled as the
        largest score grows, so that scores of [C, capacity] never exist whole.
        """
        (blocks, queries, _, width), page, slots = q.shape, self.k.shape[2], self.table.shape[1]
        heads = (self.kv_heads, q.shape[2] // self.kv_heads)
        most = min(_TURN_KEYS // blocks, _TURN_SCORES // (blocks * queries))
        pages = min(slots, max(1, most // page))
        keys = pages * page
        table = jnp.pad(self.table[sequence], ((0, 0), (0, -slots % pages)))
        q = q.reshape(blocks, queries, *heads, width)

        def turn(i, carry):
            top, total, mixed = carry
            names = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
            back = position[..., None] - (i * keys + jnp.arange(keys))
            seen = (back >= 0) & (back < window)
            k = self.k[row, names].reshape(blocks, keys, heads[0], width).astype(q.dtype)
            v = self.v[row, names].reshape(blocks, keys, heads[0], width).astype(q.dtype)
            v = jnp.where(seen.any(1)[..., None, None], v, 0)  # 0 x NaN of a stale page is NaN
            scores = jnp.einsum("bckgh,bskh->bkgcs", q, k, preferred_element_type=jnp.float32)
            scores = jnp.where(seen[:, None, None], scores * width**-0.5, MASKED)
            higher = jnp.maximum(top, scores.max(-1))
            weights = jnp.where(seen[:, None, None], jnp.exp(scores - higher[..., None]), 0)
            decay = jnp.exp(top - higher)
            gained = jnp.einsum(
                "bkgcs,bskh->bkgch", weights.astype(q.dtype), v, preferred_element_type=jnp.float32
            )
            return higher, total * decay + weights.sum(-1), mixed * decay[..., None] + gained

        shape = (blocks, *heads, queries)
        carry = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
        if pages == slots:
            carry = turn(0, carry)
        else:
            last = jnp.max(position) + 1
            first = jnp.maximum(jnp.min(jnp.where(position < 0, last, position)) - window + 1, 0)
            carry = lax.fori_loop(first // keys, -(-last // keys), turn, carry)
        _, total, mixed = carry
        mixed = mixed / jnp.maximum(total, 1e-30)[..., None]
        return jnp.moveaxis(mixed, 3, 1).reshape(blocks, queries, -1, width).astype(q.dtype)


def cache_shardings(cache: Cache, mesh: Mesh) -> Cache:
    """Where each array of a cache lies on `mesh`: kv heads over `tensor`, the table on every device."""
    pool = sharding.named(mesh, ". . . E", cache.k.shape)
    return dataclasses.replace(cache, k=pool, v=pool, table=sharding.named(mesh, ". .", cache.table.shape))
