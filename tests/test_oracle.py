"""An independent SwiftKV in plain PyTorch, on transformers' layers, agrees with ours through our own export.

Written from the description of the reference: one shared RMSNorm on the stream entering layer `split`,
keys and values of every later layer (or group of layers) from it, RoPE at the token's own position, and
each later layer's own input norm for its query only.
"""

import hf_models
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from swiftkv_jax.checkpoint.hf import from_pretrained, save_pretrained
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.surgery import to_swiftkv

LAYERS = 5
QUERIES = ("q_proj", "q_norm", "q_a_proj", "q_a_layernorm", "q_b_proj")
ROWS = ("k_proj", "v_proj", "k_norm", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
TOKENS = hf_models.tokens()

DEEPSEEK = hf_models.LATENT | hf_models.DEEPSEEK_MOE | {"first_k_dense_replace": 1}
# (family, split, share, fields): uniform groups, ragged last groups, one group for all, biases, odd heads.
CASES = [
    ("llama", 4, 1, {"tie_word_embeddings": True}),
    ("llama", 2, 2, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 20}),
    ("llama", 1, 4, {"rope_scaling": hf_models.LLAMA3, "num_key_value_heads": 4}),
    ("qwen2", 1, 3, {}),
    ("qwen3", 2, 2, {"head_dim": 20}),
    ("mixtral", 2, 2, hf_models.MOE | {"num_local_experts": 5}),
    ("qwen2_moe", 1, 3, hf_models.QWEN_MOE | {"shared_expert_intermediate_size": 40}),
    ("qwen3_moe", 2, 1, hf_models.QWEN_MOE | {"head_dim": 20, "mlp_only_layers": [1, 3]}),
    # Latents: the last layer alone, half of the layers, groups of two and four, a ragged last group.
    ("deepseek_v2", 4, 1, hf_models.LATENT | {"first_k_dense_replace": 5}),
    ("deepseek_v2", 2, 1, DEEPSEEK | {"rope_scaling": hf_models.DEEPSEEK_YARN}),
    ("deepseek_v2", 1, 4, DEEPSEEK | {"q_lora_rank": 20, "attention_bias": True}),
    ("deepseek_v3", 2, 2, DEEPSEEK | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}),
    ("olmoe", 2, 2, hf_models.MOE | {"num_experts": 6, "norm_topk_prob": True}),
]


class Oracle:
    """A transformers model turned into a SwiftKV student, with the reference's start from the teacher."""

    def __init__(self, teacher, split: int, share: int):
        self.model, self.split, self.share = teacher, split, share
        inner = teacher.model
        inner.norm_swiftkv = type(inner.norm)(inner.norm.weight.shape[0], inner.norm.variance_epsilon)
        inner.norm_swiftkv.weight.data.copy_(inner.layers[split].input_layernorm.weight)
        upper = range(split, LAYERS)
        for j in upper:
            for name in QUERIES:
                self._replace(j, name, [j])
        for j in upper:
            if (j - split) % share == 0:
                for name in ROWS:
                    self._replace(j, name, range(j, min(j + share, LAYERS)))
        for j in upper:
            for name in (*QUERIES, *ROWS):
                if hasattr(inner.layers[j].self_attn, name):
                    delattr(inner.layers[j].self_attn, name)

    def _replace(self, j: int, name: str, group):
        """`<name>_swiftkv` of layer j: the mean of the teacher's over `group`."""
        attention = self.model.model.layers[j].self_attn
        if getattr(attention, name, None) is None:
            return
        old = [getattr(self.model.model.layers[i].self_attn, name) for i in group]
        if isinstance(old[0], nn.Linear):
            new = nn.Linear(old[0].in_features, old[0].out_features, bias=old[0].bias is not None)
        else:
            new = type(old[0])(old[0].weight.shape[0], old[0].variance_epsilon)
        for key, value in new.named_parameters():
            value.data.copy_(torch.stack([dict(layer.named_parameters())[key].data for layer in old]).mean(0))
        setattr(attention, f"{name}_swiftkv", new)

    @torch.no_grad()
    def logits(self, tokens) -> np.ndarray:
        inner = self.model.model
        x = inner.embed_tokens(torch.tensor(tokens))
        batch, length, _ = x.shape
        at = inner.rotary_emb(x, torch.arange(length)[None].expand(batch, -1))
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for layer in inner.layers[: self.split]:
            x = layer(x, attention_mask=mask, position_embeddings=at)
            x = x[0] if isinstance(x, tuple) else x
        s = inner.norm_swiftkv(x)
        for j in range(self.split, LAYERS):
            layer = inner.layers[j]
            if (j - self.split) % self.share == 0:
                k, v = self.row(layer.self_attn, s)
            q, k_turned = self.turned(self.queries(layer.self_attn, layer.input_layernorm(x)), k, at)
            groups = q.shape[1] // k.shape[1]
            scores = q @ repeat_kv(k_turned, groups).transpose(2, 3) * layer.self_attn.scaling + mask
            mixed = scores.softmax(-1) @ repeat_kv(v, groups)
            x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(inner.norm(x)).numpy()

    def row(self, attention, s) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, heads, tokens, width], before their rotation."""
        return self._heads(attention, "k", s), self._heads(attention, "v", s)

    def queries(self, attention, h) -> torch.Tensor:
        return self._heads(attention, "q", h)

    def turned(self, q, k, at) -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rotary_pos_emb(q, k, *at)

    @staticmethod
    def _heads(attention, name: str, x) -> torch.Tensor:
        """[batch, heads, tokens, head_dim] of one projection, with its per-head norm where there is one."""
        y = getattr(attention, f"{name}_proj_swiftkv")(x).unflatten(-1, (-1, attention.head_dim))
        norm = getattr(attention, f"{name}_norm_swiftkv", None)
        if norm is not None and norm.weight.numel() > attention.head_dim:  # OLMoE: all heads together
            y = norm(y.flatten(-2)).view_as(y)
            norm = None
        return (y if norm is None else norm(y)).transpose(1, 2)


class LatentOracle(Oracle):
    """The same of DeepSeek's attention: the leader's latent, its norm and kv_b make the keys and values of a
    group, and the rotary part of a key is one for all heads."""

    def row(self, attention, s):
        latent, shared = attention.kv_a_proj_with_mqa_swiftkv(s).split(
            [attention.kv_lora_rank, attention.qk_rope_head_dim], -1
        )
        both = attention.kv_b_proj_swiftkv(attention.kv_a_layernorm_swiftkv(latent))
        both = both.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        k, v = both.split([attention.qk_nope_head_dim, attention.v_head_dim], -1)
        return torch.cat([k, shared[:, None].expand(-1, attention.num_heads, -1, -1)], -1), v

    def queries(self, attention, h):
        if attention.q_lora_rank is None:
            q = attention.q_proj_swiftkv(h)
        else:
            q = attention.q_b_proj_swiftkv(attention.q_a_layernorm_swiftkv(attention.q_a_proj_swiftkv(h)))
        return q.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)

    def turned(self, q, k, at):
        """Neighbours of a head's last numbers are complex numbers, and turn by the token's angle."""
        rotary, wide = self.model.model.rotary_emb, self.model.config.qk_rope_head_dim
        angle = torch.arange(q.shape[2])[:, None] * rotary.inv_freq
        turn = torch.polar(torch.full_like(angle, rotary.attention_scaling), angle)

        def one(x):
            pairs = torch.view_as_complex(x[..., -wide:].unflatten(-1, (-1, 2)).contiguous())
            return torch.cat([x[..., :-wide], torch.view_as_real(pairs * turn).flatten(-2)], -1)

        return one(q), one(k)


@pytest.mark.slow(
    *("qwen3-2-2-fields4", "qwen2_moe-1-3-fields6", "qwen3_moe-2-1-fields7"),
    *("deepseek_v2-4-1-fields8", "deepseek_v2-2-1-fields9", "olmoe-2-2-fields12"),
)
@pytest.mark.parametrize("family, split, share, fields", CASES)
def test_forward_start_and_export_equal_the_oracle(family, split, share, fields, tmp_path):
    teacher = hf_models.build(family, num_hidden_layers=LAYERS, **fields)
    model, params = from_pretrained(hf_models.save(teacher, tmp_path / "teacher"))
    plan = model.config.plan(split, share)
    student = Transformer(model.config, plan)
    copied = jax.jit(lambda params: to_swiftkv(model, params, plan, init="copy")[1])(params)
    oracle = (LatentOracle if "kv_lora_rank" in fields else Oracle)(teacher, split, share)
    apply = jax.jit(student.apply)

    # The untrained student is the reference's untrained student.
    started = agrees(oracle, apply({"params": copied}, TOKENS))

    # Any student, by its published names: strict loading finds every name and shape, and no other.
    moved = _moved(copied)
    save_pretrained(tmp_path / "student", student, moved)
    tensors = load_file(tmp_path / "student" / "model.safetensors")
    if fields.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    oracle.model.load_state_dict(hf_models.stacked(tensors), strict=True)
    trained = agrees(oracle, apply({"params": moved}, TOKENS))
    assert np.abs(trained - started).max() > 0.5


def agrees(oracle: Oracle, got) -> np.ndarray:
    """The oracle's logits, which equal `got` but for tokens whose experts rounding may decide."""
    want, sure = hf_models.decided(lambda: oracle.logits(TOKENS))
    np.testing.assert_allclose(np.asarray(got)[sure], want[sure], rtol=0, atol=1e-4)
    return want


def _moved(params):
    """Every parameter changed by a tenth of its own spread, as training might."""
    random = np.random.default_rng(7)

    def move(leaf):
        leaf = np.asarray(leaf)
        noise = random.standard_normal(leaf.shape, np.float32)
        return leaf + 0.1 * leaf.std() * noise if leaf.size else leaf

    return jax.tree.map(move, params)
