"""Attention over paged keys and values. A named implementation runs or raises; None picks by platform."""

import functools

from jaxtyping import Array, Float, Int

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.paged_attention import jax_nn, native_cpu, reference, xla

PAGED_ATTENTION = {
    "reference": Implementation(reference.paged_attention),
    "xla": Implementation(xla.paged_attention),
    "xla_one_turn": Implementation(functools.partial(xla.paged_attention, one_turn=True)),
    "native_cpu": Implementation(native_cpu.paged_attention, native_cpu.refuses),
    "pallas_tpu": Implementation.of(f"{__package__}.pallas_tpu", "paged_attention"),
    "pallas_gpu": Implementation.of(f"{__package__}.pallas_gpu", "paged_attention"),
    "cudnn": Implementation(jax_nn.paged_attention, jax_nn.refuses_cudnn),
}


def paged_attention(
    q: Float[Array, "b C N H"],
    pools: tuple[Pool, Pool] | tuple[Pool],
    table: Int[Array, "Q slots"],
    sequence: Int[Array, "_"],
    position: Int[Array, "_ _"],
    *,
    row: int = 0,
    value: int | None = None,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    bias: Float[Array, "N S"] | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "b C N U"]:
    """Attention of queries over one row of a paged pool, for decode tokens and chunks of prompts alike.

    Args:
      q: [b, C, N, H], C queries of one sequence in each block; a ragged batch is cut into such blocks, of
        which a sequence may own several.
      pools: of keys [R, P, Z, K * H] and of values [R, P, Z, K * U]; the kernels read the row in place.
        int8 and float8_e4m3fn pools have scales. One pool has both: the value of a token is the first
        `value` numbers of its key.
      table: [Q, slots] pages of each sequence in order. sequence: [b] of each block.
      position: [b, C] of each query; -1 is no query and gives zeros. A query sees the keys at its own
        position and before, fewer than `window` back. Unseen keys may hold anything, NaN included.
      row: of the pool. scale: of the scores, H ** -0.5 by default.
      bias: [N, S] added to the scores, by head and by how far back a key is; the last entry applies to all
        keys further back. Only "reference", "xla" and "xla_one_turn" support it.
      softcap: largest absolute score, as in `mask.capped`, for the same three.
      implementation: "reference", "xla", "xla_one_turn" (no loop of unknown length, and more memory; what
        "xla" is on GPUs and TPUs), "native_cpu" (needs a C++ compiler), "pallas_tpu", "pallas_gpu" (bfloat16
        queries), "cudnn" (bfloat16 and float16; the positions of a block rise by one, those of the blocks
        of one sequence too, which lie in order; no window), or None.

    Returns:
      [b, C, N, U] in q's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    (k, k_scale), (v, v_scale) = pools[0], pools[-1]
    heads, width = q.shape[2:]
    kv_heads = k.shape[-1] // width
    if k.shape[-1] % width or heads % kv_heads or v.shape[-1] % kv_heads:
        raise dispatch.UnsupportedError(
            f"{heads} query heads {width} wide do not fit k {k.shape}, v {v.shape}"
        )
    scales = (*k.shape[:2], kv_heads, k.shape[2])
    dispatch.expect(
        k_and_v=(k.shape[:-1], v.shape[:-1]),
        k_and_k_scale=(scales, k_scale),
        v_and_v_scale=(scales, v_scale),
        q_and_position=(q.shape[:2], position),
        q_and_sequence=(q.shape[:1], sequence),
    )
    options = {"row": row, "scale": width**-0.5 if scale is None else scale, "window": window}
    options |= {"k_scale": k_scale, "v_scale": v_scale}
    args = (q, k, v, table, sequence, position)
    mixed = dispatch.call("paged_attention", PAGED_ATTENTION, implementation, args, options, bias, softcap)
    return mixed[..., :value]
