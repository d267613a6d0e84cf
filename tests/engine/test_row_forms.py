"""Students with rows in each form, and with experts: their tokens do not depend on how they are run."""

import dataclasses

import pytest
import tiny_engine as tiny

from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.core import latent
from swiftkv_jax.engine.llm import LLM

FREE = {"num_kv_heads": 4, "head_dim": 12, "rope": RopeConfig(rope_type=NONE), "exit_head": True}
FORMS = {
    "x": ("x",),
    "mixed": ("x", "k", "v"),
}
WAYS = {
    "chunks of 16, guesses from the prompt": {"max_num_batched_tokens": 16, "drafts": 3},
    "the exit head's guesses": {"drafts": 2, "drafter": "exit", "steps_per_launch": 2},
    "so few pages that sequences are preempted": {"num_pages": 14},
}


GREEDY = dataclasses.replace(tiny.GREEDY, max_tokens=20)  # so many that every model repeats itself


def ragged_prompts() -> list[list[int]]:
    """Prompts of 1 to 45 tokens, each twice: repetitions give drafts, equal beginnings prefix hits."""
    return [(prompt[:9] * 3)[:27] + prompt for prompt in tiny.prompts(tiny.LENGTHS)[:6]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, dtype",
    [*((form, "float32") for form in (*tiny.MODELS, *FORMS)), ("deepseek", "int8"), ("mixed", "int8")],
)
def test_tokens_do_not_depend_on_how_a_model_is_run(form, dtype):
    if form in tiny.MODELS:
        model = tiny.model(form)
    else:
        model = tiny.make_model(tiny.PLANS["acrosskv"].stored_as(*FORMS[form]), **FREE)
    prompts, found = ragged_prompts(), []
    for changes in ({}, *WAYS.values()):
        settings = tiny.SIZES | {"max_model_len": 96, "cache_dtype": dtype} | changes
        llm = LLM.from_model(*model, None, **settings)
        tiny.poison(llm)  # NaN wherever no token has been written
        found.append(tiny.tokens(llm.generate(prompts, GREEDY, use_tqdm=False)))
        stats = llm.engine.stats
        assert (stats.preemptions if "num_pages" in changes else stats.prefix_hits) > 0
        assert (stats.drafted_tokens > 0) == ("drafts" in changes)
    assert found[1:] == found[:1] * len(WAYS)
    if dtype == "float32":
        assert found[0][1] == tiny.greedy(*model, prompts[1], len(found[0][1]))


@pytest.mark.slow
def test_steps_of_two_sequences_that_expand_their_latents_change_no_token(monkeypatch):
    """Amid NaN in unused pages."""
    sequences, run = set(), latent._over_expanded

    def counted(config, reader, q, paged):
        sequences.add(len(paged.table))
        return run(config, reader, q, paged)

    monkeypatch.setattr(latent, "_over_expanded", counted)
    llm = tiny.make("deepseek", max_num_seqs=2, kernels="attention=xla_one_turn")
    tiny.poison(llm)
    assert tiny.tokens(tiny.run(llm)) == tiny.definition("deepseek")
    assert sequences == {1, 2}
