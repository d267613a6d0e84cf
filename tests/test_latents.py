"""Latent attention: any chunks give the definition's numbers; what config.json says; what is refused."""

import dataclasses
import json
from functools import partial
from unittest import mock

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from documents import ROOT
from safetensors.numpy import load_file, save_file
from tiny_models import LATENT, tiny

from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import latent as latents
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.form import Paged
from swiftkv_jax.core.latent import Latents
from swiftkv_jax.core.layers import route
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import is_trained, to_slim, to_swiftkv
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import ByKind, Implementation
from swiftkv_jax.kernels.common.pools import Pool, encode
from swiftkv_jax.kernels.paged_attention import pallas_gpu, pallas_tpu
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

V2_LITE = json.loads(
    (ROOT / "tests" / "published_configs" / "deepseek-ai--DeepSeek-V2-Lite.json").read_text()
)
V3 = json.loads((ROOT / "tests" / "published_configs" / "deepseek-ai--DeepSeek-V3.json").read_text())
# A dense layer, then experts with the router of DeepSeek-V3.
DEEPSEEK = dataclasses.replace(
    LATENT,
    mlps=("dense", "experts", "experts", "experts"),
    experts=Experts(
        count=6, per_token=2, width=28, router="noaux_tc", groups=3, top_groups=2, normalise=True, shared=20
    ),
)
LENGTH, PAGE = 40, 8


@pytest.fixture
def tpu(monkeypatch):
    """The TPU's kernel runs by its name, interpreted, and rows are as wide as there. What is not made of a
    temporary pool is NaN."""
    monkeypatch.delitem(dispatch.PLATFORM_OF, "pallas_tpu")
    run = partial(pallas_tpu.paged_attention, interpret=True)
    monkeypatch.setitem(PAGED_ATTENTION, "pallas_tpu", Implementation(run))
    monkeypatch.setattr(latents, "device", lambda: ("tpu", "TPU v5p", 2))
    monkeypatch.setattr(latents, "_LANES", 4)
    monkeypatch.setattr(latents, "_TILE", 16)
    monkeypatch.setattr(latents.lax, "empty", lambda *what: jnp.full(what[0], jnp.nan, what[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "split, share, chunk", [(2, 2, None), (1, 4, None), (2, 2, "xla_one_turn"), (2, 2, "pallas_tpu")]
)
def test_any_chunks_give_the_definitions_numbers(split, share, chunk, tpu):
    """Amid pages of NaN; the last token of each chunk alone survives. Named, a chunk of all is expanded."""
    model, params = tiny(DEEPSEEK, DEEPSEEK.plan(split, share))
    tokens = np.random.default_rng(0).integers(0, 67, LENGTH, np.int32)
    x = jax.jit(partial(forward, model))(params, tokens[None])
    want = np.asarray(logits(model, params, x)[0])
    assert want.std() > 0.5, "flat logits would hide errors"
    run = jax.jit(partial(step, model))
    for size, room in ((1, 1), (7, 16), (16, 16), (LENGTH, LENGTH)):
        order = 1 + np.random.default_rng(size).permutation(9)[: LENGTH // PAGE]
        cache = Cache.create(model.config, model.plan, jnp.asarray(order[None]), 10, PAGE, jnp.float32)
        cache = dataclasses.replace(cache, attention=ByKind(chunk=chunk))
        nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.stores)
        cache = dataclasses.replace(cache, stores=nan)
        for start in range(0, LENGTH, size):
            count = min(size, LENGTH - start)
            ids, at = (
                np.pad(x[start : start + count], (0, room - count)) for x in (tokens, np.arange(LENGTH))
            )
            got, cache = run(params, ids, at, np.array([0, count]), np.array([count - 1]), cache)
            np.testing.assert_allclose(got[0], want[start + count - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_expanded_latents_are_read_as_they_are_stored(dtype, sequences):
    """By blocks of ten queries, amid stale pages of NaN; a sequence may own none, and others several."""
    form, latent, rng = Latents(), LATENT.latent, np.random.default_rng(1)
    q = jnp.asarray(rng.normal(size=(4, 10, 4, 18)), jnp.float32)
    reader = {"kernel": jnp.asarray(rng.normal(size=(4, latent.rank, 14)), jnp.float32)}
    data, scale = encode(jnp.asarray(rng.normal(size=(2, 14, 8, 1, 30)), jnp.float32), jnp.dtype(dtype))
    data = data.reshape(2, 14, 8, 30)
    data = data if dtype == "int8" else data.at[:, 13].set(jnp.nan)
    pool = Pool(data, None if scale is None else jnp.swapaxes(scale, 2, 3))
    table = jnp.array([[4, 2, 5, 13], [7, 1, 3, 0], [9, 12, 6, 13]])[:sequences]
    sequence = jnp.array([0, 0, 2, 2]) % sequences
    position = jnp.where(jnp.arange(40) < 38, jnp.arange(40) % 20, -1).reshape(4, 10)
    where = table, sequence, position

    @partial(jax.jit, static_argnums=0)
    def run(name, pool, *where):
        return form.read(LATENT, reader, q, Paged((pool,), 1, *where, 99, 32, name))

    with mock.patch.object(latents, "_over_expanded", wraps=latents._over_expanded) as long:
        found = {name: run(name, pool, *where) for name in ("xla_one_turn", "reference")}
    long.assert_called_once()
    np.testing.assert_allclose(found["xla_one_turn"], found["reference"], rtol=0, atol=1e-5)
    assert found["reference"].std() > 0.5


@pytest.mark.slow("float32-0-4", "float32-10-3", "float32-23-4", "int8-0-4", "int8-23-4")
@pytest.mark.parametrize("start, blocks", [(0, 4), (10, 3), (23, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_tpu_expands_the_pages_in_use(dtype, start, blocks, tpu):
    """Of a chunk from `start` on, in blocks of ten queries; amid stale pages of NaN."""
    latent, rng = LATENT.latent, np.random.default_rng(start)
    q = jnp.asarray(rng.normal(size=(blocks, 10, 4, 18)), jnp.float32)
    reader = {"kernel": jnp.asarray(rng.normal(size=(4, latent.rank, 14)) / 2, jnp.float32)}
    data, scale = encode(jnp.asarray(rng.normal(size=(2, 14, 8, 1, 30)), jnp.float32), jnp.dtype(dtype))
    table = rng.permutation(13)[None, :9]
    position = start + np.arange(10 * blocks)
    position[-7:] = -1
    stale = np.setdiff1d(np.arange(14), table[0, : position.max() // 8 + 1])
    data = np.pad(data.reshape(2, 14, 8, 30), [(0, 0)] * 3 + [(0, 2)])
    if scale is None:
        data[:, stale] = np.nan
    else:
        scale = jnp.swapaxes(scale, 2, 3).at[:, stale].set(jnp.nan)
    pool, position = Pool(jnp.asarray(data), scale), jnp.asarray(position).reshape(blocks, 10)
    where = jnp.asarray(table), jnp.zeros(blocks, int), position
    with mock.patch.object(latents, "_in_use", wraps=latents._in_use) as expanded:
        found, want = (
            Latents().read(LATENT, reader, q, Paged((pool,), 1, *where, 99, 72, name))
            for name in ("pallas_tpu", "reference")
        )
    expanded.assert_called_once()
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    assert want.std() > 0.5


def test_a_row_is_a_latent_and_the_rotary_part_of_keys_once():
    """Bytes of a token of DeepSeek-V2-Lite, in rows of 576 numbers; in 8 bits a scale."""
    config = ModelConfig.from_hf(V2_LITE)
    for plan, dtype, want in [
        (config.plan(), "bfloat16", 31_104),
        (config.plan(15), "bfloat16", 31_104),
        (config.plan(15, 2), "bfloat16", 24_192),
        (config.plan(15, 4), "bfloat16", 18 * 576 * 2),
        (config.plan(15, 2), "int8", 21 * (576 + 4)),
    ]:
        make = partial(Cache.create, config, plan, pages=3, page=16, dtype=dtype)
        cache = jax.eval_shape(make, jnp.zeros((1, 2), jnp.int32))
        assert cache.bytes_per_token == want


def test_flops_are_those_of_the_published_sizes():
    """Of a prompt's token in DeepSeek-V2-Lite at split 15, share 2: 21 rows, 15 layers, of which 14 run 6 of
    64 experts and 2 shared ones; keys and values of 16 heads of 192 and 128 numbers."""
    config = ModelConfig.from_hf(V2_LITE)
    table = flops_table(config, config.plan(15, 2), 2048)
    want = {
        "kv": 21 * (2048 * 576 + 512 * 16 * 256),
        "qo": 15 * 16 * 2048 * (192 + 128),
        "mlp": 2048 * (3 * 10944 + 14 * (3 * 8 * 1408 + 64)),
        "attention": 15 * 16 * (192 + 128) * 2049 / 2,
    }
    for name, products in want.items():
        assert table[name] == pytest.approx(2e-9 * products), name


def test_weights_that_add_up_to_1_are_scaled_by_v3_alone():
    """transformers ignores `norm_topk_prob` of DeepSeek-V2, whose own code then leaves out the scale."""
    scores = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    best = -np.sort(-chances, axis=-1)[:, :6]
    for says, want in [
        ({"routed_scaling_factor": 16.0, "norm_topk_prob": False}, 16 * best),
        ({"routed_scaling_factor": 16.0, "norm_topk_prob": True}, best / best.sum(-1, keepdims=True)),
    ]:
        experts = ModelConfig.from_hf(V2_LITE | says).experts
        assert experts is not None
        np.testing.assert_allclose(route(experts, jnp.asarray(scores), None)[1], want, rtol=1e-5)
    third = ModelConfig.from_hf(V3).experts
    assert third is not None
    _, shares = route(third, jnp.zeros((1, 256)), jnp.arange(256.0))
    np.testing.assert_allclose(shares.sum(), 2.5, rtol=1e-6)


@pytest.mark.parametrize(
    "says, has",
    [
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, "dxxxxx"),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "ddxdxd"),  # a multiple of 2, from 1 on
        ({"first_k_dense_replace": 3, "moe_layer_freq": 3}, "dddxdd"),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, "xdxdxd"),
        ({"first_k_dense_replace": 6}, "dddddd"),
    ],
)
def test_layers_with_experts_are_those_of_deepseeks_own_code(says, has):
    """transformers ignores `moe_layer_freq`."""
    config = ModelConfig.from_hf(V2_LITE | {"num_hidden_layers": 6} | says)
    assert "".join({"dense": "d", "experts": "x"}[kind.mlp] for kind in config.kinds) == has
    assert ModelConfig.from_hf(config.to_hf(config.plan())) == config


def test_a_routers_bias_stays_in_float32_and_layers_that_predict_more_are_left_out(tmp_path):
    fields = (
        hf_models.LATENT
        | hf_models.DEEPSEEK_MOE
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    )
    theirs = hf_models.build("deepseek_v3", **fields)
    folder = hf_models.save(theirs.bfloat16(), tmp_path / "theirs")
    tensors = {name: x.float().numpy() for name, x in theirs.state_dict().items() if "correction" in name}
    (file,) = folder.glob("*.safetensors")
    held = load_file(file) | tensors | {"model.layers.4.eh_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(held, file, {"format": "pt"})
    model, params = from_pretrained(folder)
    assert model.dtype == "bfloat16"
    bias = params["layers"][1]["mlp"]["choice"]
    assert bias.dtype == jnp.float32
    save_pretrained(tmp_path / "ours", model, params)
    again = load_file(tmp_path / "ours" / "model.safetensors")
    for name, want in tensors.items():
        np.testing.assert_array_equal(again[name], want)


def test_distillation_trains_queries_and_rows_of_later_layers_alone():
    """Not `o_proj`, norms, routers or experts; the names are those that ArcticTraining trains."""
    model = Transformer(DEEPSEEK, DEEPSEEK.plan(2, 2))
    chosen = is_trained(model, weights.weights(model.config, model.plan), "swiftkv")
    paths = [weights.keys(path) for path, yes in jax.tree_util.tree_leaves_with_path(chosen) if yes]
    parts = {path[-2] if path[-1] == "kernel" else path[-1] for path in paths}
    assert parts == {
        *("q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "kv_b_proj", "shared_norm")
    }
    of_layers = {path[1] for path in paths if path[0] == "layers"}
    starts = weights.partition(model.plan, model.config.kinds)[0]
    assert min(starts[i].start for i in of_layers) == 2


REFUSED = [
    (V2_LITE, {"topk_method": "top_p"}, 'topk_method is "top_p"; only "greedy" or "group_limited_greedy"'),
    (V2_LITE, {"topk_method": "noaux_tc"}, 'topk_method is "noaux_tc"'),
    (V2_LITE, {"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"; only "softmax"'),
    (V2_LITE, {"n_group": 3, "topk_method": "group_limited_greedy"}, "64 experts in 3 groups"),
    (V2_LITE, {"routed_scaling_factor": "1"}, "config.json: routed_scaling_factor must be a finite number"),
    (V2_LITE, {"kv_lora_rank": None}, "kv_lora_rank must be"),
    (V2_LITE, {"qk_rope_head_dim": 63}, "must be even"),
    (V2_LITE, {"n_routed_experts": None}, "n_routed_experts must be"),
    (V2_LITE, {"moe_layer_freq": 0}, "moe_layer_freq must be"),
    (V3, {"rope_interleave": False}, "rope_interleave is false"),
    (V3, {"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
    (V3, {"model_type": "llama"}, "v_head_dim is 128"),
    (V3, {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "mlp_layer_types must be dense or"),
]


@pytest.mark.parametrize("raw, fields, said", REFUSED, ids=[str(fields) for _, fields, _ in REFUSED])
def test_what_is_not_computed_is_refused(raw, fields, said):
    with pytest.raises(UsageError, match=said):
        ModelConfig.from_hf(raw | fields)


def test_rows_of_latents_have_one_form():
    model, params = tiny(LATENT, LATENT.plan())
    for made, said in [
        (lambda: tiny(LATENT, KVPlan.standard(4)), "rows cannot be stored as 'kv': llama stores latents"),
        (lambda: to_slim(model, params, "k"), "not of latent"),
        (lambda: to_swiftkv(model, params, KVPlan.swiftkv(4, 2).stored_as("x")), "as its teacher's"),
    ]:
        with pytest.raises(UsageError, match=said):
            made()
    student, _ = to_swiftkv(model, params, KVPlan.swiftkv(4, 2, 2))
    assert student.plan == LATENT.plan(2, 2), "a plan of keys and values is read as one of latents"
    raw = V2_LITE | {
        "model_type": "deepseek_v2_swiftkv",
        "num_key_value_layers": 15,
        "key_value_group_size": 2,
    }
    assert plan_from_hf(raw) == ModelConfig.from_hf(raw).plan(15, 2)


def test_a_kernel_that_cannot_read_rows_so_wide_says_so():
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    q, pool = shape(4, 1, 16, 576), shape(2, 9, 64, 576)
    assert pallas_gpu.refuses(q, pool, pool).startswith("heads 576 and 576 wide")
