"""Distance of a model with converted rows from the original model, on a text; and the paper's hybrid.

The hybrid is for models with an encoder: keys of the first layer's cross-attention replace the encoder's
output E. One row K = E W_K of that layer is stored, and every layer recovers E = K W_K^-1 by its own
projections, W_K^-1 W. As a plan this is the E-cache of another stream: rows of inputs, where K is the input.
It stores as many numbers as the E-cache, and all layers depend on one inverse, so it is only measured and
never served.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Encoded
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.matrices import SINGULAR, between, condition
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS, SLIM, rounded
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.shapes import Array, PyTree
from swiftkv_jax.core.surgery import to_slim
from swiftkv_jax.slim.calibrate import EXACT, FITTED, solve
from swiftkv_jax.slim.texts import Pieces


class Reference:
    """A plain model on a text: the hidden states before its head are computed once, for any number of models
    that are compared with it.

    dtype: of a cache. Rows of the models that are compared are rounded as in it, those of the plain model are
    not. All compute in float32.
    """

    def __init__(self, model: Transformer, params: PyTree, kept: Pieces, dtype: str):
        self._model, self._params, self._kept, self._dtype = model, params, kept, dtype
        self._x = [np.asarray(_hidden(model, params, *_given(batch), "auto")) for batch in kept.batches()]

    def distance(
        self,
        model: Transformer,
        params: PyTree,
        stored: Callable[[Encoded], Encoded] = lambda encoded: encoded,
    ) -> tuple[float, float]:
        """(KL in nats per token, share of positions with the same most likely token) of a model against the
        plain one.

        stored: maps an encoder's output to what the model makes its rows from.
        """
        total = np.zeros(2)
        for x, batch in zip(self._x, self._kept.batches(), strict=True):
            tokens, encoded = _given(batch)
            got = _hidden(model, params, tokens, encoded and stored(encoded), self._dtype)
            want, logits = (_logits(self._model, self._params, each) for each in (x, got))  # one head
            total += np.asarray(_compare(want, logits, jnp.asarray(batch.real)), np.float64)
        kl, same = total / self._kept.count
        return float(kl), float(same)


def _given(batch: Pieces) -> tuple[Array, Encoded | None]:
    """The tokens of a batch, and the encoder's output beside them."""
    return jnp.asarray(batch.tokens), batch.encoded


@partial(jax.jit, static_argnums=(0, 4))
def _hidden(model: Transformer, params: PyTree, tokens: Array, encoded: Encoded | None, dtype) -> Array:
    """[B, T, D] before the head; rows are rounded as in a cache of `dtype`."""
    return forward(model, params, tokens, encoded=encoded, store=partial(rounded, dtype=dtype))


_logits = jax.jit(logits, static_argnums=0)


@jax.jit
def _compare(want: Array, got: Array, real: Array) -> Array:
    """[2]: the sums over real tokens of KL and of agreement.

    KL is the sum of p (e^d - 1 - d), d = log q - log p. All its terms are positive, so nothing cancels when
    the models are almost equal. When they are not, -p d alone is used, which cannot overflow.
    """
    p, q = jax.nn.log_softmax(want), jax.nn.log_softmax(got)
    d = q - p
    plain = -jnp.sum(jnp.exp(p) * d, axis=-1)
    small = jnp.clip(d, -20, 20)
    fine = jnp.sum(jnp.exp(p) * (jnp.expm1(small) - small), axis=-1)
    same = jnp.argmax(want, -1) == jnp.argmax(got, -1)
    return jnp.stack([jnp.sum(jnp.where(plain < 1e-2, fine, plain), where=real), jnp.sum(same, where=real)])


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
