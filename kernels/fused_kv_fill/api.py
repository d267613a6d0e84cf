"""The fused fill. A named implementation runs or raises; None picks by platform."""

import functools

from jaxtyping import Array, Float, Int

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.fused_kv_fill import reference
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers, Pools, fold_gain
from swiftkv_jax.kernels.fused_kv_fill.xla import rows_of

FUSED_KV_FILL = {
    "reference": Implementation(reference.fused_kv_fill),
    "xla": Implementation(functools.partial(reference.fused_kv_fill, make=rows_of)),
    "pallas_tpu": Implementation.of(f"{__package__}.pallas_tpu", "fused_kv_fill"),
    "pallas_gpu": Implementation.of(f"{__package__}.pallas_gpu", "fused_kv_fill"),
}

__all__ = ["FUSED_KV_FILL", "Makers", "fold_gain", "fused_kv_fill", "rows_of"]


def fused_kv_fill(
    x: Float[Array, "T D"],
    makers: Makers,
    cos: Float[Array, "_ _"],
    sin: Float[Array, "_ _"],
    pools: tuple[Pool, Pool],
    names: Int[Array, "_"],
    live: Int[Array, "_"],
    *,
    rows: tuple[int, ...],
    eps: float,
    implementation: str | None = None,
) -> tuple[Pool, Pool]:
    """The pools with keys and values of `rows` made from the stream, whole pages at a time.

    RMS norm, projections, bias, a norm of the keys, rotary embedding, rounding to the pool's dtype (8 bits
    with a float32 scale for each token and head). The kernels update the pools in place: donate them.

    Args:
      x: [T, D] the stream, not normalised; each run of Z tokens is one page of one sequence.
      makers: the projections, with the norm's gain folded in by `fold_gain`.
      cos, sin: [T, H / 2] of the rotary angles of each token.
      pools: of keys and of values, where the rows are. Pages that are not named stay as they are.
      names: [T / Z] page of each Z tokens; P (one past the last) means that nothing is written.
      live: [T / Z] tokens of each page; those after are written as zeros, whatever x holds.
      rows: of the pools, one for each maker. eps: of the norms.
      implementation: "reference", "xla", "pallas_tpu", "pallas_gpu" (bfloat16 streams), or None.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    (k, k_scale), (v, v_scale) = pools
    (*pool, page, k_width), v_width, width = k.shape, v.shape[-1], 2 * cos.shape[-1]
    scales = (*pool, k_width // width, page)
    for data, scale in pools:
        if (data.dtype.itemsize == 1) != (scale is not None):
            raise dispatch.UnsupportedError(
                f"{data.dtype} rows: 8-bit rows have scales, wider ones have none"
            )
    dispatch.expect(
        x_and_cos=(x.shape[:1], cos.shape[:1]),
        cos_and_sin=(cos, sin),
        w_k_and_rows_x_k=(makers.w_k, (len(rows), x.shape[1], k_width)),
        w_v_and_rows_x_v=(makers.w_v, (len(rows), x.shape[1], v_width)),
        b_k_and_rows_k=(makers.b_k, (len(rows), k_width)),
        b_v_and_rows_v=(makers.b_v, (len(rows), v_width)),
        k_norm_and_rows_cos=(makers.k_norm, (len(rows), width)),
        k_and_v=(k.shape[:-1], v.shape[:-1]),
        k_and_k_scale=(scales, k_scale),
        v_and_v_scale=(scales, v_scale),
        names_and_pages_of_x=(names, (x.shape[0] // page,)),
        names_and_live=(names, live),
    )
    if x.shape[0] % page or k_width % width or v_width % (k_width // width):
        raise dispatch.UnsupportedError(
            f"x {x.shape} and cos {cos.shape} do not fit pages of k {k.shape} and v {v.shape}: "
            "whole pages, whole heads"
        )
    args = (x, makers, cos, sin, Pools(k, v, k_scale, v_scale), names, live)
    made = dispatch.call("fused_kv_fill", FUSED_KV_FILL, implementation, args, {"rows": rows, "eps": eps})
    return Pool(made.k, made.k_scale), Pool(made.v, made.v_scale)
