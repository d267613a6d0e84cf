"""Layers with their own numbers of heads and MLP widths, against the published definition of OpenELM."""

import dataclasses
import json
from functools import partial

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import tiny_engine as tiny
import torch
import transformers
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import swiftkv_jax as skv
from swiftkv_jax.analysis import flops
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.plan import Prediction
from swiftkv_jax.core import predict
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.surgery import layer_pruned
from swiftkv_jax.distill import least_squares, step
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.engine.llm import LLM

HEADS, KV_HEADS, FFN = (4, 4, 8, 12), (1, 1, 2, 3), (32, 64, 176, 96)
OPENELM = {
    "model_type": "openelm",
    "vocab_size": 101,
    "model_dim": 48,
    "head_dim": 12,
    "num_transformer_layers": 4,
    "num_query_heads": list(HEADS),
    "num_kv_heads": list(KV_HEADS),
    "num_gqa_groups": 4,
    "qkv_multipliers": [1.0, 3.0],
    "ffn_multipliers": [0.5, 1.21, 3.55, 1.9],  # 24, 58.1, 170.4, 91.2, to the nearest 16
    "ffn_dim_divisor": 16,
    "ffn_with_glu": True,
    "activation_fn_name": "swish",
    "normalization_layer_name": "rms_norm",
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
    "max_context_length": 128,
    "rope_max_length": 256,
    "rope_freq_constant": 10000,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def openelm(tmp_path_factory):
    """A folder with random weights by the names and in the shapes of apple/OpenELM."""
    random, width, head = np.random.default_rng(0), OPENELM["model_dim"], OPENELM["head_dim"]

    def made(*shape: int):
        noise = random.standard_normal(shape, np.float32)
        return 1 + 0.3 * noise if len(shape) == 1 else noise * shape[1] ** -0.5

    tensors = {
        "transformer.token_embeddings.weight": made(101, width),
        "transformer.norm.weight": made(width),
    }
    for i, (heads, kv_heads, ffn) in enumerate(zip(HEADS, KV_HEADS, FFN, strict=True)):
        of_layer = {
            "attn.qkv_proj": made((heads + 2 * kv_heads) * head, width),
            "attn.q_norm": made(head),
            "attn.k_norm": made(head),
            "attn.out_proj": made(width, heads * head),
            "ffn.proj_1": made(2 * ffn, width),
            "ffn.proj_2": made(width, ffn),
            "attn_norm": made(width),
            "ffn_norm": made(width),
        }
        tensors |= {f"transformer.layers.{i}.{name}.weight": value for name, value in of_layer.items()}
    folder = tmp_path_factory.mktemp("openelm")
    (folder / "config.json").write_text(json.dumps(OPENELM))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain


def turned(x):
    """[heads, T, H] rotated by position."""
    length, width = x.shape[-2:]
    angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def defined(folder, tokens) -> np.ndarray:
    """Logits [T, V] of one prompt, as modeling_openelm.py of apple/OpenELM computes them."""
    p = {
        name: torch.tensor(x) for name, x in safetensors.numpy.load_file(folder / "model.safetensors").items()
    }
    x = p["transformer.token_embeddings.weight"][list(tokens)]
    for i, (heads, kv_heads) in enumerate(zip(HEADS, KV_HEADS, strict=True)):
        w = {n.split(".", 3)[3][:-7]: v for n, v in p.items() if n.startswith(f"transformer.layers.{i}.")}
        qkv = norm(x, w["attn_norm"]) @ w["attn.qkv_proj"].T
        q, k, v = qkv.reshape(len(x), -1, 12).transpose(0, 1).split((heads, kv_heads, kv_heads))
        q, k = turned(norm(q, w["attn.q_norm"])), turned(norm(k, w["attn.k_norm"]))
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ w["attn.out_proj"].T
        gate, up = (norm(x, w["ffn_norm"]) @ w["ffn.proj_1"].T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ w["ffn.proj_2"].T
    return (norm(x, p["transformer.norm.weight"]) @ p["transformer.token_embeddings.weight"].T).numpy()


def generated(folder, prompt: list[int], count: int = 10) -> list[int]:
    for _ in range(count):
        prompt = [*prompt, int(defined(folder, prompt)[-1].argmax())]
    return prompt[-count:]


def prompts() -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(3, 101, length).tolist() for length in (1, 19, 3, 33, 8, 2)]


def test_openelm_is_its_published_definition_and_comes_back_bit_for_bit(openelm, tmp_path):
    model, params = from_pretrained(openelm)
    assert [tuple(kind.sizes) for kind in model.config.kinds] == list(zip(HEADS, KV_HEADS, FFN, strict=True))
    tokens = prompts()[3]
    got = jax.jit(model.apply)({"params": params}, jnp.array([tokens]))[0]
    want = defined(openelm, tokens)
    assert want.std() > 0.5, "flat logits would hide errors"
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    save_pretrained(tmp_path / "ours", model, params)
    files = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (openelm, tmp_path / "ours")
    )
    want, got = files
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert skv.ModelConfig.from_hf(tmp_path / "ours") == model.config


@pytest.mark.slow
def test_an_engine_serves_openelm_and_its_student(openelm, tmp_path):
    """Ragged prompts in chunks: greedy tokens of the definition, which those of an untrained student are too
    that is cut before its last layer."""
    llm = LLM(openelm, tokenizer=tiny.Bytes(), **tiny.SIZES)
    want = [generated(openelm, prompt) for prompt in prompts()]
    assert tiny.tokens(llm.generate(prompts(), tiny.GREEDY, use_tqdm=False)) == want
    with pytest.warns(UsageWarning, match="no PyTorch code"):
        save_pretrained(tmp_path, *skv.to_swiftkv(*from_pretrained(openelm), skv.KVPlan.swiftkv(4, 3)))
    student = LLM(tmp_path, tokenizer=tiny.Bytes(), **tiny.SIZES)
    assert tiny.tokens(student.generate(prompts(), tiny.GREEDY, use_tqdm=False)) == want


@pytest.mark.slow
def test_a_decilm_is_llama_with_kv_heads_of_each_layers_own(tmp_path):
    """Also in an engine, where narrower rows repeat their heads."""
    theirs = hf_models.build("llama", rope_scaling=hf_models.LLAMA3, rope_theta=5e5)
    config = {**theirs.config.to_dict(), "attn_implementation": "eager"}
    for i, kv_heads in enumerate((4, 2, 1, 2)):
        of_layer = transformers.LlamaConfig(**config | {"num_key_value_heads": kv_heads})
        theirs.model.layers[i] = LlamaDecoderLayer(of_layer, i)
    theirs = hf_models.randomised(theirs.eval(), "llama", False, 0)
    tensors = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    raw = {name: value for name, value in config.items() if name != "num_key_value_heads"}
    raw |= {"model_type": "deci", "num_key_value_heads_per_layer": [4, 2, 1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model, params = from_pretrained(tmp_path)
    tokens = prompts()[3]
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = jax.jit(model.apply)({"params": params}, jnp.array([tokens]))[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    save_pretrained(tmp_path / "ours", model, params)
    assert skv.ModelConfig.from_hf(tmp_path / "ours") == model.config
    for name, value in safetensors.numpy.load_file(tmp_path / "ours" / "model.safetensors").items():
        np.testing.assert_array_equal(value, tensors[name].numpy(), err_msg=name)
    llm = LLM(tmp_path, tokenizer=tiny.Bytes(), **tiny.SIZES)
    got = tiny.tokens(llm.generate([tokens], tiny.GREEDY, use_tqdm=False))[0]
    with torch.no_grad():
        whole = theirs(torch.tensor([tokens + got])).logits[0].argmax(-1)
    assert got == whole[len(tokens) - 1 : -1].tolist()


# Attention with so many query heads for each kv head, or absent; an MLP of so many thirds, or absent.
PARTS = [
    (4, 7.5),
    ("no_op", 16.0),
    (2, "no_op"),
    ("no_op", "no_op"),
    ("linear", 8.0),
    (2, 7.5),
    (1, "linear"),
]
PARTS += [("no_op", "no_op"), (2, 7.5), ("no_op", 7.5)]


def block(own: str, part) -> dict:
    said = {own: None, "no_op": part == "no_op", "replace_with_linear": part == "linear", "sparsify": None}
    return said | ({} if isinstance(part, str) else {own: part})


NAS = {
    "model_type": "nemotron-nas",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": len(PARTS),
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "block_configs": [
        {"attention": block("n_heads_in_group", attention), "ffn": block("ffn_mult", ffn)}
        for attention, ffn in PARTS
    ],
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def nas(tmp_path_factory):
    """A folder with random weights, whose layers lack parts as those of Nemotron-NAS do."""
    random = np.random.default_rng(1)

    def made(*shape: int):
        noise = random.standard_normal(shape, np.float32)
        return 1 + 0.3 * noise if len(shape) == 1 else noise * shape[1] ** -0.5

    tensors = {"model.embed_tokens.weight": made(101, 48), "lm_head.weight": made(101, 48)}
    tensors["model.norm.weight"] = made(48)
    for i, (attention, ffn) in enumerate(PARTS):
        of_layer = {}
        if attention != "no_op":
            of_layer["input_layernorm"] = made(48)
        if attention == "linear":
            of_layer["self_attn.linear_attn"] = made(48, 48)
        elif attention != "no_op":
            of_layer |= {f"self_attn.{x}_proj": made(48, 48) for x in "qo"}
            of_layer |= {f"self_attn.{x}_proj": made(48 // attention, 48) for x in "kv"}
        if ffn != "no_op":
            of_layer["post_attention_layernorm"] = made(48)
        if ffn == "linear":
            of_layer["mlp.linear_mlp"] = made(48, 48)
        elif ffn != "no_op":
            wide = -(-int(2 * ffn * 48 / 3) // 256) * 256
            of_layer |= {f"mlp.{x}_proj": made(wide, 48) for x in ("gate", "up")}
            of_layer["mlp.down_proj"] = made(48, wide)
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in of_layer.items()}
    folder = tmp_path_factory.mktemp("nas")
    (folder / "config.json").write_text(json.dumps(NAS))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def nas_defined(folder, tokens) -> np.ndarray:
    """Logits [T, V] of one prompt, as modeling_decilm.py of nvidia/Llama-3_1-Nemotron-51B computes them."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    p = {name.removesuffix(".weight"): torch.tensor(x) for name, x in tensors.items()}
    x = p["model.embed_tokens"][list(tokens)]
    for i, (attention, ffn) in enumerate(PARTS):
        w = {n.split(".", 3)[3]: v for n, v in p.items() if n.startswith(f"model.layers.{i}.")}
        h = norm(x, w["input_layernorm"]) if attention != "no_op" else x
        if attention == "linear":
            x = x + h @ w["self_attn.linear_attn"].T
        elif attention != "no_op":
            made = (h @ w[f"self_attn.{name}_proj"].T for name in "qkv")
            q, k, v = (y.reshape(len(x), -1, 12).transpose(0, 1) for y in made)
            k, v = (y.repeat_interleave(attention, 0) for y in (turned(k), v))
            mixed = functional.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
            x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ w["self_attn.o_proj"].T
        h = norm(x, w["post_attention_layernorm"]) if ffn != "no_op" else x
        if ffn == "linear":
            x = x + h @ w["mlp.linear_mlp"].T
        elif ffn != "no_op":
            gate, up = (h @ w[f"mlp.{name}_proj"].T for name in ("gate", "up"))
            x = x + (functional.silu(gate) * up) @ w["mlp.down_proj"].T
    return (norm(x, p["model.norm"]) @ p["lm_head"].T).numpy()


def test_layers_without_attention_or_mlp_are_their_published_definition(nas, tmp_path):
    """Only layers with attention have rows; logits, and every tensor after saving, are the definition's."""
    model, params = from_pretrained(nas)
    assert [row.maker for row in model.plan.rows] == [0, 2, 5, 6, 8]
    tokens = prompts()[3]
    got = jax.jit(model.apply)({"params": params}, jnp.array([tokens]))[0]
    want = nas_defined(nas, tokens)
    assert want.std() > 0.5, "flat logits would hide errors"
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    save_pretrained(tmp_path, model, params)
    got, want = (safetensors.numpy.load_file(at / "model.safetensors") for at in (tmp_path, nas))
    assert want.keys() == got.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert skv.ModelConfig.from_hf(tmp_path) == model.config
    table = flops.flops_table(model.config, model.plan, context=1)
    stacks = jax.tree.leaves((params["layers"], params["rows"]))
    multiplied = sum(leaf.size for leaf in stacks if leaf.ndim == 3)
    assert 1e9 * (table["kv"] + table["qo"] + table["mlp"]) == pytest.approx(2 * multiplied)


@pytest.mark.slow("None")
@pytest.mark.parametrize("split", [None, 7])
def test_an_engine_serves_layers_without_attention(split, nas, tmp_path):
    """Ragged prompts in chunks: greedy tokens of the definition. Those of an untrained student are the same
    if its last layer with attention is split off, also where the split is at a layer without any part."""
    if split:
        plan = skv.ModelConfig.from_hf(nas).plan(split)
        with pytest.warns(UsageWarning, match="no PyTorch code"):
            save_pretrained(tmp_path, *skv.to_swiftkv(*from_pretrained(nas), plan))
    llm = LLM(tmp_path if split else nas, tokenizer=tiny.Bytes(), **tiny.SIZES)
    assert llm.model.plan.num_rows == 5
    want = []
    for prompt in prompts():
        for _ in range(10):
            prompt = [*prompt, int(nas_defined(nas, prompt)[-1].argmax())]
        want.append(prompt[-10:])
    assert tiny.tokens(llm.generate(prompts(), tiny.GREEDY, use_tqdm=False)) == want


def test_a_least_squares_start_finds_the_rows_of_a_layer_behind_others_without(nas):
    """From the input of the last layer with attention its own keys and values are a linear map."""
    model, params = from_pretrained(nas)
    student, trained, frozen = step.prepare(model, params, model.config.plan(8), "copy", "swiftkv")
    untrained = jax.tree.map(jnp.zeros_like, trained["rows"])
    whole = step.merge(trained | {"rows": untrained}, frozen.student)
    tokens = jnp.array([prompts()[3]] * 2)
    alike = jnp.ones_like(tokens)
    batch = Batch(tokens, tokens, jnp.cumsum(alike, 1) - 1, alike, jnp.ones(tokens.shape))
    found = least_squares.fit(
        student, whole, *step.teacher_of(student, whole, frozen), [batch] * 3, ridge=1e-9
    )
    got = jax.jit(student.apply)({"params": found}, tokens[:1])[0]
    np.testing.assert_allclose(got, nas_defined(nas, prompts()[3]), rtol=0, atol=1e-2)


def test_groups_of_across_kv_pass_over_layers_without_attention():
    plan = skv.KVPlan.swiftkv(10, 2, 2, without=(1, 3, 4, 7, 9))
    assert plan.reads == (0, None, 1, None, None, 1, 2, None, 2, None)
    assert [(row.source, row.maker) for row in plan.rows] == [(0, 0), (2, 2), (2, 6)]
    assert plan.split_and_share == (2, 2)
    with pytest.raises(UsageError, match="split 9 of 10"):
        skv.KVPlan.swiftkv(10, 9, without=(1, 3, 4, 7, 9))


@pytest.mark.parametrize(
    "field, value", [("sparsify", ["2:4"]), ("window_length", 512), ("num_sink_tokens", 4)]
)
def test_other_kinds_of_attention_are_refused(field, value):
    blocks = [dict(each) for each in NAS["block_configs"]]
    blocks[2]["attention"] = blocks[2]["attention"] | {field: value}
    with pytest.raises(UsageError, match=rf"block_configs\[2\].attention: {field}"):
        skv.ModelConfig.from_hf(NAS | {"block_configs": blocks})


@pytest.mark.parametrize(
    "what, change",
    [
        ("ffn_multipliers must list", {"ffn_multipliers": [0.5, 4.0]}),
        ("layer 1 has 6 query heads and 1 kv heads", {"num_query_heads": [4, 6, 8, 12]}),
        ("ffn_with_glu", {"ffn_with_glu": False}),
        ("num_kv_heads", {"num_kv_heads": [1, 1, 2, 0]}),
    ],
)
def test_what_is_not_supported_is_refused(what, change):
    with pytest.raises(UsageError, match=what):
        skv.ModelConfig.from_hf(OPENELM | change)


def test_plans_that_need_equal_layers_are_refused(openelm):
    """A row cannot be the mean of rows of other widths, and no matrix turns such keys into values."""
    model, params = from_pretrained(openelm)
    with pytest.raises(UsageError, match="layer 1 has 4 and 1, layer 2 has 8 and 2"):
        skv.to_swiftkv(model, params, skv.KVPlan.swiftkv(4, 1, 2))
    with pytest.raises(UsageError, match="rows cannot be stored as 'k'"):
        skv.to_slim(model, params)


@pytest.mark.slow
def test_an_engine_serves_a_base_that_some_of_its_layers_read_for(openelm, tmp_path):
    """KV prediction from layers 0 and 2, saved and loaded: greedy tokens of the definition."""
    base, params = from_pretrained(openelm)
    auxiliary, own = layer_pruned(base, params, (0, 2))
    pair = Predicted(base, auxiliary, Prediction.nearest(4, (0, 2)))
    predictor = jax.tree.map(lambda x: 2 * x, predict.uniform(pair, jax.random.key(2)))
    parts = {"base": params, "auxiliary": own, "predictor": predictor}
    skv.save_pretrained(tmp_path / "pair", pair, parts, base=openelm)
    _, back = skv.from_pretrained(tmp_path / "pair")
    jax.tree.map(np.testing.assert_array_equal, back, parts)
    ends = np.array([len(prompt) - 1 for prompt in prompts()])
    padded = jnp.array([prompt + [0] * (33 - len(prompt)) for prompt in prompts()])
    x = jax.jit(partial(predict.forward, pair))(parts, padded)
    want = logits(base, params, x)[np.arange(len(ends)), ends].argmax(-1)[:, None].tolist()
    llm = LLM(tmp_path / "pair", tokenizer=tiny.Bytes(), **tiny.SIZES)
    greedy = dataclasses.replace(tiny.GREEDY, max_tokens=1)
    assert tiny.tokens(llm.generate(prompts(), greedy, use_tqdm=False)) == want
    assert want != [generated(openelm, prompt, 1) for prompt in prompts()], "prediction must matter"
