"""Rows of keys alone (Slim attention), served: the tokens of transformers, and half of the bytes."""

import hf_models
import numpy as np
import pytest
import tiny_engine
import torch

import swiftkv_jax as skv

NEW = 8
LLAMA = {"num_key_value_heads": 4, "num_hidden_layers": 3}  # multi-head: keys determine their inputs
GREEDY = skv.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


def build(folder, family: str = "llama", forms="k", **fields):
    """(transformers' model, ours with rows of keys and values, ours with rows of `forms`)."""
    theirs = hf_models.build(family, seed=3, **(LLAMA | fields))
    model, params = skv.from_pretrained(hf_models.save(theirs, folder))
    return theirs, (model, params), skv.to_slim(model, params, forms)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build(tmp_path_factory.mktemp("llama"))


def ragged_prompts(seed: int = 0) -> list[list[int]]:
    """100 prompts of 1 to 60 tokens; some begin as one long before them does."""
    random = np.random.default_rng(seed)
    made: list[list[int]] = []
    for i in range(100):
        prompt = random.integers(0, hf_models.BASE["vocab_size"], random.integers(1, 61)).tolist()
        before = made[i - (30 if i % 2 else 3)] if i >= 60 else []
        made.append(before[:40] + prompt[:20] if before else prompt)
    return made


def transformers_tokens(theirs, prompts: list[list[int]]) -> list[list[int]]:
    theirs.generation_config.eos_token_id = None  # no end before NEW tokens, as `ignore_eos`

    def greedy(prompt):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    return [greedy(prompt) for prompt in prompts]


SERVED = {
    "heads of 20, mixed forms, prompts whole": ({"head_dim": 20, "forms": ("kv", "k", "k")}, {}),
    "Qwen's biases, heads of 80, mixed forms, chunks of 19": (
        {"family": "qwen2", "head_dim": 80, "forms": ("k", "kv", "k")},
        {"max_num_batched_tokens": 19, "page_size": 8, "steps_per_launch": 3},
    ),
    "square, chunks of 33, so few pages that sequences are preempted": (
        {},
        {"max_num_batched_tokens": 33, "num_pages": 24, "page_size": 8},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_equal_transformers(name, tmp_path):
    fields, changes = SERVED[name]
    theirs, (_, plain), (model, params) = build(tmp_path, **fields)
    kernels = np.concatenate([np.asarray(stack["k_proj"]["kernel"], np.float64) for stack in plain["rows"]])
    assert max(np.linalg.cond(kernel) for kernel in kernels) < 1e3, "the exact inverse is for such"
    llm = skv.LLM.from_model(model, params, **({"max_model_len": 80, "page_size": 16} | changes))
    tiny_engine.poison(llm)  # NaN wherever no token has been written
    prompts = ragged_prompts(1 + [*SERVED].index(name))
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tiny_engine.tokens(outputs) == transformers_tokens(theirs, prompts)
    assert llm.engine.stats.prefix_hits > 0
    assert (llm.engine.stats.preemptions > 0) == ("num_pages" in changes)
    arrays = sum({"k": 1, "kv": 2}[row.form] for row in model.plan.rows)
    assert llm.cache_bytes_per_token == arrays * 4 * model.config.head_dim * 4


def test_a_row_of_keys_takes_half_of_the_bytes(llama):
    """In 8 bits it has one scale a token, beside one for each head of both."""
    for dtype, want in (
        ("float32", (3 * 2 * 48 * 4, 3 * 48 * 4)),  # rows x (keys, values) x width x bytes
        ("bfloat16", (3 * 2 * 96, 3 * 96)),
        ("int8", (3 * 2 * (48 + 16), 3 * (48 + 4))),
        ("float8_e4m3fn", (3 * 2 * (48 + 16), 3 * (48 + 4))),
    ):
        llms = [skv.LLM.from_model(*pair, max_model_len=40, cache_dtype=dtype) for pair in llama[1:]]
        assert tuple(llm.cache_bytes_per_token for llm in llms) == want
    slim = llama[2][0]
    assert skv.cache_bytes_per_token(slim.config, slim.plan, "float32") == 3 * 48 * 4


@pytest.mark.slow
def test_eight_bit_rows_of_keys_do_not_depend_on_chunks(tmp_path):
    """int8, one scale a token: a prompt in chunks reads what a whole one reads. Keys are orthogonal maps of
    their inputs here, so that a number rounded the other way stays small in the values."""
    theirs = hf_models.build("llama", seed=3, **LLAMA)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.k_proj.weight.copy_(torch.linalg.qr(layer.self_attn.k_proj.weight)[0])
    pair, found = skv.to_slim(*skv.from_pretrained(hf_models.save(theirs, tmp_path))), []
    for budget in (80, 16):
        sizes = {"max_model_len": 80, "cache_dtype": "int8", "max_num_batched_tokens": budget}
        llm = skv.LLM.from_model(*pair, **sizes)
        found.append(tiny_engine.tokens(llm.generate(ragged_prompts()[:8], GREEDY, False)))
    assert found[0] == found[1] and llm.cache_bytes_per_token == 3 * (48 + 4)


def test_models_whose_keys_do_not_determine_values_are_refused(tmp_path):
    for number, fields in enumerate(
        ({"num_key_value_heads": 2}, {"head_dim": 8}, {"num_key_value_heads": 2, "head_dim": 24})
    ):
        folder = hf_models.save(hf_models.build("llama", **(LLAMA | fields)), tmp_path / f"{number}")
        with pytest.raises(skv.UsageError, match="kv heads"):
            skv.to_slim(*skv.from_pretrained(folder))
