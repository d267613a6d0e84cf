"""ModelConfig: published config.json files in both spellings, back again, and the text of every refusal."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import transformers

from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.hf import FULL_ATTENTION
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig

FILES = {
    "Llama-2-7b": "meta-llama--Llama-2-7b-hf", "Llama-3.1-8B": "meta-llama--Llama-3.1-8B-Instruct",
    "Llama-3.2-3B": "meta-llama--Llama-3.2-3B-Instruct", "Mistral-7B-v0.1": "mistralai--Mistral-7B-v0.1",
    "Mistral-Small-2409": "mistralai--Mistral-Small-Instruct-2409",
    "Qwen2.5-14B": "Qwen--Qwen2.5-14B-Instruct", "Qwen3-8B": "Qwen--Qwen3-8B",
}  # fmt: skip
FOLDER = Path(__file__).parent / "published_configs"
PUBLISHED = {name: json.loads((FOLDER / f"{file}.json").read_text()) for name, file in FILES.items()}
SMALL = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12}
SMALL |= {"num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 64}


def of(name) -> ModelConfig:
    return ModelConfig.from_hf(PUBLISHED[name])


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
    found = small.num_kv_heads, small.head_dim, small.rms_norm_eps, small.rope.rope_theta
    assert found == (2, 4, 1e-6, 1e4)
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
    tailed = student | {"swiftkv_tail": 5}
    assert plan_from_hf(tailed) == KVPlan.swiftkv(4, 2, tail=5) != KVPlan.swiftkv(4, 2)
    assert plan_from_hf(ModelConfig.from_hf(tailed).to_hf(plan_from_hf(tailed))) == plan_from_hf(tailed)
    assert plan_from_hf(SMALL) == KVPlan.standard(4)
    assert ModelConfig.from_hf(student) == ModelConfig.from_hf(SMALL)
    written = ModelConfig.from_hf(SMALL).to_hf(KVPlan.swiftkv(4, 1, 2))
    assert (
        written["architectures"] == ["LlamaSwiftKVForCausalLM"] and written["model_type"] == "llama_swiftkv"
    )
    assert (written["num_key_value_layers"], written["key_value_group_size"]) == (1, 2)


QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2}
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2}
LONGROPE = {"type": "longrope", "original_max_position_embeddings": 16}
GEMMA3 = {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"}
BAD = [
    {"model_type": "bloom"},
    {"attn_logit_softcapping": 50.0},
    {"is_causal": False},
    {"hidden_act": "gelu"},
    {"quantization_config": {"bits": 8}},
    {"partial_rotary_factor": 0.5},
    {"vocab_size": None},
    {"num_attention_heads": 0},
    {"head_dim": 4.0},
    {"tie_word_embeddings": "no"},
    QWEN2 | {"attention_bias": True},
    QWEN2 | {"mlp_bias": True},
    {"layer_types": ["sliding_attention"] * 4},
    MISTRAL | {"sliding_window": 0},
    QWEN2 | {"layer_types": ["chunked_attention"] * 4},
    MISTRAL | {"layer_types": ["full_attention"] * 4},
    QWEN2 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": "all"},
    {"rope_scaling": {"rope_type": "proportional"}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}},
    {"rope_scaling": {"type": "default", "mrope_section": [16]}},
    {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "proportional"}}},
    GEMMA3 | {"sliding_window_pattern": -1},
    MISTRAL | {"model_type": "exaone4", "sliding_window_pattern": "LX"},
    MISTRAL | {"model_type": "smollm3", "no_rope_layers": [1, 2, 1, 1]},
    {"rope_theta": "big"},
    {"rope_scaling": LONGROPE | {"short_factor": [1.0], "long_factor": [2.0]}},
    {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"rope_scaling": {"type": "llama3", "factor": 8.0}},
]


OTHERS = [  # which another name says
    ({"model_type": "qwen2"}, "num_key_value_heads"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_kv_heads"),
    ({"torch_dtype": "int8"}, "dtype"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": LONGROPE}, "short_factor"),
]


def inside(fields: dict) -> set[str]:
    """The names of fields, and of those in them."""
    return {*fields}.union(*(inside(value) for value in fields.values() if isinstance(value, dict)))


@pytest.mark.parametrize("fields, names", [*((each, inside(each) - {"type"}) for each in BAD), *OTHERS])
def test_an_invalid_config_json_is_refused_by_the_name_of_a_field(fields, names):
    with pytest.raises(UsageError) as error:
        ModelConfig.from_hf(SMALL | fields)
    assert any(name in str(error.value) for name in ([names] if isinstance(names, str) else names))


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


DOUBTFUL = [
    ({"some_new_part": 0.5}, "some_new_part=0.5"),
    ({"some_new_part": 0}, "some_new_part=0"),
    ({"another": True}, "another=true"),
    ({"a": {"b": list(range(99))}}, "a="),
    ({"a": 1, "b": 2, "rms_eps": None}, "a=1, b=2"),
    ({"rope_thetas": 1.0}, "did you mean 'rope_theta'"),
    ({"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "modeling_x.X"}}, "modeling_x.X"),
]


@pytest.mark.parametrize("fields, message", DOUBTFUL)
def test_unknown_fields_that_might_change_the_numbers_are_named_in_one_warning(fields, message):
    with pytest.warns(UsageWarning, match=re.escape(message)) as caught:
        assert ModelConfig.from_hf(SMALL | fields) == ModelConfig.from_hf(SMALL)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def test_a_qwen_that_was_rewritten_as_a_llama_has_no_window():
    fields = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
    assert ModelConfig.from_hf(SMALL | fields) == ModelConfig.from_hf(SMALL)


def test_a_students_invalid_config_json_is_refused():
    layers = [{"num_key_value_layers": 5}, {"num_key_value_layers": 0}, {"num_hidden_layers": None}]
    tails = ({"swiftkv_tail": -1}, {"swiftkv_tail": "5"}, {"swiftkv_tail": 1, "num_key_value_layers": 4})
    for fields in (*layers, *tails, {"key_value_group_size": 0}, {"model_type": "bloom_swiftkv"}):
        with pytest.raises(UsageError):
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


def test_the_folder_of_a_run_is_told_from_the_student_in_it(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "run", "steps": 3}')
    with pytest.raises(UsageError, match="model_type"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(UsageError):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_null_heads_of_keys_are_one_for_each_head(family):
    raw = SMALL | {"model_type": family, "num_key_value_heads": None}
    assert ModelConfig.from_hf(raw).num_kv_heads == raw["num_attention_heads"]
    if family != "mistral":  # transformers read it so before it checked types
        assert transformers.AutoConfig.for_model(**raw).num_key_value_heads == raw["num_attention_heads"]
