"""ModelConfig: published config.json files in both spellings, back again, and the text of every refusal."""

import dataclasses
import json

import pytest
import transformers

from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.hf import FULL_ATTENTION
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig

COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_31_8B = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_32_3B = LLAMA_31_8B | {
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_hidden_layers": 28,
    "rope_scaling": LLAMA3_ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
LLAMA_2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B = COMMON | {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
MISTRAL_SMALL = MISTRAL_7B | {
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
QWEN25_14B = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "max_position_embeddings": 32768,
    "max_window_layers": 70,
    "model_type": "qwen2",
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_8B = QWEN25_14B | {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "rope_scaling": None,
    "sliding_window": None,
}
PUBLISHED = {
    "Llama-2-7b": LLAMA_2_7B,
    "Llama-3.1-8B": LLAMA_31_8B,
    "Llama-3.2-3B": LLAMA_32_3B,
    "Mistral-7B-v0.1": MISTRAL_7B,
    "Mistral-Small-2409": MISTRAL_SMALL,
    "Qwen2.5-14B": QWEN25_14B,
    "Qwen3-8B": QWEN3_8B,
}
SMALL = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def of(name) -> ModelConfig:
    return ModelConfig.from_hf(PUBLISHED[name])


def test_published_configs_are_read_correctly():
    assert of("Llama-3.1-8B").rope == RopeConfig(
        rope_type="llama3", rope_theta=5e5, factor=8.0, original_max_position_embeddings=8192
    )
    assert of("Llama-3.1-8B").kv_width == 1024 and of("Llama-3.1-8B").head_dim == 128
    assert of("Llama-3.2-3B").tie_word_embeddings and of("Llama-3.2-3B").rope.factor == 32
    assert of("Llama-2-7b").dtype == "float16" and of("Llama-2-7b").rope == RopeConfig()
    assert of("Mistral-7B-v0.1").windows == (4096,) * 32
    assert of("Mistral-Small-2409").windows == (FULL_ATTENTION,) * 56
    assert of("Mistral-Small-2409").num_heads * of("Mistral-Small-2409").head_dim == 6144
    assert of("Qwen2.5-14B").windows == (FULL_ATTENTION,) * 48, "use_sliding_window is false"
    assert of("Qwen2.5-14B").qkv_bias and not of("Qwen2.5-14B").o_bias
    assert of("Qwen3-8B").qk_norm and not of("Qwen3-8B").qkv_bias
    assert {of(name).dtype for name in list(PUBLISHED)[1:]} == {"bfloat16"}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("plan", ["standard", "swiftkv"])
def test_a_written_config_reads_back_the_same(name, plan, tmp_path):
    config = of(name)
    layers = config.num_layers
    plan = KVPlan.standard(layers) if plan == "standard" else KVPlan.swiftkv(layers, layers // 2, 4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf(plan)))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert (ModelConfig.from_hf(source), plan_from_hf(source)) == (config, plan)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_spelling_of_transformers_5_means_the_same(name):
    """`rope_parameters` holds theta and scaling, `dtype` replaces `torch_dtype`, `layer_types` the flags."""
    raw = dict(PUBLISHED[name])
    config = ModelConfig.from_hf(raw)
    theta, scaling = raw.pop("rope_theta", 10000.0), raw.pop("rope_scaling", None) or {"rope_type": "default"}
    raw["rope_parameters"] = scaling | {"rope_theta": theta}
    raw["dtype"] = raw.pop("torch_dtype")
    if raw["model_type"] != "llama":
        kinds = {FULL_ATTENTION: "full_attention", 4096: "sliding_attention"}
        raw["layer_types"] = [kinds[window] for window in config.windows]
    assert ModelConfig.from_hf(raw) == config


def test_fields_that_may_be_left_out():
    small = ModelConfig.from_hf(SMALL)
    assert (small.num_kv_heads, small.head_dim, small.rms_norm_eps, small.rope.rope_theta) == (
        2,
        4,
        1e-6,
        1e4,
    )
    rest = {"num_key_value_heads": 2}
    assert ModelConfig.from_hf(SMALL | rest | {"model_type": "mistral"}).windows == (4096,) * 4
    assert ModelConfig.from_hf(SMALL | rest | {"model_type": "qwen3"}).head_dim == 128
    window = {"use_sliding_window": True, "sliding_window": 3}
    deep = SMALL | rest | window | {"model_type": "qwen2", "num_hidden_layers": 30}
    assert ModelConfig.from_hf(deep).windows == (FULL_ATTENTION,) * 28 + (3, 3)
    shallow = deep | {"num_hidden_layers": 4, "max_window_layers": 1}
    assert ModelConfig.from_hf(shallow).windows == (FULL_ATTENTION, 3, 3, 3)
    types = ["sliding_attention", "full_attention"] * 2
    assert ModelConfig.from_hf(shallow | {"layer_types": types}).windows == (3, FULL_ATTENTION) * 2


def test_yarn_factors():
    """attention_factor is 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22), or the quotient of the mscales."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

    def rope(**fields):
        return RopeConfig.from_hf(SMALL | {"rope_scaling": yarn | fields})

    assert rope().attention_factor == pytest.approx(1.1386294361)
    assert rope(mscale=0.707, mscale_all_dim=0.707).attention_factor == 1.0
    assert rope(mscale=2.0, mscale_all_dim=1.0).attention_factor == pytest.approx(1.2772588722 / 1.1386294361)
    assert rope(attention_factor=1.3, mscale=2.0, mscale_all_dim=1.0).attention_factor == 1.3
    assert rope(factor=None).factor == 4.0, "the quotient of the context lengths"
    assert rope(beta_fast=None).beta_fast == 32.0
    published = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True}
    assert RopeConfig.from_hf(SMALL | {"rope_scaling": published}) == rope()
    outside = SMALL | {"rope_scaling": published | {"original_max_position_embeddings": 8}}
    assert RopeConfig.from_hf(outside | {"original_max_position_embeddings": 16}) == rope()


def test_swiftkv_fields():
    student = SMALL | {"model_type": "llama_swiftkv", "swiftkv": True, "num_key_value_layers": 2}
    assert plan_from_hf(student) == KVPlan.swiftkv(4, 2)
    assert plan_from_hf(student | {"key_value_group_size": 2}) == KVPlan.swiftkv(4, 2, 2)
    assert plan_from_hf(SMALL) == KVPlan.standard(4)
    assert ModelConfig.from_hf(student) == ModelConfig.from_hf(SMALL)
    written = ModelConfig.from_hf(SMALL).to_hf(KVPlan.swiftkv(4, 1, 2))
    assert (
        written["architectures"] == ["LlamaSwiftKVForCausalLM"] and written["model_type"] == "llama_swiftkv"
    )
    assert (written["num_key_value_layers"], written["key_value_group_size"]) == (1, 2)


QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2}
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
BAD = {
    "model_type": (
        {"model_type": "bloom"},
        "model_type 'bloom' is not supported; known: llama, mistral, qwen2, qwen3",
    ),
    "no_model_type": ({"model_type": None}, "model_type None is not supported"),
    "soft_cap": (
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping is 50.0; only null or false is supported",
    ),
    "interleaved": ({"rope_interleaved": True}, "rope_interleaved is true; only null or false is supported"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8; only null or false is supported"),
    "multiplier": ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22; only 1 or null is supported"),
    "not_causal": ({"is_causal": False}, "is_causal is false; only true or null is supported"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; only "silu" or "swish" is supported'),
    "quantized": ({"quantization_config": {"bits": 8}}, "quantization_config is .*quantised weights are not"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial_new": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor other than 1.0",
    ),
    "missing": ({"vocab_size": None}, "field 'vocab_size' is missing"),
    "missing_heads": ({"model_type": "qwen2"}, "field 'num_key_value_heads' is missing"),
    "string": ({"hidden_size": "8"}, "hidden_size must be an integer, not '8'"),
    "zero_heads": ({"num_attention_heads": 0}, r"num_attention_heads must be in \[1, 2147483647\], not 0"),
    "bool": ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, not True"),
    "float": ({"head_dim": 4.0}, "head_dim must be an integer, not 4.0"),
    "odd_head": ({"head_dim": 5}, "head_dim must be even for rotary embeddings, not 5"),
    "ratio": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "num_heads 4 is not a multiple of num_kv_heads 3",
    ),
    "flag": ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, not 'no'"),
    "eps": ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number, not 'small'"),
    "dtype": ({"torch_dtype": "int8"}, "dtype 'int8' is not supported; known: float32, bfloat16, float16"),
    "qwen2_bias": (QWEN2 | {"attention_bias": True}, "attention_bias is true, but qwen2 has no such choice"),
    "mistral_bias": (MISTRAL | {"attention_bias": True}, "attention_bias is true, but mistral"),
    "qwen2_mlp_bias": (QWEN2 | {"mlp_bias": True}, "mlp_bias is true, but qwen2 has no MLP biases"),
    "llama_window": ({"sliding_window": 4}, "llama has no sliding window, but sliding_window is 4"),
    "llama_types": ({"layer_types": ["sliding_attention"] * 4}, "no sliding window is in force"),
    "window": (MISTRAL | {"sliding_window": 0}, r"sliding_window must be in \[1, 2147483647\], not 0"),
    "types_short": (QWEN2 | {"layer_types": ["full_attention"]}, "for 4 layers"),
    "types_unknown": (
        QWEN2 | {"layer_types": ["chunked_attention"] * 4},
        "layer_types must name full_attention or",
    ),
    "types_off": (QWEN2 | {"layer_types": ["sliding_attention"] * 4}, "no sliding window is in force"),
    "types_mixed": (
        MISTRAL | {"layer_types": ["full_attention"] * 4},
        "mistral has its window on every layer",
    ),
    "max_window": (
        QWEN2 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": "all"},
        "max_window_layers must be an integer, not 'all'",
    ),
    "rope_type": (
        {"rope_scaling": {"rope_type": "proportional"}},
        "rope_type 'proportional' is not supported; known:",
    ),
    "rope_list": ({"rope_scaling": [1]}, r"rope_scaling must be an object or null, not \[1\]"),
    "rope_extra": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}},
        "does not take beta_fast",
    ),
    "rope_section": (
        {"rope_scaling": {"type": "default", "mrope_section": [16]}},
        "does not take mrope_section",
    ),
    "rope_factor": ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs a factor"),
    "rope_negative": (
        {"rope_scaling": {"type": "linear", "factor": -1}},
        "factor must be above 0, not -1.0",
    ),
    "rope_string": ({"rope_scaling": YARN | {"factor": "4"}}, "factor must be a finite number, not '4'"),
    "rope_theta": ({"rope_theta": "big"}, "rope_theta must be a finite number, not 'big'"),
    "longrope_lists": (
        {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 16}},
        "rope_type 'longrope' needs short_factor",
    ),
    "longrope_length": (
        {
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 16,
                "short_factor": [1.0],
                "long_factor": [2.0],
            }
        },
        "longrope needs [0-9]+ numbers in short_factor and long_factor each, not 1 and 1",
    ),
    "partial_rotation": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "llama has no partial_rotary_factor other than 1.0",
    ),
    "yarn_truncate": ({"rope_scaling": YARN | {"truncate": 1}}, "truncate must be true or false, not 1"),
    "llama3_original": (
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
        "needs original_max_position_embeddings",
    ),
    "llama3_factors": (
        {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}},
        "needs high_freq_factor > low_freq_factor, not 4.0 and 4.0",
    ),
}


@pytest.mark.parametrize("fields, message", BAD.values(), ids=BAD)
def test_an_invalid_config_json_is_refused(fields, message):
    with pytest.raises(UsageError, match=message) as error:
        ModelConfig.from_hf(SMALL | fields)
    assert "\n" not in str(error.value)


INERT = {
    "off": {"some_new_part": None, "another": False, "a_third": [], "a_fourth": {}},
    "names": {"_name_or_path": "x/y", "pad_token": "<pad>", "unk_token_id": 0, "tokenizer_class": "T"},
    "versions": {"transformers_version": "5.1", "unsloth_version": "2024.9", "_commit_hash": "0a1b"},
    "training": {"unsloth_fixed": True, "attention_dropout": 0.1, "initializer_range": 0.02},
    "metadata": {"transformers.js_config": {"dtype": "q4"}, "auto_map": {"AutoTokenizer": "code.Tokenizer"}},
    "parts_that_are_off": {"rope_interleaved": False, "num_experts": 0, "logits_scaling": 1.0},
}


@pytest.mark.parametrize("fields", INERT.values(), ids=INERT)
def test_config_fields_without_effect_are_ignored_silently(fields):
    assert ModelConfig.from_hf(SMALL | fields) == ModelConfig.from_hf(SMALL)


DOUBTFUL = {
    "number": (
        {"some_new_part": 0.5},
        "fields are ignored, and might change the numbers: some_new_part=0.5$",
    ),
    "zero": ({"some_new_part": 0}, "some_new_part=0$"),
    "true": ({"another": True}, "another=true$"),
    "text": ({"kind_of_norm": "layer"}, 'kind_of_norm="layer"$'),
    "long": ({"a": {"b": list(range(99))}}, r'a=\{"b": \[0, 1, .{30,60}\.\.\.$'),
    "all": ({"a": 1, "b": 2, "rms_eps": None}, "a=1, b=2$"),
    "typo": ({"rope_thetas": 1.0}, r"rope_thetas=1.0 \(did you mean 'rope_theta'\?\)$"),
    "no_likeness": ({"dual_chunk_attention_config": {"chunk_size": 9}}, r'_config=\{"chunk_size": 9\}$'),
    "program": (
        {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "modeling_x.X"}},
        'auto_map names a program, "modeling_x.X", which is not run: the model is read as a plain llama',
    ),
    "a_students_program": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_swiftkv.LlamaSwiftKVForCausalLM"}},
        'names a program, "modeling_swiftkv.LlamaSwiftKVForCausalLM", which is not run',
    ),
}


@pytest.mark.parametrize("fields, message", DOUBTFUL.values(), ids=DOUBTFUL)
def test_unknown_fields_that_might_change_the_numbers_are_named_in_one_warning(fields, message):
    with pytest.warns(UsageWarning, match=message) as caught:
        assert ModelConfig.from_hf(SMALL | fields) == ModelConfig.from_hf(SMALL)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_a_qwen_that_was_rewritten_as_a_llama_has_no_window():
    fields = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
    assert ModelConfig.from_hf(SMALL | fields) == ModelConfig.from_hf(SMALL)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_key_value_layers": 5}, r"split must be in \[1, 4\] for 4 layers, not 5"),
        ({"num_key_value_layers": 0}, r"num_key_value_layers must be in \[1, 2147483647\], not 0"),
        ({"key_value_group_size": 0}, r"key_value_group_size must be in \[1, 2147483647\], not 0"),
        ({"num_hidden_layers": None}, "field 'num_hidden_layers' is missing"),
        ({"model_type": "bloom_swiftkv"}, "model_type 'bloom_swiftkv' is not supported"),
    ],
)
def test_a_students_invalid_config_json_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        plan_from_hf(SMALL | {"model_type": "llama_swiftkv"} | fields)


@pytest.mark.parametrize(
    "fields, lost",
    [
        ({"windows": (3,) * 4}, "windows"),
        ({"family": "qwen2"}, "qkv_bias"),
        ({"qkv_bias": True}, "o_bias"),
        ({"family": "mistral", "windows": (3, 3, 3, FULL_ATTENTION)}, "windows"),
        ({"family": "qwen3", "qk_norm": True, "windows": (3, 4, 5, 6)}, "windows"),
        ({"rope": RopeConfig(rope_type="linear", factor=2.0, beta_fast=3.0)}, "rope"),
    ],
)
def test_a_config_that_no_family_can_express_is_not_saved(fields, lost):
    config = dataclasses.replace(ModelConfig.from_hf(SMALL), **fields)
    with pytest.raises(UsageError, match=f"config.json cannot express {lost}="):
        config.to_hf(KVPlan.standard(4))


@pytest.mark.parametrize(
    "text, message", [("{", "is not JSON"), ("[1]", "must hold a JSON object, not list")]
)
def test_a_malformed_config_json_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        ModelConfig.from_hf(tmp_path)
    with pytest.raises(UsageError, match=r"cannot read .*config.json: No such file"):
        ModelConfig.from_hf(tmp_path / "elsewhere" / "config.json")


def test_the_folder_of_a_run_is_told_from_the_student_in_it(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "run", "steps": 3}')
    with pytest.raises(UsageError, match="model_type None is not supported"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is the folder of a run; its student is in .*export$"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_null_heads_of_keys_are_one_for_each_head(family):
    raw = SMALL | {"model_type": family, "num_key_value_heads": None}
    assert ModelConfig.from_hf(raw).num_kv_heads == raw["num_attention_heads"]
    if family != "mistral":  # transformers read it so before it checked types
        assert transformers.AutoConfig.for_model(**raw).num_key_value_heads == raw["num_attention_heads"]
