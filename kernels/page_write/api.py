"""Tokens written into pages. A named implementation runs or raises; None picks by platform."""

import jax

from swiftkv_jax.kernels import dispatch
from swiftkv_jax.kernels.dispatch import Implementation
from swiftkv_jax.kernels.page_write import native_cpu, reference
from swiftkv_jax.kernels.pools import Pools

PAGE_WRITE = {
    "xla": Implementation(reference.page_write),
    "native_cpu": Implementation(native_cpu.page_write, native_cpu.refuses),
}


def page_write(
    pools: Pools,
    k: jax.Array,
    v: jax.Array,
    page: jax.Array,
    slot: jax.Array,
    *,
    rows: tuple[int, ...],
    implementation: str | None = None,
) -> Pools:
    """The pools with keys and values of some tokens in them, rounded to the pools' dtype.

    Args:
      pools: where the rows are; donate them.
      k: [T, F, K, H] and v: [T, F, K, U] of T tokens in F rows.
      page: [T] of the pool, in [0, P); page 0 is scratch, whose contents nobody reads.
      slot: [T] place in the page. No two tokens have one place, but in page 0.
      rows: of the pools, one for each of F.
      implementation: "xla", which is the definition, "native_cpu" (needs a C++ compiler), or None.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    tokens, heads = k.shape[0], k.shape[2]
    scales = (*pools.k.shape[:2], heads, pools.k.shape[2])
    dispatch.expect(
        k_and_v=(k.shape[:-1], v.shape[:-1]),
        k_and_rows=(k.shape[1:2], (len(rows),)),
        k_and_the_pool_of_k=((heads * k.shape[3],), pools.k.shape[-1:]),
        v_and_the_pool_of_v=((heads * v.shape[3],), pools.v.shape[-1:]),
        k_and_page=((tokens,), page),
        k_and_slot=((tokens,), slot),
        k_and_k_scale=(scales, pools.k_scale),
        v_and_v_scale=(scales, pools.v_scale),
    )
    args = (pools, k, v, page, slot)
    return dispatch.call("page_write", PAGE_WRITE, implementation, args, {"rows": tuple(rows)})
