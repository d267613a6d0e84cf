"""step agrees with forward for every plan, chunking and page table; a last-layer student is its teacher."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import LATENT, MOE, ODD, PLAIN, REPEATED, SIZED, sized, tiny

from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.layers import by_token, dequantised, kernel_of, linear
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import rounded
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import to_slim, to_swiftkv

LAYERS = 4
LENGTHS = (19, 4, 11)
BATCH = 16  # tokens of one padded flat batch
PAGE, SLOTS = 3, 7
PAGES = 31  # more than 3 sequences of 7 slots use: the rest stay NaN

PLANS = {"standard": KVPlan.standard(LAYERS)}
PLANS |= {f"split{s}": KVPlan.swiftkv(LAYERS, s) for s in range(1, LAYERS)}
PLANS |= {f"split{s}x{g}": KVPlan.swiftkv(LAYERS, s, g) for s, g in [(1, 2), (1, 3), (2, 2)]}
PLANS |= {
    "cross_layer": KVPlan.from_rows([0, 0, 1, 1]),
    "early_row_again": KVPlan.from_rows([0, 1, 0, 2], split=2),
}

# Most of this file's time is compiling; the numbers are the same without LLVM's optimisations.
jit_model = functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
run_step, run_forward = jit_model(step), jit_model(forward)


@jit_model
def full_logits(model, params, tokens):
    return logits(model, params, forward(model, params, tokens))


def sequences(seed: int, lengths=LENGTHS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, PLAIN.vocab_size, (len(lengths), max(lengths)), np.int32)


def paged_cache(model, seed: int) -> Cache:
    """A pool full of NaN under a shuffled page table: reading what was never written shows."""
    order = 1 + np.random.default_rng(seed).permutation(PAGES)[: len(LENGTHS) * SLOTS]
    table = jnp.asarray(order.reshape(len(LENGTHS), SLOTS), jnp.int32)
    cache = Cache.create(model.config, model.plan, table, 1 + PAGES, PAGE, jnp.float32)
    stores = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.stores)
    return dataclasses.replace(cache, stores=stores)


def flat_batch(tokens, done, counts, wanted):
    """Arrays of one padded flat batch: `counts[s]` tokens of each sequence after the first `done[s]`."""
    flat = [(s, done[s] + i) for s in range(len(counts)) for i in range(counts[s])]
    fill = BATCH - len(flat)
    ids = np.array([tokens[s, p] for s, p in flat] + [66] * fill, np.int32)
    positions = np.array([p for _, p in flat] + [0] * fill, np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    survivors = np.array([*wanted, *[BATCH] * (BATCH - len(wanted))], np.int32)
    return flat, (ids, positions, starts, survivors)


def feed(model, params, tokens, cache, chunkings, choose):
    """Feed the sequences in these chunks; yields (sequence, position, logits) of every survivor."""
    done = [0] * len(LENGTHS)
    for counts in chunkings:
        counts = [min(n, length - d) for n, length, d in zip(counts, LENGTHS, done, strict=True)]
        flat = [s for s, n in enumerate(counts) for _ in range(n)]
        wanted = [i for i in range(len(flat)) if choose(i)]
        flat, arrays = flat_batch(tokens, done, counts, wanted)
        got, cache = run_step(model, params, *arrays, cache)
        for row, i in enumerate(wanted):
            yield *flat[i], np.asarray(got[row])
        done = [d + n for d, n in zip(done, counts, strict=True)]


def check_step(plan, config, chunks, choose=lambda i: True) -> int:
    """Compare every survivor with `forward`; the number of positions compared."""
    model, params = tiny(config, plan.stored_as(config.form))
    tokens, seen = sequences(1), 0
    want = np.asarray(full_logits(model, params, tokens))
    assert want.std() > 0.5, "flat logits would hide errors"
    for s, p, got in feed(model, params, tokens, paged_cache(model, 3), chunks, choose):
        np.testing.assert_allclose(got, want[s, p], rtol=0, atol=1e-5)
        seen += 1
    return seen


OF_OWN_SIZES = [("standard", SIZED), ("split1x2", SIZED), ("split2", REPEATED)]
EVERY = [(plan, ODD) for plan in PLANS] + OF_OWN_SIZES + [("split2", MOE)]
OF_LATENTS = [(plan, LATENT) for plan in ("standard", "split1x2")]
EVERY += OF_LATENTS


@pytest.mark.slow("split1x2", "split1x3", "split2", "split3", "cross_layer", "sized", "repeated_split2")
@pytest.mark.parametrize(
    "plan, config",
    EVERY,
    ids=[
        *PLANS,
        "sized",
        "sized_split1x2",
        "repeated_split2",
        "moe",
        "latent",
        "latent_split1x2",
    ],
)
def test_step_is_forward_for_every_plan(plan, config):
    """They agree at every position of a ragged, chunked, padded batch over shuffled pages amid NaN."""
    assert check_step(PLANS[plan], config, [(5, 4, 7), (0, 0, 3), (8, 0, 1), (6, 0, 0)]) == sum(LENGTHS)


FREE = dataclasses.replace(  # of rotary embedding: a model that can store rows in every form
    PLAIN,
    num_kv_heads=4,
    head_dim=20,
    qkv_bias=True,
    rope=RopeConfig(rope_type="none"),
    windows=(3, 2**30, 5, 2**30),
)


@pytest.mark.slow("split1x2-x k v")
@pytest.mark.parametrize("plan, forms", [("standard", "k v x kv"), ("split1x2", "x k v")])
def test_rows_of_every_form_are_those_of_keys_and_values(plan, forms):
    """`forward` and `step` of a converted model give the logits of the model it was made of."""
    kv, params = tiny(FREE, PLANS[plan])
    tokens = sequences(1)
    want = np.asarray(full_logits(kv, params, tokens))
    model, made = to_slim(kv, params, forms.split())
    np.testing.assert_allclose(full_logits(model, made, tokens), want, rtol=0, atol=1e-4)
    chunks = [(5, 4, 7), (0, 0, 3), (8, 0, 1), (6, 0, 0)]
    served = list(feed(model, made, tokens, paged_cache(model, 3), chunks, lambda i: True))
    assert len(served) == sum(LENGTHS)
    for s, p, got in served:
        np.testing.assert_allclose(got, want[s, p], rtol=0, atol=1e-4)


@pytest.mark.parametrize("share", [1, 2])
def test_upper_layers_of_one_input_share_one_row_of_it(share):
    """Each by its own projections: a student without rotary embedding keeps split + 1 rows of inputs."""
    kv, params = tiny(FREE, KVPlan.swiftkv(4, 2, share))
    tokens = sequences(1)
    want = np.asarray(full_logits(kv, params, tokens))
    model, made = to_slim(kv, params, "x")
    assert model.plan.reads == (0, 1, 2, 2) and {row.form for row in model.plan.rows} == {"x"}
    np.testing.assert_allclose(full_logits(model, made, tokens), want, rtol=0, atol=1e-4)
    cache = paged_cache(model, 3)
    assert cache.bytes_per_token == 3 * 4 * FREE.hidden_size
    chunks = [(5, 4, 7), (0, 0, 3), (8, 0, 1), (6, 0, 0)]
    for s, p, got in feed(model, made, tokens, cache, chunks, lambda i: True):
        np.testing.assert_allclose(got, want[s, p], rtol=0, atol=1e-4)


@pytest.mark.slow("bfloat16", "int8")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_step_over_a_rounding_cache_is_forward_with_rounded_rows(dtype):
    kv, params = tiny(FREE, PLANS["standard"])
    model, made = to_slim(kv, params, ["k", "v", "x", "kv"])
    tokens, store = jnp.asarray(sequences(1)[:1, :18]), functools.partial(rounded, dtype=dtype)

    @jit_model
    def with_rounded_rows(model, params, tokens):
        return logits(model, params, forward(model, params, tokens, store=store))

    want = np.asarray(with_rounded_rows(model, made, tokens))
    plain = np.asarray(full_logits(model, made, tokens))
    felt, off = np.abs(plain - want).max(), []
    cache = Cache.dense(model.config, model.plan, 1, 20, jnp.dtype(dtype))
    for start in (0, 9):
        ids, places = tokens[0, start : start + 9], np.arange(start, start + 9, dtype=np.int32)
        got, cache = run_step(model, made, ids, places, np.array([0, 9], np.int32), np.arange(9), cache)
        off.append(np.abs(got - want[0, start : start + 9]).max(-1))
    # A number that lies between two roundings may go the other way: that is seen, and is small.
    assert felt > 1e-2 and np.max(off) < felt / 10 and np.median(off) < felt / 1000


def test_step_is_forward_with_grouped_heads():
    assert check_step(PLANS["split1x2"], PLAIN, [(8, 0, 8), (3, 4, 3), (8, 0, 0)]) == sum(LENGTHS)


def test_merge_all_is_forward_within_one_prefill():
    """Later chunks find the last layer's row where each layer's own was: for measuring only (paper, 5.1)."""
    assert check_step(KVPlan.merge_all(LAYERS), PLAIN, [(5, 4, 7)]) == 16


CHUNKS = st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=12)


@given(chunks=CHUNKS, choices=st.randoms(use_true_random=False))
def test_step_is_forward_for_any_chunks_and_survivors(chunks, choices):
    """Chunks of nothing included; only some tokens survive, the rest of `survivors` is padding."""
    check_step(PLANS["split1x2"], ODD, chunks, lambda i: choices.random() < 0.4)


@pytest.mark.parametrize("name", ["standard", "split2", "split1x2"])
def test_a_chunk_that_ends_no_prompt_reads_no_weight_of_the_upper_layers(name):
    """With NaN in their MLPs the rows of the chunk are the same, and the scores no numbers of theirs."""
    model, params = tiny(PLAIN, PLANS[name])
    layers = weights.recut(params["layers"], [range(i, i + 1) for i in range(LAYERS)])
    spoilt = [p | {"mlp": jax.tree.map(lambda w: w * jnp.nan, p["mlp"])} for p in layers]
    depth, caches = model.plan.depth, []
    for last in (layers[depth:], spoilt[depth:]):
        tree, arrays = params | {"layers": layers[:depth] + last}, flat_batch(sequences(1), (0,), (9,), [])[1]
        out, cache = run_step(model, tree, *arrays, paged_cache(model, 1))
        assert not np.any(out)
        caches.append(jax.tree.leaves(cache))
    for a, b in zip(*caches, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow("standard")
@pytest.mark.parametrize(
    "plan, config",
    [("standard", PLAIN), ("split2", PLAIN), ("split1x2", ODD)],
    ids=["standard", "split2", "split1x2_odd"],
)
def test_greedy_tokens_are_those_of_forward(plan, config):
    """Prompts in one ragged batch, then one token of each sequence a step, over NaN-filled pages."""
    model, params = tiny(config, PLANS[plan])
    prompt_lengths, new = (5, 3, 8), 9
    tokens = sequences(5, (17,) * 3)
    want = tokens.copy()
    for i in range(new):
        best = np.asarray(full_logits(model, params, want)).argmax(-1)
        for s, n in enumerate(prompt_lengths):
            want[s, n + i] = best[s, n + i - 1]

    cache = paged_cache(model, 6)
    ends = np.cumsum(prompt_lengths) - 1
    _, arrays = flat_batch(tokens, (0, 0, 0), prompt_lengths, ends)
    out, cache = run_step(model, params, *arrays, cache)
    for i in range(new):
        best = np.asarray(out[:3]).argmax(-1).astype(np.int32)
        positions = np.array([n + i for n in prompt_lengths], np.int32)
        np.testing.assert_array_equal(best, want[np.arange(3), positions])
        out, cache = run_step(
            model, params, best, positions, np.arange(4, dtype=np.int32), np.arange(3), cache
        )


def test_packed_rows_equal_their_sequences_run_separately():
    """forward with segments and restarting positions: nothing leaks between neighbours."""
    model, params = tiny(ODD, PLANS["split1x2"])
    a, b = np.random.default_rng(0).integers(0, 67, (2, 1, 9))
    positions = jnp.tile(jnp.arange(9), 2)[None]
    segments = jnp.repeat(jnp.array([1, 2]), 9)[None]
    both = run_forward(model, params, jnp.concatenate([a, b], 1), positions, segments)
    apart = jnp.concatenate([run_forward(model, params, x) for x in (a, b)], 1)
    np.testing.assert_allclose(both, apart, rtol=0, atol=1e-5)


def test_long_sequences_are_attended_in_blocks():
    """1100 tokens, more than one query block and one cache turn, with a window across their edges."""
    config = dataclasses.replace(PLAIN, num_layers=2, windows=(600, 2**30), max_position_embeddings=4096)
    model, params = tiny(config, KVPlan.swiftkv(2, 1))
    tokens = np.random.default_rng(0).integers(0, 67, (1, 1100), np.int32)
    want = np.asarray(full_logits(model, params, tokens))
    cache = Cache.dense(config, model.plan, 1, 1200, jnp.float32)
    for start, stop in [(0, 700), (700, 1100)]:
        ids, at = tokens[0, start:stop], np.arange(start, stop, dtype=np.int32)
        starts = np.array([0, stop - start], np.int32)
        got, cache = run_step(model, params, ids, at, starts, np.arange(stop - start), cache)
        np.testing.assert_allclose(got, want[0, start:stop], rtol=0, atol=2e-5)  # sums of 1100 terms


def test_step_computes_no_cosine_over_rows_stored_rotated():
    """Rotary angles come from the cache's table. Keys before rotation (`k`) are turned by angles computed as
    they are read."""

    def lowered(model, params) -> str:
        _, arrays = flat_batch(sequences(1), [0, 0, 0], [5, 4, 7], [15])
        return run_step.lower(model, params, *arrays, paged_cache(model, 3)).as_text()

    kv, params = tiny(dataclasses.replace(PLAIN, num_kv_heads=4), PLANS["split2"])
    assert not re.search(r"\b(co)?sine\b", lowered(kv, params))
    assert re.search(r"\bcosine\b", lowered(*to_slim(kv, params, ("k",))))


@pytest.mark.parametrize(
    "init, config",
    [("copy", PLAIN), ("fold", ODD), ("copy", LATENT), ("fold", LATENT)],
    ids=["copy-plain", "fold-odd", "copy-latent", "fold-latent"],
)
def test_a_student_of_the_last_layer_alone_is_its_teacher(init, config):
    """At split = L-1 the only rewired layer already reads the stream entering itself."""
    teacher, params = tiny(config, config.plan())
    student, rewired = to_swiftkv(teacher, params, KVPlan.swiftkv(LAYERS, LAYERS - 1), init=init)
    assert student.plan.is_swiftkv
    tokens = sequences(1)
    want = full_logits(teacher, params, tokens)
    np.testing.assert_allclose(full_logits(student, rewired, tokens), want, rtol=0, atol=1e-5)
    earlier, rewired = to_swiftkv(teacher, params, KVPlan.swiftkv(LAYERS, LAYERS - 2), init=init)
    assert np.abs(full_logits(earlier, rewired, tokens) - want).max() > 1e-2, "rewiring must matter"


@pytest.mark.slow
def test_the_flax_module_is_the_plain_functions():
    """`init`, `apply` and `apply(method="step")` under jit, grad and vmap (of sequences, and of a batch of
    models). Other programs add in another order."""
    model, tokens = Transformer(PLAIN, PLANS["split1x2"]), jnp.asarray(sequences(1))
    made = [model.init(jax.random.key(seed), tokens)["params"] for seed in (0, 1)]
    own = weights.init(model.config, model.plan, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, made[0], own)
    params, other = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, made)
    jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

    def apply(params, tokens):
        return model.apply({"params": params}, tokens)

    def plain(params, tokens):
        return logits(model, params, forward(model, params, tokens))

    want = full_logits(model, params, tokens)
    assert want.std() > 0.5, "flat logits would hide errors"
    stacked = jax.tree.map(lambda *each: jnp.stack(each), params, other)
    one_by_one = jit(jax.vmap(apply, (None, 0)))(params, tokens[:, None])[:, 0]
    each_model = jit(jax.vmap(apply, (0, None)))(stacked, tokens)
    for got in (jit(apply)(params, tokens), one_by_one, each_model[0]):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    np.testing.assert_allclose(each_model[1], full_logits(model, other, tokens), rtol=0, atol=1e-4)
    grads = (jit(jax.grad(lambda p, run=run: run(p, tokens).var()))(params) for run in (apply, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *grads)

    cache = Cache.dense(model.config, model.plan, 1, 24, jnp.float32)
    chunk = tokens[0], jnp.arange(19), jnp.array([0, 19]), jnp.array([18])
    by_apply = jit(lambda params, *given: model.apply({"params": params}, *given, method="step"))
    got, filled = by_apply(params, *chunk, cache)
    np.testing.assert_allclose(got[0], want[0, 18], rtol=0, atol=1e-4)
    own = run_step(model, params, *chunk, cache)[1]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-4), filled, own)


LLAMA_8B = sized(128256, 4096, 14336, 32, 32, 8, 128)


# As OPT-6.7B: multi-head, without rotary embedding; and with heads that are wider than the stream.
OPT_7B = dataclasses.replace(LLAMA_8B, num_kv_heads=32, rope=RopeConfig(rope_type="none"))
WIDE = dataclasses.replace(OPT_7B, hidden_size=1024)
FORMS = KVPlan.standard(32).stored_as


@pytest.mark.parametrize(
    "config, plan, dtype, want",
    [
        (LLAMA_8B, KVPlan.standard(32), "bfloat16", 131072),  # 32 rows x 2 x 1024 x 2 bytes
        (LLAMA_8B, KVPlan.swiftkv(32, 16), "bfloat16", 131072),
        (LLAMA_8B, KVPlan.swiftkv(32, 16, 2), "bfloat16", 98304),
        (LLAMA_8B, KVPlan.swiftkv(32, 16, 4), "bfloat16", 81920),
        (LLAMA_8B, KVPlan.swiftkv(32, 16, 16), "float32", 139264),
        (LLAMA_8B, KVPlan.merge_all(32), "bfloat16", 4096),
        (OPT_7B, FORMS("kv"), "bfloat16", 524288),  # 32 rows x 2 x 4096 x 2 bytes
        (OPT_7B, FORMS("v"), "bfloat16", 262144),
        (OPT_7B, FORMS("x"), "float32", 524288),
        (OPT_7B, FORMS("v"), "int8", 131200),  # 4 bytes more a row, its scale
        (WIDE, FORMS("x"), "bfloat16", 65536),
        (WIDE, FORMS("x"), "int8", 32896),
        (WIDE, FORMS(*["kv", "k", "v", "x"] * 8), "bfloat16", 278528),  # 8 x (4 x 4096 + 1024) x 2 bytes
    ],
)
def test_cache_bytes_per_token_are_the_plans(config, plan, dtype, want):
    """Read from the arrays, for the shapes of Llama-3.1-8B and OPT-6.7B."""
    cache = Cache.dense(config, plan, sequences=2, capacity=3, dtype=dtype)
    tokens = 3 * 3  # two sequences of one page, and the scratch page
    assert sum(x.nbytes for x in jax.tree.leaves(cache.stores)) / tokens == cache.bytes_per_token == want


def test_kernel_of_applies_the_scale_of_8_bit_weights():
    """Alone, and in a stack; as `linear` has it."""
    random = np.random.default_rng(0)
    stack = {"kernel": random.integers(-9, 9, (2, 5, 3), np.int8), "scale": random.random((2, 3), np.float32)}
    stack = jax.tree.map(jnp.asarray, stack)
    whole, x = kernel_of(stack), jnp.asarray(random.random((4, 5), np.float32))
    assert whole.dtype == jnp.float32 and kernel_of(stack, jnp.bfloat16).dtype == jnp.bfloat16
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], stack)
        np.testing.assert_array_equal(kernel_of(one), whole[i])
        np.testing.assert_allclose(linear(x, one), x @ whole[i], rtol=1e-5)
    assert kernel_of({"kernel": stack["kernel"]}) is stack["kernel"]


@pytest.mark.parametrize(("dtype", "most", "bound"), [("int8", 127, 0.01), ("float8_e4m3fn", 448, 0.05)])
def test_products_of_two_8_bit_arrays(dtype, most, bound):
    """Each token of x has its own scale; a token of zeros stays one."""
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 4, 64)).astype(np.float32) * np.float32([1e-3, 1, 1e3])[:, None, None]
    x[1, 2] = 0
    q = random.integers(-9, 9, (64, 5)).astype(jnp.dtype(dtype))
    p = jax.tree.map(jnp.asarray, {"kernel": q, "scale": random.random(5, np.float32), "bias": np.ones(5)})
    s = np.abs(x).max(-1, keepdims=True) / np.float32(most)
    s[s == 0] = 1
    rounded = np.round(x / s) if dtype == "int8" else x / s
    want = (rounded.astype(jnp.dtype(dtype)).astype(np.float32) * s) @ np.asarray(kernel_of(p)) + 1
    got = jax.jit(linear)(x, by_token({"part": p})["part"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    exact = jax.jit(linear)(x, p)
    assert 0 < np.linalg.norm((got - exact)[1]) < bound * np.linalg.norm((exact - 1)[1])
    assert (got[1, 2] == 1).all()
    back = dequantised(by_token({"part": p}), jnp.float32)["part"]
    assert sorted(back) == ["bias", "kernel"]
