"""A plan with a tail served: the end of a prompt, and generated tokens, have rows of every layer's own."""

import dataclasses
import functools

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny

import swiftkv_jax as skv
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import loop, surgery, weights
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.model import Transformer


@functools.cache
def tailed(tail: int):
    return tiny.make_model(dataclasses.replace(tiny.PLANS["swiftkv"], tail=tail), seed=5)


@functools.cache
def programs():
    return jax.jit(loop.fill, static_argnums=0), jax.jit(loop.step, static_argnums=0)


def definition(tail: int, prompt: list[int]) -> list[int]:
    """No engine in it."""
    model, params = tailed(tail)
    own, own_params = weights.of_tail(model, params)
    fill, run = programs()
    cache = Cache.dense(own.config, own.plan, 1, tiny.CONTEXT, jnp.float32)
    return tiny.alone(
        lambda *batch: fill(model, params, *batch)[-1],
        functools.partial(run, own, own_params),
        *(cache, prompt, tail),
    )


@functools.cache
def wanted(tail: int = 3) -> list[list[int]]:
    return [definition(tail, prompt) for prompt in tiny.prompts(tiny.LENGTHS)]


def make(tail: int = 3, **changes) -> skv.LLM:
    return skv.LLM.from_model(*tailed(tail), tiny.Bytes(), **(tiny.SIZES | changes))


@pytest.mark.parametrize("tail", [1, 3])
def test_tokens_are_those_of_the_definition_over_pages_of_nan(tail):
    """Prompts of 1 to 45 tokens together, chunked, shorter and longer than the tail."""
    llm = make(tail)
    tiny.poison(llm)
    assert tiny.tokens(tiny.run(llm)) == wanted(tail)
    assert tiny.all_free(llm.engine)
    model, params = tailed(tail)
    paper = Transformer(model.config, tiny.PLANS["swiftkv"]), params
    without = tiny.tokens(tiny.run(skv.LLM.from_model(*paper, **tiny.SIZES)))
    differ = sum(a != b for a, b in zip(wanted(tail), without, strict=True))
    assert differ >= 4, "else this would hold of any engine"


@pytest.mark.slow("int8")
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_scores_are_those_of_the_token_after_a_prompt(dtype):
    """Of prompts of every length, with a tail of one token, against the engine's own."""
    llm, prompt = make(tail=1, cache_dtype=dtype), tiny.prompts((12,), seed=6)[0]
    params = skv.SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, ignore_eos=True)
    for length in (1, 5, 11):
        first = llm.generate([prompt[:length]], params, use_tqdm=False)[0].outputs[0]
        (token, best), *_ = first.logprobs[0].items()
        again = llm.score([*prompt[:length], token])[-1][token]
        assert again.rank == 1 and abs(again.logprob - best.logprob) < 1e-5


@pytest.mark.parametrize("name", ["llama31_rope", "gemma3", "qwen2_moe"])
def test_a_prompt_within_the_tail_is_answered_as_by_the_teacher_in_transformers(name, tmp_path):
    """Before training, by a student from its file; a longer prompt is answered otherwise."""
    theirs = hf_models.make(name)
    teacher, params = skv.from_pretrained(hf_models.save(theirs, tmp_path / "teacher"))
    plan = teacher.config.plan(split=1, tail=24)
    skv.save_pretrained(tmp_path / "student", *skv.to_swiftkv(teacher, params, plan))
    llm = skv.LLM.from_model(*skv.from_pretrained(tmp_path / "student"), max_num_seqs=3)
    prompts = [hf_models.tokens(length, 1, length)[0].tolist() for length in (5, 24, 90)]
    params = skv.SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    apart = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        logits = hf_models.torch_logits(theirs, np.array([[*prompt, *answer.token_ids]]))[
            0, len(prompt) - 1 :
        ]
        want = jax.nn.log_softmax(logits)[np.arange(12), answer.token_ids]
        got = [each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        apart.append(np.abs(want - np.array(got)).max())
    assert max(apart[:2]) < 1e-4 < 1e-2 < apart[2]


def test_a_student_that_was_trained_without_a_tail_gets_its_teacher_back():
    teacher = tiny.model("standard")
    student, params = skv.to_swiftkv(*teacher, KVPlan.swiftkv(tiny.LAYERS, 2))
    chosen = surgery.is_trained(student, params, "upper")
    trained = jax.tree.map(lambda leaf, yes: leaf * 1.1 if yes else leaf, params, chosen)
    llm = skv.LLM.from_model(*skv.with_tail(student, trained, *teacher, 50), **tiny.SIZES)
    assert tiny.tokens(tiny.run(llm)) == tiny.definition("standard")
    shared = skv.to_swiftkv(*teacher, KVPlan.swiftkv(tiny.LAYERS, 1, 2))
    other = tiny.make_model(tiny.PLANS["standard"], head_dim=8)
    for said, made, of, tail in (
        ("share 2", shared, teacher, 1),
        ("at least 1", (student, params), teacher, 0),
        ("shapes", (student, params), other, 1),
    ):
        with pytest.raises(skv.UsageError, match=said):
            skv.with_tail(*made, *of, tail)


@pytest.mark.slow
def test_prompts_in_any_company_are_answered_as_alone():
    tiny.in_any_company(make, functools.partial(definition, 3), 3)


def test_a_second_turn_finds_what_was_read_at_the_split_and_no_more():
    """The first answer has rows of the layers' own: it is read again, as a part of the second prompt."""
    llm, first = make(num_pages=32), tiny.prompts((27,), seed=8)[0]
    answer = tiny.tokens(tiny.run(llm, [first]))[0]
    second = [*first, *answer, *tiny.prompts((3,), seed=9)[0]]
    for hits in (24, 32):
        assert tiny.tokens(tiny.run(llm, [second])) == [definition(3, second)]
        assert llm.stats["prefix_hits"] == hits


@pytest.mark.slow
def test_nothing_compiles_after_the_engine_says_it_is_ready():
    llm = make(max_num_seqs=3, max_num_batched_tokens=64)
    llm.engine.warm_up()
    assert llm.fingerprint
    with tiny.compilations() as found:
        assert tiny.tokens(tiny.run(llm)) == wanted()
    assert not found


@pytest.mark.parametrize("changes", [{"kernels": "fill=xla"}, {"batch_invariant": True}])
def test_the_fused_fill_and_batch_invariance_give_the_same_tokens(changes):
    assert tiny.tokens(tiny.run(make(**changes))) == wanted()


def test_students_with_other_tails_or_tail_rows_share_no_pages():
    model, params = tailed(3)
    moved = params | {"tail_rows": jax.tree.map(lambda x: x + 0.1, params["tail_rows"])}
    other = tailed(1)[0], params
    names = {skv.LLM.from_model(*each).fingerprint for each in ((model, params), (model, moved), other)}
    assert len(names) == 3
