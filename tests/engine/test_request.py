"""Sampling parameters: vLLM's names and defaults, and every bad value named."""

import dataclasses
import math

import pytest

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine.request import SamplingParams


def test_defaults_are_vllms():
    got = dataclasses.asdict(SamplingParams())
    want = {"n": 1, "max_tokens": 16, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    want |= {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    want |= {"seed": None, "stop": (), "stop_token_ids": (), "ignore_eos": False, "bad_words": ()}
    want |= {"include_stop_str_in_output": False, "logit_bias": (), "allowed_token_ids": None}
    assert got == want | {"prompt_logprobs": None, "logprobs": None, "skip_special_tokens": True}


BAD = {
    "n": (0, True),
    "max_tokens": (0, 2.0),
    "min_tokens": (-1, 17),
    "temperature": (math.nan, math.inf, -0.1, 2.1, "hot", True),
    "top_p": (0.0, 1.01),
    "top_k": (-2, 2**31, 1.5),
    "min_p": (-0.1, math.nan),
    "repetition_penalty": (0.0, math.inf),
    "presence_penalty": (2.5,),
    "frequency_penalty": (-2.5,),
    "seed": (2**63, 0.5),
    "stop": (["a", ""], [1], 7),
    "stop_token_ids": ([-1], [1.0], 3),
    "ignore_eos": (1,),
    "include_stop_str_in_output": ("yes",),
    "skip_special_tokens": (None,),
    "logprobs": (21, -1),
    "prompt_logprobs": (21,),
    "bad_words": ([""], 3),
    "allowed_token_ids": ([], [1.5]),
    "logit_bias": ({"a": 1.0}, {-1: 1.0}, {3: 101}, {3: math.nan}, [3]),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_value_is_an_error_that_names_its_field(field):
    for value in BAD[field]:
        with pytest.raises(UsageError, match=field):
            SamplingParams(**{field: value})


def test_synonyms_are_normalised():
    params = SamplingParams(top_k=-1, seed=-1, stop="end", stop_token_ids=[3], temperature=1e-6)
    assert (params.top_k, params.seed, params.stop, params.stop_token_ids) == (0, None, ("end",), (3,))
    assert params.greedy
    assert SamplingParams(top_p=1e-300).top_p == 1e-9  # which float32 still tells from 0
    assert SamplingParams(temperature=1e-3).temperature == 0.01  # raised to a floor that divides safely
    with pytest.raises(UsageError, match="max_tokens"):
        SamplingParams().updated({"max_token": 3})
