"""Causal attention in jax.numpy, in blocks of queries so that [T, T] scores never exist whole."""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.causal_attention.segments import first_key
from swiftkv_jax.kernels.common.mask import bias_of, capped

_BLOCK = 512  # queries whose scores exist at a time
_SPANS = 4  # of a long sequence's queries, each with its own static number of keys
_MASKED = -1e30  # finite: a row with nothing to see gives an average, never NaN


def causal_attention(q, k, v, segments, window, *, scale, shards=None, bias=None, softcap=None):
    """As `api.causal_attention`."""
    length, first = q.shape[1], first_key(segments, window)

    def one(start, q, k, v):
        """Queries [start, start + len(q)) against the first len(k) keys."""
        at, keys = start + jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
        own = jnp.take(first, jnp.minimum(at, length - 1), axis=1)
        seen = (keys <= at[:, None]) & (keys >= own[..., None])
        by_distance = None if bias is None else bias_of(bias, at[:, None] - keys)
        return _attention(q, k, v, seen, scale, by_distance, softcap)

    if length <= _BLOCK:
        return one(0, q, k, v)
    # A few unrolled spans, so that early queries skip late keys. Inside a span a loop runs over blocks, whose
    # scores are recomputed in the backward pass, so that only one block's exist at a time.
    size = _BLOCK * -(-length // (_SPANS * _BLOCK))
    checkpointed = jax.checkpoint(one, prevent_cse=False)
    spans = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        pieces = -(-(stop - start) // _BLOCK)
        cut = jnp.pad(q[:, start:stop], ((0, 0), (0, pieces * _BLOCK - (stop - start)), (0, 0), (0, 0)))
        cut = jnp.moveaxis(cut.reshape(cut.shape[0], pieces, _BLOCK, *cut.shape[2:]), 1, 0)
        begin = start + _BLOCK * jnp.arange(pieces)
        keys, values = k[:, :stop], v[:, :stop]
        out = jax.lax.map(lambda x, keys=keys, values=values: checkpointed(*x, keys, values), (begin, cut))
        out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], pieces * _BLOCK, *out.shape[3:])
        spans.append(out[:, : stop - start])
    return jnp.concatenate(spans, axis=1)


def _attention(q, k, v, mask, scale, bias, softcap):
    """Grouped-query attention over the keys that `mask` [..., T, S] shows each query; softmax in float32.

    bias: [N, T, S] of the scores, or None.
    """
    (length, heads), groups = q.shape[-3:-1], q.shape[-2] // k.shape[-2]
    # Heads outermost and a group's queries in one matrix: both products are plain matmuls, and no operand
    # needs a transpose.
    q, k, v = (jnp.moveaxis(x, -2, -3) for x in (q, k, v))
    q = q.reshape(*k.shape[:-2], groups * length, q.shape[-1])
    scores = jnp.einsum("...qh,...sh->...qs", q, k, preferred_element_type=jnp.float32) * scale
    scores = capped(scores.reshape(*k.shape[:-2], groups, length, -1), softcap)
    scores = scores if bias is None else scores + bias.reshape(*scores.shape[-4:])
    weights = jax.nn.softmax(jnp.where(mask[..., None, None, :, :], scores, _MASKED), axis=-1)
    weights = weights.astype(v.dtype).reshape(*k.shape[:-2], groups * length, -1)
    mixed = jnp.einsum("...qs,...sh->...qh", weights, v)
    return jnp.moveaxis(mixed.reshape(*k.shape[:-3], heads, length, -1), -3, -2)
