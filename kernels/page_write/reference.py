"""The definition of writing tokens into pages.

Letters: T tokens, F rows that are written, K kv heads, H width of a key, U of a value.
"""

import jax

from swiftkv_jax.kernels.pools import Pools, encode


def page_write(pools: Pools, k, v, page, slot, *, rows: tuple[int, ...]) -> Pools:
    """As `api.page_write`."""

    def put(pool: jax.Array, scales: jax.Array | None, new):
        stored, factor = encode(new, pool.dtype)
        for i, row in enumerate(rows):  # one scatter for all rows is slower
            pool = pool.at[row, page, slot].set(stored[:, i].reshape(len(new), -1))
            if scales is not None and factor is not None:
                scales = scales.at[row, page, :, slot].set(factor[:, i])
        return pool, scales

    k, k_scale = put(pools.k, pools.k_scale, k)
    v, v_scale = put(pools.v, pools.v_scale, v)
    return Pools(k, v, k_scale, v_scale)
