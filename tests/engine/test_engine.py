"""The engine: the same tokens however requests are run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine as tiny
from tiny_engine import GREEDY, LENGTHS, all_free, definition, make, model, poison, run, tokens

from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import to_slim
from swiftkv_jax.engine import loop, runner
from swiftkv_jax.engine.draft import lookup
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.loop import decode
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.score import prompt_logprobs
from swiftkv_jax.kernels.common.pools import encode

WAYS = {
    "chunks of 7, three steps a launch, two lanes": {
        "max_num_batched_tokens": 7, "steps_per_launch": 3, "max_num_seqs": 2
    },
    "pages of 1, read a few keys at a time": {
        "page_size": 1, "max_num_batched_tokens": 16, "kernels": "attention=xla"
    },
    "no prefix cache": {"prefix_caching": False},
    "so few pages that sequences are preempted": {"num_pages": 33, "page_size": 2},
    "guesses checked": {"drafts": 3},
    "pages of 5 filled at once, guesses checked, in chunks of 7, one sequence at a time": {
        "kernels": "fill=xla", "page_size": 5, "drafts": 3, "max_num_batched_tokens": 7, "max_num_seqs": 1
    },
}  # fmt: skip


SLOW = [way for way in WAYS if "pages" in way and way != "so few pages that sequences are preempted"]


@pytest.mark.slow(*SLOW)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_the_definitions_however_they_are_run(way):
    """Twice: the second time from a warm prefix cache. Unused pages hold NaN."""
    llm = make(**({"num_pages": 200} | WAYS[way]))
    poison(llm)
    for _ in range(2):
        assert tokens(run(llm)) == definition("acrosskv")
        assert all_free(llm.engine)
    stats = llm.engine.stats
    assert (stats.preemptions > 0) == ("preempted" in way)
    assert (stats.prefix_hits > 0) == ("no prefix" not in way and "so few" not in way)


def greedy_of_all(net, params, prompts, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens of the full forward pass for many prompts, and by how much each was the likeliest."""
    width = max(map(len, prompts)) + count
    ids = np.zeros((len(prompts), width), np.int32)
    ends = np.array([len(p) for p in prompts])
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def best(ids, at):
        values, tokens = jax.lax.top_k(net.apply({"params": params}, ids)[jnp.arange(ids.shape[0]), at], 2)
        return tokens[:, 0], values[:, 0] - values[:, 1]

    tokens, margins = [], []
    for i in range(count):
        token, margin = best(jnp.asarray(ids), jnp.asarray(ends + i - 1))
        ids[np.arange(len(prompts)), ends + i] = token
        tokens.append(np.asarray(token))
        margins.append(np.asarray(margin))
    return np.stack(tokens, 1).tolist(), np.stack(margins, 1).tolist()


@pytest.mark.slow("mixtral", "deepseek")
@pytest.mark.parametrize("plan", ["acrosskv", *tiny.MODELS])
def test_random_prompts_that_begin_alike(plan):
    """150 for each model; pages are scarce, guesses are checked.

    A token may differ only where the definition's two best logits lie within 1e-5, which is counted.
    """
    random = np.random.default_rng(7)
    stems = [random.integers(0, 256, 40).tolist() for _ in range(12)]
    prompts = []
    for _ in range(150):
        stem = stems[random.integers(12)][: random.integers(1, 41)]
        prompts.append(stem + random.integers(0, 256, random.integers(0, 10)).tolist())
    want, margins = greedy_of_all(*model(plan), prompts, 10)
    llm = make(plan, num_pages=32, page_size=4, drafts=2, max_num_batched_tokens=24)
    poison(llm)
    ties = 0
    for got, tokens_, margin in zip(tokens(run(llm, prompts)), want, margins, strict=True):
        first = next((i for i, pair in enumerate(zip(got, tokens_, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            assert margin[first] < 1e-5
            ties += 1
    assert ties <= 1
    stats = llm.engine.stats
    assert stats.prefix_hits > 500 and stats.preemptions > 0
    assert all_free(llm.engine)


def test_drafts_change_no_token_greedy_or_sampled():
    """Of prompts whose greedy continuation the n-gram lookup can sometimes guess."""
    plain, guessing = make(), make(drafts=3)
    kinds = [
        dataclasses.replace(GREEDY, max_tokens=24),
        SamplingParams(max_tokens=24, seed=5, temperature=0.3, ignore_eos=True),
        SamplingParams(max_tokens=24, seed=6, top_k=3, logprobs=2),
        SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=1.3),
    ]
    prompts = [p * 3 for p in tiny.prompts((4, 9, 7, 5), seed=3)]
    want, got = run(plain, prompts, kinds), run(guessing, prompts, kinds)
    assert tokens(got) == tokens(want)
    for a, b in zip(got[2].outputs[0].logprobs, want[2].outputs[0].logprobs, strict=True):
        assert a.keys() == b.keys()
        assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)
    assert guessing.engine.stats.drafted_tokens > 0


def test_correct_drafts_are_accepted(monkeypatch):
    """An oracle's guesses: four tokens per step, and the same tokens; wrong ones cost nothing but time."""
    llm, prompt = make(drafts=3), tiny.prompts((20,))[0]
    want = tiny.greedy(*model("acrosskv"), prompt, 16)
    whole = prompt + want
    for wrong in (0, 1):
        monkeypatch.setattr(
            "swiftkv_jax.engine.draft.lookup",
            lambda known, most, wrong=wrong: [t ^ wrong for t in whole[len(known) : len(known) + most]],
        )
        assert tokens(run(llm, [prompt], dataclasses.replace(GREEDY, max_tokens=16))) == [want]
        assert (llm.stats["accepted_tokens"] > 8) == (not wrong)
        assert (llm.stats["steps"] < 8) == (not wrong)


def test_lookup_finds_the_last_and_longest_repetition():
    assert lookup([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert lookup([7, 1, 2, 5, 9, 1, 2, 6, 7, 1, 2], 3) == [5, 9, 1]  # three tokens match there
    assert lookup([1, 2, 3, 4], 3) == [] and lookup([], 3) == []


def rounded(made, dtype: str):
    """A row's arrays as they are read again."""

    def one(x):
        stored, scale = encode(x, jnp.dtype(dtype))
        return stored.astype(jnp.float32) * (1 if scale is None else scale[..., None])

    return tuple(map(one, made))


@functools.cache
def rounded_definition(plan: str, dtype: str) -> list[list[int]]:
    """Greedy tokens of the model's definition with every row passed through the rounding of its store."""
    net, params = model(plan)
    store = functools.partial(rounded, dtype=dtype)
    apply = jax.jit(lambda ids: logits(net, params, forward(net, params, ids, store=store))[0])
    out = []
    for prompt in tiny.prompts(LENGTHS):
        known = list(prompt)
        for _ in range(8):
            ids = np.zeros((1, 64), np.int32)
            ids[0, : len(known)] = known
            known.append(int(apply(ids)[len(known) - 1].argmax()))
        out.append(known[len(prompt) :])
    return out


@pytest.mark.parametrize(
    ("plan", "dtype", "fill"),
    [
        ("acrosskv", "float8_e4m3fn", "unfused"),
        pytest.param("acrosskv", "int8", "xla", marks=pytest.mark.slow),
        pytest.param("deepseek", "float8_e4m3fn", "unfused", marks=pytest.mark.slow),
    ],
)
def test_rounding_caches_give_one_result_for_any_chunking(plan, dtype, fill):
    params = dataclasses.replace(GREEDY, max_tokens=8)
    want = rounded_definition(plan, dtype)
    assert want != [row[:8] for row in definition(plan)], "rounding must matter"
    for budget in (32, 7):
        llm = make(plan, cache_dtype=dtype, max_num_batched_tokens=budget, kernels=f"fill={fill}")
        assert tokens(run(llm, params=params)) == want
    rows, config = llm.model.plan.num_rows, llm.model.config
    stored = 24 + 8 + 4 if plan == "deepseek" else 2 * (config.kv_width + 4 * config.num_kv_heads)
    assert llm.cache_bytes_per_token == rows * stored
    assert llm.engine.runner.cache.bytes_per_token == llm.cache_bytes_per_token


def test_streamed_pieces_are_the_whole_and_stop_strings_never_leak():
    llm = make(steps_per_launch=2)
    want = run(llm, ["hello there"], dataclasses.replace(GREEDY, max_tokens=20))[0].outputs[0]
    stop = want.text[5:8]
    for params, text in (
        (dataclasses.replace(GREEDY, max_tokens=20), want.text),
        (dataclasses.replace(GREEDY, max_tokens=20, stop=[stop]), want.text[: want.text.index(stop)]),
    ):
        llm.engine.add(llm.request("hello there", params))
        pieces, ids = "", []
        while llm.engine.busy:
            for group in llm.engine.step():
                delta = group.sequences[0].delta()
                pieces, ids = pieces + delta.text, ids + delta.token_ids
                assert text.startswith(pieces)
        assert pieces == text and ids == want.token_ids[: len(ids)]


@pytest.mark.slow
def test_nothing_compiles_after_warm_up():
    """A server's traffic of all kinds."""
    kinds = (
        GREEDY,
        SamplingParams(max_tokens=9, seed=1, stop_token_ids=[*range(100, 164)], min_tokens=4),
        SamplingParams(max_tokens=9, seed=1, top_p=0.9, repetition_penalty=1.2, logprobs=3, n=2),
        SamplingParams(max_tokens=9, seed=1, logit_bias={3: 5.0}, bad_words=["ab"]),
    )
    jax.clear_caches()  # of earlier tests
    with tiny.compilations() as compiled:
        llm = make("swiftkv", drafts=2, max_num_seqs=1, max_num_batched_tokens=32)
        assert llm.fingerprint  # which the first request makes
        loops = decode._cache_size()
        assert llm.engine.warm_up() > 4
        # A loop that follows another is the same program as one from the host.
        assert decode._cache_size() - loops == len(llm.engine.runner.modes)
        before = len(compiled)
        assert before > 4
        prompts = tiny.prompts((1, 40, 9, 22, 33, 5, 2, 17))
        outputs = run(llm, prompts, [kinds[i % 4] for i in range(8)])
        llm.engine.runner.clear([1, 2, 3])
        assert len(outputs) == 8 and compiled[before:] == []


@pytest.mark.parametrize("changes", [{}, {"drafts": 3}], ids=str)
def test_any_number_of_stop_ids_ends_at_the_first_and_not_too_early(changes):
    """More than a launch looks for: the host ends at the others, and rules them out before `min_tokens`."""
    net, params = model("acrosskv")

    def want(prompt: list[int], stops: list[int], least: int) -> list[int]:
        out: list[int] = []
        while len(out) < 20 and not (out and out[-1] in stops):
            padded = np.zeros((1, tiny.CONTEXT), np.int32)
            padded[0, : len(prompt) + len(out)] = prompt + out
            scores = np.array(tiny.full_logits(net, params, padded)[0, len(prompt) + len(out) - 1])
            scores[stops if len(out) < least else []] = -np.inf
            out.append(int(scores.argmax()))
        return out

    prompts, most = tiny.prompts((9, 3, 14, 6)), dataclasses.replace(GREEDY, max_tokens=20)
    free, ends = tokens(run(make(), prompts, most)), 0
    for least in (0, 5):
        for many in (4, 40):  # ids of every prompt's own text are among them, the last of them first
            stops = [list(dict.fromkeys([*range(200, 200 + many), *out[6:9]]))[::-1] for out in free]
            stops = [ids[::-1] if many > 4 else ids for ids in stops]
            rules = [dataclasses.replace(most, min_tokens=least, stop_token_ids=ids) for ids in stops]
            found = run(make(**changes), prompts, rules)
            for prompt, ids, output in zip(prompts, stops, found, strict=True):
                expected = want(prompt, ids, least)
                assert output.outputs[0].token_ids == expected
                ends += output.outputs[0].finish_reason == "stop" and len(expected) < 20
    assert ends > 8


@pytest.mark.parametrize("steps", [1, 7])
def test_a_new_prompt_is_read_after_steps_per_launch_tokens_of_the_others(steps):
    """It comes while a launch is read: that one and the next, sent ahead, are what it waits for."""
    engine = (llm := make(steps_per_launch=steps, max_num_seqs=2)).engine
    long, short = (dataclasses.replace(GREEDY, max_tokens=n) for n in (50, 1))
    engine.add(llm.request([1, 2, 3], long))
    while engine.stats.decoded_steps < 3 * steps:
        before = engine.stats.decoded_steps
        engine.step()
    engine.add(llm.request([4, 5, 6], short))
    while engine.stats.prompt_tokens < 6:
        engine.step()
    assert engine.stats.decoded_steps - before <= 2 * -(-steps // 2)


def check_in_place(machine: runner.Runner) -> None:
    """A launch of decoding gives back the buffers of its pool, and needs little beside it."""
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (machine.params, machine.cache))
    dtypes = (np.int32, np.int32, np.int32, bool)
    lanes = loop.Lanes(*(np.zeros(4, dtype) for dtype in dtypes), np.zeros((4, 0), np.int32))
    table, policy = (
        np.zeros((4, machine.arrays.slots), np.int32),
        machine.seats.policy([], 4, runner.MODES[0]),
    )
    wide = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0], 4096, *x.shape[2:]), x.dtype), shape[1].stores
    )
    big = dataclasses.replace(shape[1], stores=wide)
    args = (machine.model, runner.MODES[0], 8, shape[0], big, table, lanes, policy)
    memory = decode.lower(*args, exits=machine.exits).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= big.nbytes
    assert memory.temp_size_in_bytes < big.nbytes / 20


def test_launches_update_the_pool_in_place():
    llm = make()
    run(llm, [[1, 2, 3]])
    before = llm.engine.runner.cache
    run(llm, [[4, 5, 6]])
    assert all(x.is_deleted() for x in jax.tree.leaves(before.stores))
    check_in_place(llm.engine.runner)


@pytest.mark.slow
def test_bias_allowed_ids_and_bad_words():
    llm, prompt = make(), tiny.prompts((9,))[0]

    def given(**rules) -> list[int]:
        return run(llm, [prompt], dataclasses.replace(GREEDY, **rules))[0].outputs[0].token_ids

    first = given()[0]
    assert set(given(allowed_token_ids=[65, 66])) <= {65, 66}
    assert given(logit_bias={77: 100}) == [77] * 10
    assert first not in given(logit_bias={first: -100})
    text = bytes(given(allowed_token_ids=[65, 66], bad_words=["AB", "BB"]))
    assert len(text) == 10 and b"AB" not in text and b"BB" not in text


def log_probabilities(net, params, ids: list[int], store=tuple):
    """[tokens, V], by the model's definition."""
    x = jax.jit(lambda ids: logits(net, params, forward(net, params, ids, store=store)))(jnp.asarray([ids]))
    return jax.nn.log_softmax(x[0])


def test_prompt_logprobs_are_the_full_depth_models():
    llm, (prompt,) = make(), tiny.prompts((45,))
    output = run(llm, [prompt], dataclasses.replace(GREEDY, prompt_logprobs=2, max_tokens=1))[0]
    raw = log_probabilities(*model("acrosskv"), prompt)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 45
    for i, entries in enumerate(output.prompt_logprobs[1:]):
        best = jnp.argsort(-raw[i])[:2].tolist()
        assert list(entries) == list(dict.fromkeys([prompt[i + 1], *best]))
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(float(raw[i][token]), abs=1e-4)
            assert entry.rank == 1 + int((raw[i] > raw[i][token]).sum())


def test_scores_of_a_model_whose_learned_positions_fill_no_compiled_size():
    net, params = tiny.make_model(
        tiny.PLANS["standard"],
        learned_positions=True,
        max_position_embeddings=100,
        rope=RopeConfig(rope_type=NONE),
    )
    llm = LLM.from_model(net, params, tiny.Bytes(), **tiny.SIZES | {"max_model_len": 100})
    prompt = tiny.prompts((100,))[0]
    raw = jax.nn.log_softmax(tiny.full_logits(net, params, jnp.asarray([prompt])))[0]
    found = [entries[token].logprob for token, entries in zip(prompt[1:], llm.score(prompt)[1:], strict=True)]
    want = [float(raw[i][token]) for i, token in enumerate(prompt[1:])]
    np.testing.assert_allclose(found, want, atol=1e-4)


def test_a_short_text_is_scored_in_an_array_of_64():
    """As the endings of HellaSwag are; and few sizes are compiled."""
    sizes = []

    def read(tokens, following, *_):
        sizes.append(tokens.shape[1])
        none = following[:, None][:, :0]
        return np.zeros(len(following)), following, none, none

    for count in (2, 65, 66, 257, 258, 1025, 1026):  # the last token is only predicted
        assert len(prompt_logprobs([[0] * count], 0, 4096, None, read)[0]) == count
    assert sizes == [64, 64, 256, 256, 1024, 1024, 4096]


SHARING = {
    "windows": {"windows": (64, 9, 1, 30)},
    "learned positions": {"learned_positions": True, "rope": RopeConfig(rope_type=NONE)},
}


@pytest.mark.parametrize("kind", SHARING)
def test_texts_that_share_a_pass_are_scored_as_each_alone(kind, monkeypatch):
    net, params = tiny.make_model(tiny.PLANS["acrosskv"], **SHARING[kind])
    llm, texts = LLM.from_model(net, params, **tiny.SIZES), tiny.prompts((20, 1, 30, 2, 45, 12, 7, 19, 33))
    passes, read = [], llm._scores
    monkeypatch.setattr(llm, "_scores", lambda *arrays: passes.append(arrays) or read(*arrays))
    for ids, scored in zip(texts, llm.score_each(texts), strict=True):
        found = [entries[token].logprob for token, entries in zip(ids[1:], scored[1:], strict=True)]
        want = log_probabilities(net, params, ids)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found, want, atol=1e-4)
    assert len(passes) == 3


FREE = {"num_kv_heads": 4, "rope": RopeConfig(rope_type=NONE)}  # a model that can store rows in every form


@pytest.mark.slow("swiftkv-x-int8")
@pytest.mark.parametrize(
    ("plan", "forms", "dtype"),
    [
        ("acrosskv", None, "float32"),
        ("acrosskv", None, "float8_e4m3fn"),
        ("swiftkv", "x", "int8"),  # which an engine stores transformed
        pytest.param("acrosskv", "k", "int8", marks=pytest.mark.slow),
        pytest.param("standard", "k v x kv", "float8_e4m3fn", marks=pytest.mark.slow),
    ],
)
def test_scores_are_what_decoding_reports_over_rows_of_any_dtype(plan, forms, dtype):
    """The full-depth score of a generated text is the log probability that each token was generated with, and
    the definition's with rounded rows. Those of rows that are not rounded are another thing."""
    net, params = tiny.make_model(tiny.PLANS[plan], **FREE if forms else {})
    net, params = to_slim(net, params, forms.split()) if forms else (net, params)
    llm, (prompt,) = LLM.from_model(net, params, **tiny.SIZES, cache_dtype=dtype), tiny.prompts((30,))
    chosen = run(llm, [prompt], dataclasses.replace(GREEDY, logprobs=0))[0].outputs[0]
    ids = [*prompt, *chosen.token_ids]
    entries = zip(ids[1:], llm.score(ids)[1:], strict=True)
    scored = np.array([entry[token].logprob for token, entry in entries])
    reported = [entry[token].logprob for token, entry in zip(chosen.token_ids, chosen.logprobs, strict=True)]
    store = functools.partial(rounded, dtype=dtype)
    exact, want = (
        np.asarray(log_probabilities(*each))[np.arange(39), ids[1:]]
        for each in ((net, params, ids), (llm.model, llm.params, ids, store))
    )
    off = np.abs(scored - want)
    off[29:] = np.maximum(off[29:], np.abs(scored[29:] - reported))
    felt = np.abs(scored - exact).max()
    assert np.median(off) < 1e-5 and (felt > 1e-2) == (dtype != "float32")
    # A number that lies between two roundings may go the other way; it must be close to their boundary, and
    # of the coarse float there are few.
    assert off.max() < (3e-5 if dtype in ("float32", "float8_e4m3fn") else felt / 20)
