"""Tiles on Hopper, and in interpretation: the words that Pallas' GPU interpreter does not know.

On the chip every array has a layout in registers and matmuls read transposed references; the interpreter has
neither. What a kernel does with them is here, once for each, so that all the rest of it is tested on a CPU.
Layouts are cast where they are known: left to the compiler, the search for them can run for minutes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # some of its names are not exported as type checkers understand it

_TILE = plgpu.Layout.WGMMA
_VECTOR = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What kernels do with [m, n] tiles and [n] vectors along their columns, in float32 registers."""

    interpreted: bool = False

    def matmul(self, shape: tuple[int, int], a, b, transpose: tuple[bool, bool]):
        """a @ b of references in shared memory, each transposed or not."""
        if self.interpreted:
            one, other = (x[...].astype(jnp.float32) for x in (a, b))
            return jnp.dot(one.T if transpose[0] else one, other.T if transpose[1] else other)
        a, b = (plgpu.transpose_ref(x, (1, 0)) if t else x for x, t in zip((a, b), transpose, strict=True))

        def run(sums):
            plgpu.wgmma(sums, a, b)
            plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))

    def store_transposed(self, ref, tile) -> None:
        """Write [m, n] to a reference [n, m]."""
        tile = tile.astype(ref.dtype)
        if self.interpreted:
            ref[...] = tile.T
        else:
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.transpose_ref(ref, (1, 0))[...] = tile

    def load(self, ref):
        """A tile of shared memory, or a vector of global memory."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, (), layout=_TILE if len(ref.shape) == 2 else _VECTOR, optimized=False)

    def constant(self, value: float, shape: tuple[int, ...]):
        """A tile or a vector of one value."""
        full = jnp.full(shape, value, jnp.float32)
        return full if self.interpreted else plgpu.layout_cast(full, _TILE if len(shape) == 2 else _VECTOR)

    def row_number(self, shape: tuple[int, int]):
        """Each element's row."""
        if self.interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, 0)
        return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_TILE)


def down(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A vector [n] along the columns of [m, n]."""
    return lax.broadcast_in_dim(vector, shape, (1,))
