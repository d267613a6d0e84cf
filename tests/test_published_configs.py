"""The config.json of popular checkpoints, as published: those of our families load with the right sizes, the
others are refused by the name of their model's type."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from swiftkv_jax.checkpoint.names import slots
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.hf import FULL_ATTENTION, text_of
from swiftkv_jax.config.model import ModelConfig, plan_from_hf
from swiftkv_jax.core import weights
from swiftkv_jax.core.layers import inverse_frequencies

FOLDER = Path(__file__).parent / "published_configs"
# Checkpoint -> its number of parameters, as the hub counts them (a tied head once), or what a refusal must
# name: the model's type, or how the weights are stored.
EXPECTED = json.loads(FOLDER.with_name("published_expected.json").read_text())
PARAMETERS = {name: count for name, count in EXPECTED.items() if isinstance(count, int)}
REFUSED = {name: said for name, said in EXPECTED.items() if isinstance(said, str)}
# Warnings for configs that may be read otherwise than they were meant; every other file loads without a word.
WARNINGS = {
    "NousResearch--Yarn-Llama-2-7b-128k": "auto_map names a program",
    "microsoft--Phi-3-mini-4k-instruct": "auto_map names a program",
    "Qwen--Qwen2.5-7B-Instruct-1M": "might change the numbers: dual_chunk_attention_config=",
    "Qwen--Qwen3-VL-4B-Instruct": "qwen3_vl reads images too; only its text model is loaded",
    "google--gemma-3-4b-it": "gemma3 reads images too",
    "mistralai--Ministral-3-3B-Reasoning-2512": "mistral3 reads images too",
    "mistralai--Mistral-Small-3.1-24B-Instruct-2503": "mistral3 reads images too",
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
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_checkpoint_of_our_families_has_as_many_parameters_as_the_hub_counts(name):
    plan = plan_from_hf(published(name))
    assert plan.is_swiftkv == ("SwiftKV" in name)
    assert weights.count(weights.weights(load(name), plan)) == PARAMETERS[name]


# transformers' name of a part of Mixtral -> that of its files.
MIXTRAL = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def apart(tensors: dict[str, tuple[int, ...]], kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors as files hold them: transformers stacks experts when it loads them."""
    out = {}
    for name, shape in tensors.items():
        head, mark, part = name.partition(".experts.")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, own in itertools.product(range(shape[0] if mark else 0), parts):
            out[f"{head}.experts.{expert}.{own}.weight"] = (shape[1] // len(parts), shape[2])
        out |= {} if mark else {name: shape}
    for old, new in MIXTRAL.items() if kind == "mixtral" else ():
        out = {name.replace(old, new): shape for name, shape in out.items()}
    return out


@pytest.mark.parametrize("name", [name for name in PARAMETERS if "SwiftKV" not in name])
def test_tensors_rotary_frequencies_windows_and_norms_are_those_of_transformers(name):
    """Models of two layers are made on torch's meta device, without weights."""
    (raw, _), ours = text_of(published(name)), dataclasses.replace(load(name), wrapper=None)
    fields = {field: value for field, value in raw.items() if field not in ("model_type", "auto_map")}
    theirs = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    span = getattr(theirs, "sliding_window", None) or FULL_ATTENTION
    assert ours.windows == tuple(span if kind == "sliding_attention" else FULL_ATTENTION for kind in kinds)
    eps = next((getattr(theirs, field) for field in EPS if hasattr(theirs, field)), 1e-5)
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (eps, theirs.max_position_embeddings)
    if raw["model_type"] == "gemma3_text":  # the context that Google publishes includes a linear scaling
        assert ours.longest_context == theirs.max_position_embeddings

    short = {
        field: value[:2] for field, value in fields.items() if field in ("layer_types", "no_rope_layers")
    }
    theirs = transformers.AutoConfig.for_model(raw["model_type"], **fields | short | {"num_hidden_layers": 2})
    first = {name: getattr(ours, name)[:2] for name in ("windows", "ropes", "mlps")}
    two = dataclasses.replace(ours, num_layers=2, **first)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    tensors = {tensor: tuple(value.shape) for tensor, value in model.state_dict().items()}
    if ours.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    tensors = apart(tensors, ours.family)
    assert {tensor: slot.shape for tensor, slot in slots(two, two.plan()).items()} == tensors

    if ours.rope.rope_type == "none":
        return
    whole = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    rotary = type(model.model.rotary_emb)(whole)
    turned = getattr(whole, "no_rope_layers", None) or [True] * ours.num_layers
    for kind, own, turns in zip(kinds, ours.kinds, turned, strict=True):
        if own.rope.rope_type == "none":
            assert not turns or (raw["model_type"] == "exaone4" and kind == "full_attention")
            continue
        prefix = "" if hasattr(rotary, "inv_freq") else f"{kind}_"
        np.testing.assert_allclose(
            inverse_frequencies(ours, 1, own.rope), getattr(rotary, f"{prefix}inv_freq"), rtol=1e-5
        )
        scaling = getattr(rotary, f"{prefix}attention_scaling")
        assert turns and own.rope.attention_factor == pytest.approx(scaling)


@pytest.mark.parametrize("name", REFUSED)
def test_any_other_checkpoint_is_refused_in_a_line_that_says_why(name):
    with pytest.raises(UsageError) as error:
        ModelConfig.from_hf(published(name))
    said = str(error.value)
    assert REFUSED[name] in said.replace("'", "").split() and "\n" not in said and len(said) < 350
