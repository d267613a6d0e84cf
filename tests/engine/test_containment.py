"""A request that fails, is aborted or is refused ends alone: its pages are freed and all others go on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
from tiny_engine import GREEDY, LENGTHS, SIZES, all_free, definition, make, model, run, tokens

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine import engine as engine_module
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

POINTS = ("schedule", "run", "sample", "detokenise")


@pytest.mark.slow("run", "schedule")
@pytest.mark.parametrize("point", POINTS)
def test_a_request_that_fails_inside_ends_alone(point):
    llm = make()
    requests = [llm.request(prompt, GREEDY) for prompt in tiny.prompts(LENGTHS)]
    victim, passed = requests[3].request_id, []

    def probe(where, request_id):
        if (where, request_id) == (point, victim):
            passed.append(where)
            if len(passed) == 2 or point == "schedule":
                raise RuntimeError("injected")

    llm.engine.probe = probe
    outputs = dict(llm.run(requests))
    failed = outputs.pop(3).outputs[0]
    assert failed.finish_reason == "error" and "injected" in failed.error
    want = dict(enumerate(definition("acrosskv")))
    assert {i: o.outputs[0].token_ids for i, o in outputs.items()} == {i: want[i] for i in outputs}
    assert failed.token_ids == want[3][: len(failed.token_ids)]
    assert all_free(llm.engine) and llm.engine.stats.failed_requests == 1


def test_a_failure_on_arrival_reaches_the_caller_only():
    llm = make()
    llm.engine.probe = lambda where, request_id: 1 // (where != "admit")
    with pytest.raises(ZeroDivisionError):
        llm.engine.add(llm.request([1, 2], GREEDY))
    assert all_free(llm.engine)


def test_a_nan_ends_its_request_and_is_wiped_before_its_pages_are_reused():
    """One token's embedding is NaN: its row of the cache, in pages that others will get, must be cleared."""
    net, params = model("acrosskv")
    params = params | {"embed": params["embed"].at[200].set(jnp.nan)}
    llm = LLM.from_model(net, params, tiny.Bytes(), **(SIZES | {"num_pages": 20}))
    prompts = [[t % 200 for t in p] for p in tiny.prompts(LENGTHS)]
    want = tokens(run(make(), prompts))
    bad = [*prompts[3][:-1], 200]
    for _ in range(2):
        outputs = run(llm, [*prompts[:3], bad, *prompts[4:]])
        assert outputs[3].outputs[0].finish_reason == "error" and "finite" in outputs[3].outputs[0].error
        for i, output in enumerate(outputs):
            assert i == 3 or 200 in want[i] or output.outputs[0].token_ids == want[i]
        run(llm, [bad])  # alone and last: nobody comes after it to overwrite what it left
        assert clean(llm) and all_free(llm.engine)


def check_finds(llm: LLM, prompt: list[int], found_each_time: tuple[int, ...]) -> None:
    """How many tokens of a prompt are found in the cache each time it comes; and its answer is right."""
    for hits in found_each_time:
        request, before = llm.request(prompt, GREEDY), llm.engine.stats.prefix_hits
        llm.engine.add(request)
        found: list[list[int]] = []
        while llm.engine.busy:
            ended = [g for g in llm.engine.step() if g.finished and g.request is request]
            found += [g.sequences[0].output for g in ended]
        assert found == [tiny.greedy(*model("acrosskv"), prompt, 10)]
        assert llm.engine.stats.prefix_hits - before == hits
    assert all_free(llm.engine)


def clean(llm: LLM) -> bool:
    """No page that others will get holds NaN."""
    return all(
        np.isfinite(np.asarray(x)[:, 1:]).all() for x in jax.tree.leaves(llm.engine.runner.cache.stores)
    )


def poisoned(llm: LLM, token: int):
    """Parameters under which whoever reads this token computes NaN."""
    params = llm.engine.runner.params
    return params | {"embed": params["embed"].at[token].set(jnp.nan)}


def faulty() -> tuple[LLM, list[int], dict]:
    """An LLM by whose parameters a prompt of 45 tokens computes NaN from its fourth on; the good ones."""
    llm, (prompt,) = make(max_num_batched_tokens=16), tiny.prompts((45,))
    good = llm.engine.runner.params
    llm.engine.runner.params = poisoned(llm, 200)
    return llm, [200 if i == 3 else t % 200 for i, t in enumerate(prompt)], good


@pytest.mark.slow
def test_no_page_of_a_faulty_prompt_is_cached_when_a_request_that_shares_it_is_aborted():
    """Pages are shared as soon as they are written, and NaN is seen only where a token is sampled: by then
    another may hold them too, and leave before it comes to see it."""
    llm, prompt, good = faulty()
    first, second = llm.request(prompt, GREEDY), llm.request(prompt, GREEDY)
    llm.engine.add(first)
    llm.engine.step()
    llm.engine.add(second)
    failed: list[str] = []
    while not failed:
        failed = [str(g.sequences[0].error) for g in llm.engine.step() if g.finished]
    assert "not finite" in failed[0]
    (other,) = llm.engine.scheduler.running.values()
    assert other.request is second and other.cached >= 16 and not other.output, "it shares, and has not seen"
    shared, before = list(other.pages), llm.engine.stats.prefix_hits
    llm.engine.runner.params = good
    third = llm.request(prompt, GREEDY)
    llm.engine.add(third)
    llm.engine.step()
    assert other.pages == shared and llm.engine.stats.prefix_hits == before, "found, though known to be bad"
    llm.engine.abort(second.request_id)
    cache = llm.engine.runner.cache
    for pool in jax.tree.leaves(cache.stores):
        assert np.isfinite(np.asarray(pool)[:, shared]).all(), "what was shared is given back as it was"
    while llm.engine.busy:
        llm.engine.step()
    check_finds(llm, prompt, (40,))


@pytest.mark.slow("1-1")
@pytest.mark.parametrize("steps, callers", [(1, 1), (2, 1), (1, 2)])
def test_no_page_of_a_faulty_prompt_is_cached_when_it_is_aborted_half_way(steps, callers):
    """Nothing was sampled yet, so nobody has seen that it is NaN: its pages are not kept; whole ones are."""
    llm, prompt, good = faulty()
    requests = [llm.request(prompt, GREEDY) for _ in range(callers)]
    for request in requests:
        llm.engine.add(request)
        for _ in range(steps):
            llm.engine.step()
    running = llm.engine.scheduler.running.values()
    assert len(running) == callers and all(one.names and not one.output for one in running)
    for request in requests:
        llm.engine.abort(request.request_id)
    llm.engine.runner.params = good
    check_finds(llm, prompt, (0, 40))
    assert llm.engine.stats.failed_requests == 0


def test_pages_read_beside_a_failed_completion_are_not_cached():
    """The caller aborts after the first failure; the other completion has read pages of the same prompt.

    The prompt then finds none of its pages, and they are clean; later it finds its own."""
    llm, prompt, good = faulty()
    request = llm.request(prompt, dataclasses.replace(GREEDY, n=2))
    llm.engine.add(request)
    group = llm.engine.groups[request.request_id]
    while not group.sequences[0].finish_reason:
        llm.engine.step()
    llm.engine.step()
    assert group.sequences[1].cached >= 16 and not group.sequences[1].finish_reason
    llm.engine.abort(request.request_id)
    llm.engine.step()
    llm.engine.runner.params = good
    check_finds(llm, prompt, (0, 40))
    assert clean(llm)


def test_a_score_that_is_not_a_number_ends_its_request_only():
    net, params = model("acrosskv")
    params = params | {"embed": params["embed"].at[200].set(jnp.nan)}
    llm = LLM.from_model(net, params, tiny.Bytes(), **SIZES)
    params = dataclasses.replace(GREEDY, prompt_logprobs=1, max_tokens=1)
    fine, bad = run(llm, [[1, 2, 3], [4, 200, 5]], params)
    assert fine.outputs[0].finish_reason == "length" and fine.prompt_logprobs[2][3].logprob < 0
    assert bad.outputs[0].finish_reason == "error" and bad.prompt_logprobs is None
    with pytest.raises(FloatingPointError):
        llm.score([4, 200, 5])


@pytest.mark.slow("2-mixtral", "3-deepseek")
@pytest.mark.parametrize(
    ("after", "plan"),
    [*((after, "acrosskv") for after in (0, 1, 2, 3, 5)), (2, "mixtral"), (3, "deepseek")],
)
def test_abort_at_any_moment_frees_everything_and_changes_no_other_request(after, plan):
    llm = make(plan)
    requests = [llm.request(prompt, GREEDY) for prompt in tiny.prompts(LENGTHS)]
    for request in requests:
        llm.engine.add(request)
    done = {}
    for turn in range(1000):
        if turn == after:
            for i in (1, 3, 7):
                llm.engine.abort(requests[i].request_id)
            llm.engine.abort("unknown")
        if not llm.engine.busy:
            break
        done |= {g.request.request_id: g.output() for g in llm.engine.step() if g.finished}
    for i, (request, want) in enumerate(zip(requests, definition(plan), strict=True)):
        got = done[request.request_id].outputs[0]
        assert got.token_ids == want or (i in (1, 3, 7) and got.finish_reason == "abort")
    assert all_free(llm.engine)


def test_requests_are_aborted_when_their_caller_closes_the_stream():
    llm = make()
    requests = [llm.request(prompt, GREEDY) for prompt in tiny.prompts(LENGTHS)]
    stream = llm.run(requests)
    next(stream)
    stream.close()
    assert all_free(llm.engine)
    assert tokens(run(llm)) == definition("acrosskv")


def test_a_request_that_rules_out_every_token_fails_alone():
    llm, prompt = make(), tiny.prompts((9,))[0]
    ruled = [
        dataclasses.replace(GREEDY, ignore_eos=False, allowed_token_ids=[tiny.EOS], min_tokens=3),
        dataclasses.replace(GREEDY, allowed_token_ids=[65, 66], bad_words=["A", "B"]),
        SamplingParams(seed=1, max_tokens=9, allowed_token_ids=[65], bad_words=["AA"]),
    ]
    outputs = run(llm, [prompt] * 4, [*ruled, GREEDY])
    for output, length in zip(outputs[:3], (0, 0, 1), strict=True):
        got = output.outputs[0]
        assert (got.finish_reason, len(got.token_ids)) == ("error", length) and "token" in got.error
    assert tokens(outputs[3:]) == tokens(run(make(), [prompt]))
    assert all_free(llm.engine) and llm.engine.stats.failed_requests == 0


def test_a_restarted_engine_frees_the_old_cache_first_and_keeps_counters(monkeypatch):
    """There is no room for two caches on a device, and counters never fall."""
    old, deleted, new_cache = [], [], engine_module.new_cache

    def watched(*arguments):
        deleted.extend(array.is_deleted() for array in old)
        return new_cache(*arguments)

    monkeypatch.setattr(engine_module, "new_cache", watched)
    llm = make(num_pages=33, page_size=2, max_num_seqs=3)
    run(llm)
    engine = llm.engine
    requests = [llm.request(prompt, GREEDY) for prompt in tiny.prompts(LENGTHS)]
    engine.add(*requests)
    for _ in range(3):
        engine.step()
    old.extend(jax.tree.leaves(engine.runner.cache))
    before, running = dataclasses.replace(engine.stats), len(engine.scheduler.running)
    assert before.preemptions and before.prefix_queries and running
    engine.restart(RuntimeError(""))
    assert deleted and all(deleted)
    ended = {}
    while engine.busy:
        ended |= {g.request.request_id: g for g in engine.step() if g.finished}
    stats = engine.stats
    assert stats.failed_requests == before.failed_requests + running
    assert stats.preemptions >= before.preemptions and stats.prefix_queries > before.prefix_queries
    reasons = [ended[r.request_id].sequences[0].finish_reason for r in requests]
    assert reasons.count("error") == running and set(reasons) == {"error", "length"}
    for request, want in zip(requests, definition("acrosskv"), strict=True):
        one = ended[request.request_id].sequences[0]
        assert one.output == want[: len(one.output)] and all_free(engine)


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_pages": 7}, {"cache_dtype": "int9"}, {"attention": "pallas"}, {"attention": "pallas_gpu"}),
        *({"fill": "pallas-tpu"}, {"fill": "pallas_tpu"}, {"page_sise": 8}, {"drafts": -1}, {"page_size": 0}),
        *({"memory_fraction": 0.0}, {"batch_invariant": True, "drafts": 2}),
        {"batch_invariant": True, "exit_threshold": 0.9},
    ],
    ids=str,
)
def test_bad_settings_are_refused(changes):
    name = {"num_pages": "pages", "page_sise": "page_size", "fill": "fill|fused_kv_fill"}
    with pytest.raises(UsageError, match=name.get(first := next(iter(changes)), first)):
        make(**changes)


def test_requests_are_added_all_or_none():
    llm = make()
    first, second = (llm.request([1] * 15, GREEDY) for _ in range(2))
    llm.engine.add(first)
    with pytest.raises(UsageError, match="in use"):
        llm.engine.add(second, first)
    assert list(llm.engine.groups) == [first.request_id]
    llm.engine.abort(first.request_id)
    llm.engine.step()
    llm.engine.add(first, second)
    with pytest.raises(UsageError, match="max_tokens"):
        make(num_pages=8).request([1] * 60, dataclasses.replace(GREEDY, max_tokens=5))
