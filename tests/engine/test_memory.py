"""The pool is what a device's memory leaves beside weights and the arrays of the largest program."""

import dataclasses

import jax
import pytest
import tiny_engine as tiny

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import surgery
from swiftkv_jax.core.predict import Predicted, uniform
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.runner import allocated, working_bytes
from swiftkv_jax.engine.settings import empty_pools, resolve

KINDS = {
    "plain": {},
    "looked up guesses": {"drafts": 3},
    "the exit head's guesses": {"drafts": 2, "drafter": "exit", "exit_threshold": 0.9},
    "an auxiliary reads": {},
}


def make(kind: str) -> LLM:
    model, params = tiny.make_model(KVPlan.swiftkv(3, 1, 2), exit_head=True, num_layers=3)
    if "auxiliary" in kind:
        small, own = surgery.layer_pruned(model, params, range(3))  # an auxiliary has no exit head
        pair = Predicted(model, small, Prediction.nearest(2, (0, 1)))
        params = {"base": params, "auxiliary": own, "predictor": uniform(pair, jax.random.key(0))}
        model = pair
    sizes = {"max_num_seqs": 6, "max_model_len": 64, "max_num_batched_tokens": 64}
    return LLM.from_model(model, params, tiny.Bytes(), **sizes, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_program_takes_more_than_is_kept_for_the_largest(kind):
    """All programs of a warm-up are checked. The pools are small, so that they cannot hide anything."""
    llm = make(kind)
    calls = [program.call for program in llm.engine.runner.programs()]
    kept = working_bytes(llm.model, llm.params, llm.mesh, llm.settings)
    assert len(calls) >= 10
    compiled = (call.func.lower(*call.args, **call.keywords).compile() for call in calls)
    assert max(map(allocated, compiled)) <= kept
    more = dataclasses.replace(llm.settings, num_pages=4 * llm.settings.num_pages)
    assert working_bytes(llm.model, llm.params, llm.mesh, more) == kept


class Device:
    """One of so many bytes, some in use."""

    process_index = 0

    def __init__(self, limit: float, used: int, platform: str = "tpu"):
        self._stats = {"bytes_limit": limit, "bytes_in_use": used}
        self.platform = platform

    def memory_stats(self) -> dict[str, float]:
        return self._stats


def test_the_pool_takes_all_that_is_left_and_no_page_more():
    llm, used, working = make("plain"), 10**6, 300_000
    wanted = dataclasses.replace(llm.settings, num_pages=None, memory_fraction=0.8)
    (two,) = empty_pools(llm.model, dataclasses.replace(wanted, num_pages=1))
    for room in (2, 5):
        limit = (used + working + (room + 1.5) * two.nbytes // 2) / 0.8
        found = resolve(wanted, llm.model, [Device(limit, used)], None, lambda settings: working)
        assert found.num_pages == room
    with pytest.raises(UsageError, match="num_pages"):
        resolve(wanted, llm.model, [Device(used + working, used)], None, lambda settings: working)
    named = dataclasses.replace(wanted, num_pages=7)  # then nothing is compiled to find out
    assert resolve(named, llm.model, [Device(1, 1)], None, lambda settings: 1 // 0).num_pages == 7


def test_an_accelerator_without_a_memory_limit_is_not_sized_by_host_memory():
    llm = make("plain")
    wanted = dataclasses.replace(llm.settings, num_pages=None)
    named = dataclasses.replace(wanted, num_pages=7)
    for platform in ("cpu", "gpu", "tpu"):
        device = Device(0, 0, platform)
        del device._stats["bytes_limit"]
        if platform == "cpu":
            assert resolve(wanted, llm.model, [device], None, lambda settings: 0).num_pages
            continue
        with pytest.raises(UsageError, match="--num-pages"):
            resolve(wanted, llm.model, [device], None, lambda settings: 0)
        assert resolve(named, llm.model, [device], None, lambda settings: 0).num_pages == 7


@pytest.mark.parametrize("asked, of_card", [(0.9, 0.9), (0.5, 0.5), (1.0, 0.9)])
def test_a_fraction_of_a_gpu_is_of_the_card_and_counts_once(asked, of_card, monkeypatch):
    """JAX knows as its limit only the part of the card that it was given."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    llm, used, card = make("plain"), 10**6, 2 * 10**7
    wanted = dataclasses.replace(llm.settings, num_pages=None, memory_fraction=asked, max_num_seqs=10**6)
    (two,) = empty_pools(llm.model, dataclasses.replace(wanted, num_pages=1))
    found = resolve(wanted, llm.model, [Device(0.9 * card, used, "gpu")], None, lambda settings: 0)
    assert found.num_pages == int((of_card * card - used) / (two.nbytes / 2)) - 1


def test_changed_settings_resize_the_pool_unless_num_pages_is_given():
    llm = tiny.make("standard")
    assert llm.settings.num_pages == 4 * 8  # of 8 tokens, for 4 sequences of 64
    assert llm.replace(max_num_seqs=2).settings.num_pages == 2 * 8
    assert llm.replace(page_size=7).settings.num_pages == 4 * 10
    assert llm.replace(tiny.GREEDY).settings.num_pages == 4 * 8
    asked = tiny.make("standard", num_pages=20)
    assert asked.replace(max_num_seqs=2).settings.num_pages == 20
    assert asked.replace(num_pages=30).settings.num_pages == 30
