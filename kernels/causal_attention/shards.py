"""Kernels that the compiler cannot partition, run on each device's own part of a call."""

import dataclasses
import math

import jax
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Shards:
    """The mesh axes that a call is sharded over. An array axis without mesh axes that divide it stays whole.

    Attributes:
      rows: mesh axes of B. tokens: of T, for queries only: every device has all keys of its rows. heads: of
        K.
    """

    rows: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def of(self, rows: int, tokens: int, heads: int) -> "Shards":
        """The axes that are on the mesh of `jax.set_mesh` and divide a call of these sizes."""

        def fit(names: tuple[str, ...], size: int) -> tuple[str, ...]:
            there = tuple(name for name in names if self.count((name,)) > 1)
            return there if size % self.count(there) == 0 else ()

        return Shards(fit(self.rows, rows), fit(self.tokens, tokens), fit(self.heads, heads))

    def count(self, names: tuple[str, ...]) -> int:
        """Number of parts that these axes give; one without a mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        return 1 if mesh.empty else math.prod(mesh.shape.get(name, 1) for name in names)

    def run(self, function, q, k, v, segments, extra=None, extra_spec=None):
        """`function(extra, q, k, v, query segments, key segments)` on each device's part: [B, T, N, U].

        N is sharded like K, since the heads of a group are neighbours. `extra` is a tree with the partition
        specs `extra_spec`.
        """
        if not (self.rows or self.tokens or self.heads):
            return function(extra, q, k, v, segments, segments)
        rows, tokens, heads = (names or None for names in (self.rows, self.tokens, self.heads))
        queries, keys = (PartitionSpec(rows, t, heads, None) for t in (tokens, None))
        marks = PartitionSpec(rows, tokens), PartitionSpec(rows, None)
        specs = (extra_spec, queries, keys, keys, *marks)
        part = jax.shard_map(function, in_specs=specs, out_specs=queries, check_vma=False)
        return part(extra, q, k, v, segments, segments)


WHOLE = Shards()
