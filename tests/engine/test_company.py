"""What a greedy answer owes to those who run beside it: in bfloat16, what rounding decides and no more."""

import dataclasses

import jax
import numpy as np
import tiny_engine as tiny

from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

MARGIN = 0.05  # nats: bfloat16 has 8 bits, and a product is rounded by the number of rows beside it
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)


def gap(alone, beside) -> float:
    """How far apart, in nats, the two likeliest tokens are where two answers part; 0 where they do not."""
    for one, other in zip(alone.logprobs, beside.logprobs, strict=True):
        if next(iter(one)) != next(iter(other)):
            assert set(one) == set(other), "the same two are the likeliest"
            first, second = (entry.logprob for entry in one.values())
            return abs(first - second)
    return 0.0


def test_company_changes_a_bfloat16_answer_only_where_two_tokens_are_as_likely():
    """Beyond the margin a difference would be a fault, of the cache or of the batch, and no rounding."""
    model, params = tiny.model("acrosskv")
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    settings = tiny.SIZES | {"prefix_caching": False}
    llm = LLM.from_model(dataclasses.replace(model, dtype="bfloat16"), narrow, tiny.Bytes(), **settings)
    prompts = tiny.prompts(np.random.default_rng(5).integers(1, 40, 32), seed=7)
    beside = llm.generate(prompts, PARAMS, use_tqdm=False)
    found = [
        gap(llm.generate([prompt], PARAMS, use_tqdm=False)[0].outputs[0], output.outputs[0])
        for prompt, output in zip(prompts, beside, strict=True)
    ]
    assert max(found) <= MARGIN, found
