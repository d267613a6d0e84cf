"""The one table between Hugging Face tensor names and our parameter tree, read in both directions."""

import dataclasses
import re
import typing

import numpy as np

from swiftkv_jax import weights
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import PyTree

# Our path of a part of a layer or of a row -> its name in a published checkpoint.
_PARTS: dict[tuple[str | int, ...], str] = {
    ("attentions", 0, "norm"): "input_layernorm",
    ("attentions", 0, "q_proj"): "self_attn.q_proj",
    ("attentions", 0, "q_norm"): "self_attn.q_norm",
    ("attentions", 0, "o_proj"): "self_attn.o_proj",
    ("mlp", "norm"): "post_attention_layernorm",
    ("mlp", "gate_proj"): "mlp.gate_proj",
    ("mlp", "up_proj"): "mlp.up_proj",
    ("mlp", "down_proj"): "mlp.down_proj",
    ("k_proj",): "self_attn.k_proj",
    ("v_proj",): "self_attn.v_proj",
    ("k_norm",): "self_attn.k_norm",
    ("kv_proj",): "self_attn.kv_proj",  # values of keys, and keys of values (Slim attention): ours
    ("vk_proj",): "self_attn.vk_proj",
}
_TOP: dict[tuple[str | int, ...], str] = {
    ("embed",): "model.embed_tokens.weight",
    ("norm",): "model.norm.weight",
    ("shared_norm",): "model.norm_swiftkv.weight",
    ("lm_head",): "lm_head.weight",
    ("exit", "norm"): "exit.norm.weight",  # the exit head's names are ours: none is published
    ("exit", "lm_head"): "exit.lm_head.weight",
}
# What SwiftKV replaces in the upper layers; the published names add a suffix (ArcticTraining).
_SLIM = ("kv_proj", "vk_proj")
_REPLACED = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", *_SLIM)
_ORIGINAL = re.compile(rf"model\.layers\.(\d+)\.self_attn\.(?:{'|'.join(_REPLACED)})\.(?:weight|bias)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one checkpoint tensor lies in our tree.

    Attributes:
      path: keys from the root to our array.
      index: the tensor's place in a stack, None when it is the whole array.
      transposed: a kernel, [out, in] in the checkpoint and [in, out] here.
      heads: 0, or how many its outputs are cut into here: a kernel is [heads, in, width] then.
      shape: the tensor's shape in the checkpoint.
    """

    path: tuple[str | int, ...]
    index: int | None
    transposed: bool
    heads: int
    shape: tuple[int, ...]

    def part(self, leaf):
        """This tensor's part of our array, in our layout."""
        return leaf if self.index is None else leaf[self.index]

    def read(self, tensor, spans: list[slice]) -> np.ndarray:
        """`spans` of our part, in our layout, of the checkpoint's tensor (or a lazy slice of it)."""
        if not self.heads:
            return tensor[tuple(spans[::-1])].T if self.transposed else tensor[tuple(spans)]
        width, (cut, *inside, columns) = self.shape[0] // self.heads, spans
        found = tensor[(slice(cut.start * width, cut.stop * width), *inside)]
        return np.moveaxis(found.reshape(-1, width, *found.shape[1:]), 1, -1)[..., columns]

    def written(self, part: np.ndarray) -> np.ndarray:
        """The checkpoint's tensor of our part: the inverse of `read`."""
        if self.heads:
            return np.moveaxis(part, -1, 1).reshape(self.shape)
        return part.T if self.transposed else part


def slots(config: ModelConfig, plan: KVPlan, cuts: weights.Cuts = ()) -> dict[str, Slot]:
    """Every tensor a checkpoint of this model must hold, in the order of its layers.

    cuts: of our tree, as in `weights.partition`.
    """
    stacks = weights.partition(plan, config.windows, cuts)
    out = {}
    for path, weight in leaves(weights.weights(config, plan, cuts)):
        if path in _TOP:
            out[_TOP[path]] = _slot(path, weight.shape, None)
            continue
        held = stacks[0 if path[0] == "layers" else 1][typing.cast(int, path[1])]
        for index, number in enumerate(held):
            layer = number if path[0] == "layers" else plan.rows[number].maker
            out[_layer_name(plan, layer, path)] = _slot(path, weight.shape[1:], index)
    return dict(sorted(out.items(), key=lambda item: _order(item[0])))


def ignored(name: str, config: ModelConfig, plan: KVPlan, swiftkv: bool, slim: bool = False) -> bool:
    """Whether a checkpoint may hold `name` though the model does not use it.

    Rotary buffers of old files; the head of a tied model; in a SwiftKV checkpoint the originals of what
    SwiftKV replaced (ArcticTraining saves them), and the norm when no layer is left to use it; in a
    `slim` one the projections of keys to values and back, if the model is read as a plain one.
    """
    if slim and plan.forms == ("kv",) and any(f".{part}" in name for part in _SLIM):
        return True
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    if name == _TOP["shared_norm",]:
        return swiftkv and not plan.is_swiftkv
    original = _ORIGINAL.fullmatch(name)
    return swiftkv and original is not None and plan.split <= int(original[1]) < plan.num_layers


def as_dtype(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` in `dtype`; `name` is the tensor's, for the message.

    Raises:
      UsageError: a finite number becomes infinite in float16, as those of a W_KV may.
    """
    with np.errstate(over="ignore"):
        out = array.astype(dtype)
    if dtype == np.float16 and np.isinf(out).any() and np.isfinite(array).all():
        most = np.abs(array).max()
        raise UsageError(
            f"{name} holds {most:.3g}, and float16 ends at 65504: use bfloat16 or float32 for this model"
        )
    return out


def leaves(tree: PyTree, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], typing.Any]]:
    """(path, leaf) of nested dicts and lists; empty ones have none."""
    if not isinstance(tree, dict | list):
        return [(path, tree)]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [pair for key, value in pairs for pair in leaves(value, (*path, key))]


def _layer_name(plan: KVPlan, layer: int, path: tuple[str | int, ...]) -> str:
    last = path[-1] if path[-1] in ("kernel", "bias") else None
    part = _PARTS[path[2:-1] if last else path[2:]]
    replaced = part.removeprefix("self_attn.") in _REPLACED
    suffix = "_swiftkv" if plan.is_swiftkv and layer >= plan.split and replaced else ""
    return f"model.layers.{layer}.{part}{suffix}.{'bias' if last == 'bias' else 'weight'}"


def _slot(path: tuple[str | int, ...], shape: tuple[int, ...], index: int | None) -> Slot:
    transposed = path[-1] in ("kernel", "lm_head")
    heads = shape[0] if len(shape) == {"kernel": 3, "bias": 2}.get(str(path[-1])) else 0
    if heads:
        shape = (heads * shape[-1], *shape[1:-1])
    elif transposed:
        shape = shape[::-1]
    return Slot(path=path, index=index, transposed=transposed, heads=heads, shape=shape)


def _order(name: str) -> tuple[int, int]:
    """Embeddings, layers by number, then the rest, so that a shard holds neighbours."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (1, int(layer[1])) if layer else (0 if name == _TOP["embed",] else 2, 0)
