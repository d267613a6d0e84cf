"""The cache as a value: rows in pages, written and read by token position.

A dense cache is a page table whose pages lie in order. There is no length: a query at position p reads the
rows of positions [0, p], all of which were written before it or with it.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax.config.hf import FULL_ATTENTION
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import ENCODER, SELF, KVPlan
from swiftkv_jax.core import sharding
from swiftkv_jax.core.form import Paged
from swiftkv_jax.core.layers import Rotary, rotary
from swiftkv_jax.core.pytree import pytree, static
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.core.shapes import Array, Bool, Float, Int, Mixed, PyTree, Queries
from swiftkv_jax.kernels.common.dispatch import ByKind
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill.api import Makers
from swiftkv_jax.kernels.fused_kv_fill.pages import Tokens, fill_pages
from swiftkv_jax.kernels.page_write.api import page_write, places

EIGHT_BIT = ("float8_e4m3fn", "int8")  # the rounding dtypes: rows with a scale for each token and head
POOL = Pool._make((". . . E", ". . K ."))  # axis letters of its arrays
_DENSE_PAGE = 64  # largest page of a dense cache, in tokens
_rotary = jax.jit(rotary, static_argnums=(0, 2))  # one program for all caches of a capacity
QUERY_BLOCK = 128  # queries of one sequence in a block, at most


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
    valid: Bool[Array, " T"]
    block_token: Int[Array, "b C"]
    block_sequence: Int[Array, " b"]
    block_position: Int[Array, "b C"]
    place: Int[Array, " T"]
    chunks: bool = static(default=False)


def make_batch(starts: Int[Array, " Q1"] | None, position: Int[Array, " T"], each: int = 1) -> Batch:
    """Sequence s owns tokens [starts[s], starts[s+1]); tokens from starts[-1] on are padding.

    With starts=None, sequence s owns the `each` tokens from s * each on. This case needs no search for the
    sequence of each token.
    """
    if starts is None:
        token = jnp.arange(position.shape[0])
        whole = jnp.ones(position.shape, bool)
        block = token.reshape(-1, each)
        own = jnp.arange(block.shape[0])
        sequence = jnp.repeat(own, each) if each > 1 else own
        return Batch(sequence, position, whole, block, own, position.reshape(-1, each), token)
    tokens, sequences = position.shape[0], starts.shape[0] - 1
    size = block_size(tokens, sequences)
    count = block_count(tokens, sequences)
    blocks = -(-jnp.diff(starts) // size)
    first = jnp.concatenate([jnp.zeros(1, blocks.dtype), jnp.cumsum(blocks)])

    def owner(edges, index):
        found = jnp.searchsorted(edges, index, side="right", method="compare_all")  # without a loop
        return jnp.clip(found - 1, 0, sequences - 1)

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


def block_size(tokens: int, sequences: int) -> int:
    """About the mean tokens of a sequence, as a power of two: 1 when every sequence decodes."""
    mean = max(1, tokens // max(1, sequences))
    return min(QUERY_BLOCK, 1 << (mean - 1).bit_length())


def block_count(tokens: int, sequences: int) -> int:
    """The most blocks that such a batch needs: each sequence begins one, and all others are whole."""
    return sequences + (tokens - sequences) // block_size(tokens, sequences)


def _filled(x: Float[Array, "T n H"], heads: int) -> Float[Array, "T N H"]:
    """`x` with zeros for the heads that it lacks."""
    return jnp.pad(x, ((0, 0), (0, heads - x.shape[1]), (0, 0))) if x.shape[1] < heads else x


@pytree
class Sources:
    """Which pages hold the encoder's output that each sequence of a batch reads.

    Attributes:
      table: [Q, slots] page ids in order. lengths: [Q] positions in them; 0: the sequence reads nothing.
    """

    table: Int[typing.Any, "Q slots"]
    lengths: Int[typing.Any, " Q"]


@pytree
class Encoded:
    """An encoder's output for a batch of sources.

    Attributes:
      x: [B, S, D] the hidden states after its last norm. lengths: [B] positions of each that are not padding.
    """

    x: Float[Array, "B S D"]
    lengths: Int[Array, " B"]


@pytree
class Cache:
    """The rows of a plan in pages.

    Pools are flat, `[rows, pages, page, heads * width]`: other layouts make XLA copy them. Page 0 is scratch:
    padding and dead lanes write there, and a table is filled up with it.

    Attributes:
      stores: form -> one `Pool` for each array of the form, with all rows of that form. A page id is valid in
        every row of its space.
      table: [Q, slots] page ids of each sequence in order.
      angles: [capacity] the rotary angles of each position.
      config, plan: of the model: which row lies where, in which arrays.
      capacity: tokens that one sequence may hold.
      attention: implementations of the attention over pages, by name and kind of call.
      fill: implementation of the fused fill, by name; None: rows with a shared norm are made and written
        token by token, as others are.
      writer: implementation of writing made rows into their pages, by name; None: the platform's.
      mesh: the devices that share the kv heads over the axis `tensor`; None: one device has them all.
      space: whose rows these are, "self" or "encoder".
      cross: the rows of the encoder's output, in pages of their own; None without an encoder.
      lengths: of "encoder", [Q] positions that each sequence of a batch reads.
    """

    stores: dict[str, tuple[Pool, ...]]
    table: Int[Array, "Q slots"]
    angles: Rotary
    config: ModelConfig = static()
    plan: KVPlan = static()
    capacity: int = static()
    attention: ByKind = static(default=ByKind())
    fill: str | None = static(default=None)
    writer: str | None = static(default=None)
    mesh: Mesh | None = static(default=None)
    space: str = static(default=SELF)
    cross: "Cache | None" = None
    lengths: Int[Array, " Q"] | None = None

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
        space: str = SELF,
    ) -> "Cache":
        """An empty pool of `pages` pages (scratch included) of `page` tokens, for the rows of `space` under
        the page table `table`.

        `dtype` is a float type, or float8_e4m3fn or int8 with a scale per token and head.
        """
        eight = jnp.dtype(dtype).name in EIGHT_BIT

        def pool(rows: int, heads: int, width: int) -> Pool:
            scale = jnp.zeros((rows, pages, heads, page), jnp.float32) if eight else None
            return Pool(jnp.zeros((rows, pages, page, heads * width), dtype), scale)

        stores = {
            form: tuple(pool(rows, a.heads, a.width) for a in FORMS[form].arrays(config))
            for form in plan.forms_of(space)
            for rows in (plan.stored(form, space),)
        }
        capacity = table.shape[1] * page if capacity is None else capacity
        angles = _rotary(config, jnp.arange(capacity), capacity)
        lengths = None if space == SELF else jnp.zeros(table.shape[0], jnp.int32)
        return cls(stores, table, angles, config, plan, capacity, space=space, lengths=lengths)

    @classmethod
    def dense(
        cls, config: ModelConfig, plan: KVPlan, sequences: int, capacity: int, dtype, sources: int = 0
    ) -> "Cache":
        """`capacity` tokens per sequence, and `sources` positions of an encoder's output, whose pages lie one
        after the other."""

        def ordered(capacity: int, space: str) -> Cache:
            page = min(_DENSE_PAGE, capacity)
            slots = -(-capacity // page)
            table = 1 + jnp.arange(sequences * slots, dtype=jnp.int32).reshape(sequences, slots)
            return cls.create(config, plan, table, 1 + sequences * slots, page, dtype, capacity, space)

        cross = ordered(sources, ENCODER) if sources else None
        return dataclasses.replace(ordered(capacity, SELF), cross=cross)

    @property
    def pages(self) -> int:
        """Pages of the pool, scratch included."""
        return self._shape[1]

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self._shape[2]

    @property
    def _shape(self) -> tuple[int, ...]:
        return next(iter(self.stores.values()))[0].data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of this space's pools, of arrays or of their shapes."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.stores))

    @property
    def bytes_on_each(self) -> int:
        """Bytes of this space's pools on one device of the mesh."""
        if self.mesh is None:
            return self.nbytes
        leaves, places = (jax.tree.leaves(x.stores) for x in (self, self.shardings))
        return sum(
            math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
            for x, place in zip(leaves, places, strict=True)
        )

    def pinned(self) -> "Cache":
        """The same cache with its shardings constrained, for a jitted function to return."""
        if self.mesh is None:
            return self
        return jax.lax.with_sharding_constraint(self, self.shardings)

    @property
    def shardings(self) -> "Cache":
        """The sharding of each array on the mesh: kv heads over `tensor`, tables on every device."""
        assert self.mesh is not None
        place = partial(sharding.named, self.mesh)

        def lie(form: str, pool: Pool) -> Pool:
            letters = tuple(POOL) if self._cut(form) else (". . . .",) * 2
            given = zip(pool, letters, strict=True)
            return Pool._make(x if x is None else place(str(a), x.shape) for x, a in given)

        stores = {form: tuple(lie(form, pool) for pool in pools) for form, pools in self.stores.items()}
        whole = self.table, self.angles, self.lengths
        table, angles, lengths = jax.tree.map(lambda x: place(" ".join("." * x.ndim), x.shape), whole)
        cross = self.cross and self.cross.shardings
        found = {"table": table, "angles": angles, "lengths": lengths, "cross": cross}
        return dataclasses.replace(self, stores=stores, **found)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all rows, read from the arrays."""
        return self.nbytes // (self.pages * self.page)

    def seen_by(self, table: Int[Array, "Q slots"]) -> "Cache":
        """The same rows under another page table."""
        return dataclasses.replace(self, table=table)

    def reading(self, sources: Sources | None) -> "Cache":
        """The same rows, and the sources that each sequence reads; None changes nothing."""
        if sources is None:
            return self
        assert self.cross is not None
        seen = dataclasses.replace(self.cross, table=sources.table, lengths=sources.lengths)
        return dataclasses.replace(self, cross=seen)

    @property
    def sources(self) -> Sources | None:
        """The sources that `reading` was last given."""
        return self.cross and Sources(self.cross.table, self.cross.lengths)

    def write(self, rows: Sequence[int], made: Sequence[Sequence[Array]], batch: Batch) -> "Cache":
        """Store a flat batch's tokens in some rows of one form; made: for each row, its arrays [T, K, H]."""
        form = self.plan.rows[rows[0]].form
        where = tuple(self.plan.place(row) for row in rows)
        page, slot = places(self.table, batch.sequence, batch.position, batch.valid, self.page)
        wide = [tuple(self._widened(row, x) for x in each) for row, each in zip(rows, made, strict=True)]
        arrays = tuple(jnp.stack(each, axis=1) for each in zip(*wide, strict=True))

        def put(pools, arrays, page, slot):
            both = zip(pools, arrays, strict=True)
            options = {"rows": where, "implementation": self.writer}
            return tuple(page_write(pool, new, page, slot, **options) for pool, new in both)

        pools, new = (POOL,) * len(arrays), (". . K .",) * len(arrays)
        put = sharding.on_own_heads(put, self.mesh, self._cut(form), (pools, new, ".", "."), pools)
        return self._with(form, put(self.stores[form], arrays, page, slot))

    def write_pages(
        self,
        rows: Sequence[int],
        makers: Makers,
        eps: float,
        x: Float[Array, "T D"],
        at: Rotary,
        batch: Batch,
    ) -> "Cache":
        """Make rows of a flat batch from its hidden states `x`, whole pages at a time, by the fused fill."""
        form = self.plan.rows[rows[0]].form
        keys, values = self.stores[form]
        (cos,), (sin,) = at.cos, at.sin
        tokens = Tokens(x, cos, sin, batch.sequence, batch.position, batch.valid)
        fill = partial(
            fill_pages,
            rows=tuple(self.plan.place(row) for row in rows),
            eps=eps,
            chunks=batch.chunks,
            implementation=self.fill,
            writer=self.writer,
        )
        axes = (".", Makers._make((". . E", ". . E", ". E", ". E", ". .")), (POOL, POOL), ".")
        fill = sharding.on_own_heads(fill, self.mesh, self._cut(form), axes, (POOL, POOL))
        return self._with(form, fill(tokens, makers, (keys, values), self.table))

    def _with(self, form: str, pools: tuple[Pool, ...]) -> "Cache":
        return dataclasses.replace(self, stores=self.stores | {form: pools})

    def clear(self, pages: Int[Array, " n"]) -> "Cache":
        """Zeros in these pages of every row of this space."""
        stores = jax.tree.map(lambda x: x.at[:, pages].set(0), self.stores)
        return dataclasses.replace(self, stores=stores)

    def attend_source(self, row: int, reader: PyTree, q: Queries, batch: Batch) -> Queries:
        """Cross-attention of the flat batch's queries over `row` of their sources, each seen whole."""
        assert self.cross is not None and self.cross.lengths is not None
        last = self.cross.lengths[batch.block_sequence, None] - 1
        seeing = dataclasses.replace(batch, block_position=jnp.where(batch.block_position < 0, -1, last))
        return self.cross.attend(row, reader, q, seeing, FULL_ATTENTION)

    def attend(
        self,
        row: int,
        reader: PyTree,
        q: Queries,
        batch: Batch,
        window: int,
        bias: Float[Array, "N S"] | None = None,
    ) -> Mixed:
        """Attention of the flat batch's queries over `row`: [T, N, H] -> [T, N, U].

        reader: the weights that the row's form needs for reading, see `rows.reader_of`. bias: added to the
        scores, by head and distance.
        """
        form, heads = self.plan.rows[row].form, q.shape[1]
        q = _filled(q, self.config.num_heads if self.config.sizes else heads)

        def read(q, pools, reader, bias, table, sequence, position):
            where = Paged(
                pools=pools,
                row=self.plan.place(row),
                table=table,
                sequence=sequence,
                position=position,
                window=window,
                capacity=self.capacity,
                implementation=self.attention.of(position.shape[1]),
                bias=bias,
            )
            return FORMS[form].read(self.config, reader, q, where)

        apart = FORMS[form].apart and self._shares(heads)
        pool, weights = (Pool._make((". . . .",) * 2), "N . .") if apart else (POOL, ".")
        axes = (". . N .", (pool,) * len(self.stores[form]), weights, "N", ".", ".", ".")
        read = sharding.on_own_heads(read, self.mesh, apart or self._cut(form), axes, ". . N .")
        where = self.table, batch.block_sequence, batch.block_position
        mixed = read(q[batch.block_token], self.stores[form], reader, bias, *where)
        return mixed.reshape(-1, *mixed.shape[2:])[batch.place][:, :heads]

    def _widened(self, row: int, made: Float[Array, "T k H"]) -> Float[Array, "T K H"]:
        """A row of a layer with fewer kv heads than the widest: each head again for some of the queries that
        read it, if the layer has all query heads, else with heads that no query of the layer reads."""
        if not self.config.sizes:
            return made
        heads, kv_heads, _ = self.config.kinds[self.plan.rows[row].maker].sizes
        if heads == self.config.num_heads:
            return jnp.repeat(made, self.config.num_kv_heads // kv_heads, axis=1)
        return _filled(made, self.config.num_kv_heads)

    def _cut(self, form: str) -> bool:
        """Whether this form's arrays are sharded by head over the mesh; else every device has all of them."""
        return all(self._shares(array.heads) for array in FORMS[form].arrays(self.config))

    def _shares(self, heads: int) -> bool:
        """Whether the devices have equally many of these heads."""
        return heads % (1 if self.mesh is None else self.mesh.shape["tensor"]) == 0
