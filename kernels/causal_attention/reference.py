"""The definition of causal attention inside segments.

Letters: B sequences of T tokens, N query heads, K kv heads, H the width of a key, U of a value.
"""

import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.segments import first_key
from swiftkv_jax.kernels.common.mask import bias_of, capped, weights_of


def causal_attention(q, k, v, segments, window, *, scale, shards=None, bias=None, softcap=None):
    """As `api.causal_attention`, in at least float32."""
    wide, at = jnp.promote_types(q.dtype, jnp.float32), jnp.arange(q.shape[1])
    seen = (at <= at[:, None]) & (at >= first_key(segments, window)[..., None])
    grouped = q.astype(wide).reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k.astype(wide), precision="highest") * scale
    scores = capped(scores, softcap)
    if bias is not None:
        scores += bias_of(bias, at[:, None] - at).reshape(*scores.shape[1:])
    weights = weights_of(scores, seen[:, None, None])
    mixed = jnp.einsum("bkgts,bsku->btkgu", weights, v.astype(wide), precision="highest")
    return mixed.reshape(*q.shape[:3], -1).astype(q.dtype)
