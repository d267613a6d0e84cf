"""The definition of attention from a cache of keys alone, or of layer inputs alone.

Slim attention (arXiv 2503.05840): with W_KV = W_K^-1 W_V, values are V = K W_KV, so head i of a query is
softmax(q_i K_i^T) K W_KV,i. The weighted sum is over whole rows K of all heads, before rotary embedding.

Letters: b blocks of queries, C queries of a block (of one sequence), N heads, H their width, U the width
of an output head, E the width of a cached row, R rows, P pages, Z tokens of a page.
"""

from collections import namedtuple

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.mask import bias_of, visible, weights_of

# The options of `api.k_cache_attention`.
Options = namedtuple(
    "Options", "row frequencies scale window rotated threshold k_scale bias", defaults=(None,)
)


def rotate(heads: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotary embedding of [..., N, H] by angles [..., H / 2]: the two halves of a head are a plane each."""
    cos, sin = (f(angle)[..., None, :].astype(heads.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def k_cache_attention(q, k, w_kv, table, sequence, position, **options):
    """As `api.k_cache_attention`, in at least float32; `threshold` skips nothing here."""
    how, wide = Options(**options), jnp.promote_types(q.dtype, jnp.float32)
    stored = k[how.row, table[sequence]].reshape(len(sequence), -1, k.shape[-1]).astype(wide)
    keys = stored.shape[1]
    seen = visible(position, keys, how.window)
    stored = jnp.where(seen.any(1)[..., None], stored, 0)
    scales = jnp.ones((), wide)
    if how.k_scale is not None:
        scales = how.k_scale[how.row, table[sequence]].reshape(len(sequence), keys)
        scales = jnp.where(seen.any(1), scales, 0)[:, None, None]
    heads = stored.reshape(*stored.shape[:2], *q.shape[2:])
    raw, turned = heads, heads
    if how.frequencies is not None:
        angle = jnp.arange(keys)[:, None] * how.frequencies.astype(wide)
        raw, turned = (rotate(heads, -angle), heads) if how.rotated else (heads, rotate(heads, angle))
    scores = jnp.einsum("bcnh,bsnh->bncs", q.astype(wide), turned, precision="highest") * how.scale * scales
    scores += _bias(how.bias, position, keys)
    weights = weights_of(scores, seen[:, None])
    mixed = jnp.einsum("bncs,bse->bcne", weights * scales, raw.reshape(stored.shape), precision="highest")
    return jnp.einsum("bcne,neu->bcnu", mixed, w_kv.astype(wide), precision="highest").astype(q.dtype)


def _bias(bias, position, keys: int):
    """The bias of scores [b, N, C, keys]; 0 without one."""
    if bias is None:
        return 0.0
    return jnp.moveaxis(bias_of(bias, position[..., None] - jnp.arange(keys)), 0, 1)


def x_cache_attention(
    q, x, w_k, w_v, table, sequence, position, *, row, scale, window, x_scale=None, bias=None
):
    """As `api.x_cache_attention`: keys and values made from the cached inputs, in at least float32."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    seen = visible(position, table.shape[1] * x.shape[2], window)
    inputs = x[row, table[sequence]].reshape(len(sequence), -1, x.shape[-1]).astype(wide)
    if x_scale is not None:
        inputs *= x_scale[row, table[sequence]].reshape(*inputs.shape[:2], 1)
    inputs = jnp.where(seen.any(1)[..., None], inputs, 0)
    keys = jnp.einsum("bse,neh->bsnh", inputs, w_k.astype(wide), precision="highest")
    values = jnp.einsum("bse,neu->bsnu", inputs, w_v.astype(wide), precision="highest")
    scores = jnp.einsum("bcnh,bsnh->bncs", q.astype(wide), keys, precision="highest") * scale
    scores += _bias(bias, position, inputs.shape[1])
    weights = weights_of(scores, seen[:, None])
    return jnp.einsum("bncs,bsnu->bcnu", weights, values, precision="highest").astype(q.dtype)
