"""Chunks of prompts over paged keys and values in two dense parts, for cuDNN's flash attention.

A chunk attends to itself, causally, and to all tokens before it, which are gathered from their pages. The two
sums are merged by their log-sum-exps. Neither part has a mask in memory, and there is one program for all
lengths.

cuDNN's can be neither compiled nor run without a GPU; tests check only that its arguments are right. On an
H200 it was right, and 9 to 41 times as fast as XLA's.
"""

from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common import mask

_WIDEST = 256


def paged_attention(q, k, v, table, sequence, position, *, row, scale, window, k_scale, v_scale, by=None):
    """As `api.paged_attention`, for blocks whose positions rise by one, as those of one sequence do together.
    `by`: `by_cudnn` if None, or `by_xla`."""
    attend: Any = by or by_cudnn  # any window is wider than the table: see `refuses`
    blocks = q.shape
    if len(table) == 1:  # of one sequence, whose pages are then gathered once
        q, sequence, position = q.reshape(1, -1, *q.shape[2:]), sequence[:1], position.reshape(1, -1)
    (_, queries, _, width), page, names = q.shape, k.shape[2], table[sequence]
    heads, place = k.shape[-1] // width, jnp.arange(queries)
    live = position >= 0
    first, count = jnp.min(jnp.where(live, position, 1 << 30), axis=1), live.sum(1)
    first = jnp.where(count > 0, first, 0)

    def stored(x, x_scale, name, slot, some):
        """Rows of pages, or of one slot of each, as heads. Zeros where not `some`, since 0 x NaN is NaN."""
        rows = x[row, name] if slot is None else x[row, name, slot]
        rows = rows.reshape(*some.shape, heads, width)
        if x_scale is not None:
            factor = jnp.swapaxes(x_scale[row, name], 2, 3) if slot is None else x_scale[row, name, :, slot]
            rows = rows.astype(jnp.float32) * factor.reshape(*some.shape, heads, 1)
        return jnp.where(some[..., None, None], rows.astype(q.dtype), 0)

    def part(name, slot, some):
        return tuple(stored(*x, name, slot, some) for x in ((k, k_scale), (v, v_scale)))

    # Shift queries to begin at index 0, as the causal mask expects.
    begin = jnp.argmax(live, axis=1)[:, None]
    own = place < count[:, None]
    shifted = jnp.take_along_axis(q, jnp.minimum(place + begin, queries - 1)[..., None, None], axis=1)
    shifted = jnp.where(own[..., None, None], shifted, 0)
    some = jnp.maximum(count, 1).astype(jnp.int32)  # never empty; the result of an empty part is not used
    positions = jnp.where(own, first[:, None] + place, 0)
    inside = part(jnp.take_along_axis(names, positions // page, axis=1), positions % page, own)
    inside = attend(shifted, *inside, some, some, scale, True)
    before = part(names, None, jnp.arange(names.shape[1] * page) < first[:, None])
    before = attend(shifted, *before, some, jnp.maximum(first, 1).astype(jnp.int32), scale, False)
    mixed = merge(inside, before, first > 0)
    mixed = jnp.take_along_axis(mixed, jnp.maximum(place - begin, 0)[..., None, None], axis=1)
    return jnp.where(live[..., None, None], mixed, 0).astype(q.dtype).reshape(blocks)


def merge(one, other, there):
    """Merge the sums [b, C, N, H] over two sets of keys by their log-sum-exps [b, C, N], in float32. `other`
    counts only where it is `there` [b]."""
    (mixed, lse), (second, its) = one, other
    there = there[:, None, None]
    its = jnp.where(there, its, -jnp.inf)
    both = jnp.logaddexp(lse, its)
    second = jnp.where(there[..., None], second, 0) * jnp.exp(its - both)[..., None]
    return mixed * jnp.exp(lse - both)[..., None] + second


def by_xla(q, k, v, queries, keys, scale, causal: bool):
    """(sums, log-sum-exps) by XLA's composition; in float32, since jax.nn rounds the latter to its inputs."""
    wide = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v))
    lengths = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
    how: Any = {"scale": scale, "is_causal": causal, "implementation": "xla", "return_residual": True}
    return jax.nn.dot_product_attention(*wide, **lengths, **how)


def by_cudnn(q, k, v, queries, keys, scale, causal: bool):
    """(sums, log-sum-exps) by cuDNN, the latter in float32.

    This uses a private function of JAX: `jax.nn.dot_product_attention` rounds log-sum-exps to the queries'
    dtype, and in bfloat16 a merge is then off by several per cent.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    kind = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    how = {"q_seqlen": queries, "kv_seqlen": keys, "scale": scale, "mask_type": kind, "return_residual": True}
    sums: Any = cudnn.dot_product_attention(q, k, v, **how)
    mixed, lse = sums
    return mixed, jnp.swapaxes(lse, 1, 2)


def refuses(q, k, v, table, *_, window=None, **__) -> str:
    """Name the part of a call that this split does not support and what it supports instead, or return ""."""
    if k.shape[-1] != v.shape[-1]:
        return f"keys and values {k.shape[-1]} and {v.shape[-1]} wide: equally wide"
    context = table.shape[1] * k.shape[2]
    if not isinstance(mask.window_of(window), int) or mask.window_of(window) < context:
        return f"a window of {window} tokens in a context of {context}: none"
    return ""


def refuses_cudnn(q, k, v, *args, **kwargs) -> str:
    """Name the part of a call that cuDNN does not support and what it supports instead, or return ""."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype} queries: bfloat16, float16"
    if (width := q.shape[-1]) % 8 or width > _WIDEST:
        return f"heads {width} wide: multiples of 8 up to {_WIDEST}"
    return refuses(q, k, v, *args, **kwargs)
