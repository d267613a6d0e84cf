"""The one table between Hugging Face tensor names and our parameter tree, read in both directions."""

import dataclasses
import re
import typing

from swiftkv_jax import params as weights
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import PyTree

# Our name of a part of a layer -> its name in a published checkpoint.
_LAYER = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
_TOP = {
    ("embed",): "model.embed_tokens.weight",
    ("norm",): "model.norm.weight",
    ("fill", "norm_swiftkv"): "model.norm_swiftkv.weight",
    ("lm_head",): "lm_head.weight",
    ("exit", "norm"): "exit.norm.weight",  # the exit head's names are ours: none is published
    ("exit", "lm_head"): "exit.lm_head.weight",
}
# What SwiftKV replaces in the upper layers; the published names add a suffix (ArcticTraining).
_REPLACED = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
_ORIGINAL = re.compile(rf"model\.layers\.(\d+)\.self_attn\.(?:{'|'.join(_REPLACED)})\.(?:weight|bias)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one checkpoint tensor lies in our tree.

    Attributes:
      path: keys from the root to our array.
      axis: the array's stack axis, None when the tensor is the whole array. index: its place there.
      transposed: a kernel, [out, in] in the checkpoint and [in, out] here.
      shape: the tensor's shape in the checkpoint.
    """

    path: tuple[str, ...]
    axis: int | None
    index: int
    transposed: bool
    shape: tuple[int, ...]

    def part(self, leaf):
        """This tensor's part of our array, in our layout."""
        return leaf if self.axis is None else leaf[(slice(None),) * self.axis + (self.index,)]


def slots(config: ModelConfig, plan: KVPlan) -> dict[str, Slot]:
    """Every tensor a checkpoint of this model must hold, in the order of its layers."""
    layers = {
        "lower": range(plan.depth),
        "lower_rows": plan.lower_makers,
        "fill": plan.upper_makers,
        "upper": range(plan.depth, plan.num_layers),
    }
    out = {}
    for path, weight in leaves(weights.weights(config, plan)):
        if path in _TOP:
            out[_TOP[path]] = _slot(path, weight, None, 0)
            continue
        for index, layer in enumerate(layers[path[0]]):
            out[_layer_name(plan, layer, path)] = _slot(path, weight, weight.axes.split().index("L"), index)
    return dict(sorted(out.items(), key=lambda item: _order(item[0])))


def ignored(name: str, config: ModelConfig, plan: KVPlan, swiftkv: bool) -> bool:
    """Whether a checkpoint may hold `name` though the model does not use it.

    Rotary buffers of old files; the head of a tied model; in a SwiftKV checkpoint the originals of what
    SwiftKV replaced (ArcticTraining saves them), and the norm when no layer is left to use it.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if name == _TOP["fill", "norm_swiftkv"]:
        return swiftkv and not plan.is_swiftkv
    original = _ORIGINAL.fullmatch(name)
    return swiftkv and original is not None and plan.split <= int(original[1]) < plan.num_layers


def leaves(tree: PyTree, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], typing.Any]]:
    """(path, leaf) of a nested dict; empty dicts have none."""
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [pair for key, value in tree.items() for pair in leaves(value, (*path, key))]


def _layer_name(plan: KVPlan, layer: int, path: tuple[str, ...]) -> str:
    part = path[1]
    suffix = "_swiftkv" if plan.is_swiftkv and layer >= plan.split and part in _REPLACED else ""
    return f"model.layers.{layer}.{_LAYER[part]}{suffix}.{'bias' if path[-1] == 'bias' else 'weight'}"


def _slot(path: tuple[str, ...], weight: weights.Weight, axis: int | None, index: int) -> Slot:
    shape = tuple(size for i, size in enumerate(weight.shape) if i != axis)
    transposed = path[-1] in ("kernel", "lm_head")
    shape = shape[::-1] if transposed else shape
    return Slot(path=path, axis=axis, index=index, transposed=transposed, shape=shape)


def _order(name: str) -> tuple[int, int]:
    """Embeddings, layers by number, then the rest, so that a shard holds neighbours."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (1, int(layer[1])) if layer else (0 if name == _TOP["embed",] else 2, 0)
