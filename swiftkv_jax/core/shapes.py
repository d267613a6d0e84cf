"""The axis letters of every annotation, einsum and sharding rule; `Weight`, an array described by them.

B  batch rows        T  tokens of a row, or of a flat ragged batch     Q  sequences of a ragged batch
S  cached tokens     M  survivors: positions whose logits are wanted   C  tokens of one attention block
D  model width       F  ffn width     V  vocabulary                    L  layers
N  query heads       K  kv heads      G  N // K                        H  head width
X  experts           k  experts of a token
R  cache rows        P  pages         Z  tokens in a page              E  K * H, one token's keys in one row
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array as Array
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Int as Int
from jaxtyping import PyTree as PyTree

Tokens = Int[Array, "B T"]
Logits = Float[Array, "B T V"]
Hidden = Float[Array, "*batch D"]
Queries = Float[Array, "*batch N H"]
KeyValues = Float[Array, "*batch K H"]
Mixed = Float[Array, "*batch N U"]  # weighted sums of values, which may have another width than keys
Angles = Float[Array, "*batch half"]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter array.

    Attributes:
      shape: of the array. axes: its axis letters, '.' for an axis without one.
      std: standard deviation of its initial values; 0: all are `fill`.
      dtype: None: the model's dtype. An 8-bit array has a float32 scale beside it.
      scale_axes: the letters of `axes` that the scale has; "" without a scale.
    """

    shape: tuple[int, ...]
    axes: str
    std: float = 0.0
    fill: float = 0.0
    dtype: str | None = None
    scale_axes: str = ""

    def init(self, key: Array, dtype=jnp.float32) -> Array:
        """Initial values."""
        dtype = self.dtype or dtype
        if not self.std:
            return jnp.full(self.shape, self.fill, dtype)
        return (self.std * jax.random.normal(key, self.shape)).astype(dtype)

    def stacked(self, n: int) -> "Weight":
        """`n` such arrays stacked along a new first axis."""
        scale = f"L {self.scale_axes}" if self.scale_axes else ""
        return dataclasses.replace(
            self, shape=(n, *self.shape), axes=f"L {self.axes}".strip(), scale_axes=scale
        )

    @property
    def scale(self) -> "Weight | None":
        """The scale beside an 8-bit array; None for others."""
        if not self.scale_axes:
            return None
        sizes = dict(zip(self.axes.split(), self.shape, strict=True))
        shape = tuple(sizes[letter] for letter in self.scale_axes.split())
        return Weight(shape, self.scale_axes, fill=1.0, dtype="float32")
