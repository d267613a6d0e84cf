"""A greedy answer depends on the requests beside it only by rounding in bfloat16, and not at all in
batch-invariant mode."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_engine as tiny

from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import Request, SamplingParams

MARGIN = 0.05  # nats: bfloat16 has 8 bits, and a product is rounded by the number of rows beside it
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)


def narrow(plan: str, **changes) -> LLM:
    """An LLM in bfloat16."""
    model, params = tiny.model(plan)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    return LLM.from_model(
        dataclasses.replace(model, dtype="bfloat16"), params, tiny.Bytes(), **tiny.SIZES | changes
    )


def gap(alone, beside) -> float:
    """How far apart, in nats, the two likeliest tokens are where two answers part; 0 where they do not."""
    for one, other in zip(alone.logprobs, beside.logprobs, strict=True):
        if next(iter(one)) != next(iter(other)):
            assert set(one) == set(other), "the same two are the likeliest"
            first, second = (entry.logprob for entry in one.values())
            return abs(first - second)
    return 0.0


@pytest.mark.slow
def test_bfloat16_answers_depend_on_the_batch_only_where_two_tokens_are_equally_likely():
    """Beyond the margin a difference would be a fault, of the cache or of the batch, and no rounding."""
    llm = narrow("acrosskv", prefix_caching=False)
    prompts = tiny.prompts(np.random.default_rng(5).integers(1, 40, 32), seed=7)
    beside = llm.generate(prompts, PARAMS, use_tqdm=False)
    found = [
        gap(llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0], output.outputs[0])
        for prompt, output in zip(prompts, beside, strict=True)
    ]
    assert max(found) <= MARGIN, found


KINDS = (  # of the company: whatever sampling needs runs in the same programs
    PARAMS,
    SamplingParams(temperature=1.0, seed=3, max_tokens=7, top_p=0.9, repetition_penalty=1.3, n=2),
    SamplingParams(temperature=0.0, max_tokens=9, bad_words=["ab", "e"], ignore_eos=True),
)


def in_company(llm: LLM, prompts: list[list[int]], seed: int) -> list:
    """The first completion of each prompt, asked for at random moments, beside random other requests."""
    random, asked, found = np.random.default_rng(seed), [], {}
    waiting = list(random.permutation(len(prompts)))
    while waiting or llm.engine.busy:
        if waiting and random.random() < 0.5:
            asked.append(index := waiting.pop())
            coming = [named(llm, prompts[index], PARAMS, f"p{index}")]
            stranger = random.integers(0, 256, random.integers(1, 40)).tolist()
            kind = KINDS[random.integers(len(KINDS))]
            coming.append(named(llm, stranger, kind, f"s{index}"))
            llm.engine.add(*coming)
        if asked and random.random() < 0.1:
            llm.engine.abort(f"s{random.choice(asked)}")
        for group in llm.engine.step() if llm.engine.busy else ():
            found[group.request.request_id] = group
    return [found[f"p{index}"].output().outputs[0] for index in range(len(prompts))]


def named(llm: LLM, prompt: list[int], params: SamplingParams, name: str) -> Request:
    return dataclasses.replace(llm.request(prompt, params), request_id=name)


def bits(completion) -> list:
    """Every token with its log probability and its neighbour's, as they are."""
    return [sorted((token, entry.logprob) for token, entry in each.items()) for each in completion.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["acrosskv", "deepseek"])
def test_batch_invariant_bfloat16_answers_are_bit_identical_in_any_batch(plan):
    """The engine has a prefix cache, and so few pages that requests wait for them."""
    prompts = tiny.prompts(np.random.default_rng(5).integers(1, 40, 12), seed=7)
    prompts += [prompts[i][:16] + prompts[i + 1][:9] for i in range(6)]  # these begin like others
    llm = narrow(plan, batch_invariant=True, num_pages=26)
    alone = [llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    llm.engine.count_anew()
    beside = in_company(llm, prompts, seed=1)
    assert [bits(one) for one in beside] == [bits(one) for one in alone]
    assert llm.stats["preemptions"] == 0 and llm.stats["prefix_hits"] > 0


@pytest.mark.slow
def test_generated_tokens_are_not_found_by_prompts_in_batch_invariant_mode():
    """Decoding and prefill round differently, so a prompt must not reuse the rows of generated tokens."""
    llm = tiny.make(batch_invariant=True)
    (first,) = llm.generate([[1] * 17], dataclasses.replace(tiny.GREEDY, max_tokens=16), use_tqdm=False)
    llm.generate([[1] * 17 + first.outputs[0].token_ids + [2]], tiny.GREEDY, use_tqdm=False)
    assert llm.stats["prefix_hits"] == 16  # of 32 whose pages are full


@pytest.mark.slow
def test_words_of_several_tokens_are_forbidden_in_batch_invariant_mode_too():
    """The host looks at every token of these, and lets a decode launch give them one at a time."""
    llm = tiny.make(batch_invariant=True)
    prompts = tiny.prompts(range(4, 16))
    free = tiny.tokens(llm.generate(prompts, tiny.GREEDY, use_tqdm=False))
    prompt, answer, at = next(
        (prompt, answer, at)
        for prompt, answer in zip(prompts, free, strict=True)
        for at in range(1, 9)
        if max(answer[at : at + 2]) < 128
    )
    word = bytes(answer[at : at + 2]).decode()
    params = dataclasses.replace(tiny.GREEDY, bad_words=[word])
    ((found,),) = [tiny.tokens(llm.generate([prompt], params, use_tqdm=False))]
    assert found[: at + 1] == answer[: at + 1] and word not in bytes(t for t in found if t < 128).decode()
