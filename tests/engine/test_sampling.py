"""Sampling on the device against transformers' processors, NumPy and statistics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.engine import sampling
from swiftkv_jax.engine.sampling import NO_ID, Mode, Policy, TokenCounts
from swiftkv_jax.engine.sequence import BAD

FULL = Mode(sampled=True, penalised=True, logprobs=True)
sample = jax.jit(sampling.sample, static_argnums=5)
kept, penalise = jax.jit(sampling.kept), jax.jit(sampling.penalise)
gumbel = jax.jit(sampling.gumbel, static_argnums=2)


def policy(lanes: int, **changes) -> Policy:
    """Neutral rules for every lane, some of them changed."""
    one, whole = jnp.ones(lanes), jnp.zeros(lanes, jnp.int32)
    neutral = {"temperature": one, "top_k": whole, "top_p": one, "min_p": 0 * one, "repetition_penalty": one}
    neutral |= {
        "presence_penalty": 0 * one,
        "frequency_penalty": 0 * one,
        "min_tokens": whole,
        "max_tokens": whole + 99,
    }
    seeds = np.stack([np.zeros(lanes), np.arange(lanes)], 1).astype(np.uint32)
    neutral |= {"seed": jnp.asarray(seeds), "stop_ids": jnp.full((lanes, 4), NO_ID)}
    neutral |= {"bias": jnp.zeros((lanes, 0))}
    given = {
        k: jnp.broadcast_to(jnp.asarray(v, neutral[k].dtype), neutral[k].shape) for k, v in changes.items()
    }
    return Policy(**(neutral | given))


def no_tally(lanes: int) -> TokenCounts:
    return TokenCounts(jnp.zeros((lanes, 0), bool), jnp.zeros((lanes, 0), jnp.int32))


def random_logits(lanes: int = 32, vocab: int = 300, seed: int = 0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 3, (lanes, vocab)), jnp.float32)


FILTERS = [
    *({"top_k": k} for k in (1, 7, 299, 5000)),
    *({"top_p": p} for p in (0.01, 0.5, 0.97)),
    *({"min_p": 0.02}, {"min_p": 1.0}, {"min_p": 0.01, "top_k": 20}, {"top_k": 40, "top_p": 0.7}),
    {"min_p": 0.005, "top_k": 30, "top_p": 0.9},
]


@pytest.fixture(params=["cpu", "gpu"])
def platform(request, monkeypatch):
    monkeypatch.setattr(sampling, "device", lambda: (request.param, "", 1))


def test_filters_keep_exactly_what_transformers_keeps(platform):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    logits = random_logits()
    warpers = {"min_p": hf.MinPLogitsWarper, "top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper}
    for wanted in FILTERS:
        theirs = torch.tensor(np.asarray(logits))
        for name, make in warpers.items():
            theirs = make(wanted[name])(None, theirs) if name in wanted else theirs
        got = np.asarray(kept(logits, policy(len(logits), **wanted)))
        np.testing.assert_array_equal(got, np.isfinite(theirs.numpy()), str(wanted))


def test_each_lane_has_its_own_filter_and_neutral_ones_keep_all(platform):
    """The order of tied tokens does not matter."""
    logits = random_logits(4)
    both = kept(logits, policy(4, top_k=[0, 3, 0, 0], top_p=[1, 1, 0.3, 1], min_p=[0, 0, 0, 0]))
    assert both.sum(1)[0] == both.sum(1)[3] == 300 and both.sum(1)[1] == 3 and 0 < both.sum(1)[2] < 30
    logits = jnp.asarray([[1.0, 2.0, 2.0, 0.0, -0.0, 2.0]])
    assert kept(logits, policy(1, top_k=2)).tolist() == [[False, True, True, False, False, True]]
    assert kept(logits, policy(1, top_k=5)).all()  # 0.0 and -0.0 are one number


def test_the_first_of_equal_logits_is_taken():
    """NumPy's argmax and torch's greedy search do the same."""
    logits = np.random.default_rng(0).integers(-2, 3, (16, 40)).astype(np.float32)
    zero = jnp.zeros(16, jnp.int32)
    got = sample(jnp.asarray(logits), policy(16, temperature=0), no_tally(16), zero, zero, Mode())
    np.testing.assert_array_equal(got.token, logits.argmax(-1))


def test_penalties():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    random = np.random.default_rng(1)
    lanes, vocab, length = 6, 50, 30
    logits = random_logits(lanes, vocab)
    history = jnp.asarray(random.integers(0, 20, (lanes, length)), jnp.int32)
    prompt = jnp.asarray([10, 1, 5, 10, 20, 30])
    counts = TokenCounts.of(history, prompt, jnp.full(lanes, length), vocab)
    got = penalise(logits, policy(lanes, repetition_penalty=1.7), counts)
    theirs = torch.tensor(np.asarray(logits))
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(np.asarray(history, np.int64)), theirs)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)

    got = penalise(logits, policy(lanes, presence_penalty=0.6, frequency_penalty=-0.25), counts)
    for lane in range(lanes):  # the output alone counts
        counts = np.bincount(np.asarray(history[lane, int(prompt[lane]) :]), minlength=vocab)
        want = np.asarray(logits[lane]) - 0.6 * (counts > 0) + 0.25 * counts
        np.testing.assert_allclose(got[lane], want, rtol=1e-5, atol=1e-6)


def test_incremental_token_counts_equal_those_of_the_whole():
    random = np.random.default_rng(2)
    history = jnp.asarray(random.integers(0, 9, (3, 8)), jnp.int32)
    prompt = jnp.asarray([2, 5, 3])
    counts = TokenCounts.of(history, prompt, prompt, 9)
    for i in range(3):
        counts = counts.add(history[jnp.arange(3), prompt + i])
    counts = counts.add(jnp.full(3, NO_ID))
    want = TokenCounts.of(history, prompt, prompt + 3, 9)
    jax.tree.map(np.testing.assert_array_equal, counts, want)


def test_no_end_before_min_tokens():
    logits = jnp.zeros((3, 8)).at[:, 5].set(9.0).at[:, 2].set(5.0)
    rules = policy(3, temperature=0, min_tokens=[0, 4, 4], stop_ids=[[5, NO_ID, NO_ID, NO_ID]])
    got = sample(logits, rules, no_tally(3), jnp.asarray([3, 3, 4]), jnp.zeros(3, jnp.int32), Mode())
    assert got.token.tolist() == [5, 2, 5]


@pytest.mark.parametrize(
    "mode", [Mode(), Mode(sampled=True, biased=True, logprobs=True)], ids=["greedy", "all"]
)
def test_an_accelerator_draws_the_tokens_that_a_cpu_draws(mode, monkeypatch):
    """They read the logits once: with ties, tokens ruled out, ends that come too early, and NaNs."""
    lanes, vocab = 12, 300
    logits = jnp.round(random_logits(lanes, vocab))  # full of ties
    logits = logits.at[0, 7].set(jnp.nan).at[1, 299].set(jnp.inf).at[2, 0].set(-jnp.inf).at[3].set(jnp.nan)
    logits = logits.at[4, 299].set(99).at[5, 0].set(99).at[6].set(-1e30)
    bias = jnp.zeros((lanes, vocab if mode.biased else 0)).at[7 % lanes].set(-jnp.inf)
    ends = jnp.argsort(-logits, axis=1)[:, :4].at[:, 3].set(NO_ID).at[8, 0].set(299)
    rules = policy(lanes, min_tokens=jnp.arange(lanes) % 2 * 9, stop_ids=ends, top_k=5)
    rules = dataclasses.replace(rules, bias=bias)
    where = no_tally(lanes), jnp.full(lanes, 3), jnp.arange(lanes)

    def drawn():
        return jax.jit(lambda x: sampling.sample(x, rules, *where, mode))(logits)

    want = drawn()
    monkeypatch.setattr(sampling, "device", lambda: ("gpu", "a GPU", 1))
    got = drawn()
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[4:], y[4:]), got, want)
    tokens = np.asarray(want.token)
    assert got.token.tolist() == tokens.tolist()
    assert (tokens[:4] == BAD).all() and len(set(tokens[4:])) > 4


@pytest.mark.slow("{'temperature': 0.7}")
@pytest.mark.parametrize(
    "rules", [{"temperature": 0.7}, {"temperature": 1.3, "top_k": 5, "min_p": 0.05}], ids=str
)
def test_frequencies_are_those_of_softmax(rules):
    draws, vocab = 40_000, 12
    logits = jnp.broadcast_to(random_logits(1, vocab, 3) / 2, (draws, vocab))
    lanes = policy(draws, **rules)
    position = jnp.arange(draws, dtype=jnp.int32) % 7
    got = sample(logits, lanes, no_tally(draws), position, position, Mode(sampled=True))
    scaled = np.asarray(logits[0], np.float64) / rules["temperature"]
    keep = np.exp(scaled - scaled.max()) >= rules.get("min_p", 0)
    keep &= scaled >= np.sort(scaled)[-rules.get("top_k", vocab)]
    want = np.where(keep, np.exp(scaled), 0) / np.exp(scaled[keep]).sum()
    counts = np.bincount(np.asarray(got.token), minlength=vocab)
    assert not counts[~keep].any()
    chi = ((counts - draws * want)[keep] ** 2 / (draws * want[keep])).sum()
    assert chi < 3.5 * keep.sum()  # p < 1e-4 for these degrees of freedom


def test_noise_is_fold_in_of_seed_and_position_whatever_the_neighbours():
    seeds = jnp.asarray([[0, 7], [0, 8], [1, 7]], jnp.uint32)
    noise = gumbel(seeds, jnp.asarray([3, 3, 3]), 40)
    key = jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), 3)
    np.testing.assert_array_equal(noise[0], jax.random.gumbel(key, (40,)))
    with jax.enable_x64(True):
        assert gumbel(seeds, jnp.asarray([3, 3, 3]), 40).dtype == jnp.float32
    np.testing.assert_array_equal(noise[1:2], sampling.gumbel(seeds[1:2], jnp.asarray([3]), 40))
    assert not np.allclose(noise[0], noise[2])  # the high word of a seed counts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_full_mode_samples_the_tokens_of_the_plain_mode(temperature):
    logits, position = random_logits(), jnp.arange(32, dtype=jnp.int32)
    rules = policy(32, temperature=temperature)
    counts = TokenCounts(jnp.ones((32, 300), bool), jnp.ones((32, 300), jnp.int32))
    plain = sample(logits, rules, no_tally(32), position, position, Mode(sampled=temperature > 0))
    rich = sample(logits, rules, counts, position, position, FULL)
    assert plain.token.tolist() == rich.token.tolist()
    if not temperature:
        assert plain.token.tolist() == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_distribution():
    logits, position = random_logits(5), jnp.arange(5, dtype=jnp.int32)
    rules = dataclasses.replace(policy(5, temperature=1.9, top_k=50, repetition_penalty=3.0))
    counts = TokenCounts(jnp.ones((5, 300), bool), jnp.ones((5, 300), jnp.int32))
    got = sample(logits, rules, counts, position, position, FULL)
    wide = np.asarray(logits, np.float64)
    want = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    order = np.argsort(-want, axis=1)
    np.testing.assert_array_equal(got.top_ids, order[:, :20])
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, order, 1)[:, :20], atol=1e-5)
    for lane, token in enumerate(got.token.tolist()):
        assert got.logprob[lane] == pytest.approx(want[lane, token], abs=1e-5)
        assert got.rank[lane] == 1 + order[lane].tolist().index(token)
