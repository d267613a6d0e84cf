"""Distance of a model with converted rows from the original model, on a text."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.cache import Encoded
from swiftkv_jax.model import Transformer, angles_and_segments, cross_rows, embed, logits, through
from swiftkv_jax.rows import rounded
from swiftkv_jax.shapes import Array, PyTree
from swiftkv_jax.slim.texts import Pieces


def distance(
    plain: tuple[Transformer, PyTree],
    slim: tuple[Transformer, PyTree],
    kept: Pieces,
    dtype: str,
    stored: Callable[[Encoded], Encoded] = lambda encoded: encoded,
) -> tuple[float, float]:
    """(KL in nats a token, share of positions with the same likeliest token) of `slim` against `plain`. Rows
    of `slim` are rounded as in a cache of `dtype`, those of `plain` are not. Both compute in float32.

    stored: maps an encoder's output to what `slim` makes its rows from.
    """
    total = np.zeros(2)
    for batch in kept.batches():
        tokens, encoded = jnp.asarray(batch.tokens), batch.encoded
        want = _logits(*plain, tokens, encoded, None)
        got = _logits(*slim, tokens, encoded and stored(encoded), dtype)
        total += np.asarray(_compare(want, got, jnp.asarray(batch.real)), np.float64)
    kl, same = total / kept.count
    return float(kl), float(same)


@partial(jax.jit, static_argnums=(0, 4))
def _logits(model: Transformer, params: PyTree, tokens: Array, encoded: Encoded | None, dtype) -> Array:
    at, segments = angles_and_segments(model.config, tokens, None, None)
    store = (lambda made: made) if dtype is None else partial(rounded, dtype=dtype)
    read = {}
    if encoded is not None:
        read = {"rows": cross_rows(model, params, encoded.x, store), "sources": encoded.lengths}
    x = embed(model, params, tokens, None)
    return logits(model, params, through(model, params, x, at, segments, store=store, **read).x)


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
