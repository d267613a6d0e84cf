"""Turns at the tokenizer: of one key's texts, however many and long, at most one holds up another's."""

import threading

import pytest
import tiny_engine as tiny
from http_server import Running, connect, make_llm, raw_request, wait_for

from swiftkv_jax.server.admission import LONG, Readers, Turns


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


def test_short_texts_do_not_wait_for_long_ones():
    readers, released = Readers(), threading.Event()
    long = readers.submit("a", LONG + 1, lambda: released.wait(20))
    assert readers.submit("a", LONG, lambda: "short").result(20) == "short" and not long.done()
    released.set()
    assert long.result(20)
    readers.stop()


def test_a_key_with_long_texts_does_not_block_others():
    """Five long texts of one key, each as slow as can be: its own short call and another key's are answered
    meanwhile, and another key's long text waits for one more of them, not for all."""
    gate, begun = threading.Semaphore(0), []

    class Slow(tiny.Bytes):
        def encode(self, text, add_special_tokens=True):
            if len(text) > LONG:
                begun.append(text[0])
                assert gate.acquire(timeout=60)
            return super().encode(text[:8])

    def long(name: str) -> bytes:
        return raw_request(b'{"prompt": "%s"}' % (name.encode() * (LONG + 1)), "/tokenize")

    with Running(make_llm(Slow()), warm_up=False, api_keys=("one", "two")) as server:
        callers = [connect(server) for _ in range(6)]
        for number, caller in enumerate(callers):
            key = b"two" if number == 5 else b"one"
            body = long("ab"[key == b"two"])
            caller.sendall(body.replace(b"host: x", b"host: x\r\nauthorization: Bearer " + key))
            wait_for(lambda number=number: server.api.models.tickets > number)
        wait_for(lambda: begun == ["a"])
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            for route, body in (("/tokenize", {"prompt": "x"}), ("/v1/completions", {"prompt": "x"})):
                assert server.http.post(route, json=body, headers=headers, timeout=60).status_code == 200
        assert begun == ["a"], "the long ones wait for their turn, one at a time"
        for left in range(5):
            gate.release()
            wait_for(lambda left=left: len(begun) == left + 2)
        assert begun.index("b") <= 2
        gate.release()
        for caller in callers:
            caller.close()
        wait_for(server.idle)
