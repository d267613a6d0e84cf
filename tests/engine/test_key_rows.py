"""Rows of keys alone (Slim attention), served: the tokens of transformers, and half of the bytes."""

import dataclasses
import functools

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine
import torch

import swiftkv_jax as skv
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.scan import forward

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


@functools.partial(jax.jit, static_argnums=0)
def full(model, params, tokens):
    return logits(model, params, forward(model, params, tokens))


def stepped(model, params, tokens, first: int) -> np.ndarray:
    """Logits [2, T, V] of `step`, which reads two sequences in two chunks, the first of `first` tokens."""
    length = tokens.shape[1]
    cache = skv.Cache.dense(model.config, model.plan, 2, length, jnp.float32)
    step = jax.jit(functools.partial(skv.step, model))
    served, found = weights.split_layers(model.config, model.plan, params), []
    for start, stop in ((0, first), (first, length)):
        count = stop - start
        places = np.tile(np.arange(start, stop), 2).astype(np.int32)
        starts = np.array([0, count, 2 * count], np.int32)
        every = np.arange(2 * count, dtype=np.int32)
        ids = tokens[:, start:stop].reshape(-1).astype(np.int32)
        out, cache = step(served, ids, places, starts, every, cache)
        found.append(np.asarray(out).reshape(2, count, -1))
    return np.concatenate(found, axis=1)


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


@pytest.mark.slow("2")
@pytest.mark.parametrize("share", [1, 2])
def test_rows_of_keys_under_swiftkv_agree_with_rows_of_keys_and_values(llama, share):
    """Rows that the layers from the split on share or own: prompts in chunks, and forward."""
    _, (teacher, params), _ = llama
    model, kv = skv.to_swiftkv(teacher, params, skv.KVPlan.swiftkv(3, 1, share))
    slim, keys = skv.to_slim(model, kv)
    tokens = np.random.default_rng(1).integers(0, 101, (2, 30)).astype(np.int32)
    want = np.asarray(full(model, kv, tokens))
    for got in (full(slim, keys, tokens), stepped(slim, keys, tokens, 13)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    half, whole = (skv.Cache.dense(m.config, m.plan, 2, 30, jnp.float32) for m in (slim, model))
    assert 2 * half.bytes_per_token == whole.bytes_per_token


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


WAYS = {
    "chunks and guesses from the prompt": {"max_num_batched_tokens": 16, "max_num_seqs": 4, "drafts": 3},
    "the exit head's guesses": {"drafts": 2, "drafter": "exit", "steps_per_launch": 2},
    "so few pages that sequences are preempted": {"num_pages": 24},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_students_tokens_do_not_depend_on_how_it_is_run(dtype, tmp_path):
    """SwiftKV, AcrossKV and rows of keys together: chunks, prefix hits, guesses, preemption.

    Every row's keys are orthogonal maps of their inputs: a number rounded the other way stays small in the
    values. In float32 answers are long enough for the model to repeat itself, as guesses from the prompt
    need; of rounded rows that many tokens would meet a near tie.
    """
    teacher = skv.from_pretrained(hf_models.save(hf_models.build("llama", seed=3, **LLAMA), tmp_path))
    model, params = skv.to_swiftkv(*teacher, skv.KVPlan.swiftkv(3, 1, 2), init="copy", exit_head=True)
    for stack in params["rows"]:
        stack["k_proj"]["kernel"] = jnp.linalg.qr(stack["k_proj"]["kernel"])[0]
    student = skv.to_slim(model, params)
    found = []
    greedy = dataclasses.replace(GREEDY, max_tokens=40 if dtype == "float32" else NEW)
    for changes in ({}, *WAYS.values()):
        settings = {"max_model_len": 104, "page_size": 8, "cache_dtype": dtype} | changes
        llm = skv.LLM.from_model(*student, **settings)
        tiny_engine.poison(llm)
        outputs = llm.generate(ragged_prompts()[60:80], greedy, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        stats = llm.engine.stats
        assert (stats.preemptions if "num_pages" in changes else stats.prefix_hits) > 0
        if dtype == "float32":
            assert (stats.drafted_tokens > 0) == ("drafts" in changes)
    assert found[1:] == found[:1] * len(WAYS)


def test_models_whose_keys_do_not_determine_values_are_refused(tmp_path):
    for number, fields in enumerate(
        ({"num_key_value_heads": 2}, {"head_dim": 8}, {"num_key_value_heads": 2, "head_dim": 24})
    ):
        folder = hf_models.save(hf_models.build("llama", **(LLAMA | fields)), tmp_path / f"{number}")
        with pytest.raises(skv.UsageError, match="kv heads"):
            skv.to_slim(*skv.from_pretrained(folder))


EXACT = {
    "Qwen's biases, square": {"family": "qwen2"},
    "heads of 20": {"head_dim": 20},
    "heads of 80": {"head_dim": 80},
    "Qwen's biases, heads of 20, mixed forms": {"family": "qwen2", "head_dim": 20, "forms": ("kv", "k", "k")},
}


@pytest.mark.slow("heads of 20", "heads of 80")
@pytest.mark.parametrize("fields", EXACT.values(), ids=EXACT)
def test_logits_equal_transformers(fields, tmp_path):
    """Qwen2 in its multi-head form: V = (K - b_K) W_KV + b_V, the constant added where values are read."""
    theirs, _, (model, params) = build(tmp_path, **fields)
    ids = hf_models.tokens(20)
    want = hf_models.torch_logits(theirs, ids)
    for got in (full(model, params, ids), stepped(model, params, ids, 7)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
