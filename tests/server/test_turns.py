"""Turns at the tokenizer: of one key's texts, however many and long, at most one holds up another's."""

import asyncio
import threading

import pytest

from swiftkv_jax.server.admission import LONG, Turns


@pytest.fixture
def turns():
    made = Turns("turns")
    yield made
    made.stop()


def begin(turns: Turns) -> threading.Event:
    """Work that goes on until the event is set; it has begun."""
    begun, released = threading.Event(), threading.Event()
    turns.submit("first", lambda: begun.set() or released.wait(20))
    assert begun.wait(20)
    return released


def test_keys_take_turns(turns):
    released, order = begin(turns), []
    futures = [turns.submit("many", lambda i=i: order.append(f"many {i}")) for i in range(5)]
    futures += [turns.submit(key, lambda key=key: order.append(key)) for key in ("few", "late")]
    released.set()
    for future in futures:
        future.result(20)
    assert order == ["many 0", "few", "late", "many 1", "many 2", "many 3", "many 4"]


def test_a_text_that_fails_or_is_abandoned_affects_no_other(turns):
    released = begin(turns)
    failing, given_up = turns.submit("a", lambda: 1 // 0), turns.submit("a", lambda: order.append("run"))
    after, order = turns.submit("a", lambda: "done"), []
    assert given_up.cancel()
    released.set()
    with pytest.raises(ZeroDivisionError):
        failing.result(20)
    assert after.result(20) == "done" and not order, "what nobody waits for is not begun"


def test_stopping_cancels_every_waiting_call(turns):
    released = begin(turns)
    waiting = [turns.submit(key, lambda: None) for key in ("a", "b", "a")]
    turns.stop()
    assert all(future.cancelled() for future in waiting)
    released.set()


def test_short_texts_do_not_wait_for_long_ones(served):
    def submit(size: int, work):
        return asyncio.run_coroutine_threadsafe(served.api.service.encode("a", size, work), served.loop)

    released = threading.Event()
    long = submit(LONG + 1, lambda: released.wait(20))
    assert submit(LONG, lambda: "short").result(20) == "short" and not long.done()
    released.set()
    assert long.result(20)
