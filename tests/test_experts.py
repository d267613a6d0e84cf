"""Mixtures of experts: routers are those of transformers' modules; what cannot be is refused in one line."""

import dataclasses

import hf_models
import jax
import numpy as np
import pytest
import torch
from tiny_models import MOE
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.layers import route
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.surgery import widened

EXPERTS = Experts(count=12, per_token=3, width=8, scale=2.5)
GROUPS = {"groups": 4, "top_groups": 2}
ROUTERS = {
    "greedy": (DeepseekV2TopkRouter, EXPERTS),
    "group_limited_greedy": (DeepseekV2TopkRouter, dataclasses.replace(EXPERTS, **GROUPS)),
    "noaux_tc": (DeepseekV3TopkRouter, dataclasses.replace(EXPERTS, **GROUPS)),
    "noaux_tc normalised": (DeepseekV3TopkRouter, dataclasses.replace(EXPERTS, **GROUPS, normalise=True)),
}


@pytest.mark.parametrize("case", ROUTERS)
def test_routers_of_deepseek_are_those_of_transformers(case):
    (made, experts), random = ROUTERS[case], np.random.default_rng(0)
    experts = dataclasses.replace(experts, router=case.split()[0])
    fields = {"n_routed_experts": 12, "num_experts_per_tok": 3, "hidden_size": 16, "n_group": experts.groups}
    fields |= {"topk_group": experts.top_groups, "topk_method": experts.router}
    fields |= {"routed_scaling_factor": 2.5, "norm_topk_prob": experts.normalise}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    kind = "deepseek_v3" if made is DeepseekV3TopkRouter else "deepseek_v2"
    theirs = made(AutoConfig.for_model(kind, **fields))
    x, w, bias = (random.standard_normal(shape, np.float32) for shape in ((50, 16), (12, 16), (12,)))
    theirs.weight.data.copy_(torch.tensor(w))
    biased = experts.router == "noaux_tc"
    if biased:
        theirs.e_score_correction_bias.copy_(torch.tensor(bias))
    with torch.no_grad():
        _, shares, chosen = theirs(torch.tensor(x))
    ours, own = route(experts, jax.numpy.asarray(x @ w.T), jax.numpy.asarray(bias) if biased else None)
    want, got = np.zeros((2, 50, 12), np.float32)
    np.put_along_axis(want, chosen.numpy(), shares.numpy(), 1)
    np.put_along_axis(got, np.asarray(ours), np.asarray(own), 1)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_tokens_whose_experts_rounding_may_decide_are_not_compared():
    """Two experts with the same router, one of which is the last that a token runs; and all tokens behind."""
    theirs = hf_models.make("mixtral")
    gate, seen = theirs.model.layers[2].mlp.gate, []
    gate.weight.data[1] = gate.weight.data[4]
    gate.register_forward_hook(lambda _, given, __: seen.append(given[0] @ gate.weight.T))
    logits, sure = hf_models.decided(lambda: hf_models.torch_logits(theirs, hf_models.tokens()), most=1)
    scores = seen[0].reshape(*logits.shape[:2], -1).numpy()
    tied = (scores > scores[..., 1:2] + 1e-5).sum(-1) == gate.top_k - 1
    assert 0 < tied.sum() < tied.size
    np.testing.assert_array_equal(sure, np.cumsum(tied, axis=1) == 0)


BAD = [
    ({"router": "top_p"}, "router 'top_p' is not supported; known: greedy, group_limited_greedy, noaux_tc"),
    ({"groups": 5}, "12 experts in 5 groups"),
    ({"groups": 4, "top_groups": 5}, "of which 5 are chosen"),
    ({"groups": 6, "top_groups": 1}, "a token cannot run 3 of 2 experts"),
    ({"per_token": 0}, "experts: per_token must be"),
]


@pytest.mark.parametrize("fields, said", BAD)
def test_experts_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(UsageError, match=said):
        dataclasses.replace(EXPERTS, **fields)


RAW = {
    "model_type": "qwen3_moe",
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_experts": None}, "config.json: num_experts must be"),
        ({"num_experts_per_tok": 5}, "a token cannot run 5 of 4 experts"),
        ({"norm_topk_prob": "false"}, "config.json: norm_topk_prob must be true or false, not 'false'"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers must list layers"),
        ({"model_type": "olmoe", "clip_qkv": 2.0}, "clip_qkv is 2.0"),
        ({"model_type": "qwen2_moe", "use_sliding_window": True}, "use_sliding_window is true"),
        ({"model_type": "llama"}, "num_experts is 4"),
    ],
)
def test_a_config_that_asks_for_other_experts_is_refused(fields, said):
    with pytest.raises(UsageError, match=said):
        ModelConfig.from_hf(RAW | fields)


def test_files_of_either_spelling_say_the_same():
    new = {"num_local_experts" if name == "num_experts" else name: value for name, value in RAW.items()}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(RAW)
    every = dataclasses.replace(ModelConfig.from_hf(RAW), mlps=("experts", "dense"))
    assert ModelConfig.from_hf(every.to_hf(KVPlan.standard(2))) == every
    assert FAMILIES["qwen3_moe"].experts["count"] == "num_experts", "the published name is written"


def test_devices_that_cannot_share_the_experts_are_refused():
    model = Transformer(MOE, KVPlan.standard(4))
    with pytest.raises(UsageError, match="2 devices cannot share 5 experts"):
        widened(model, 2)
