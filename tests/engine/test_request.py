"""Sampling parameters: vLLM's names and defaults, and every bad value named."""

import dataclasses
import math

import pytest

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine.request import SamplingParams


def test_defaults_are_vllms():
    got = dataclasses.asdict(SamplingParams())
    want = {
        "n": 1,
        "max_tokens": 16,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    want |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None}
    want |= {"stop": (), "stop_token_ids": (), "ignore_eos": False, "include_stop_str_in_output": False}
    want |= {"bad_words": (), "logit_bias": (), "allowed_token_ids": None, "prompt_logprobs": None}
    assert got == want | {"logprobs": None, "skip_special_tokens": True}


BAD = [
    ("n", 0),
    ("n", True),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("seed", 2**63),
    ("seed", 0.5),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 7),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", 3),
    ("ignore_eos", 1),
    ("include_stop_str_in_output", "yes"),
    ("skip_special_tokens", None),
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("bad_words", [""]),
    ("bad_words", 3),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1.5]),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {3: 101}),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", [3]),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_a_bad_value_is_an_error_that_names_its_field(field, value):
    with pytest.raises(UsageError, match=field) as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


def test_an_unknown_field_gets_a_suggestion():
    with pytest.raises(UsageError, match="did you mean 'max_tokens'"):
        SamplingParams().updated({"max_token": 3})


def test_synonyms_are_normalised():
    params = SamplingParams(top_k=-1, seed=-1, stop="end", stop_token_ids=[3], temperature=1e-6)
    assert (params.top_k, params.seed, params.stop, params.stop_token_ids) == (0, None, ("end",), (3,))
    assert params.greedy and not params.filtered
    assert SamplingParams(top_p=1e-300).top_p == 1e-9  # which float32 still tells from 0
    assert SamplingParams(temperature=1e-3).temperature == 0.01  # raised to a floor that divides safely
