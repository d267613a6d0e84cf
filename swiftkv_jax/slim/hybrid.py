"""The paper's hybrid, for models with an encoder: keys of the first layer's cross-attention replace the
encoder's output E.

One row K = E W_K of that layer is stored, and every layer recovers E = K W_K^-1 by its own projections,
W_K^-1 W. As a plan this is the E-cache of another stream: rows of inputs, where K is the input. It stores as
many numbers as the E-cache, and all layers depend on one inverse, so it is only measured and never served.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Encoded
from swiftkv_jax.core.matrices import SINGULAR, between, condition
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS, SLIM, rounded
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.core.surgery import to_slim
from swiftkv_jax.slim.calibrate import EXACT, FITTED, solve
from swiftkv_jax.slim.texts import Pieces


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """A model whose cross-attentions read the first one's keys.

    Attributes:
      how: the origin of the inverse, EXACT or FITTED. stored: maps an encoder's output to its keys.
    """

    how: str
    model: Transformer
    params: PyTree
    stored: Callable[[Encoded], Encoded]


def hybrids(model: Transformer, params: PyTree, fit: Pieces, kept: Pieces, dtype: str) -> list[Hybrid]:
    """The hybrids by the exact inverse, and by one fitted to keys as a cache of `dtype` rounds them; none if
    keys do not determine their input."""
    kernel = SLIM["k"].kernels(weights.row(params, model.plan.cross[0]))[0]
    if FORMS["k"].refuses(model.config) or condition(kernel) >= SINGULAR:
        return []

    def stored(encoded: Encoded) -> Encoded:
        return Encoded(encoded.x @ jnp.asarray(kernel, encoded.x.dtype), encoded.lengths)

    def pair(half: Pieces) -> tuple[np.ndarray, np.ndarray]:
        """(keys after rounding, inputs), of the positions that count."""
        assert half.beside is not None
        x = half.beside.x[half.beside.some]
        (back,) = rounded((jnp.asarray(x @ kernel.astype(x.dtype))[:, None],), dtype)
        return np.asarray(back[:, 0], np.float64), x.astype(np.float64)

    keys, inputs = pair(kept)
    fits = solve(*pair(fit))
    best = min(fits, key=lambda matrix: float(np.linalg.norm(keys @ matrix - inputs)))
    slim, made = to_slim(model, params, "kv", cross_forms="x")
    exact = between(kernel, np.eye(len(kernel)), model.plan.name(model.plan.cross[0]))
    out = []
    for how, matrix in ((EXACT, exact), (FITTED, best)):
        layers = []
        for stack in made["layers"]:  # each reads inputs times the inverse of `matrix` [E, D]
            own_attention, cross = stack["attentions"]
            for name in FORMS["x"].moved:
                old = cross[name]["kernel"]
                moved = np.einsum("ed,ladu->laeu", matrix, np.asarray(old, np.float64))
                cross = cross | {name: cross[name] | {"kernel": jnp.asarray(moved, old.dtype)}}
            layers.append(stack | {"attentions": [own_attention, cross]})
        out.append(Hybrid(how, slim, made | {"layers": layers}, stored))
    return out
