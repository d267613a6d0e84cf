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
from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.plan import Prediction
from swiftkv_jax.core import predict
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.surgery import layer_pruned
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
    got = logits(model, params, forward(model, params, jnp.array([tokens])))[0]
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


BLOCKS = [
    {"attention": {"n_heads_in_group": 4 // n, "no_op": False}, "ffn": {"ffn_mult": m, "no_op": False}}
    for n, m in ((4, 7.5), (2, 16.0), (1, 8.0), (2, 7.5))  # of 2 / 3 x 48, up to a multiple of 256
]
DECILM = {
    "nemotron-nas": ({"block_configs": BLOCKS}, (256, 512, 256, 256)),
    "deci": ({"num_key_value_heads_per_layer": [4, 2, 1, 2], "intermediate_size": 80}, (80,) * 4),
}


@pytest.mark.slow("deci")
@pytest.mark.parametrize("family", DECILM)
def test_a_decilm_is_llama_with_layers_of_those_sizes(family, tmp_path):
    """Also in an engine, where narrower rows repeat their heads."""
    said, widths = DECILM[family]
    theirs = hf_models.build("llama", rope_scaling=hf_models.LLAMA3, rope_theta=5e5)
    config = {**theirs.config.to_dict(), "attn_implementation": "eager"}
    for i, (kv_heads, ffn) in enumerate(zip((4, 2, 1, 2), widths, strict=True)):
        of_layer = transformers.LlamaConfig(
            **config | {"num_key_value_heads": kv_heads, "intermediate_size": ffn}
        )
        theirs.model.layers[i] = LlamaDecoderLayer(of_layer, i)
    theirs = hf_models.randomised(theirs.eval(), "llama", False, 0)
    tensors = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    raw = {
        name: value
        for name, value in config.items()
        if name not in ("num_key_value_heads", "intermediate_size")
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | said | {"model_type": family}))
    model, params = from_pretrained(tmp_path)
    tokens = prompts()[3]
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0].numpy()
    got = logits(model, params, forward(model, params, jnp.array([tokens])))[0]
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


@pytest.mark.parametrize("part", ["attention", "ffn"])
def test_blocks_without_attention_or_mlp_are_refused(part):
    raw = {"model_type": "nemotron-nas", "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    block = BLOCKS[0] | {part: {"no_op": True}}
    with pytest.raises(UsageError, match=f"{part}: no_op is True"):
        skv.ModelConfig.from_hf(raw | {"vocab_size": 101, "block_configs": [block]})


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
