"""KV prediction served: the tokens of the definition, alone, batched, chunked, shared and preempted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import predict
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.predict import Caches, Predicted
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

AUXILIARY = {"num_layers": 2, "hidden_size": 32, "num_kv_heads": 2, "head_dim": 8}
COUNT = 10


@functools.cache
def pair(plan: str = "standard", tail: int = 1) -> tuple[Predicted, dict]:
    """A base of the engine's tests, and an auxiliary of other width, heads and depth."""
    base, base_params = tiny.model(plan)
    auxiliary, aux_params = tiny.make_model(KVPlan.standard(2), seed=3, **AUXILIARY)
    model = Predicted(base, auxiliary, Prediction.spread(base.plan.num_rows, 2, tail))
    predictor = jax.tree.map(lambda x: 2 * x, predict.uniform(model, jax.random.key(4)))
    return model, {"base": base_params, "auxiliary": aux_params, "predictor": predictor}


@functools.cache
def programs():
    return jax.jit(predict.fill, static_argnums=0), jax.jit(step, static_argnums=0)


def definition(plan: str, prompt: list[int], tail: int = 1, count: int = COUNT) -> list[int]:
    """Greedy tokens of one prompt alone, unchunked, in pools of its own: no engine in it."""
    model, params = pair(plan, tail)
    fill, run = programs()
    base, aux = (
        Cache.dense(part.config, part.plan, 1, tiny.CONTEXT, jnp.float32)
        for part in (model.base, model.auxiliary)
    )
    return tiny.alone(
        lambda *batch: fill(model, params, *batch[:-1], Caches(batch[-1], aux)).base,
        functools.partial(run, model.base, params["base"]),
        *(base, prompt, tail, count),
    )


@functools.cache
def wanted(plan: str = "standard", tail: int = 1) -> list[list[int]]:
    return [definition(plan, prompt, tail) for prompt in tiny.prompts(tiny.LENGTHS)]


def make(plan: str = "standard", tail: int = 1, **changes) -> LLM:
    return LLM.from_model(*pair(plan, tail), tiny.Bytes(), **(tiny.SIZES | changes))


def of_two(base, params, auxiliary=None, own=None) -> tuple[Predicted, dict]:
    """A base and an auxiliary of as many rows, by default itself, whose rows it takes as they are."""
    model = Predicted(base, auxiliary or base, Prediction(tuple(range(tiny.LAYERS))))
    return model, {"base": params, "auxiliary": own or params, "predictor": predict.identity(model)}


@pytest.mark.slow("standard", "swiftkv")
@pytest.mark.parametrize("plan", tiny.PLANS)
def test_tokens_are_those_of_the_definition_over_pages_of_nan(plan):
    """Prompts of 1 to 45 tokens together, chunked, in both pools; a base of every plan."""
    llm = make(plan)
    tiny.poison(llm)
    assert tiny.tokens(tiny.run(llm)) == wanted(plan)
    differ = sum(a != b for a, b in zip(wanted(plan), tiny.definition(plan), strict=True))
    assert differ >= 4, "else this would hold of any engine"
    assert tiny.all_free(llm.engine)


def test_a_second_turn_finds_what_the_auxiliary_read_and_no_more():
    """The first answer lies in pages of the base's own rows: the auxiliary reads it again."""
    llm, first = make(num_pages=32), tiny.prompts((25,), seed=8)[0]
    answer = tiny.tokens(tiny.run(llm, [first]))[0]
    assert answer == definition("standard", first)
    second = [*first, *answer, *tiny.prompts((3,), seed=9)[0]]
    got = tiny.run(llm, [second])
    assert llm.stats["prefix_hits"] == 24 and tiny.tokens(got) == [definition("standard", second)]
    again = tiny.run(llm, [second])
    assert llm.stats["prefix_hits"] == 32 and tiny.tokens(again) == tiny.tokens(got)
    assert got[0].outputs[0].cached_tokens == 24


def test_a_page_with_a_token_of_the_tail_is_not_shared():
    """The auxiliary reads two whole pages of 17 tokens; of 16, the second page ends with the base's own."""
    llm = make(num_pages=32)
    for length, hits in ((16, 8), (17, 16)):
        prompt = tiny.prompts((length,), seed=length)[0]
        for _ in range(2):
            assert tiny.tokens(tiny.run(llm, [prompt])) == [definition("standard", prompt)]
        assert llm.stats["prefix_hits"] == hits


@pytest.mark.slow
def test_nothing_compiles_after_the_engine_says_it_is_ready():
    llm, want = make("swiftkv", max_num_seqs=3, max_num_batched_tokens=64), wanted("swiftkv")
    llm.engine.warm_up()
    assert llm.fingerprint  # a server asks for it before the first request: it compiles a little
    with tiny.compilations() as found:
        assert tiny.tokens(tiny.run(llm)) == want
    assert not found


def test_bytes_of_both_pools_are_reported_separately():
    llm = make()
    own, auxiliary = llm.pool_bytes_per_token
    assert own == 4 * 2 * 20 * 4 and auxiliary == 2 * 16 * 4  # of its 2 layers the last does not run
    tiny.run(llm)
    runner = llm.engine.runner
    assert llm.stats["cache_bytes_per_token"] == own + auxiliary == llm.cache_bytes_per_token
    assert llm.stats["cache_bytes"] == sum(pool.nbytes for pool in runner.pools)


@pytest.mark.slow("int8")
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_scores_are_those_of_what_is_served(dtype):
    """The likelihood of the first token of every prompt length, against the engine's own."""
    llm, prompt = make(cache_dtype=dtype), tiny.prompts((12,), seed=6)[0]
    scored = llm.score(prompt)
    exact = zip(prompt[1:], scored[1:], make().score(prompt)[1:], strict=True)
    felt = max(abs(a[token].logprob - b[token].logprob) for token, a, b in exact)
    assert (felt > 1e-2) == (dtype != "auto")
    for length in (1, 5, 11):
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, ignore_eos=True)
        first = llm.generate([prompt[:length]], params, use_tqdm=False)[0].outputs[0]
        (token, best), *_ = first.logprobs[0].items()
        again = llm.score([*prompt[:length], token])[-1][token]
        assert again.rank == 1 and abs(again.logprob - best.logprob) < 1e-5
    assert scored[0] is None and len(scored) == 12
    _, packed = llm.score_each([prompt[3:], prompt])
    for token, one, other in zip(prompt[1:], packed[1:], scored[1:], strict=True):
        assert abs(one[token].logprob - other[token].logprob) < 1e-5


@pytest.mark.slow
def test_eight_bit_pools_do_not_depend_on_chunks():
    outputs = [tiny.tokens(tiny.run(make(cache_dtype="int8", max_num_batched_tokens=n))) for n in (9, 64)]
    assert outputs[0] == outputs[1] != wanted()


@pytest.mark.slow
@pytest.mark.parametrize("plan, tail", [("swiftkv", 1), ("standard", 3)])
def test_prompts_in_any_company_are_answered_as_alone(plan, tail):
    tiny.in_any_company(
        functools.partial(make, plan, tail), lambda prompt: definition(plan, prompt, tail), tail
    )


def test_pages_of_a_failed_request_are_wiped_in_both_pools():
    llm = make()
    prompt = tiny.prompts((30,), seed=4)[0]

    def fail(point: str, request_id: str) -> None:
        if point == "sample":
            raise RuntimeError("made to fail")

    llm.engine.probe = fail
    assert tiny.run(llm, [prompt])[0].outputs[0].finish_reason == "error"
    llm.engine.probe = lambda point, request_id: None
    for cache in llm.engine.runner.pools:
        for array in jax.tree.leaves(cache.stores):
            assert not np.asarray(array)[:, 1:5].any()
    assert tiny.tokens(tiny.run(llm, [prompt])) == [definition("standard", prompt)]


def test_a_device_that_fails_gets_two_new_pools():
    llm = make()
    tiny.run(llm)
    llm.engine.restart(RuntimeError("lost"))
    assert tiny.tokens(tiny.run(llm)) == wanted()


def test_models_that_differ_in_any_part_share_no_pages():
    model, params = pair()
    names = set()
    moved = jax.tree.map(lambda x: x + 0.1, params)
    for changed in ({}, {"auxiliary": moved["auxiliary"]}, {"predictor": moved["predictor"]}):
        names.add(LLM.from_model(model, params | changed, **tiny.SIZES).fingerprint)
    for other in (Prediction((0, 1, 1, 1)), Prediction(model.prediction.reads, 2)):
        names.add(LLM.from_model(dataclasses.replace(model, prediction=other), params).fingerprint)
    assert len(names) == 5


def test_unsupported_requests_and_settings_are_refused():
    """Of two students, what makes the base's upper rows by name cannot make the auxiliary's."""
    scored = SamplingParams(prompt_logprobs=1)
    short = of_two(*tiny.model("standard"), *tiny.make_model(KVPlan.standard(4), max_position_embeddings=32))
    assert LLM.from_model(*short).settings.max_model_len == 32
    students = of_two(*tiny.model("swiftkv"))
    for name, asked in (
        ("prompt_logprobs", lambda: make(tail=2).generate([[1, 2, 3]], scored, use_tqdm=False)),
        ("tail", lambda: make(tail=2).score([1, 2, 3])),
        ("scoring", lambda: make(kernels="scoring=xla")),
        ("drafter", lambda: make(drafts=1, drafter="exit")),
        ("context", lambda: LLM.from_model(*short, max_model_len=64)),
        ("fill", lambda: LLM.from_model(*students, **tiny.SIZES, kernels="fill=xla")),
        ("fill", lambda: LLM.from_model(*students, **tiny.SIZES).replace(kernels="fill=xla")),
    ):
        with pytest.raises(UsageError, match=name):
            asked()
    assert make("swiftkv", kernels="fill=xla").settings.implementations == {"fill": "xla"}


def test_ids_that_the_auxiliary_has_no_embedding_of_are_refused():
    """A base whose vocabulary is padded further: what it generates is its own affair."""
    base, params = tiny.model("standard")
    small, small_params = tiny.make_model(KVPlan.standard(2), seed=3, **AUXILIARY, vocab_size=tiny.VOCAB - 2)
    model = Predicted(base, small, Prediction((0, 0, 1, 1)))
    parts = {"base": params, "auxiliary": small_params, "predictor": pair()[1]["predictor"]}
    llm = LLM.from_model(model, parts, tiny.Bytes(), **tiny.SIZES)
    with pytest.raises(UsageError, match="256"):
        llm.generate([[1, 256, 3]], use_tqdm=False)
    with pytest.raises(UsageError, match="257"):
        llm.score([1, 257])
