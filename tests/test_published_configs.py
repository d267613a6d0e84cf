"""The config.json of popular checkpoints, as published: those of our families load with the right sizes, the
others are refused by the name of their model's type."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from swiftkv_jax.checkpoint.names import slots
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.hf import FULL_ATTENTION
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.layers import inverse_frequencies

FOLDER = Path(__file__).parent / "published_configs"
# Checkpoint -> its number of parameters, as the hub counts them (a tied head once).
PARAMETERS = {
    "01-ai--Yi-34B-200K": 34_388_917_248,
    "01-ai--Yi-6B": 6_061_035_520,
    "HuggingFaceH4--zephyr-7b-beta": 7_241_732_096,
    "HuggingFaceTB--SmolLM-1.7B-Instruct": 1_711_376_384,
    "HuggingFaceTB--SmolLM2-1.7B-Instruct": 1_711_376_384,
    "HuggingFaceTB--SmolLM2-135M": 134_515_008,
    "HuggingFaceTB--SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB--SmolLM2-360M-Instruct": 361_821_120,
    "NousResearch--Hermes-3-Llama-3.1-8B": 8_030_261_248,
    "NousResearch--Yarn-Llama-2-7b-128k": 6_738_415_616,
    "Qwen--Qwen1.5-1.8B-Chat": 1_836_828_672,
    "Qwen--Qwen1.5-7B": 7_721_324_544,
    "Qwen--Qwen2-0.5B-Instruct": 494_032_768,
    "Qwen--Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen--Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen--Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen--Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen--Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen--Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen--Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen--Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen--Qwen2.5-7B-Instruct-1M": 7_615_616_512,
    "Qwen--Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen--Qwen3-0.6B": 596_049_920,
    "Qwen--Qwen3-1.7B": 1_720_574_976,
    "Qwen--Qwen3-14B": 14_768_307_200,
    "Qwen--Qwen3-32B": 32_762_123_264,
    "Qwen--Qwen3-4B": 4_022_468_096,
    "Qwen--Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen--Qwen3-8B": 8_190_735_360,
    "Snowflake--Llama-3.1-SwiftKV-8B-Instruct": 8_030_261_248 + 4096,  # norm_swiftkv
    "TinyLlama--TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "allenai--OLMo-2-1124-7B": 7_298_617_344,
    "codellama--CodeLlama-34b-Instruct-hf": 33_743_970_304,
    "codellama--CodeLlama-7b-hf": 6_738_546_688,
    "deepseek-ai--DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "deepseek-ai--deepseek-coder-6.7b-instruct": 6_740_512_768,
    "deepseek-ai--deepseek-llm-7b-chat": 6_910_365_696,
    "facebook--opt-125m": 125_239_296,
    "google--gemma-2b": 2_506_172_416,
    "huggyllama--llama-7b": 6_738_415_616,
    "lmsys--vicuna-7b-v1.5": 6_738_415_616,
    "meta-llama--Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama--Llama-2-70b-hf": 68_976_648_192,
    "meta-llama--Llama-2-7b-hf": 6_738_415_616,
    "meta-llama--Llama-3.1-405B": 405_853_388_800,
    "meta-llama--Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama--Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama--Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama--Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama--Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama--Meta-Llama-3-8B-Instruct": 8_030_261_248,
    "microsoft--Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft--phi-4": 14_659_507_200,
    "mistralai--Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai--Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "mistralai--Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai--Mistral-7B-v0.1": 7_241_732_096,
    "mistralai--Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai--Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai--Mistral-Small-Instruct-2409": 22_247_282_688,
    "nvidia--Llama-3.1-Nemotron-70B-Instruct-HF": 70_553_706_496,
    "openai-community--gpt2": 124_439_808,
    "teknium--OpenHermes-2.5-Mistral-7B": 7_241_748_480,
    "tiiuae--Falcon3-7B-Instruct": 7_455_550_464,
    "unsloth--Llama-3.2-1B-Instruct": 1_235_814_400,
    "unsloth--Qwen2.5-7B-Instruct": 7_615_616_512,
    "unsloth--Qwen3-0.6B": 596_049_920,
    "unsloth--llama-3-8b-Instruct": 8_030_261_248,
    "unsloth--phi-4": 14_659_507_200,  # rewritten as a Llama
}
# Warnings for configs that may be read otherwise than they were meant; every other file loads without a word.
WARNINGS = {
    "NousResearch--Yarn-Llama-2-7b-128k": "auto_map names a program",
    "microsoft--Phi-3-mini-4k-instruct": "auto_map names a program",
    "Qwen--Qwen2.5-7B-Instruct-1M": "might change the numbers: dual_chunk_attention_config=",
}
# Checkpoint -> what the refusal must name: the model's type, or how the weights are stored.
REFUSED = {
    "Qwen--Qwen1.5-MoE-A2.7B": "qwen2_moe",
    "Qwen--Qwen3-30B-A3B": "qwen3_moe",
    "Qwen--Qwen3-32B-FP8": "quantization_config",
    "bigcode--starcoder2-15b": "starcoder2",
    "deepseek-ai--DeepSeek-V2-Lite": "deepseek_v2",
    "deepseek-ai--DeepSeek-V3": "deepseek_v3",
    "facebook--opt-350m": "do_layer_norm_before",
    "google--gemma-2-9b": "gemma2",
    "google--gemma-3-1b-it": "gemma3_text",
    "hugging-quants--Meta-Llama-3.1-8B-Instruct-AWQ-INT4": "quantization_config",
    "ibm-granite--granite-3.1-8b-instruct": "granite",
    "internlm--internlm2_5-7b-chat": "internlm2",
    "mistralai--Ministral-3-3B-Reasoning-2512": "mistral3",
    "mistralai--Mixtral-8x7B-v0.1": "mixtral",
    "moonshotai--Kimi-K2-Instruct": "kimi_k2",
    "openai--gpt-oss-20b": "gpt_oss",
    "tiiuae--falcon-7b": "falcon",
    "unsloth--llama-3-8b-Instruct-bnb-4bit": "quantization_config",
    "zai-org--GLM-4-9B-0414": "glm4",
}


EPS = ("rms_norm_eps", "layer_norm_epsilon")  # what transformers calls a norm's epsilon


def published(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def load(name: str) -> ModelConfig:
    """Our reading of a file; a warning fails the test, but for those that must be."""
    if name not in WARNINGS:
        return ModelConfig.from_hf(published(name))
    with pytest.warns(UsageWarning, match=WARNINGS[name]) as caught:
        config = ModelConfig.from_hf(published(name))
    assert len(caught) == 1
    return config


def test_every_file_is_expected_to_load_or_to_be_refused():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted([*PARAMETERS, *REFUSED])


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_checkpoint_of_our_families_has_as_many_parameters_as_the_hub_counts(name):
    plan = plan_from_hf(published(name))
    assert plan.is_swiftkv == ("SwiftKV" in name)
    assert weights.count(weights.weights(load(name), plan)) == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if "SwiftKV" not in name])
def test_tensors_rotary_frequencies_windows_and_norms_are_those_of_transformers(name):
    """Models of two layers are made on torch's meta device, without weights."""
    raw, ours = published(name), load(name)
    fields = {field: value for field, value in raw.items() if field not in ("model_type", "auto_map")}
    theirs = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    span = getattr(theirs, "sliding_window", None) or FULL_ATTENTION
    assert ours.windows == tuple(span if kind == "sliding_attention" else FULL_ATTENTION for kind in kinds)
    eps = next((getattr(theirs, field) for field in EPS if hasattr(theirs, field)), 1e-5)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (eps, theirs.max_position_embeddings)

    theirs = transformers.AutoConfig.for_model(raw["model_type"], **fields | {"num_hidden_layers": 2})
    two = dataclasses.replace(ours, num_layers=2, windows=ours.windows[:2])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    tensors = {tensor: tuple(value.shape) for tensor, value in model.state_dict().items()}
    if ours.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    assert {tensor: slot.shape for tensor, slot in slots(two, KVPlan.standard(2)).items()} == tensors

    if ours.rope.rope_type == "none":
        return
    rotary = type(model.model.rotary_emb)(theirs)
    np.testing.assert_allclose(inverse_frequencies(ours, 1), rotary.inv_freq, rtol=1e-5)
    assert ours.rope.attention_factor == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_checkpoint_is_refused_in_a_line_that_says_why(name):
    with pytest.raises(UsageError) as error:
        ModelConfig.from_hf(published(name))
    said = str(error.value)
    assert REFUSED[name] in said.replace("'", "").split() and "\n" not in said and len(said) < 250
