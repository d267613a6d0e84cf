"""The definition of attention inside prompts.

Letters: B prompts, T tokens of the longest, N query heads, K kv heads, H their width.
"""

import jax
import jax.numpy as jnp


def prompt_attention(q, k, v, lengths, *, scale, window):
    """As `api.prompt_attention`, in at least float32."""
    wide, tokens = jnp.promote_types(q.dtype, jnp.float32), q.shape[1]
    at = jnp.arange(tokens)
    back = at[:, None] - at
    live = at < lengths[:, None]
    near = (back >= 0) & (back < (tokens if window is None else window))
    seen = (near & live[:, :, None] & live[:, None])[:, None, None]
    k, v = (jnp.where(live[..., None, None], x, 0).astype(wide) for x in (k, v))
    grouped = q.astype(wide).reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision="highest") * scale
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), 0)
    mixed = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision="highest").reshape(q.shape)
    return jnp.where(live[..., None, None], mixed, 0).astype(q.dtype)
