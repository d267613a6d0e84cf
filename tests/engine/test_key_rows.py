"""Rows of keys alone (Slim attention), served: half of the bytes; tests/test_families.py has their tokens."""

import hf_models
import pytest

import swiftkv_jax as skv

LLAMA = {"num_key_value_heads": 4, "num_hidden_layers": 3}  # multi-head: keys determine their inputs


def test_a_row_of_keys_takes_half_of_the_bytes(tmp_path):
    """In 8 bits it has one scale a token, beside one for each head of both."""
    plain = skv.from_pretrained(hf_models.save(hf_models.build("llama", seed=3, **LLAMA), tmp_path))
    for dtype, want in (
        ("float32", (3 * 2 * 48 * 4, 3 * 48 * 4)),  # rows x (keys, values) x width x bytes
        ("int8", (3 * 2 * (48 + 16), 3 * (48 + 4))),
    ):
        pairs = plain, skv.to_slim(*plain, "k")
        llms = [skv.LLM.from_model(*pair, max_model_len=40, cache_dtype=dtype) for pair in pairs]
        assert tuple(llm.cache_bytes_per_token for llm in llms) == want
        slim = llms[1].model
        assert skv.cache_bytes_per_token(slim.config, slim.plan, dtype) == want[1]


@pytest.mark.parametrize(
    "fields", [{"num_key_value_heads": 2}, {"head_dim": 8}, {"num_key_value_heads": 2, "head_dim": 24}]
)
def test_models_whose_keys_do_not_determine_values_are_refused(fields, tmp_path):
    folder = hf_models.save(hf_models.build("llama", **(LLAMA | fields)), tmp_path)
    with pytest.raises(skv.UsageError, match="kv heads"):
        skv.to_slim(*skv.from_pretrained(folder))
