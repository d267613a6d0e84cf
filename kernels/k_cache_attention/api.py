"""The two operations of Slim attention: on a cache of keys, and on a cache of layer inputs.

A named implementation runs or raises; None picks by platform.
"""

import functools

from jaxtyping import Array, Float, Int

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.k_cache_attention import native_cpu, reference, xla

K_CACHE = {
    "reference": Implementation(reference.k_cache_attention),
    "xla": Implementation(xla.k_cache_attention),
    "xla_one_turn": Implementation(functools.partial(xla.k_cache_attention, one_turn=True)),
    "native_cpu": Implementation(native_cpu.k_cache_attention, native_cpu.refuses),
    "pallas_tpu": Implementation.of(f"{__package__}.pallas_tpu", "k_cache_attention"),
    "pallas_gpu": Implementation.of(f"{__package__}.pallas_gpu", "k_cache_attention"),
}
X_CACHE = {
    "reference": Implementation(reference.x_cache_attention),
    "xla": Implementation(xla.x_cache_attention),
    "xla_one_turn": Implementation(functools.partial(xla.x_cache_attention, one_turn=True)),
    "native_cpu": Implementation(native_cpu.x_cache_attention, native_cpu.refuses_inputs),
    "pallas_tpu": Implementation.of(f"{__package__}.pallas_tpu", "x_cache_attention"),
    "pallas_gpu": Implementation.of(f"{__package__}.pallas_gpu", "x_cache_attention", "refuses_inputs"),
}


def k_cache_attention(
    q: Float[Array, "b C N H"],
    pools: tuple[Pool],
    w_kv: Float[Array, "N N*H U"],
    table: Int[Array, "Q slots"],
    sequence: Int[Array, "b"],
    position: Int[Array, "b C"],
    *,
    row: int = 0,
    frequencies: Float[Array, "H//2"] | None = None,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    rotated: bool = False,
    threshold: float = 0.0,
    bias: Float[Array, "N S"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "b C N U"]:
    """softmax(q K^T) K W_KV: attention that reads one row of keys and nothing else (arXiv 2503.05840).

    Args:
      q: rotated queries, C of one sequence in each block.
      pools: of keys alone, [R, P, Z, N * H]; int8 and float8_e4m3fn pools have one scale a token,
        [R, P, 1, Z].
      w_kv: W_KV of each head, its rows in the order of the pool's columns.
      table: pages of each sequence in order. sequence: of each block.
      position: of each query; -1 is no query and gives zeros. A query sees the keys at its own
        position and before, fewer than `window` back. Unseen keys may hold anything, NaN included.
      row: of the pool. frequencies: rotary inverse frequencies, None without rotary embedding.
      scale: of the scores, H ** -0.5 by default; the square of a rotary attention factor belongs in it.
      rotated: keys are stored after rotary embedding and rotated back for the sum (section 3, option 2).
      threshold: pallas_tpu leaves a step's keys out of the weighted sum if none has this weight so far
        (section 2): each dropped weight is smaller. 0 is exact.
      bias: added to the scores by head and distance, as in `paged_attention`.
      implementation: "reference", "xla", "native_cpu" (not `rotated`), "pallas_tpu", "pallas_gpu"
        (bfloat16 queries, decoding), or None.

    Returns:
      An array in q's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    ((k, k_scale),) = pools
    heads, width = q.shape[2:]
    dispatch.expect(
        q_and_k=((heads * width,), k.shape[-1:]),
        k_and_k_scale=((*k.shape[:2], 1, k.shape[2]), k_scale),
    )
    options = {"row": row, "scale": width**-0.5 if scale is None else scale, "window": window}
    options |= {"frequencies": frequencies, "rotated": rotated, "threshold": threshold, "k_scale": k_scale}
    args = (q, k, w_kv, table, sequence, position)
    return dispatch.call("k_cache_attention", K_CACHE, implementation, args, options, bias)


def x_cache_attention(
    q: Float[Array, "b C N H"],
    pools: tuple[Pool],
    w_k: Float[Array, "N E H"],
    w_v: Float[Array, "N E U"],
    table: Int[Array, "Q slots"],
    sequence: Int[Array, "b"],
    position: Int[Array, "b C"],
    *,
    row: int = 0,
    scale: float | None = None,
    window: int | Int[Array, ""] | None = None,
    bias: Float[Array, "N S"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "b C N U"]:
    """Attention that caches a layer's inputs, without rotary embedding (arXiv 2503.05840, section 5).

    Scores are (q W_K^T) X^T and the result is (softmax X) W_V, so weights need not be square.

    Args:
      pools: of inputs alone, [R, P, Z, E]; in 8 bits with one scale a token, [R, P, 1, Z], which
        "reference", "xla" and "native_cpu" read. w_k, w_v: of each query head.
      table, sequence, position, row, scale, window, bias, implementation: as in `k_cache_attention`.

    Returns:
      An array in q's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    ((x, x_scale),) = pools
    dispatch.expect(
        w_k_and_the_pool=(w_k.shape[1:2], x.shape[-1:]),
        x_and_x_scale=((*x.shape[:2], 1, x.shape[2]), x_scale),
    )
    options = {"row": row, "scale": q.shape[-1] ** -0.5 if scale is None else scale, "window": window}
    options |= {} if x_scale is None else {"x_scale": x_scale}
    args = (q, x, w_k, w_v, table, sequence, position)
    return dispatch.call("x_cache_attention", X_CACHE, implementation, args, options, bias)
