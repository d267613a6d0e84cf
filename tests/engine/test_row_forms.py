"""Students with rows in each form, and with experts: their tokens do not depend on how they are run."""

import dataclasses

import pytest
import tiny_engine as tiny

from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.engine.llm import LLM

FREE = {"num_kv_heads": 4, "head_dim": 12, "rope": RopeConfig(rope_type=NONE), "exit_head": True}
# As small as can be: Mixtral, and DeepSeek-V3.
EXPERTS = Experts(count=6, per_token=2, width=16, normalise=True)
GROUPS = {"router": "noaux_tc", "groups": 3, "top_groups": 2, "scale": 1.5, "shared": 16}
MIXTRAL = {"experts": EXPERTS, "mlps": ("experts",) * 4}
DEEPSEEK = {
    **{"num_kv_heads": 4, "head_dim": 20, "qk_norm": False, "exit_head": True, "attention_scale": 0.3},
    "latent": Latent(rank=24, query_rank=20, plain=12, rotary=8, value=12),
    "rope": RopeConfig(interleaved=True),
    "mlps": ("dense", "experts", "experts", "experts"),
    "experts": dataclasses.replace(EXPERTS, **GROUPS),
}
MODELS = {"latent": DEEPSEEK, "kv": MIXTRAL | {"exit_head": True}}
FORMS = {
    "latent": ("latent",),
    "kv": ("kv",),
    "k": ("k",),
    "v": ("v",),
    "x": ("x",),
    "mixed": ("x", "k", "v"),
}
WAYS = {
    "chunks of 16, guesses from the prompt": {"max_num_batched_tokens": 16, "drafts": 3},
    "the exit head's guesses": {"drafts": 2, "drafter": "exit", "steps_per_launch": 2},
    "so few pages that sequences are preempted": {"num_pages": 14},
}


def ragged_prompts() -> list[list[int]]:
    """Prompts of 1 to 45 tokens, each twice: repetitions give drafts, equal beginnings prefix hits."""
    return [(prompt[:9] * 3)[:27] + prompt for prompt in tiny.prompts(tiny.LENGTHS)[:6]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, dtype",
    [*((form, "float32") for form in FORMS), ("latent", "int8")]
    + [("mixed", dtype) for dtype in ("bfloat16", "int8", "float8_e4m3fn")],
)
def test_tokens_do_not_depend_on_how_a_model_is_run(form, dtype):
    model = tiny.make_model(tiny.PLANS["acrosskv"].stored_as(*FORMS[form]), **MODELS.get(form, FREE))
    prompts, found = ragged_prompts(), []
    for changes in ({}, *WAYS.values()):
        settings = tiny.SIZES | {"max_model_len": 96, "cache_dtype": dtype} | changes
        llm = LLM.from_model(*model, None, **settings)
        tiny.poison(llm)  # NaN wherever no token has been written
        found.append(tiny.tokens(llm.generate(prompts, tiny.GREEDY, use_tqdm=False)))
        stats = llm.engine.stats
        assert (stats.preemptions if "num_pages" in changes else stats.prefix_hits) > 0
        assert (stats.drafted_tokens > 0) == ("drafts" in changes)
    assert found[1:] == found[:1] * len(WAYS)
    if dtype == "float32":
        assert found[0][1] == tiny.greedy(*model, prompts[1], len(found[0][1]))
