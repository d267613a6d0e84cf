"""Tokens written into pages on TPUs, interpreted: the definition's bits where tokens belong, and everywhere
else the bits that were there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from swiftkv_jax.kernels.common.pools import Pool, encode
from swiftkv_jax.kernels.page_write import cases, pallas_tpu
from swiftkv_jax.kernels.page_write.cases import Case

QUICK = ("decode",)
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in cases.SMALL]


def bits(x) -> np.ndarray:
    """The bits of an array as unsigned integers, also those of NaN."""
    x = np.array(x)
    return x.view(f"u{x.dtype.itemsize}")


def expected(pool: Pool, new, page, slot, rows) -> list[np.ndarray]:
    """The bits of a pool after its tokens were put into their places one by one; page 0 is nobody's."""
    made = jax.jit(encode, static_argnums=1)(new, pool.data.dtype)
    stored, factor = (None if x is None else bits(x) for x in made)
    page, slot = np.array(page), np.array(slot)
    want = [bits(x) for x in pool if x is not None]
    for t in np.flatnonzero(page):
        for i, row in enumerate(rows):
            want[0][row, page[t], slot[t]] = stored[t, i].reshape(-1)
            if factor is not None:
                want[1][row, page[t], :, slot[t]] = factor[t, i]
    return want


def same(got: Pool, want: list[np.ndarray]) -> None:
    for x, y in zip([x for x in got if x is not None], want, strict=True):
        np.testing.assert_array_equal(bits(x)[:, 1:], y[:, 1:])


def interpreted(rows, interpret=True):
    return jax.jit(functools.partial(pallas_tpu.page_write, rows=rows, interpret=interpret))


def check(rows, pool: Pool, *where, interpret=True) -> None:
    assert not pallas_tpu.refuses(pool, *where, rows=rows)
    same(interpreted(rows, interpret)(pool, *where), expected(pool, *where, rows))


@pytest.fixture(autouse=True)
def few_in_flight(monkeypatch):
    """So few that their places are used again and again."""
    monkeypatch.setattr(pallas_tpu, "_MOST", 4)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_written_and_nothing_else_is_touched(name):
    case = cases.SMALL[name]
    check(case.rows, *case.make()[0])


TOKENS, PAGES = 160, 40
DRAWN = {
    "float32": Case(sequences=(), padding=TOKENS, spare=PAGES, page=16, stored="float32"),
    "bfloat16": Case(sequences=(), padding=TOKENS, spare=PAGES),
    "int8": Case(sequences=(), padding=TOKENS, spare=PAGES, page=128, stored="int8", rows=(0,), of=1),
}


@functools.cache
def drawn(stored: str):
    """One program for all batches: (the case, its arguments, the kernel)."""
    case = DRAWN[stored]
    return case, case.make()[0], interpreted(case.rows)


@pytest.mark.parametrize(
    "stored", [n if n == "bfloat16" else pytest.param(n, marks=pytest.mark.slow) for n in DRAWN]
)
@settings(max_examples=8, deadline=None, phases=(Phase.generate,))  # shrinking takes minutes
@given(data=st.data())
def test_any_batch(stored, data):
    """Sequences of any length from any place in a page, padding between them, and tokens in any order."""
    case, (pool, new, *_), run = drawn(stored)
    names = iter(data.draw(st.permutations(range(1, PAGES))))
    page, slot = [], []
    size = st.one_of(st.integers(0, 3), st.sampled_from((case.page - 1, case.page, case.page + 1, 70)))
    for first, count, gap in data.draw(
        st.lists(st.tuples(st.integers(0, case.page - 1), size, st.integers(0, 2)), max_size=9)
    ):
        position = np.arange(first, first + count)
        own = np.array([next(names) for _ in range((first + count) // case.page + 1)])
        page.extend([*own[position // case.page], *[0] * gap])
        slot.extend([*position % case.page, *[3] * gap])
    page, slot = (np.resize(np.pad(np.array(x, np.int32), (0, TOKENS)), TOKENS) for x in (page, slot))
    if data.draw(st.booleans()):
        order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(TOKENS)
        page, slot = page[order], slot[order]
    where = new, jnp.array(page), jnp.array(slot)
    same(run(pool, *where), expected(pool, *where, case.rows))


SIMULATED = {
    "bfloat16": Case(sequences=((0, 32), (5, 40), (37, 1), (30, 3), (31, 1)), rows=(1,), of=2),
    "int8": Case(sequences=((0, 128), (5, 40), (37, 1), (130, 3)), page=128, stored="int8", rows=(1,), of=2),
}


@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bfloat16", pytest.param("int8", marks=pytest.mark.slow)])
def test_every_started_copy_is_waited_for(name, backwards):
    """A copy moves nothing before somebody waits for it, and memory begins as NaN. Backwards, every token is
    a run of its own, and several are in one tile."""
    case = SIMULATED[name]
    pool, *where = case.make()[0]
    where = [x[::-1] if backwards else x for x in where]
    waiting = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
    check(case.rows, pool, *where, interpret=waiting)


def test_page_write_runs_end_at_page_boundaries():
    """Worked out by hand: a run ends with its page, at padding, and at a token outside the next slot."""
    page = jnp.array([3, 3, 5, 5, 0, 0, 5, 2, 9, 3])
    slot = jnp.array([14, 15, 0, 1, 2, 3, 2, 7, 8, 0])
    runs_of = jax.jit(functools.partial(pallas_tpu.runs_of, rows=(1,), pages=9))
    runs = runs_of(page, slot)
    assert runs.first.tolist()[:5] == [0, 2, 6, 7, 9] and runs.last.tolist()[:5] == [1, 3, 6, 7, 9]
    assert runs.some.tolist() == [5, 0]  # pages 3 and 5 have two runs each; page 9 is outside
    assert runs_of(page[1:4], slot[1:4]).some.tolist() == [2, 1]
    assert runs_of(page[4:6], slot[4:6]).some.tolist() == [0, 1]
