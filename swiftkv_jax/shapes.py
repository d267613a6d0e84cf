"""The axis letters, used in every annotation, einsum and sharding rule of this library.

B  batch rows        T  tokens of a row, or of a flat ragged batch     Q  sequences of a ragged batch
S  cached tokens     M  survivors: positions whose logits are wanted   C  tokens of one attention block
D  model width       F  ffn width     V  vocabulary                    L  layers
N  query heads       K  kv heads      G  N // K                        H  head width
R  cache rows        P  pages         Z  tokens in a page              E  K * H, one token's keys in one row
"""

from jaxtyping import Array, Bool, Float, Int, PyTree

Tokens = Int[Array, "B T"]
Logits = Float[Array, "B T V"]
Hidden = Float[Array, "*batch D"]
Queries = Float[Array, "*batch N H"]
KeyValues = Float[Array, "*batch K H"]
Angles = Float[Array, "*batch half"]

__all__ = [
    "Angles",
    "Array",
    "Bool",
    "Float",
    "Hidden",
    "Int",
    "KeyValues",
    "Logits",
    "PyTree",
    "Queries",
    "Tokens",
]
