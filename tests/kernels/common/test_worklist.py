"""The attention kernels' grid: what some query needs is in exactly one step, and no other step exists."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_jax.kernels.common import worklist

PAGE, SLOTS = 4, 6


@pytest.mark.slow
@given(
    ends=st.lists(st.integers(0, PAGE * SLOTS), min_size=1, max_size=5),
    queries=st.integers(1, 3),
    window=st.sampled_from([1, 5, 1 << 30]),
    pages=st.integers(1, 4),
    cores=st.integers(1, 2),
)
def test_steps_cover_what_is_seen_once(ends, queries, window, pages, cores):
    position = np.maximum(np.array(ends)[:, None] - queries + np.arange(queries), -1)
    work = worklist.make(jnp.array(position), window, PAGE, pages, SLOTS, cores)
    *_, begin = work = worklist.WorkList(*(np.asarray(a) for a in work))
    assert begin[0] == 0 and (np.diff(begin) > 0).all() and begin[-1] == work.count.sum()
    core = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    covered = []
    for step in range(begin[-1]):
        block = work.owner[step]
        assert core[step] == core[work.first[block]]  # a block is one core's
        start = work.low[block] + (step - work.first[block]) * pages
        covered += [(block, p) for p in range(start, min(start + pages, work.high[block]))]
    keys = np.arange(PAGE * SLOTS)
    for block, at in enumerate(position):
        back = at[:, None] - keys
        seen = (back >= 0) & (back < window) & (at >= 0)[:, None]
        needed = set(keys[seen.any(0)] // PAGE)
        assert needed == {p for b, p in covered if b == block}
        low, inner, outer, high = work.edge[4 * block : 4 * block + 4]
        assert not seen[:, (keys < low) | (keys >= high)].any()
        assert seen[at >= 0][:, (keys >= inner) & (keys < outer)].all()
    assert len(covered) == len(set(covered))


@pytest.mark.parametrize("cores", [1, 2])
def test_cores_share_the_work(cores):
    position = jnp.full((8, 1), PAGE * SLOTS - 1)
    work = worklist.make(position, 1 << 30, PAGE, 1, SLOTS, cores)
    assert worklist.grid(work)[0] == cores
    assert int(worklist.grid(work)[1]) <= 8 * SLOTS // cores + SLOTS
