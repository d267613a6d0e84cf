"""Attention over paged keys and values. A named implementation runs or raises; None picks by platform."""

import jax

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.dispatch import Implementation
from swiftkv_jax.kernels.paged_attention import native_cpu, pallas_gpu, pallas_tpu, reference, xla

PAGED_ATTENTION = {
    "reference": Implementation(reference.paged_attention),
    "xla": Implementation(xla.paged_attention),
    "native_cpu": Implementation(native_cpu.paged_attention, native_cpu.refuses),
    "pallas_tpu": Implementation(pallas_tpu.paged_attention, pallas_tpu.refuses),
    "pallas_gpu": Implementation(pallas_gpu.paged_attention, pallas_gpu.refuses),
}


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    sequence: jax.Array,
    position: jax.Array,
    *,
    row: int = 0,
    scale: float | None = None,
    window: int | jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """What each query reads from one row of a paged pool: decode tokens and chunks of prompts alike.

    Args:
      q: [b, C, N, H], C queries of one sequence in each block; a ragged batch is cut into such blocks, of
        which a sequence may own several.
      k: [R, P, Z, K * H] and v: [R, P, Z, K * U] pools; the kernels read the row in place. int8 and
        float8_e4m3fn rows take `k_scale` and `v_scale` [R, P, K, Z], a float32 factor of each token and head.
      table: [Q, slots] pages of each sequence in order. sequence: [b] of each block.
      position: [b, C] of each query; -1 is no query and gives zeros. A query sees the keys at its own
        position and before, fewer than `window` back. Unseen keys may hold anything, NaN included.
      row: of the pool. scale: of the scores, H ** -0.5 by default.
      implementation: "reference", "xla", "native_cpu" (needs a C++ compiler), "pallas_tpu", "pallas_gpu"
        (bfloat16 queries, few of them), or None.

    Returns:
      [b, C, N, U] in q's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    heads, width = q.shape[2:]
    kv_heads = k.shape[-1] // width
    if k.shape[-1] % width or heads % kv_heads or v.shape[-1] % kv_heads:
        raise dispatch.UnsupportedError(
            f"{heads} query heads {width} wide do not fit k {k.shape} and v {v.shape}"
        )
    scales = (*k.shape[:2], kv_heads, k.shape[2])
    dispatch.expect(
        k_and_v=(k.shape[:-1], v.shape[:-1]),
        k_and_k_scale=(scales, k_scale),
        v_and_v_scale=(scales, v_scale),
        q_and_position=(q.shape[:2], position),
        q_and_sequence=(q.shape[:1], sequence),
    )
    options = {
        "row": row,
        "scale": width**-0.5 if scale is None else scale,
        "window": window,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    args = (q, k, v, table, sequence, position)
    return dispatch.call("paged_attention", PAGED_ATTENTION, implementation, args, options)
