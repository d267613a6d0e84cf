"""Each baseline against its description in float64, and against the model where nothing is left out."""

import dataclasses
import math
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_numpy
import pytest
from plain_numpy import Kept, Lazy, Numpy, Skipping
from tiny_models import ODD, PLAIN, tiny

from benchmarks.papers import baselines
from benchmarks.papers.baselines import FFNSkip, LazyLLM, RandomPruning, StaticPruning, generate, read
from benchmarks.papers.baselines.dense import Work
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import forward

LENGTHS = (9, 14, 1, 6)
EXTRA = 4  # tokens after each prompt
LAYERS, ALL = 5, 2**30
CONFIG = dataclasses.replace(ODD, num_layers=LAYERS, windows=(ALL, 5, ALL, 3, ALL))
MODEL = Transformer(CONFIG, KVPlan.swiftkv(LAYERS, 2, 2))  # the last group is shorter
NOTHING = {
    "random": RandomPruning(keep=1.0),
    "static": StaticPruning(keep=1.0),
    "lazy": LazyLLM(start=1.0, end=1.0),
    "skip": FFNSkip(threshold=1.01),
}
SOME = {
    "random": RandomPruning(keep=0.5, keep_first=2, seed=3),
    "static": StaticPruning(keep=0.4),
    "lazy": LazyLLM(start=0.75, end=0.3),
    "skip": FFNSkip(threshold=0.8, cold_first=1, cold_last=0, warm_up=2),
}


class Steps(NamedTuple):
    """Results for the prompts, then for each of EXTRA given tokens after them: leaves [1 + EXTRA, ...]."""

    logits: jax.Array
    held: jax.Array  # [steps, L, B, S]
    work: Work


@pytest.fixture(scope="module")
def params():
    return tiny(CONFIG, MODEL.plan)[1]


@pytest.fixture(scope="module")
def plain(params):
    return Numpy(CONFIG, params, MODEL.plan.split, 2)


@pytest.fixture(scope="module")
def rows():
    """Prompts with the tokens that follow, [B, longest + EXTRA], and the prompts' lengths."""
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (len(LENGTHS), max(LENGTHS) + EXTRA))
    return tokens.astype(np.int32), np.array(LENGTHS, np.int32)


@partial(jax.jit, static_argnames=("model", "baseline"))
def followed(model, params, baseline, tokens, lengths):
    longest = tokens.shape[1] - EXTRA

    def held(state):
        return jnp.stack([row.held for row in state.rows])

    def one(state, step):
        token = jnp.take_along_axis(tokens, (lengths + step)[:, None], axis=1)[:, 0]
        out, state, work = baseline.extend(model, params, token, state)
        return state, Steps(out, held(state), work)

    out, state, work = read(model, params, baseline, tokens[:, :longest], lengths, longest + EXTRA)
    _, after = jax.lax.scan(one, state, jnp.arange(EXTRA))
    first = Steps(out, held(state), work)
    return jax.tree.map(lambda x, more: jnp.concatenate([x[None], more]), first, after)


@pytest.fixture(scope="module")
def follow(params, rows):
    """baseline -> its `Steps` on `rows`, each run once."""
    return cache(lambda baseline: jax.tree.map(np.asarray, followed(MODEL, params, baseline, *rows)))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def agrees(steps, row, oracle, after):
    """The logits of a sequence's steps with those of an oracle that reads the same tokens `after` it."""
    for step, got in enumerate(steps.logits[:, row]):
        close(got, oracle.extend(after[step - 1]) if step else oracle.logits)


def held(steps, step, row):
    """The positions of one sequence that each row of the plan holds."""
    return [set(np.flatnonzero(each[row]).tolist()) for each in steps.held[step]]


SCALED = [  # of a context of 7 tokens; the sequences have 14
    RopeConfig(rope_type="linear", factor=2.0),
    RopeConfig(rope_type="dynamic", factor=32.0),
    RopeConfig(rope_type="yarn", factor=2.0, original_max_position_embeddings=7),
]


@pytest.mark.slow("random", "skip", "static", "dynamic")
@pytest.mark.parametrize(
    "name, rope",
    [pytest.param(name, RopeConfig(), id=name) for name in NOTHING]
    + [pytest.param("lazy", rope, id=rope.rope_type) for rope in SCALED[1:]],
)
def test_greedy_tokens_are_the_models_own_when_nothing_is_left_out(name, rope):
    context = PLAIN.max_position_embeddings if rope == RopeConfig() else 7
    config = dataclasses.replace(PLAIN, rope=rope, max_position_embeddings=context)
    model, params = tiny(config, KVPlan.standard(4))
    prompts = [[5, 6, 7, 8, 9, 1, 2, 3], [11], [20, 21, 22]]
    want = []
    whole = jax.jit(lambda tokens: logits(model, params, forward(model, params, tokens)))
    for prompt in prompts:
        row = [*prompt, *[0] * (14 - len(prompt))]
        for place in range(len(prompt), len(prompt) + 6):
            row[place] = int(jnp.argmax(whole(jnp.array([row], jnp.int32))[0, place - 1]))
        want.append(row[len(prompt) : len(prompt) + 6])
    assert generate(model, params, NOTHING[name], prompts, 6) == want


@pytest.mark.slow
def test_random_pruning_keeps_the_first_the_last_and_a_share_and_answers_by_these_alone(plain, rows, follow):
    tokens, lengths = rows
    steps = follow(SOME["random"])
    for row, length in enumerate(lengths):
        kept = held(steps, 0, row)[0]
        must = {0, 1, length - 1} & set(range(length))
        assert must <= kept <= set(range(length))
        assert len(kept) == max(len(must), math.ceil(0.5 * length))
        assert held(steps, 0, row) == [kept] * plain.rows
        agrees(steps, row, Kept(plain, tokens[row, :length], kept), tokens[row, length:])


@pytest.mark.slow
def test_static_pruning_keeps_what_the_last_token_looks_at_in_the_first_quarter(plain, rows, follow):
    tokens, lengths = rows
    steps = follow(SOME["static"])
    for row, length in enumerate(lengths):
        kept = plain_numpy.static_kept(plain, tokens[row, :length], 0.4)
        assert held(steps, 0, row) == [kept] * plain.rows
        agrees(steps, row, Kept(plain, tokens[row, :length], kept), tokens[row, length:])


@pytest.mark.slow
@pytest.mark.parametrize("revive", [None, 0])
def test_lazy_llm_agrees_with_a_set_based_reference(plain, rows, follow, revive):
    tokens, lengths = rows
    steps, taken_up = follow(dataclasses.replace(SOME["lazy"], revive=revive)), 0
    for row, length in enumerate(lengths):
        oracle = Lazy(plain, tokens[row, :length], 0.75, 0.3, revive)
        for step in range(1 + EXTRA):
            want = oracle.extend(tokens[row, length + step - 1]) if step else oracle.logits
            close(steps.logits[step, row], want)
            assert held(steps, step, row) == [set(layer) for layer in oracle.kv]
            assert steps.work.tokens[step, :, row].tolist() == oracle.ran
            assert steps.work.pairs[step, :, row].tolist() == oracle.pairs
            upper = oracle.entered[plain.split] * (plain.rows - plain.split)  # rows of all later layers
            made = [*oracle.entered[: plain.split], upper, *[0] * (LAYERS - 1 - plain.split)]
            assert steps.work.made[step, :, row].tolist() == made
            taken_up += step and sum(oracle.entered) - LAYERS
    assert taken_up if revive != 0 else not taken_up


def test_ffn_skip_leaves_out_the_ffns_behind_a_cosine_that_reaches_the_threshold(plain, rows, follow):
    tokens, lengths = rows
    skipped = 0
    cosines = Skipping(plain, tokens[1, : lengths[1]], 2.0, 1, 0, 3).cosines
    threshold = float(np.quantile(cosines, 0.6))
    steps = follow(FFNSkip(threshold=threshold, cold_last=0, warm_up=3))
    for row, length in enumerate(lengths):
        oracle = Skipping(plain, tokens[row, :length], threshold, 1, 0, 3)
        for step in range(1 + EXTRA):
            want = oracle.extend(tokens[row, length + step - 1]) if step else oracle.logits
            close(steps.logits[step, row], want)
            ran = np.array(oracle.ran) - [len(skip) for skip in oracle.skipped]
            assert steps.work.mlps[step, :, row].tolist() == ran.tolist()
            skipped += sum(map(len, oracle.skipped))
    assert skipped > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lazy", "skip"])
def test_an_answer_does_not_depend_on_neighbours_or_padding(params, rows, follow, name):
    """One sequence alone, where FFN-SkipLLM really skips; and other tokens behind the prompts' ends."""
    tokens, lengths = rows
    row, size = 0, lengths[0]
    together, alone = (
        follow(SOME[name]),
        followed(MODEL, params, SOME[name], tokens[:1, : size + EXTRA], lengths[:1]),
    )
    np.testing.assert_allclose(alone.logits[:, 0], together.logits[:, row], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(alone.held[:, :, 0], together.held[:, :, row, : size + EXTRA])
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[:, :, 0], b[:, :, row]), alone.work, together.work
    )
    spoilt = tokens.copy()
    for row, size in enumerate(lengths):
        spoilt[row, size + EXTRA :] = 66 - spoilt[row, size + EXTRA :]
    jax.tree.map(
        np.testing.assert_array_equal, followed(MODEL, params, SOME[name], spoilt, lengths), together
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lazy", "static"])
def test_given_tokens_are_scored_like_generated_ones(params, rows, follow, name):
    """The scores agree with the steps checked above, although they are padded to other sizes."""
    tokens, lengths = rows
    row, size = 0, int(lengths[0])
    prompt, after = tokens[row, :size].tolist(), tokens[row, size : size + EXTRA].tolist()
    got, likeliest = baselines.follow(MODEL, params, SOME[name], prompt, after)
    steps = follow(SOME[name]).logits[:EXTRA, row].astype(np.float64)
    want = steps - np.log(np.exp(steps).sum(-1, keepdims=True))
    close(got, want[np.arange(EXTRA), after])
    assert likeliest.tolist() == (want.argmax(-1) == after).tolist()
