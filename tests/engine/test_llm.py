"""`LLM.generate` against plain loops over the full forward pass, alone and in company."""

import dataclasses
import gc
import json

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
from tiny_engine import GREEDY, LENGTHS, SIZES, definition, make, model, tokens

from swiftkv_jax.checkpoint.generation import GenerationDefaults
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.engine import llm as llm_module
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.runner import fingerprint
from swiftkv_jax.engine.settings import resolve


@pytest.mark.parametrize("plan", ["standard", "swiftkv"])
def test_greedy_tokens_are_those_of_the_definition(plan):
    """Ragged prompts, in chunks, with lanes taken over by later requests."""
    assert len({token for row in definition(plan) for token in row}) > 30  # a model with something to say
    llm = make(plan)
    outputs = llm.generate(tiny.prompts(LENGTHS), GREEDY, use_tqdm=False)
    assert tokens(outputs) == definition(plan)
    assert [output.prompt_token_ids for output in outputs] == tiny.prompts(LENGTHS)
    rows, width = llm.model.plan.num_rows, llm.model.config.kv_width
    assert llm.stats["cache_bytes_per_token"] == llm.cache_bytes_per_token == 2 * 4 * rows * width
    assert llm.stats["prompt_tokens"] == sum(LENGTHS) and llm.stats["output_tokens"] == 10 * len(LENGTHS)


KINDS = (
    GREEDY,
    SamplingParams(max_tokens=10, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=10, seed=2**40 + 5, top_k=30, top_p=0.9, min_p=0.01, ignore_eos=True),
    SamplingParams(max_tokens=10, seed=9, repetition_penalty=1.6, presence_penalty=0.5, logprobs=3),
    SamplingParams(max_tokens=10, temperature=0.0, frequency_penalty=1.5, min_tokens=10),
)


@pytest.mark.slow
def test_answers_do_not_depend_on_the_batch():
    """Each kind of request alone, with only its own machinery compiled, and in a batch of all kinds."""
    llm, prompts = make(), tiny.prompts((4, 30, 11, 17, 6))
    together = llm.generate(prompts, list(KINDS), use_tqdm=False)
    backwards = llm.generate(prompts[::-1], list(KINDS[::-1]), use_tqdm=False)
    assert tokens(together) == tokens(backwards)[::-1]
    for i in (2, 3):
        assert tokens(llm.generate([prompts[i]], KINDS[i], use_tqdm=False)) == tokens(together[i : i + 1])
    long = make(steps_per_launch=16).generate(prompts, list(KINDS), use_tqdm=False)
    assert tokens(long) == tokens(together)  # what a lane has met is carried from launch to launch
    assert len({tuple(t) for t in tokens(llm.generate([prompts[4]] * 5, list(KINDS), use_tqdm=False))}) == 5


def test_eos_ids_stop_ids_and_stop_strings_end_requests():
    """End-of-sequence lists, stop ids and stop strings end a request where the endless one passes them."""
    prompts, endless = tiny.prompts(LENGTHS), definition("acrosskv")
    eos, stop = endless[1][3], endless[3][5]
    ends_by = GenerationDefaults(eos_token_ids=(eos, 300))
    llm = LLM.from_model(*model("acrosskv"), None, generation=ends_by, **SIZES)
    params = dataclasses.replace(GREEDY, ignore_eos=False, stop_token_ids=[stop])
    for want, output in zip(endless, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ends = [i for i, token in enumerate(want) if token in (eos, stop)]
        got = output.outputs[0]
        assert got.token_ids == (want[: ends[0] + 1] if ends else want)
        assert got.finish_reason == ("stop" if ends else "length")
        assert got.stop_reason == (stop if ends and want[ends[0]] == stop else None)
    late = llm.generate(prompts, dataclasses.replace(params, min_tokens=10), use_tqdm=False)
    assert all(len(t) == 10 and not {eos, stop} & set(t[:9]) for t in tokens(late))


@pytest.mark.slow
def test_n_completions_are_n_seeds_in_order():
    llm, prompts = make(), tiny.prompts((4, 9))
    params = SamplingParams(n=3, seed=20, max_tokens=10, ignore_eos=True)
    several = llm.generate(prompts, params, use_tqdm=False)
    assert [[c.index for c in output.outputs] for output in several] == [[0, 1, 2]] * 2
    for i in range(3):
        alone = dataclasses.replace(params, n=1, seed=20 + i)
        got = tokens(llm.generate(prompts * 2, alone, use_tqdm=False))
        assert got == [output.outputs[i].token_ids for output in several] * 2


def test_requests_without_a_seed_differ_and_a_new_llm_repeats_them():
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    prompt = tiny.prompts((4,)) * 4
    first = make(seed=3)
    both = [tokens(first.generate(prompt, params, use_tqdm=False)) for _ in range(2)]
    assert len({tuple(t) for rows in both for t in rows}) == 8
    assert tokens(make(seed=3).generate(prompt, params, use_tqdm=False)) == both[0]


def test_a_replaced_llm_shares_weights_and_leaves_the_first_as_it_was():
    first = make()
    before, engine = first.settings, first.engine
    other = first.replace(GREEDY, max_num_seqs=1, steps_per_launch=3, num_pages=None)
    assert first.settings == before and first.engine is engine and other.engine is not engine
    assert (other.settings.max_num_seqs, other.settings.steps_per_launch, other.defaults) == (1, 3, GREEDY)
    assert other.settings.num_pages == other.settings.pages_per_sequence
    pairs = zip(jax.tree.leaves(first.params), jax.tree.leaves(other.params), strict=True)
    assert all(a is b for a, b in pairs)
    for wrong in ({"page_size": 0}, {"max_model_len": 10**6}, {"page_sizes": 8}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            first.replace(**wrong)


def test_one_call_at_a_time_runs_on_an_engine():
    llm, prompts = make(), [[5, 6], [7, 8, 9]]
    params = [dataclasses.replace(GREEDY, max_tokens=most) for most in (1, 20)]
    results = llm.run([llm.request(*pair) for pair in zip(prompts, params, strict=True)])
    first = next(results)
    with pytest.raises(UsageError, match="another call"):
        llm.generate(prompts, params, use_tqdm=False)
    other = llm.replace().generate(prompts, params, use_tqdm=False)
    outputs = dict([first, *results])
    assert [outputs[i].outputs[0].token_ids for i in range(2)] == tokens(other)


@pytest.mark.slow
def test_prompts_in_any_form_and_defaults_of_the_checkpoint():
    generation = GenerationDefaults(temperature=0.0, repetition_penalty=1.2)
    sizes = SIZES | {"max_num_seqs": 1}
    llm = LLM.from_model(*model("acrosskv"), tiny.Bytes(), generation=generation, **sizes)
    assert llm.defaults == SamplingParams(temperature=0.0, repetition_penalty=1.2)
    forms = ["hi", {"prompt": "hi"}, [104, 105], {"prompt_token_ids": [104, 105]}]
    outputs = llm.generate(forms, use_tqdm=False)
    assert len({tuple(t) for t in tokens(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["hi", "hi", None, None]
    assert tokens(llm.generate("hi", use_tqdm=False)) == tokens(llm.generate([104, 105], use_tqdm=False))
    chat = llm.chat([{"role": "user", "content": "yo"}], use_tqdm=False)
    assert bytes(chat[0].prompt_token_ids) == b"u:yo|A:"
    assert llm.generate([], use_tqdm=False) == []
    endless = llm.defaults.updated({"max_tokens": None, "ignore_eos": True})
    (filled,) = llm.generate(["hi"], endless, use_tqdm=False)
    assert len(filled.outputs[0].token_ids) == 62  # to the end of the context
    assert filled.metrics.ttft > 0 and filled.metrics.tpot > 0


SIZES_OUT = {"max_model_len": 97, "max_num_seqs": 0, "max_num_batched_tokens": -5, "page_size": 0}


def test_a_bad_call_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(llm_module, "Engine", None)
    llm, bare = make(), LLM.from_model(*model("acrosskv"), **SIZES)
    for prompt in BAD_PROMPTS:
        with pytest.raises(UsageError, match=r"prompts\[1\]"):
            llm.generate(["good", prompt], GREEDY)
    for name, call in (
        ("prompts", lambda: llm.generate(5)),
        ("2 prompts", lambda: llm.generate(["a", "b"], [GREEDY])),
        ("SamplingParams", lambda: llm.generate(["a"], {"temperature": 0})),
        ("stop_token_ids", lambda: llm.generate(["a"], SamplingParams(stop_token_ids=[258]))),
        ("messages", lambda: llm.chat("hello")),
        ("tokenizer", lambda: bare.generate(["a"])),
        ("tokenizer", lambda: bare.generate([[1]], SamplingParams(stop="a"))),
        ("tokens", lambda: llm.score([])),
        ("vocabulary", lambda: llm.score([1, 10**6])),
        *((name, lambda given={name: size}: make(**given)) for name, size in SIZES_OUT.items()),
    ):
        with pytest.raises(UsageError, match=name):
            call()


BAD_PROMPTS = (
    *("", [], [1, 258], [-1], [2**40], [1, 2.0], [True], ["a"], None, 7, {"text": "a"}, {"prompt": [1]}),
    *({"prompt_token_ids": "a"}, {"messages": [{"content": "a"}]}, {"messages": []}, "x" * 64, "x" * 55),
)


@pytest.mark.slow
def test_greedy_tokens_are_transformers(tmp_path):
    """Of prompts of every length, all of them beside each other."""
    import torch

    theirs = hf_models.make("qwen3_bias_window")
    hf_models.save(theirs, tmp_path)
    llm = LLM(tmp_path, tokenizer=tiny.Bytes(), max_num_seqs=64, max_model_len=64, steps_per_launch=8)
    prompts = [[token % 101 for token in prompt] for prompt in tiny.prompts(range(1, 51))]
    options = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "eos_token_id": None}
    for prompt, got in zip(prompts, tokens(llm.generate(prompts, GREEDY, use_tqdm=False)), strict=True):
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        assert got == want[0, len(prompt) :].tolist()


def test_dynamic_rope_is_fixed_at_the_context():
    """Past the trained length, tokens must not depend on how large a neighbour made the cache."""
    from swiftkv_jax.config.rope import RopeConfig

    rope = RopeConfig(rope_type="dynamic", factor=4.0)
    net, params = tiny.make_model(tiny.PLANS["swiftkv"], max_position_embeddings=40, rope=rope)
    llm = LLM.from_model(net, params, max_num_seqs=1, max_model_len=160, max_num_batched_tokens=32)
    short, long = tiny.prompts((50, 120))
    alone = tokens(llm.generate([short], GREEDY, use_tqdm=False))
    assert tokens(llm.generate([short, long], GREEDY, use_tqdm=False))[:1] == alone


@pytest.mark.parametrize(
    "scaling, longest",
    [
        ({"type": "linear", "factor": 4}, 160),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 10}, 40),
        ({**hf_models.LLAMA3, "factor": 32}, 40),
    ],
)
def test_a_context_may_be_as_long_as_its_rotary_scaling_reaches(scaling, longest, tmp_path):
    """In llama3's files max_position_embeddings says it; in yarn's it is sometimes that before scaling."""
    model = hf_models.build("llama", max_position_embeddings=40)
    hf_models.save(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_scaling": scaling}))
    prompt = hf_models.tokens(longest - 10, 1)[0].tolist()
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "page_size": 16}
    with pytest.warns(UsageWarning, match="no tokenizer"):
        llm = LLM(tmp_path, max_model_len=longest, **sizes)
        with pytest.raises(UsageError, match=rf"max_model_len must be in \[1, {longest}\]"):
            LLM(tmp_path, max_model_len=longest + 1, **sizes)
    if longest > 40:
        want = hf_models.torch_logits(hf_models.load(tmp_path), np.array([prompt]))[0, -1].argmax()
        assert tokens(llm.generate([prompt], GREEDY, use_tqdm=False))[0][0] == want


def test_a_setting_in_generation_config_that_no_request_may_have_does_not_stop_loading(tmp_path):
    hf_models.save(hf_models.make("llama2"), tmp_path)
    said = {"temperature": 3.0, "top_p": 0.0, "top_k": 7, "eos_token_id": [-1, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.warns(UsageWarning) as caught:
        llm = LLM(tmp_path, max_model_len=16, num_pages=1)
    text = " ".join(str(each.message) for each in caught)
    assert "temperature" in text and "top_p" in text
    assert (llm.defaults.temperature, llm.defaults.top_p, llm.defaults.top_k) == (1.0, 1.0, 7)
    assert llm.eos_ids == (5,)


def test_weights_are_in_memory_once_while_an_llm_is_built(tmp_path, monkeypatch):
    """`jax.live_arrays` when the page pool is sized, and when everything is ready: no second copy."""
    folder = hf_models.save(hf_models.make("llama2"), tmp_path)

    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    gc.collect()
    before, seen = live(), []
    monkeypatch.setattr(llm_module, "resolve", lambda *args: (seen.append(live()), resolve(*args))[1])
    with pytest.warns(UsageWarning, match="no tokenizer"):
        llm = LLM(folder, max_model_len=16, num_pages=1)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params))
    assert weights <= seen[0] - before <= 1.1 * weights
    assert live() - before <= 1.1 * weights


def test_models_that_differ_in_any_kernel_of_any_layer_have_other_fingerprints():
    """An array without numbers, such as a bias of no head, changes nothing."""
    one, params = model("swiftkv")
    leaves, tree = jax.tree.flatten(jax.tree.map(np.array, params))
    names = {fingerprint(one, params, None), fingerprint(one, params | {"none": jnp.zeros((3, 0))}, None)}
    assert len(names) == 1
    for leaf in leaves:
        leaf[-1 if leaf.ndim > 2 else 0] += 1
        names.add(fingerprint(one, jax.tree.unflatten(tree, leaves), None))
    assert len(names) == 1 + len(leaves)
