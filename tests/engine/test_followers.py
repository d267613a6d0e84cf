"""A follower process repeats another one's launches: the same arrays, calls and cache."""

import queue
import threading

import numpy as np
import pytest
import tiny_engine as tiny

from swiftkv_jax.common.processes import Channel
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.engine.followers import Follower, Leader, pack, unpack
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.loop import Lanes
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.sampling import Mode

KINDS = (
    tiny.GREEDY,
    SamplingParams(max_tokens=9, seed=1, top_p=0.9, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
)


class Queue(Channel):
    """A channel within one process."""

    def __init__(self):
        self._messages: queue.Queue[bytes] = queue.Queue()

    def send(self, message: bytes) -> None:
        self._messages.put(message)

    def receive(self) -> bytes:
        return self._messages.get()


@pytest.mark.parametrize("large", (False, True))
def test_a_packed_message_unpacks_unchanged(large):
    """Bits, dtypes, shapes and kinds; a message that is small as it is, and one that is not."""
    random, rows = np.random.default_rng(0), 4000 if large else 3
    lanes = Lanes(
        token=random.integers(0, 9, rows).astype(np.int32),
        position=np.arange(rows, dtype=np.int32),
        produced=np.zeros(rows, np.int32),
        alive=np.arange(rows) % 2 == 0,  # an odd number of bytes before what follows
        history=np.zeros((rows, 0), np.int32),
    )
    seed = random.integers(0, 2**32, (rows, 2), np.uint32)
    noise = random.standard_normal((rows, 5)).astype(np.float32)
    noise[0, :3] = np.nan, -np.inf, -0.0
    sent = (Mode(sampled=True), lanes, None, seed, 7, noise)
    name, got = unpack(pack("_loop", sent))
    assert name == "_loop" and got[0] == sent[0] and type(got[0]) is Mode and got[2] is None and got[4] == 7
    for ours, theirs in zip(vars(lanes).values(), vars(got[1]).values(), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and (ours == theirs).all()
    assert got[3].dtype == np.uint32 and (got[3] == seed).all() and got[5].tobytes() == noise.tobytes()


def test_a_follower_makes_the_same_cache_and_says_the_same_of_a_prompt():
    """Steps, decode loops that follow each other, guesses, pages wiped after a failure, and scores."""
    model, params = tiny.make_model(KVPlan.swiftkv(2, 1), num_layers=2)
    first, second = (
        LLM.from_model(model, params, tiny.Bytes(), **tiny.SIZES, num_pages=12) for _ in range(2)
    )
    channel = Queue()
    first.role, second.role = Leader(channel), Follower(channel)
    following = threading.Thread(target=second.follow)
    following.start()
    params_of = [KINDS[i % 2] for i in range(6)]
    first.generate(["a", "hello there", "x" * 30, "two words", "y" * 21, "z"], params_of, use_tqdm=False)
    first.engine.runner.clear([3, 4])
    assert first.score([1, 2, 3, 4])[1] is not None
    first.dismiss()
    following.join(60)
    assert not following.is_alive()
    ours, theirs = first.engine.runner.cache.stores, second.engine.runner.cache.stores
    for form in ours:
        for one, other in zip(ours[form], theirs[form], strict=True):
            assert np.asarray(one.data).any() and (np.asarray(one.data) == np.asarray(other.data)).all()
