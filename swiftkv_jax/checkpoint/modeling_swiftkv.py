"""SwiftKV and AcrossKV students in PyTorch, for transformers.

An export of swiftkv-jax contains this file, and config.json names it. Load it with `trust_remote_code=True`:

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

swiftkv-jax itself never runs it. Layers and tensor names are those of transformers; tensors that SwiftKV
replaces are named as in ArcticTraining (arXiv 2410.03960, sections 3.2 and 3.3):

    layers 0 ... split-1   as they are
    stream                 norm_swiftkv(hidden states entering layer `split`)
    layer >= split         queries of its own input; keys and values of the stream, projected by the first
                           layer of each group of `key_value_group_size` layers and read by all of the group

So the later layers of a token influence that token alone. When only a prompt's last logits are needed, as in
`generate`, only the last token runs them.

With a `swiftkv_tail`, the last so many tokens of each call, of `generate` the end of a prompt and then every
token, have keys and values of a later layer's own: of its input, by projections with the original names.
"""

import copy
import functools
import importlib
import inspect

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

# Prefix of a family's class names -> its folder in transformers, if it has another name.
FOLDERS = {
    **{"SeedOss": "seed_oss", "Qwen2Moe": "qwen2_moe", "Qwen3Moe": "qwen3_moe"},
    **{"DeepseekV2": "deepseek_v2", "DeepseekV3": "deepseek_v3", "Glm4MoeLite": "glm4_moe_lite"},
}
# The name of the cache in transformers' signatures: `past_key_values` before 5.24.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class SwiftKVAttention:
    """Attention of a layer from `split` on: its own queries over keys and values that are given."""

    module = None  # of the family in transformers
    queries, made = ("q_proj", "q_norm"), ("k_proj", "k_norm", "v_proj")  # parts that are replaced

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if (fused := self._modules.pop("qkv_proj", None)) is not None:  # Phi-3
            heads = config.num_attention_heads, *(config.num_key_value_heads,) * 2
            for name, count in zip("qkv", heads, strict=True):
                part = nn.Linear(fused.in_features, count * self.head_dim, bias=False)
                self.add_module(f"{name}_proj", part)
        makes = (layer_idx - config.num_key_value_layers) % config.key_value_group_size == 0
        for name in (*self.queries, *self.made):
            part = self._modules.pop(name, None)
            if part is not None and (makes or name in self.queries):
                self.add_module(f"{name}_swiftkv", part)
                if config.swiftkv_tail and name in self.made:
                    self.add_module(name, copy.deepcopy(part))

    def heads(self, name: str, x: torch.Tensor, kind: str = "_swiftkv") -> torch.Tensor:
        """[B, T, hidden] -> [B, heads, T, head_dim]: projected, and normed where the family does that."""
        y, norm = getattr(self, f"{name}_proj{kind}")(x), getattr(self, f"{name}_norm{kind}", None)
        if norm is not None and norm.weight.numel() == y.shape[-1]:  # of all heads together, or of one
            y, norm = norm(y), None
        y = y.view(*x.shape[:-1], -1, self.head_dim)
        return (y if norm is None else norm(y)).transpose(1, 2)

    @property
    def turns(self) -> bool:
        """Whether the keys that this layer makes are rotated: not in some layers of SmolLM3 and EXAONE 4."""
        if hasattr(self, "use_rope"):
            return bool(self.use_rope)
        return "exaone4" not in self.module.__name__ or self.sliding_window is None or self.is_sliding

    def rotated(self, x: torch.Tensor, at) -> torch.Tensor:
        """Rotated heads; at: cos and sin, or None."""
        return x if at is None else self.module.apply_rotary_pos_emb(x, x, *at)[0]

    def make(self, stream: torch.Tensor, at, kind: str = "_swiftkv") -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, of the stream, or with kind="" of the layer's own input; called on the
        first layer of a group."""
        return self.rotated(self.heads("k", stream, kind), at), self.heads("v", stream, kind)

    def forward(self, hidden_states, position_embeddings, attention_mask, row, **kwargs):
        kwargs.pop(CACHE, None)  # a decoder layer passes it on; keys and values come from there
        keys, values = row(self, hidden_states, position_embeddings)
        queries = self.rotated(self.heads("q", hidden_states), position_embeddings)
        if hasattr(self.module, "get_llama_4_attn_scale"):  # Ministral 3
            rope = self.config.rope_parameters
            given = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
            scale = self.module.get_llama_4_attn_scale(kwargs["position_ids"], *given)
            queries = queries * scale.to(queries.dtype)
        if cap := getattr(self, "attn_logit_softcapping", None):
            kwargs["softcap"] = cap
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.module.eager_attention_forward
        )
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        out, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=window if getattr(self, "is_sliding", True) else None,
            **kwargs,
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class LatentAttention(SwiftKVAttention):
    """The same of DeepSeek's attention. The first layer of a group expands its latents for all of them."""

    queries = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
    made = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")

    def heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.q_lora_rank is None:
            y = self.q_proj_swiftkv(x)
        else:
            y = self.q_b_proj_swiftkv(self.q_a_layernorm_swiftkv(self.q_a_proj_swiftkv(x)))
        return y.view(*x.shape[:-1], -1, self.qk_head_dim).transpose(1, 2)

    def rotated(self, x: torch.Tensor, at) -> torch.Tensor:
        """The last part of each head is rotated, neighbours together."""
        plain, turned = x.split([x.shape[-1] - self.qk_rope_head_dim, self.qk_rope_head_dim], dim=-1)
        if torch.is_tensor(at):  # DeepSeek-V2
            turned = self.module.apply_rotary_emb(turned, turned, at)[0]
        else:
            turned = self.module.apply_rotary_pos_emb_interleave(turned, turned, *at)[0]
        return torch.cat([plain, turned], dim=-1)

    def make(self, stream: torch.Tensor, at) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.kv_a_proj_with_mqa_swiftkv(stream)
        latent, rotary = both.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        made = self.kv_b_proj_swiftkv(self.kv_a_layernorm_swiftkv(latent))
        made = made.view(*stream.shape[:-1], self.num_heads, -1).transpose(1, 2)
        keys, values = made.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        rotary = rotary[:, None].expand(-1, self.num_heads, -1, -1)
        return self.rotated(torch.cat([keys, rotary], dim=-1), at), values


class SwiftKVModel:
    """A decoder without its output head."""

    attention: type[nn.Module]  # of layers from `split` on

    def __init__(self, config):
        super().__init__(config)
        for number in range(config.num_key_value_layers, config.num_hidden_layers):
            self.layers[number].self_attn = self.attention(config, number)
        normed = hasattr(self.layers[0], "input_layernorm")  # else norms follow attention (OLMo 2)
        if normed:
            self.norm_swiftkv = type(self.norm)(config.hidden_size, eps=config.rms_norm_eps)
        every = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        self.kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        past_key_values=None,
        last_only=False,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """As in any decoder of transformers. last_only: return the last token's hidden states only."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = x * getattr(self, "embedding_multiplier", 1)  # Granite
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device).unsqueeze(0)
        masks = attention_mask  # `generate` may have made them
        if not isinstance(masks, dict):
            masks = {
                kind: MASKS[kind](
                    config=self.config,
                    inputs_embeds=x,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    **{CACHE: cache},
                )
                for kind in set(self.kinds)
            }
        split, share = self.config.num_key_value_layers, self.config.key_value_group_size
        tail = min(self.config.swiftkv_tail, x.shape[1])
        at, rows = self.angles(x, position_ids), {}
        for number, layer in enumerate(self.layers):
            if number == split:
                stream = self.norm_swiftkv(x) if hasattr(self, "norm_swiftkv") else x
                rows = self.rows(stream, at, cache, tail)
                # Every token runs the later layers where masks are no tensors (flex_attention), and where no
                # mask hides the empty places of a static cache from a single query, or later tokens from one
                # of several.
                full = (cache is None or not cache.is_compileable) and tail < 2
                if last_only and all(torch.is_tensor(m) or (m is None and full) for m in masks.values()):
                    last = max(1, tail)
                    x, position_ids = x[:, -last:], position_ids[:, -last:]
                    at = [angles_of(one, slice(-last, None)) for one in at]
                    masks = {kind: last_queries(mask, last) for kind, mask in masks.items()}
            x = layer(
                x,
                attention_mask=masks[self.kinds[number]],
                position_ids=position_ids,
                # A reader turns its queries by the table that rotated the keys: its group's first layer's.
                position_embeddings=at[number - (number - split) % share if rows else number],
                use_cache=use_cache,
                **({"row": rows[number]} if rows else {CACHE: cache}),
                **kwargs,
            )
        output = getattr(self.attention.module, "MoeModelOutputWithPast", BaseModelOutputWithPast)
        return output(last_hidden_state=self.norm(x), **{CACHE: cache if use_cache else None})

    def angles(self, x: torch.Tensor, position_ids) -> list:
        """cos and sin for each layer; None where keys made from `split` on are not rotated."""
        if "layer_type" in inspect.signature(self.rotary_emb.forward).parameters:
            tables = {kind: self.rotary_emb(x, position_ids, kind) for kind in set(self.kinds)}
        else:
            tables = dict.fromkeys(self.kinds, self.rotary_emb(x, position_ids))
        attentions = [layer.self_attn for layer in self.layers]
        turns = [not isinstance(part, SwiftKVAttention) or part.turns for part in attentions]
        return [tables[kind] if turned else None for kind, turned in zip(self.kinds, turns, strict=True)]

    def rows(self, stream: torch.Tensor, at, cache, tail: int) -> dict:
        """For every layer from `split` on, a function that gives its keys and values, those of earlier tokens
        included, from the attention, its input and the angles there. Those of the last `tail` tokens are made
        of that input, all others of the stream, here.

        A group's layers share one place in the cache, or two if some of them have a sliding window.
        """
        split, share = self.config.num_key_value_layers, self.config.key_value_group_size
        ahead, made, whole, places = stream.shape[1] - tail, {}, {}, {}
        for number in range(split, len(self.layers), share) if ahead else ():
            early = angles_of(at[number], slice(ahead))
            made[number] = self.layers[number].self_attn.make(stream[:, :ahead], early)

        def row(number: int, attention, x: torch.Tensor, at):
            first, kind = number - (number - split) % share, self.kinds[number]
            if number == first:
                last = slice(-tail, None)
                parts = [made[first]] if ahead else []
                parts += [attention.make(x[:, last], angles_of(at, last), "")] if tail else []
                whole[first] = tuple(torch.cat(each, dim=2) for each in zip(*parts, strict=True))
            if cache is None:
                return whole[first]
            if (first, kind) not in places:
                places[first, kind] = cache.update(*whole[first], number)
            return places[first, kind]

        return {number: functools.partial(row, number) for number in range(split, len(self.layers))}


def angles_of(at, tokens: slice):
    """The angles of some of the tokens."""
    if at is None or torch.is_tensor(at):
        return at if at is None else at[:, tokens]
    return tuple(part[:, tokens] for part in at)


def last_queries(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """The mask of the last queries; one of [B, keys], as flash attention has it, is for every query."""
    return mask[:, :, -count:] if mask is not None and mask.dim() == 4 else mask


class SwiftKVForCausalLM:
    """A decoder with its output head."""

    body: type[PreTrainedModel]
    # The exit head and the tensors of Slim attention are for swiftkv-jax alone.
    _keys_to_ignore_on_load_unexpected = (r"^exit\.", r"\.self_attn\.(kv|vk)_proj")

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.model = self.body(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        past_key_values=None,
        **kwargs,
    ):
        """As in any causal language model of transformers."""
        if labels is None and isinstance(logits_to_keep, int) and logits_to_keep == 1:
            kwargs["last_only"] = True
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: past_key_values if cache is None else cache},
            **kwargs,
        )


class SwiftKVConfig:
    """The common part of all families' configs."""

    base_model_tp_plan = base_model_pp_plan = None  # the families' own plans name other tensors

    def __post_init__(self, **kwargs):
        kwargs.pop("transformers_weights", None)  # it stops other classes from loading this
        super().__post_init__(**kwargs)


def define(family: str) -> None:
    """Define the classes of a family, by the names that config.json gives them; `family` is their prefix."""
    folder = FOLDERS.get(family, family.lower())
    theirs = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    settings = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    text = "Text" if family == "Gemma3" else ""  # beside a class for images and text
    config = getattr(settings, f"{family}{text}Config")

    class Config(SwiftKVConfig, config):
        """The family's config, the split, and how many layers share keys and values."""

        model_type = f"{config.model_type}_swiftkv"
        num_key_value_layers: int = 1
        key_value_group_size: int = 1
        swiftkv_tail: int = 0

    attention = getattr(theirs, f"{family}Attention")
    own = LatentAttention if hasattr(attention, "expand_kv") else SwiftKVAttention

    class Attention(own, attention):
        module = theirs

    class Model(SwiftKVModel, getattr(theirs, f"{family}{text}Model")):
        config_class = Config

    class ForCausalLM(SwiftKVForCausalLM, getattr(theirs, f"{family}ForCausalLM")):
        config_class = Config

    if stacked := get_checkpoint_conversion_mapping(config.model_type):  # the experts of Mixtral and others
        register_checkpoint_conversion_mapping(Config.model_type, stacked, overwrite=True)
    Model.attention, ForCausalLM.body = Attention, Model
    for part in (Config, Attention, Model, ForCausalLM):
        part.__name__ = part.__qualname__ = f"{family}SwiftKV{part.__name__}"
        globals()[part.__name__] = part


def __getattr__(name: str) -> type:
    """Define the family of a class that is asked for."""
    family, mark, _ = name.partition("SwiftKV")
    if not mark or not family:
        raise AttributeError(name)
    define(family)
    return globals()[name]
