"""The grid of the attention kernels: exactly the steps that some query needs, sequence after sequence.

In a grid of blocks x pages of the longest sequence most steps would be empty, and each would take about as
long as reading a page. Here every grid step belongs to one block of queries and takes the next few of its
pages; the number of steps is a run-time value.
"""

from collections import namedtuple

import jax
import jax.numpy as jnp

# Steps of all blocks, in order; all int32, for the scalar core.
# owner: [most] the block of each step. first: [b] the first step of each block. count: [b] its steps, one at
# least. low: [b] its first page. high: [b] one past its last page, equal to low if it needs none.
# edge: [b * 4] of each block: no query sees a key before the first or from the fourth on, and every live one
# sees the keys from the second up to the third.
# begin: [cores + 1] the first step of each core, and the number of all steps.
WorkList = namedtuple("WorkList", "owner first count low high edge begin")


def make(position: jax.Array, window, page: int, pages: int, slots: int, cores: int) -> WorkList:
    """Blocks of queries at `position` [b, C] (-1: no query) in steps of `pages` pages of `page` tokens."""
    blocks = position.shape[0]
    live = position >= 0
    last = jnp.max(position, axis=1)
    least = jnp.min(jnp.where(live, position, jnp.iinfo(jnp.int32).max), axis=1)
    start = jnp.maximum(least - window + 1, 0)
    inner = jnp.maximum(last - window + 1, 0)
    some = last >= 0
    low = jnp.where(some, start // page, 0)
    high = jnp.where(some, last // page + 1, 0)
    edge = jnp.stack([start, inner, jnp.where(some, least + 1, 0), last + 1], axis=1).reshape(-1)
    count = jnp.maximum(-(-(high - low) // pages), 1)
    end = jnp.cumsum(count)
    most = blocks * max(1, -(-slots // pages))
    owner = jnp.searchsorted(end, jnp.arange(most), side="right", method="compare_all")
    first = end - count
    cores = min(cores, blocks)
    # Each core takes whole blocks, at least one, with about equally many steps.
    shares = [end[-1] * core // cores for core in range(1, cores)]
    ends = [jnp.searchsorted(end, share, method="compare_all") for share in shares]  # without a loop
    cuts = [jnp.clip(last + 1, core, blocks - cores + core) for core, last in enumerate(ends, 1)]
    begin = jnp.stack([jnp.zeros((), first.dtype), *(first[cut] for cut in cuts), end[-1]])
    arrays = (jnp.minimum(owner, blocks - 1), first, count, low, high, edge, begin)
    return WorkList(*(a.astype(jnp.int32) for a in arrays))


def grid(work: WorkList) -> tuple:
    """(cores, the most steps of any core)."""
    return work.begin.shape[0] - 1, jnp.max(jnp.diff(work.begin))


def step_of(core, index, begin_ref):
    """The step of grid point (core, index); past a core's last step, that last step again."""
    return jnp.minimum(begin_ref[core] + index, begin_ref[core + 1] - 1)


def smem_bytes(blocks: int, slots: int, pages: int, sequences: int) -> int:
    """Scalar memory that the page table and the work list take."""
    return 4 * (sequences * slots + blocks * -(-slots // pages) + blocks * 9)
