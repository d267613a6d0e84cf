"""What a form of cache rows is: the arrays that store a row, the weights that make and read it, and how."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.layers import Rotary, linear
from swiftkv_jax.core.shapes import Array, Float, Hidden, Int, KeyValues, Mixed, PyTree, Queries
from swiftkv_jax.kernels.common.pools import Pool

Pair = tuple[KeyValues, Float[Array, "*batch K U"]]  # keys, values
# A row as its projections leave it, before norm and rotation: [*batch, E] each.
Raw = tuple[Float[Array, "..."], ...]
PAGED = "paged_attention"


def filled(x: Float[Array, "*batch e"], width: int) -> Float[Array, "*batch E"]:
    """`x` with zeros up to `width`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of a form: `heads` x `width` numbers per token; in 8 bits each head has a scale."""

    heads: int
    width: int


@dataclasses.dataclass(frozen=True)
class Paged:
    """The rows of a form in pages, and the blocks of queries that read them.

    Attributes:
      pools: one for each array of the form. row: of the pools.
      table: [Q, slots] page ids of each sequence. sequence: [b] of each block of queries.
      position: [b, C] of each query, -1 where there is none. window: keys a query sees, its own included.
      capacity: tokens that a sequence may hold. implementation: of the attention, by name, or None.
      bias: [N, S] of the scores, by head and distance; None without one.
    """

    pools: tuple[Pool, ...]
    row: int
    table: Int[Array, "Q slots"]
    sequence: Int[Array, " b"]
    position: Int[Array, "b C"]
    window: int
    capacity: int
    implementation: str | None
    bias: Float[Array, "N S"] | None = None

    @property
    def how(self) -> dict:
        """The options common to all attentions over pages."""
        options = {"row": self.row, "window": self.window, "implementation": self.implementation}
        return options | ({} if self.bias is None else {"bias": self.bias})

    @property
    def places(self) -> tuple[Array, Array, Array]:
        """The table, and the sequence and positions of each block."""
        return self.table, self.sequence, self.position


@runtime_checkable
class Form(Protocol):
    """A way to store and read a row.

    Attributes:
      operation: the one of kernels/ that reads it from pages.
      projections: the weights that the stream is multiplied with, in the order of `project`'s results.
      names: weight -> its name in a published attention, where that differs.
      kept: weights that only checkpoints keep, so that other software can read the plain model.
      moved: weights that belong not to the row but to each attention that reads it.
      apart: whether each device reads whole rows for its own query heads, with its part of the reader's
        arrays, whose first axis is that of heads.
    """

    operation: ClassVar[str]
    projections: ClassVar[tuple[str, ...]] = ()
    names: ClassVar[Mapping[str, str]] = {}
    kept: ClassVar[tuple[str, ...]] = ()
    moved: ClassVar[tuple[str, ...]] = ()
    apart: ClassVar[bool] = False

    def refuses(self, config: ModelConfig) -> str:
        """Why a model of this shape cannot have such rows, in one line, or ""."""
        return ""

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        """The arrays that store a token."""
        ...

    def weights(self, config: ModelConfig) -> PyTree:
        """The tree of `Weight`s that make and read one row, but for those that are `moved`."""
        ...

    def reader_weights(self, config: ModelConfig) -> PyTree:
        """The `moved` `Weight`s of one attention."""
        return {}

    def project(self, p: PyTree, h: Hidden) -> Raw:
        """The row of the normalised hidden states `h` as its projections leave it."""
        return tuple(linear(h, p[name]) for name in self.projections)

    def finish(self, config: ModelConfig, p: PyTree, raw: Raw, at: Rotary) -> tuple[KeyValues, ...]:
        """The stored arrays [*batch, heads, width] of a projected row."""
        ...

    def make(self, config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, ...]:
        """The stored arrays of the normalised hidden states `h`."""
        return self.finish(config, p, self.project(p, h), at)

    def reader(self, p: PyTree) -> PyTree:
        """The part of a row's weights needed to read it, besides `moved` ones."""
        return {}

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        """Keys, ready for rotated queries, and values, from stored arrays of full sequences."""
        ...

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Mixed:
        """Attention of blocks of queries [b, C, N, H] over pages: [b, C, N, U]."""
        ...

    def convert(
        self, config: ModelConfig, plain: PyTree, solved: Sequence[np.ndarray | None], names: Sequence[str]
    ) -> PyTree:
        """The weights of a stack of n rows, from those of n rows of keys and values: by default these.

        solved: for each, the matrix [E, E] float64 that recovers what is not stored; None: the exact one,
        solved in float64 on the host. names: of the rows, for messages.
        """
        return plain

    def convert_reader(self, config: ModelConfig, plain: PyTree) -> PyTree:
        """The `moved` weights of a stack of attentions, from those of the rows of keys and values that they
        read."""
        return {}
