"""The one table between Hugging Face tensor names and our parameter tree, read in both directions."""

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Iterable, Sequence

import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.families import WRAPPERS
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import SELF, KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.core.shapes import PyTree

Path = tuple[str | int, ...]

# Our path of a part of a layer or of a row -> its name in a published checkpoint.
_PARTS: dict[Path, str] = {
    ("attentions", 0, "norm"): "input_layernorm",
    ("attentions", 0, "q_proj"): "self_attn.q_proj",
    ("attentions", 0, "q_norm"): "self_attn.q_norm",
    ("attentions", 0, "o_proj"): "self_attn.o_proj",
    ("mlp", "norm"): "post_attention_layernorm",
    ("mlp", "gate_proj"): "mlp.gate_proj",
    ("mlp", "up_proj"): "mlp.up_proj",
    ("mlp", "down_proj"): "mlp.down_proj",
    ("mlp", "router"): "mlp.gate",
    **{
        ("mlp", "experts", name): f"mlp.experts.{{}}.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    },
    **{
        ("mlp", "shared", name): f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    },
    ("mlp", "shared_gate"): "mlp.shared_expert_gate",
    ("attentions", 0, "linear_attn"): "self_attn.linear_attn",
    ("mlp", "linear_mlp"): "mlp.linear_mlp",
    ("k_proj",): "self_attn.k_proj",
    ("v_proj",): "self_attn.v_proj",
    ("k_norm",): "self_attn.k_norm",
}
# Ours, for the rows of a cross-attention: the first element of the paths of their parts.
_CROSS = "cross"
_TOP: dict[Path, str] = {
    ("embed",): "model.embed_tokens",
    ("norm",): "model.norm",
    ("shared_norm",): "model.norm_swiftkv",
    ("lm_head",): "lm_head",
    ("exit", "norm"): "exit.norm",  # the exit head's names are ours: none is published
    ("exit", "lm_head"): "exit.lm_head",
}
# What SwiftKV replaces in the upper layers; the published names add a suffix (ArcticTraining).
_SLIM = ("kv_proj", "vk_proj")
_LATENT = ("q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "kv_b_proj")
_PUBLISHED = ("q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")  # of three of them
_REPLACED = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", *_SLIM, *_LATENT, *_PUBLISHED)
_OF_ROWS = tuple(f".{part}_swiftkv" for part in ("k_proj", "v_proj"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """Tensor names in a family's checkpoints.

    Attributes:
      layer: the prefix before a layer's number. parts: our path of a part of a layer, or of a row, -> its
        name, with {} in the place of an expert's number. top: the same for everything outside of layers.
      fused: the name of a tensor -> the parts whose outputs it holds, concatenated. Layers in which SwiftKV
        replaced one of them store each part by itself.
      encoder: the names of the encoder's tensors; None: there is no encoder.
      inputs_first: whether kernels are [in, out] in files too, as in GPT-2.
      bare: a prefix that a file may omit from all names but the head's, as files of the headless model do.
      buffers: tensors that are not weights, by the ends of their names.
      more: whether files may hold layers after the last, which predict more tokens ahead.
    """

    layer: str = "model.layers."
    parts: dict[Path, str] = dataclasses.field(default_factory=lambda: _PARTS)
    top: dict[Path, str] = dataclasses.field(default_factory=lambda: _TOP)
    fused: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    encoder: "Names | None" = None
    inputs_first: bool = False
    bare: str = ""
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq",)
    more: bool = False

    def of(self, path: Path) -> str:
        """The name of a part of a layer or of a row. Projections that belong to an attention (`rows.Inputs`)
        have the names of its rows' projections. A part without a name here has its own, or its form's, beside
        its neighbours'."""
        if path[0] == "attentions" and path not in self.parts:
            path = ((_CROSS,) if path[1] else ()) + path[2:]
        if path in self.parts:
            return self.parts[path]
        module, dot, _ = self.parts[(*path[:-1], "up_proj" if path[0] == "mlp" else "k_proj")].rpartition(".")
        theirs = {leaf: name for form in FORMS.values() for leaf, name in form.names.items()}
        return f"{module}{dot}{theirs.get(str(path[-1]), path[-1])}"

    @property
    def in_layer(self) -> re.Pattern:
        """Pattern of a layer's tensors: the number, the part, and "weight" or "bias"."""
        return re.compile(rf"{re.escape(self.layer)}(\d+)\.(.+)\.(weight|bias)")


_LLAMA = Names()
_AFTER = {
    ("attentions", 0, "after_norm"): "post_attention_layernorm",
    ("mlp", "after_norm"): "post_feedforward_layernorm",
}
_GEMMA2 = Names(parts=_PARTS | _AFTER | {("mlp", "norm"): "pre_feedforward_layernorm"})
_GLM4 = {
    ("attentions", 0, "after_norm"): "post_self_attn_layernorm",
    ("mlp", "after_norm"): "post_mlp_layernorm",
}
_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_OPENELM = {
    ("attentions", 0, "norm"): "attn_norm",
    ("mlp", "norm"): "ffn_norm",
    ("mlp", "down_proj"): "ffn.proj_2",
    **{("attentions", 0, name): f"attn.{name}" for name in ("q_proj", "q_norm")},
    ("attentions", 0, "o_proj"): "attn.out_proj",
    **{(name,): f"attn.{name}" for name in ("k_proj", "v_proj", "k_norm")},
    **{("mlp", name): f"ffn.{name}" for name in ("gate_proj", "up_proj")},  # files hold these fused
}
_OPENELM_TOP = {
    ("embed",): "transformer.token_embeddings",
    ("norm",): "transformer.norm",
    ("shared_norm",): "transformer.norm_swiftkv",
}
_MIXTRAL = {("mlp", "router"): "block_sparse_moe.gate"} | {
    ("mlp", "experts", name): f"block_sparse_moe.experts.{{}}.{theirs}"
    for name, theirs in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items()
}
_DEEPSEEK = {("mlp", "choice"): "mlp.gate.e_score_correction_bias"} | {
    ("mlp", "shared", name): f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")
}
_GPT2 = {
    ("attentions", 0, "norm"): "ln_1",
    ("attentions", 0, "o_proj"): "attn.c_proj",
    ("mlp", "norm"): "ln_2",
    ("mlp", "up_proj"): "mlp.c_fc",
    ("mlp", "down_proj"): "mlp.c_proj",
    ("attentions", 0, "q_proj"): "attn.q_proj",  # our names from here on: files hold these fused
    **{(name,): f"attn.{name}" for name in ("k_proj", "v_proj")},
}
_GPT2_TOP = {
    ("embed",): "transformer.wte",
    ("positions",): "transformer.wpe",
    ("norm",): "transformer.ln_f",
    ("shared_norm",): "transformer.norm_swiftkv",
}
_OPT = {
    ("attentions", 0, "norm"): "self_attn_layer_norm",
    ("attentions", 0, "o_proj"): "self_attn.out_proj",
    ("mlp", "norm"): "final_layer_norm",
    ("mlp", "up_proj"): "fc1",
    ("mlp", "down_proj"): "fc2",
}
_OPT_TOP = {
    ("embed",): "model.decoder.embed_tokens",
    ("positions",): "model.decoder.embed_positions",
    ("norm",): "model.decoder.final_layer_norm",
    ("shared_norm",): "model.decoder.norm_swiftkv",
}


def _attention(number: int, place: str, norm: str, letters: dict[str, str]) -> dict[Path, str]:
    """Names of a layer's attention and of its rows. letters: "q", "k", ... -> the family's name of it."""
    layer: dict[Path, str] = {("attentions", number, "norm"): norm}
    layer |= {("attentions", number, f"{x}_proj"): f"{place}.{letters[x]}" for x in "qo"}
    row = {"k_proj": letters["k"], "v_proj": letters["v"]}
    head = (_CROSS,) if number else ()
    return layer | {(*head, name): f"{place}.{theirs}" for name, theirs in row.items()}


def _t5(gated: bool, half: str) -> Names:
    """Names of a T5, or of its encoder."""
    letters = {x: x for x in "qkvo"}
    parts = _attention(0, "layer.0.SelfAttention", "layer.0.layer_norm", letters)
    if half == "decoder":
        parts |= _attention(1, "layer.1.EncDecAttention", "layer.1.layer_norm", letters)
    mlp = f"layer.{2 if half == 'decoder' else 1}"
    dense = f"{mlp}.DenseReluDense."
    parts |= {("mlp", "norm"): f"{mlp}.layer_norm", ("mlp", "down_proj"): f"{dense}wo"}
    parts |= {
        ("mlp", "up_proj"): f"{dense}wi_1" if gated else f"{dense}wi",
        ("mlp", "gate_proj"): f"{dense}wi_0",
    }
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias"
    top: dict[Path, str] = {("relative",): f"{half}.{bias}", ("norm",): f"{half}.final_layer_norm"}
    return Names(
        layer=f"{half}.block.",
        parts=parts,
        top=top | {("embed",): "shared", ("lm_head",): "lm_head"},
        encoder=_t5(gated, "encoder") if half == "decoder" else None,
        buffers=(f"{half}.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    )


def _whisper(half: str) -> Names:
    """Names of a Whisper, or of its encoder."""
    letters = {x: f"{x}_proj" for x in "qkv"} | {"o": "out_proj"}
    parts = _attention(0, "self_attn", "self_attn_layer_norm", letters)
    if half == "decoder":
        parts |= _attention(1, "encoder_attn", "encoder_attn_layer_norm", letters)
    parts |= {("mlp", "norm"): "final_layer_norm", ("mlp", "up_proj"): "fc1", ("mlp", "down_proj"): "fc2"}
    top: dict[Path, str] = {
        ("positions",): "embed_positions",
        ("norm",): "layer_norm",
        ("embed",): "embed_tokens",
    }
    top |= {(name,): name for name in ("conv1", "conv2")}
    top = {path: f"model.{half}.{name}" for path, name in top.items()}
    return Names(
        layer=f"model.{half}.layers.",
        parts=parts,
        top=top | {("lm_head",): "proj_out"},
        encoder=_whisper("encoder") if half == "decoder" else None,
    )


_NAMES = {
    "whisper": _whisper("decoder"),
    "opt": Names(layer="model.decoder.layers.", parts=_PARTS | _OPT, top=_TOP | _OPT_TOP, bare="model."),
    "gpt2": Names(
        layer="transformer.h.",
        parts=_GPT2,
        top=_TOP | _GPT2_TOP,
        fused={"attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj")},
        inputs_first=True,
        bare="transformer.",
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "openelm": Names(
        layer="transformer.layers.",
        parts=_PARTS | _OPENELM,
        top=_TOP | _OPENELM_TOP,
        fused={
            "attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            "ffn.proj_1": ("ffn.gate_proj", "ffn.up_proj"),
        },
    ),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), Names(parts=_PARTS | _AFTER)),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA2),
    "glm4": Names(parts=_PARTS | _GLM4, fused=_GATE_UP),
    "mixtral": Names(parts=_PARTS | _MIXTRAL),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), Names(parts=_PARTS | _DEEPSEEK, more=True)
    ),
    "phi3": Names(
        fused={"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), **_GATE_UP}
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one checkpoint tensor, or of the first part of a fused one, in our tree.

    Attributes:
      path: keys from the root to our array.
      index: the tensor's place in a stack, and in the stack of a layer's experts; () when it is the whole
        array.
      transposed: a kernel, [out, in] in the checkpoint and [in, out] here.
      width: of the heads that its outputs are split into here, when a kernel is [heads, in, width]; else 0.
      shape: the tensor's shape in the checkpoint.
      start: the tensor's first output that belongs to this part. rest: the tensor's other parts, in order.
    """

    path: Path
    index: tuple[int, ...]
    transposed: bool
    width: int = 0
    shape: tuple[int, ...]
    start: int = 0
    rest: tuple["Slot", ...] = ()

    @property
    def parts(self) -> tuple["Slot", ...]:
        return (self, *self.rest)

    @property
    def outputs(self) -> int:
        return 0 if self.transposed else len(self.shape) - 1

    def part(self, leaf):
        """This tensor's part of our array, in our layout."""
        return leaf[self.index] if self.index else leaf

    def read(self, tensor, spans: list[slice]) -> np.ndarray:
        """Read `spans` of our part, in our layout, from the checkpoint's tensor (or a lazy slice of it)."""
        *inside, outputs = spans
        if self.width:
            cut, *inside, columns = spans
            outputs = slice(cut.start * self.width, cut.stop * self.width)
        where = list(inside)
        where.insert(self.outputs, slice(self.start + outputs.start, self.start + outputs.stop))
        values = np.moveaxis(tensor[tuple(where)], self.outputs, 0)
        if not self.width:
            return np.moveaxis(values, 0, -1)
        return np.moveaxis(values.reshape(-1, self.width, *values.shape[1:]), 1, -1)[..., columns]

    def written(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The checkpoint's tensor, made of our parts in their order: the inverse of `read`."""
        each = [slot._laid_out(part) for slot, part in zip(self.parts, parts, strict=True)]
        return np.concatenate(each, axis=self.outputs) if self.rest else each[0]

    def _laid_out(self, part: np.ndarray) -> np.ndarray:
        if self.width:
            first = np.moveaxis(part, -1, 1)
            part = np.moveaxis(first.reshape(-1, *first.shape[2:]), 0, -1)
        return np.moveaxis(part, -1, self.outputs)


def slots(config: ModelConfig, plan: KVPlan, cuts: weights.Cuts = ()) -> dict[str, Slot]:
    """Every tensor that a checkpoint of this model must hold, in the order of its layers.

    cuts: where our tree's stacks are cut, as in `weights.partition`.
    """
    return _slots(config, plan, names_of(config), weights.weights(config, plan, cuts), cuts)


def names_of(config: ModelConfig) -> Names:
    names = _t5(config.gated, "decoder") if config.family == "t5" else _NAMES.get(config.family, _LLAMA)
    if config.wrapper is None:
        return names
    wrapper = WRAPPERS[config.wrapper]
    top = {path: wrapper.prefix + name.removeprefix("model.") for path, name in names.top.items()}
    top["lm_head",] = wrapper.head + names.top["lm_head",]
    return dataclasses.replace(names, top=top, layer=wrapper.prefix + names.layer.removeprefix("model."))


def _slots(
    config: ModelConfig, plan: KVPlan, names: Names, tree: PyTree, cuts: weights.Cuts
) -> dict[str, Slot]:
    layers, rows = weights.partition(plan, config.kinds, cuts)
    tail, out = weights.tail_ranges(plan, config.kinds, cuts), {}
    stacks: dict[str, Sequence[range]] = {"layers": layers, "rows": rows, "tail_rows": tail}
    if config.encoder is not None and names.encoder is not None:
        within, own = config.encoder, tree["encoder"]
        slots = _slots(within, within.plan(), names.encoder, own, None)
        out = {name: dataclasses.replace(slot, path=("encoder", *slot.path)) for name, slot in slots.items()}
        tree = {name: part for name, part in tree.items() if name != "encoder"}
    for path, weight in leaves(tree):
        if not math.prod(weight.shape):
            continue  # see `rows.NOTHING`
        top, kind = _part_and_kind(path)
        if top in names.top:
            out[f"{names.top[top]}.{kind}"] = _slot(names, path, weight.shape, ())
            continue
        held = stacks[typing.cast(str, path[0])][typing.cast(int, path[1])]
        for index, number in enumerate(held):
            name = _layer_name(names, plan, number, path)
            if "experts" not in path:
                out[name] = _slot(names, path, weight.shape[1:], (index,))
                continue
            for expert in range(weight.shape[1]):
                out[name.format(expert)] = _slot(names, path, weight.shape[2:], (index, expert))
    return dict(sorted(_fused(names, out).items(), key=lambda item: _order(names, item[0])))


def bare_names(config: ModelConfig, present: Iterable[str]) -> dict[str, str]:
    """Name in a file -> name in `slots`, for files of the model without its head (`Names.bare`), and for
    models of images and text: tensors of images are left out, and prefixes may have either order."""
    prefix, present = names_of(config).bare, list(present)
    if config.wrapper is not None:
        wrapper, whole = WRAPPERS[config.wrapper], {}
        for name in present:
            bare = name.replace("language_model.", "", 1)
            if bare == "lm_head.weight":
                whole[name] = wrapper.head + bare
            elif bare != name:
                whole[name] = wrapper.prefix + bare.removeprefix("model.")
        return whole
    if not prefix or any(name.startswith(prefix) for name in present):
        return {name: name for name in present}
    return {name: name if name == "lm_head.weight" else prefix + name for name in present}


def ignored(name: str, config: ModelConfig, plan: KVPlan, swiftkv: bool, slim: bool = False) -> bool:
    """Whether a checkpoint may hold `name` though the model does not use it.

    These are: rotary buffers of old files; the head of a tied model; in a SwiftKV checkpoint the originals of
    the replaced tensors (ArcticTraining saves them), and the norm if no layer uses it; in a `slim` checkpoint
    the projections of keys to values and back, if it is read as a plain model, and those that layers of
    inputs have of their own although they share a row; layers that predict more tokens ahead.
    """
    names = names_of(config)
    in_layer = names.in_layer.fullmatch(name)
    if slim and {*plan.forms, *plan.cross_forms} == {"kv"}:
        if any(f".{part}" in name for part in _SLIM):
            return True
        makers = {row.maker for row in plan.rows}
        if in_layer and in_layer[2].endswith(_OF_ROWS) and int(in_layer[1]) not in makers:
            return True
    if name.endswith(names.buffers) or (names.encoder is not None and name.endswith(names.encoder.buffers)):
        return True
    if name == f"{names.top['lm_head',]}.weight":
        return config.tie_word_embeddings
    if name == f"{_TOP['shared_norm',]}.weight":
        return swiftkv and not plan.is_swiftkv
    number = re.match(rf"{re.escape(names.layer)}(\d+)\.", name)
    if names.more and number and int(number[1]) >= plan.num_layers:
        return True
    if not swiftkv or in_layer is None or in_layer[2].rpartition(".")[2] not in _REPLACED:
        return False
    return plan.split <= int(in_layer[1]) < plan.num_layers


def as_dtype(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` in `dtype`; `name` is the tensor's, for the message."""
    with np.errstate(over="ignore"):
        out = array.astype(dtype)
    if dtype == np.float16 and np.isinf(out).any() and np.isfinite(array).all():
        most = np.abs(array).max()
        raise UsageError(f"{name} holds {most:.3g}, and float16 ends at 65504: use bfloat16 or float32")
    return out


def leaves(tree: PyTree, path: Path = ()) -> list[tuple[Path, typing.Any]]:
    """(path, leaf) for every leaf of nested dicts and lists."""
    if not isinstance(tree, dict | list):
        return [(path, tree)]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [pair for key, value in pairs for pair in leaves(value, (*path, key))]


def _layer_name(names: Names, plan: KVPlan, number: int, path: Path) -> str:
    """The tensor name of a part of layer or row `number`."""
    layer, head = number, ()
    if path[0] != "layers":
        row = plan.rows[number]
        layer, head = row.maker, () if row.space == SELF else (_CROSS,)
    tree = path[0]
    path, kind = _part_and_kind((*head, *path[2:]))
    renamed = tree == "rows" or (tree == "layers" and path[-1] in _REPLACED)
    replaced = plan.is_swiftkv and layer >= plan.split and renamed
    name = f"{names.layer}{layer}.{names.of(path)}"
    if name.endswith("_bias"):  # a tensor of its own
        return name
    return f"{name}{'_swiftkv' if replaced else ''}.{kind}"


def _part_and_kind(path: Path) -> tuple[Path, str]:
    """The path of the part that a tensor belongs to, and the tensor's own name there."""
    *rest, last = path
    if last in ("kernel", "bias"):
        return tuple(rest), "bias" if last == "bias" else "weight"
    name = str(last).removesuffix("_bias")
    return (*rest, name), "weight" if name == last else "bias"


def _slot(names: Names, path: Path, shape: tuple[int, ...], index: tuple[int, ...]) -> Slot:
    transposed = path[-1] == "lm_head" or (path[-1] == "kernel" and not names.inputs_first)
    width = shape[-1] if len(shape) == {"kernel": 3, "bias": 2}.get(str(path[-1])) else 0
    if width:
        shape = (*shape[1:-1], shape[0] * width)
    shape = shape[::-1] if transposed else shape
    return Slot(path=path, index=index, transposed=transposed, width=width, shape=shape)


def _fused(names: Names, alone: dict[str, Slot]) -> dict[str, Slot]:
    """The slots of tensors as files hold them, from the slots of all separate parts."""
    out = dict(alone)
    for whole, parts in names.fused.items():
        for name in alone:
            match = names.in_layer.fullmatch(name)
            if match is None or match[2] != parts[0]:
                continue
            each = [f"{names.layer}{match[1]}.{part}.{match[3]}" for part in parts]
            if all(one in out for one in each):
                joined = _joined([out.pop(one) for one in each])
                out[f"{names.layer}{match[1]}.{whole}.{match[3]}"] = joined
    return out


def _joined(slots: list[Slot]) -> Slot:
    """The slot of one fused tensor that holds these parts."""
    axis, shape = slots[0].outputs, list(slots[0].shape)
    ends = list(itertools.accumulate((slot.shape[axis] for slot in slots), initial=0))
    shape[axis] = ends.pop()
    first, *rest = (
        dataclasses.replace(slot, shape=tuple(shape), start=start)
        for slot, start in zip(slots, ends, strict=True)
    )
    return dataclasses.replace(first, rest=tuple(rest))


def _order(names: Names, name: str) -> tuple[int, int]:
    """Sort key: embeddings, layers by number, then the rest, so that a shard holds neighbours."""
    layer = re.match(rf"{re.escape(names.layer)}(\d+)\.", name)
    return (1, int(layer[1])) if layer else (0 if name == f"{names.top['embed',]}.weight" else 2, 0)
