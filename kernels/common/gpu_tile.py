"""Tile operations for Hopper, with fallbacks for Pallas' interpreter, which supports neither layouts nor
WGMMA.

Everything that differs between the chip and the interpreter is here, so that the rest of each kernel is
tested on a CPU. Layouts are cast explicitly, because the compiler's search for them can take minutes.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # type checkers do not see all of its exports

SMEM_BYTES = 232448  # most shared memory of a CTA on Hopper

_WHOLE = ((),) if jax.__version_info__ < (0, 11) else ()  # the index of a load, which jax 0.12 does not take

_TILE = plgpu.Layout.WGMMA
_VECTOR = plgpu.Layout.WGMMA.reduce(0)
_ROWS = plgpu.Layout.WGMMA.reduce(1)


def smem_bytes(scratch) -> int:
    """Upper bound of the shared memory that the compiler gives a tree of `plgpu.SMEM` and `plgpu.Barrier`.

    Every buffer starts at a multiple of 1024 bytes, and reductions across warps, if any, take two of those.
    """
    leaves = jax.tree.leaves(scratch)
    barriers = sum(math.prod(x.num_barriers) for x in leaves if isinstance(x, plgpu.Barrier))
    buffers = (x for x in leaves if not isinstance(x, plgpu.Barrier))
    sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers)
    return sum(-(-size // 1024) * 1024 for size in sizes) + 2048 + 8 * barriers


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Operations on [m, n] tiles and [n] vectors along their columns, in float32 registers."""

    interpreted: bool = False

    def store(self, ref, tile) -> None:
        """Write a tile of any width to a reference, also where no order of its numbers avoids bank conflicts,
        which jax 0.12 asks to be told."""
        if self.interpreted or not hasattr(plgpu, "store"):
            ref[...] = tile
        else:
            plgpu.store(ref, tile, optimized=False)

    def store_transposed(self, ref, tile) -> None:
        """Write [m, n] to a reference [n, m]."""
        tile = tile.astype(ref.dtype)
        if self.interpreted:
            ref[...] = tile.T
        else:
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
            ref.transpose((1, 0))[...] = tile

    def add_matmul(self, sums, a, b):
        """`sums` + a^T @ b^T of references in shared memory, in the registers of `sums`."""
        if self.interpreted:
            return sums + jnp.dot(*(x[...].astype(jnp.float32).T for x in (a, b)))

        def run(sums):
            plgpu.wgmma(sums, *(x.transpose((1, 0)) for x in (a, b)))
            plgpu.wgmma_wait(0)

        return pl.run_state(run)(plgpu.ACC.init(sums))

    def products(self, shape: tuple[int, int], terms):
        """The sum of a @ b^T over (a [m, k] in registers or shared memory, b [n, k] in shared memory)."""
        if self.interpreted:
            return sum(jnp.dot(a[...].astype(jnp.float32), b[...].T.astype(jnp.float32)) for a, b in terms)

        def run(sums):
            for a, b in terms:  # made one by one, so that few are in registers at a time
                plgpu.wgmma(sums, a, b.transpose((1, 0)))
                plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

    def send(self, tile, ref, arrived, parts: int, axis: str) -> None:
        """Copy a tile to the same place of shared memory in each of the `parts` CTAs of a cluster."""
        if self.interpreted or parts == 1:
            ref[...] = tile
            plgpu.commit_smem()
            plgpu.barrier_arrive(arrived)
            return
        for part in range(parts):
            plgpu.async_store_smem(
                tile, ref, arrived, cluster_idx=jnp.int32(part), cluster_dim=axis, optimized=False
            )

    def accumulate(self, shape: tuple[int, int], add):
        """(an accumulator that starts at zero, after `add(sums)`; the result of `add`)."""

        def run(sums):
            result = add(sums)
            return sums[...], result

        return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

    def keep_registers(self, count: int, action: Literal["increase", "decrease"]) -> None:
        """Redistribute the multiprocessor's registers among its warpgroups."""
        if not self.interpreted:
            plgpu.set_max_registers(count, action=action)

    def load(self, ref, rows: bool = False):
        """Load a tile of shared or global memory, or a vector of global memory along the columns (or the
        rows)."""
        if self.interpreted:
            return ref[...]
        layout = _TILE if len(ref.shape) == 2 else _ROWS if rows else _VECTOR
        return plgpu.load(ref, *_WHOLE, layout=layout, optimized=False)

    def constant(self, value: float, shape: tuple[int, ...], rows: bool = False):
        """A tile of one value, or a vector along the columns (or the rows)."""
        full = jnp.full(shape, value, jnp.float32)
        layout = _TILE if len(shape) == 2 else _ROWS if rows else _VECTOR
        return full if self.interpreted else plgpu.layout_cast(full, layout)

    def row_number(self, shape: tuple[int, int]):
        """Each element's row."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, 0)
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_TILE)


def down(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A vector [n] along the columns of [m, n]."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def across(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A vector [m] along the rows of [m, n]."""
    return lax.broadcast_in_dim(vector, shape, (0,))
