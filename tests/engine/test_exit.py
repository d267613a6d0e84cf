"""The exit head: guesses that change no token, and the lossy rule exactly as it is written down."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiny_engine as tiny
from test_engine import check_in_place
from tiny_engine import tokens

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.ends import embed, exit_logits, logits
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.engine import loop, runner
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "page_size": 8}
LENGTHS = (1, 45, 3, 20, 33, 2)


@functools.cache
def model(agreement: float):
    """An exit head that is the model's own, below upper layers that add less and less (1: nothing).

    Below 0: a random head.
    """
    net, params = tiny.make_model(KVPlan.swiftkv(3, 1, 2), exit_head=True, num_layers=3)
    if agreement < 0:
        return net, params

    def quieter(path, x):
        adds = {"o_proj", "down_proj"} & {getattr(key, "key", None) for key in path}
        return x * (1 - agreement) if adds else x

    lower, upper = params["layers"]
    layers = [lower, jax.tree_util.tree_map_with_path(quieter, upper)]
    exits = {"norm": params["norm"], "lm_head": params["lm_head"]}
    return net, params | {"layers": layers, "exit": exits}


def make(agreement: float = 0.7, drafts: int = 0, **changes) -> LLM:
    given = {"drafts": drafts, "drafter": "exit"} if drafts else {}
    return LLM.from_model(*model(agreement), tiny.Bytes(), **(SIZES | given | changes))


def run(llm: LLM, params, prompts=None):
    return llm.generate(prompts or tiny.prompts(LENGTHS), params, use_tqdm=False)


KINDS = [  # one for each prompt: all that can decide a token, together in one batch
    dataclasses.replace(GREEDY, max_tokens=19),
    SamplingParams(max_tokens=19, seed=5, temperature=0.5, ignore_eos=True),  # to the end of the context
    SamplingParams(max_tokens=17, seed=6, top_p=0.9, logprobs=2, min_tokens=6, stop_token_ids=[*range(90)]),
    dataclasses.replace(GREEDY, max_tokens=16, frequency_penalty=2.0, allowed_token_ids=[*range(66, 72)]),
    SamplingParams(max_tokens=15, seed=7, temperature=0.7, stop_token_ids=[*range(0, 256, 16)]),
    dataclasses.replace(GREEDY, max_tokens=13, logit_bias={65: 2.0}, bad_words=["A"], logprobs=0),
]
WAYS = {
    "so few pages that sequences are preempted": {"drafts": 3, "num_pages": 33, "page_size": 2},
    "five guesses, one turn a launch, two lanes": {
        "drafts": 5, "steps_per_launch": 1, "max_num_seqs": 2, "page_size": 5
    },
}  # fmt: skip


@functools.cache
def plain(agreement: float, kinds: bool):
    return run(make(agreement), KINDS if kinds else GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_exit_head_drafts_change_no_token_under_any_settings(way):
    """Ragged prompts, ends by length and by stop ids, penalties, biases; unused pages hold NaN.

    Twice: the second time from a warm prefix cache.
    """
    want = plain(0.7, True)
    assert {o.outputs[0].finish_reason for o in want} == {"length", "stop"}
    llm = make(**WAYS[way])
    tiny.poison(llm)
    for _ in range(2):
        for a, b in zip(run(llm, KINDS), want, strict=True):
            a, b = a.outputs[0], b.outputs[0]
            found = (a.token_ids, a.finish_reason, a.stop_reason)
            assert found == (b.token_ids, b.finish_reason, b.stop_reason)
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert x.keys() == y.keys()
                assert all(x[t].logprob == pytest.approx(y[t].logprob, abs=1e-4) for t in x)
        assert tiny.all_free(llm.engine)
    stats = llm.engine.stats
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert (stats.preemptions > 0) == ("preempted" in way)


def test_the_cache_afterwards_is_plain_decodings():
    """Wrong guesses are overwritten, and nothing was written beyond the last token that another follows."""
    pools = []
    for drafts in (0, 5):
        llm = make(0.7, drafts=drafts, max_num_seqs=1)
        tiny.poison(llm)
        run(llm, dataclasses.replace(GREEDY, max_tokens=15), tiny.prompts((20,)))
        pools.append(np.asarray(llm.engine.runner.cache.stores["kv"][0].data)[:, 1:])  # page 0 is scratch
    assert np.isfinite(pools[0][:, :, :, 0]).sum() == llm.model.plan.num_rows * 34
    np.testing.assert_allclose(pools[1], pools[0], atol=1e-4)


def test_all_drafts_are_accepted_if_the_exit_head_equals_the_model(monkeypatch):
    """Upper layers that add nothing: 24 tokens after the prompt's own in the fewest turns, none in vain."""
    llm = make(1.0, drafts=3)
    params = dataclasses.replace(GREEDY, max_tokens=25)
    launches = []

    def counted(*args, **kwargs):
        launches.append(args[2])
        return loop.decode(*args, **kwargs)

    monkeypatch.setattr(runner, "decode", counted)
    got = tokens(run(llm, params, tiny.prompts((20,))))
    assert got == [tiny.greedy(*model(1.0), tiny.prompts((20,))[0], 25)]
    assert llm.engine.stats.drafted_tokens == llm.engine.stats.accepted_tokens == 6 * 3
    assert launches == [4] * 6  # six launches, each of one turn of 4 tokens


@functools.partial(jax.jit, static_argnums=0)
def both_heads(net, params, ids):
    """(exit head's, model's) logits at every position, by full-sequence functions that know no cache."""
    at, segments = angles_and_segments(net.config, ids, None, None)
    x, depth = embed(net, params, ids, None), net.plan.depth
    below = through(net, params, x, at, segments, range(depth)).x
    return exit_logits(net, params, below), logits(net, params, through(net, params, x, at, segments).x)


def ruled(agreement: float, prompt: list[int], count: int, threshold: float) -> tuple[list[int], int]:
    """Greedy tokens under the lossy rule, by its definition; and how many were the exit head's."""
    known, exited = list(prompt), 0
    for _ in range(count):
        ids = np.zeros((1, tiny.CONTEXT), np.int32)
        ids[0, : len(known)] = known
        early, final = (
            np.asarray(x[0, len(known) - 1], np.float64) for x in both_heads(*model(agreement), ids)
        )
        sure = np.exp(early - early.max()).sum() ** -1 > threshold
        exited += sure
        known.append(int((early if sure else final).argmax()))
    return known[len(prompt) :], exited


@pytest.mark.parametrize(
    "threshold, drafts", [(0.0, 3), (0.6, 0), pytest.param(1.0, 3, marks=pytest.mark.slow)]
)
def test_the_lossy_rule_is_exactly_its_definition(threshold, drafts):
    """However many tokens are guessed, whoever the neighbours are: 0 takes every exit, 1 takes none."""
    want = [ruled(0.5, prompt, 10, threshold) for prompt in tiny.prompts(LENGTHS)]
    exited = sum(count for _, count in want)
    share = exited / (10 * len(LENGTHS))
    assert {0.0: share == 1, 1.0: share == 0}.get(threshold, 0.1 < share < 0.9)
    llm = make(0.5, drafts=drafts, exit_threshold=threshold)
    tiny.poison(llm)
    assert tokens(run(llm, dataclasses.replace(GREEDY, max_tokens=10))) == [row for row, _ in want]


@pytest.mark.slow
def test_lossy_tokens_of_any_kind_do_not_depend_on_the_guesses():
    one, three = (run(make(0.5, drafts=drafts, exit_threshold=0.6), KINDS) for drafts in (0, 3))
    assert tokens(one) == tokens(three)


def test_a_draft_token_with_nan_embeddings_fails_no_request():
    """Tokens that the exit head guesses and the model never says have NaN embeddings."""
    net, params = model(-1)
    prompts, want = tiny.prompts(LENGTHS), tokens(plain(-1, False))
    said = {t for row in [*prompts, *want] for t in row}
    guessed = set()
    for prompt, row in zip(prompts, want, strict=True):
        ids = np.zeros((1, tiny.CONTEXT), np.int32)
        ids[0, : len(prompt) + len(row)] = prompt + row
        guessed |= set(np.asarray(both_heads(net, params, ids)[0][0, len(prompt) :].argmax(-1)).tolist())
    broken = jnp.array(sorted(guessed - said))
    assert len(broken) > 2
    bad = params | {"embed": params["embed"].at[broken].set(jnp.nan)}
    llm = LLM.from_model(net, bad, tiny.Bytes(), **SIZES, drafts=2, drafter="exit")
    assert tokens(run(llm, GREEDY)) == want
    assert llm.engine.stats.accepted_tokens < llm.engine.stats.drafted_tokens / 10, "nearly all are wrong"


def test_a_nan_in_the_upper_half_ends_the_request():
    net, params = model(0.7)
    bad = params | {"norm": params["norm"] * jnp.nan}
    llm = LLM.from_model(net, bad, tiny.Bytes(), **SIZES, drafts=2, drafter="exit")
    assert {o.outputs[0].finish_reason for o in run(llm, GREEDY)} == {"error"}


@pytest.mark.slow
def test_drafted_samples_have_the_models_distribution():
    """Chi-square of 600 triples of tokens against the product of the model's own conditionals."""
    ids, (prompt,) = (65, 97, 130), tiny.prompts((4,))
    # All 64 at once, so that every token but the first is one of the decode loop's.
    llm = make(0.7, drafts=2, max_num_seqs=64, max_num_batched_tokens=256, prefix_caching=False)
    params = SamplingParams(n=600, max_tokens=3, seed=11, temperature=2.0, allowed_token_ids=ids)
    drawn = [tuple(c.token_ids) for c in run(llm, params, [prompt])[0].outputs]
    stats = llm.engine.stats
    assert stats.accepted_tokens > 100 and stats.drafted_tokens - stats.accepted_tokens > 20

    def chances(known):
        padded = np.zeros((1, tiny.CONTEXT), np.int32)
        padded[0, : len(known)] = known
        final = np.asarray(both_heads(*model(0.7), padded)[1][0, len(known) - 1], np.float64)[list(ids)] / 2.0
        return np.exp(final - final.max()) / np.exp(final - final.max()).sum()

    cells = []
    for triple in itertools.product(range(3), repeat=3):
        said = [ids[i] for i in triple]
        p = np.prod([chances([*prompt, *said[:i]])[triple[i]] for i in range(3)])
        cells.append((600 * p, drawn.count(tuple(said))))
    rare = [cell for cell in cells if cell[0] < 5]  # counted as one: chi-square wants five or so in each
    cells = [cell for cell in cells if cell[0] >= 5] + [tuple(np.sum(rare, axis=0))] * bool(rare)
    assert len(cells) > 5 and sum(count for _, count in cells) == 600
    statistic = sum((count - want) ** 2 / want for want, count in cells)
    assert statistic < scipy.stats.chi2.ppf(0.999, len(cells) - 1)


@pytest.mark.slow
def test_nothing_compiles_after_warm_up():
    with tiny.compilations() as compiled:
        llm = make(0.7, drafts=2, exit_threshold=0.9, max_num_seqs=1)
        assert llm.fingerprint  # compiles a little, at the first request or, in a server, before it
        llm.engine.warm_up()
        before = len(compiled)
        assert before > 4
        outputs = run(llm, [dataclasses.replace(kind, n=2) for kind in KINDS])
        assert len(outputs) == len(KINDS) and compiled[before:] == []


def test_launches_update_the_pool_in_place():
    check_in_place(make(0.7, drafts=3, exit_threshold=0.9).engine.runner)


def test_invalid_settings_are_refused():
    headless = tiny.make_model(tiny.PLANS["swiftkv"])
    for pair, changes, name in (
        (model(0.7), {"drafter": "exits", "drafts": 2}, "exit"),
        (model(0.7), {"drafter": "exit"}, "drafts"),
        (model(0.7), {"exit_threshold": 1.5}, "exit_threshold"),
        (headless, {"drafter": "exit", "drafts": 1}, "exit head"),
        (headless, {"exit_threshold": 0.95}, "exit head"),
    ):
        with pytest.raises(UsageError, match=name):
            LLM.from_model(*pair, tiny.Bytes(), **SIZES, **changes)
