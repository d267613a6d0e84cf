"""The definition of writing tokens into pages.

Letters: T tokens, F rows that are written, K heads with one scale each, H width of a head.
"""

from swiftkv_jax.kernels.common.pools import Pool, encode


def page_write(pool: Pool, new, page, slot, *, rows: tuple[int, ...]) -> Pool:
    """As `api.page_write`."""
    data, scale = pool
    stored, factor = encode(new, data.dtype)
    for i, row in enumerate(rows):  # one scatter for all rows is slower
        data = data.at[row, page, slot].set(stored[:, i].reshape(len(new), -1))
        if scale is not None and factor is not None:
            scale = scale.at[row, page, :, slot].set(factor[:, i])
    return Pool(data, scale)
