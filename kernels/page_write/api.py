"""Write tokens into pages. A named implementation runs or raises; None picks by platform."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.page_write import native_cpu, reference

PAGE_WRITE = {
    "xla": Implementation(reference.page_write),
    "native_cpu": Implementation(native_cpu.page_write, native_cpu.refuses),
    "pallas_tpu": Implementation.of(f"{__package__}.pallas_tpu", "page_write"),
}


def places(table: jax.Array, sequence, position, valid, size: int) -> tuple[jax.Array, jax.Array]:
    """(page, slot) that each token of a flat batch belongs in, both [T]; padding in page 0, which is scratch.

    Args:
      table: [Q, slots] page ids of each sequence in order, of pages of `size` tokens.
      sequence: [T] of each token. position: [T] in its sequence. valid: [T], False for padding.
    """
    number = jnp.clip(position // size, 0, table.shape[1] - 1)
    return jnp.where(valid, table[sequence, number], 0), position % size


def page_write(
    pool: Pool,
    new: Float[Array, "T F K H"],
    page: Int[Array, "_"],
    slot: Int[Array, "_"],
    *,
    rows: tuple[int, ...],
    implementation: str | None = None,
) -> Pool:
    """The pool with some tokens' entries of some rows in it, rounded to the pool's dtype.

    Args:
      pool: where the rows are; donate it.
      new: [T, F, K, H] of T tokens in F rows; in 8 bits each of K heads gets a scale.
      page: [T] of the pool, in [0, P); page 0 is scratch, whose contents nobody reads.
      slot: [T] place in the page. No two tokens may share a place, except in page 0.
      rows: of the pool, one for each of F.
      implementation: "xla", which is the definition, "native_cpu" (needs a C++ compiler), "pallas_tpu", or
        None.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, or a call that the named implementation cannot run.
    """
    tokens, filled, heads, width = new.shape
    dispatch.expect(
        new_and_rows=((filled,), (len(rows),)),
        new_and_the_pool=((heads * width,), pool.data.shape[-1:]),
        new_and_page=((tokens,), page),
        new_and_slot=((tokens,), slot),
        new_and_scale=((*pool.data.shape[:2], heads, pool.data.shape[2]), pool.scale),
    )
    if (pool.scale is None) != (pool.data.dtype.itemsize > 1):
        raise dispatch.UnsupportedError(f"a pool of {pool.data.dtype}: 8-bit rows have scales, others none")
    args = (pool, new, page, slot)
    return dispatch.call("page_write", PAGE_WRITE, implementation, args, {"rows": tuple(rows)})
