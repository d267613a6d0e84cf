"""The config of a decoder, and of its encoder: read from a Hugging Face config.json, frozen, validated."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError, UsageWarning
from swiftkv_jax.config.encoders import family_fields, family_written
from swiftkv_jax.config.experts import EXPERTS, Experts
from swiftkv_jax.config.families import FAMILIES, WRAPPERS
from swiftkv_jax.config.hf import (
    FULL_ATTENTION,
    base_family,
    check_fields,
    cross_forms_from_hf,
    fields_from_hf,
    forms_from_hf,
    integer,
    is_swiftkv,
    read_config_json,
    text_of,
    with_llama_names,
    written_fields,
)
from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.rope import RopeConfig
from swiftkv_jax.config.sizes import Sizes, sizes_from_hf

DTYPES = ("float32", "bfloat16", "float16")
ROWS = "rows"  # the kind of attention that reads a row of the cache
NORMS = ("rms", "rms_plus_one", "layer", "layer_plain")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
_SIZES = (
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_position_embeddings"
).split()


class Kind(NamedTuple):
    """What may differ from layer to layer; see `ModelConfig`."""

    window: int
    attention: str
    mlp: str
    rope: RopeConfig
    sizes: Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. The defaults are Llama's: pre-norm, rotary, grouped-query attention, gated SiLU MLP.

    Attributes:
      family: config.json's `model_type` of the base model, one of FAMILIES.
      norm: "rms"; "rms_plus_one": its gain is stored less 1, and applied in float32 (Gemma); "layer":
        LayerNorm with a bias; "layer_plain": without weights (OLMo). rms_norm_eps: of any norm.
      norm_before, norm_after: norms precede attention and MLP, or follow them (OLMo-2), or both (Gemma 2).
      qk_norm: queries and keys are normed before rotary embedding: each head by itself, or with
        qk_norm_whole all heads together. clip_qkv: clips the projected queries, keys and values.
      k_bias: whether keys have a bias too if queries and values have one (qkv_bias).
      latent: of attention whose keys and values follow from a latent (DeepSeek), with head_dim the width of
        queries and keys; None: they do not.
      attention_scale: of the scores; None: head_dim ** -0.5. attention_softcap, logits_softcap: their largest
        absolute value, which they approach as tanh does (Gemma 2); None: there is none.
      activation: of the MLP, "silu", "gelu_tanh" (the tanh approximation), "gelu" or "relu". gated: whether
        its output multiplies a second projection.
      learned_positions: a table of position embeddings is added to the token embeddings; `unused_positions`
        of its rows precede position 0 (OPT).
      relative_buckets: number of distance ranges of a learned bias of the scores by head and distance (T5);
        the last range begins at `relative_distance`. 0: no such bias.
      embedding_scale, residual_scale, logits_scale: factors of the embeddings, of what attention and MLP add
        to the stream, and of the normed stream before the head.
      windows: keys that a query sees in each layer, its own included; FULL_ATTENTION for all.
      attentions: the kind of each layer's attention: "rows", which reads a row of the cache; "linear", one
        linear map in its place; "none". Empty: all read rows.
      mlps: the kind of each layer's MLP, a key of `layers.MLPS`; empty: all are dense.
      experts: those of the layers whose kind of MLP is "experts"; None: there are none.
      ropes: the rotary embedding of each layer; empty: that of all is `rope`.
      sizes: the numbers of heads and the MLP width of each layer; empty: those of all are num_heads,
        num_kv_heads and intermediate_size, which are otherwise the largest of them. They are 0 where a layer
        has no attention that reads a row, or no dense MLP. A layer with fewer query heads has as many of them
        for each kv head as the widest has; rows in a cache are as wide as that.
      dtype: the checkpoint's dtype, and the default for loading it.
      max_position_embeddings: context length in tokens.
      encoder: config of the encoder whose output every layer also reads; None: there is none.
      bidirectional: this is an encoder, whose tokens also see later ones. mels: mel bins of the audio frames
        that its two convolutions read; 0: it reads tokens, by the decoder's embeddings.
      exit_head: whether there is an exit head, a norm and an output head on the hidden states entering
        `split`, for early exit (SwiftKV paper, B.4); for SwiftKV plans only.
      wrapper: `model_type` of the model of images and text that this one is the text part of, which its
        checkpoint's names and config.json have too; None: there is none. Like `source` it is not compared.
      source: folder the model was read from, if it has a tokenizer, generation settings or token ids. It does
        not take part in comparisons: configs that differ in it alone are equal, and share compiled programs.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    k_bias: bool = True
    attention_scale: float | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    clip_qkv: float | None = None
    latent: Latent | None = None
    norm: str = "rms"
    norm_before: bool = True
    norm_after: bool = False
    activation: str = "silu"
    gated: bool = True
    relative_buckets: int = 0
    relative_distance: int = 128
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    learned_positions: bool = False
    unused_positions: int = 0
    windows: tuple[int, ...] = ()
    attentions: tuple[str, ...] = ()
    mlps: tuple[str, ...] = ()
    experts: Experts | None = None
    ropes: tuple[RopeConfig, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    dtype: str = "float32"
    exit_head: bool = False
    encoder: "ModelConfig | None" = None
    bidirectional: bool = False
    mels: int = 0
    wrapper: str | None = dataclasses.field(default=None, compare=False, repr=False)
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise UsageError(f"model_type {self.family!r} is not supported; known: {', '.join(FAMILIES)}")
        for size in self.sizes:
            for name, value in size._asdict().items():
                checks.integer(f"sizes: {name}", value, 0)
        for name, values in zip(Sizes._fields, zip(*self.sizes, strict=True), strict=False):
            object.__setattr__(self, name, max(values))
        for name in _SIZES:
            checks.integer(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise UsageError(
                f"partial_rotary_factor {self.rope.partial_rotary_factor} of head_dim {self.head_dim} is "
                f"{self.rotary_dim}, and must be an even number"
            )
        if self.norm == "layer" and not self.qkv_bias:
            raise UsageError('norm "layer" has a bias, which only keys and values with qkv_bias can take up')
        short = self.rope.short_factor or (1.0,) * (self.rotary_dim // 2)
        if {len(short), len(self.rope.long_factor or short)} != {self.rotary_dim // 2}:
            raise UsageError(
                f"longrope needs {self.rotary_dim // 2} numbers in short_factor and long_factor each, not "
                f"{len(short)} and {len(self.rope.long_factor)}"
            )
        for name, known in (("dtype", DTYPES), ("norm", NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} {getattr(self, name)!r} is not supported; known: {', '.join(known)}"
                )
        windows = self.windows or (FULL_ATTENTION,) * self.num_layers
        if len(windows) != self.num_layers or min(windows) < 1:
            raise UsageError(
                f"windows needs one positive number for each of {self.num_layers} layers, not {windows}"
            )
        object.__setattr__(self, "windows", windows)
        for name in ("attentions", "mlps", "ropes", "sizes"):
            if len(given := getattr(self, name)) not in (0, self.num_layers):
                raise UsageError(f"{name} needs one for each of {self.num_layers} layers, not {given}")
        if EXPERTS in self.mlps and self.experts is None:
            raise UsageError(f"mlps are {self.mlps}, but there are no `experts`")
        for name, usual in (("ropes", self.rope), ("attentions", ROWS), ("mlps", "dense")):
            if set(getattr(self, name)) == {usual}:
                object.__setattr__(self, name, ())
        if len(set(self.sizes)) == 1:
            object.__setattr__(self, "sizes", ())
        if self.latent and (self.qk_norm or self.sizes or self.learned_positions or self.encoder):
            raise UsageError(
                "latent attention has no norms of heads, sizes by layer, position table or encoder"
            )
        for layer, kind in enumerate(self.kinds if self.sizes else ()):
            heads, kv_heads, _ = kind.sizes
            if kind.attention != ROWS:
                continue
            repeated = kv_heads and heads == self.num_heads and self.num_kv_heads % kv_heads == 0
            if (
                not kv_heads
                or heads % kv_heads
                or not (repeated or heads * self.num_kv_heads == self.num_heads * kv_heads)
            ):
                raise UsageError(
                    f"layer {layer} has {heads} query heads and {kv_heads} kv heads; beside layers with "
                    f"{self.num_heads} and {self.num_kv_heads} it needs as many query heads for each kv "
                    f"head, or {self.num_heads} query heads and a divisor of {self.num_kv_heads}"
                )

    def __hash__(self) -> int:
        """Of some fields, as programs hash their config at every call."""
        return hash((self.family, self.num_layers, self.hidden_size, self.windows, self.dtype))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer: only layers of one kind lie in one stack."""
        many, widest = self.num_layers, Sizes(self.num_heads, self.num_kv_heads, self.intermediate_size)
        each = (
            (self.attentions, ROWS),
            (self.mlps, "dense"),
            (self.ropes, self.rope),
            (self.sizes, widest),
        )
        return tuple(map(Kind, self.windows, *(given or (usual,) * many for given, usual in each)))

    def plan(self, split: int | None = None, share: int = 1, tail: int = 0) -> KVPlan:
        """The standard plan of these layers; with `split`, that of SwiftKV."""
        without = [layer for layer, kind in enumerate(self.kinds) if kind.attention != ROWS]
        if split is None:
            plan = KVPlan.standard(self.num_layers, without)
        else:
            plan = KVPlan.swiftkv(self.num_layers, split, share, without, tail)
        return plan.stored_as(self.form)

    @property
    def form(self) -> str:
        """The form of a row that has not been converted."""
        return "kv" if self.latent is None else "latent"

    def at(self, layer: int) -> "ModelConfig":
        """The config whose layers all have the sizes of `layer`, as far as it has parts of any size."""
        if not self.sizes:
            return self
        own = {name: size for name, size in self.sizes[layer]._asdict().items() if size}
        return dataclasses.replace(self, sizes=(), **own)

    @property
    def tables(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings that layers have, each once."""
        return tuple(dict.fromkeys(self.ropes or (self.rope,)))

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence: rotary scaling may take it beyond `max_position_embeddings`, which
        of families with a table for windows (Gemma 3) includes it. A relative position bias sets no limit."""
        if self.relative_buckets:
            return 2**20
        context = self.max_position_embeddings
        return context if FAMILIES[self.family].ropes == "window" else self.rope.longest(context)

    @classmethod
    def from_hf(cls, source: Mapping | str | Path) -> "ModelConfig":
        """Read config.json (a dict, the file, or its folder) of a standard or a SwiftKV model.

        Raises:
          UsageError: the file cannot be read, the model type is unknown, or a field asks for something that
            this decoder does not compute. An unknown field that might matter gives a UsageWarning.
        """
        raw, wrapper = text_of(read_config_json(source))
        if wrapper:
            message = f"config.json: {wrapper} reads images too; only its text model is loaded"
            warnings.warn(message, UsageWarning, stacklevel=2)
        family, raw = base_family(raw), with_llama_names(raw)
        check_fields(raw)
        fields = fields_from_hf(family, raw)
        fields["wrapper"] = wrapper
        if FAMILIES[family].encoder is not None:
            whole = family_fields(family, raw, fields)
            fields, within = whole["decoder"], whole["encoder"]
            fields["encoder"] = cls(**within)
        return cls(**fields)

    def to_hf(self, plan: KVPlan) -> dict:
        """The config.json of this model as it is published; a SwiftKV plan has `model_type`
        `<family>_swiftkv`.

        Raises:
          UsageError: config.json cannot express this config and plan (a hand-made mixture of families, an
            arbitrary row map).
        """
        if plan != plan.named:
            raise UsageError(
                "this is an engine's internal model (LLM.model): save the model that the engine was made from"
            )
        (split, share), family = plan.split_and_share, FAMILIES[self.family]
        out = {
            "model_type": self.family,
            "architectures": [family.architecture + ("SwiftKV" if plan.is_swiftkv else "") + family.head],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": self.rope.to_hf(self.max_position_embeddings),
            "attention_dropout": 0.0,
            "torch_dtype": self.dtype,
        }
        out |= written_fields(self) | family.written
        if self.rope.rope_type == "longrope":  # outside of rope_scaling too, where transformers looks first
            out["original_max_position_embeddings"] = self.rope.original_max_position_embeddings
        if "partial_rotary_factor" in family.reads:
            out["partial_rotary_factor"] = self.rope.partial_rotary_factor
        if "word_embed_proj_dim" in family.reads:
            out["word_embed_proj_dim"] = self.hidden_size
        said = {"attention_bias": self.qkv_bias, "attention_out_bias": self.o_bias, "mlp_bias": self.mlp_bias}
        out |= {name: value for name, value in said.items() if name in family.reads}
        if plan.is_swiftkv:
            out |= {"model_type": f"{self.family}_swiftkv", "swiftkv": True}
            out |= {"num_key_value_layers": split, "key_value_group_size": share}
        if plan.tail:
            out["swiftkv_tail"] = plan.tail  # ours: published models have none
        if self.exit_head:
            out["exit_head"] = True  # ours: published checkpoints have none
        if not plan.is_plain:
            out["slim_attention"] = {"version": 1, "forms": list(plan.listed_forms)}  # ours too
        if set(plan.cross_forms) - {"kv"}:
            slim = out.setdefault("slim_attention", {"version": 1, "forms": list(plan.listed_forms)})
            slim["cross_forms"] = list(plan.cross_forms)
        out = {
            family.spelling.get(name, name): value for name, value in out.items() if name not in family.omits
        }
        if self.encoder is not None:
            out |= family_written(self)
        self._check_says_all(out)
        return out if self.wrapper is None else self._wrapped(out)

    def _wrapped(self, text: dict) -> dict:
        """The config.json of the model of images and text around this one; its images' fields are missing."""
        wrapper = WRAPPERS[self.wrapper or ""]
        kind = next(name for name, family in wrapper.texts.items() if family == self.family)
        outer = {"model_type": self.wrapper, "architectures": [wrapper.architecture]}
        outer |= {name: text[name] for name in ("tie_word_embeddings", "torch_dtype")}
        return outer | {"text_config": {**text, "model_type": kind}}

    def _check_says_all(self, raw: dict) -> None:
        read = ModelConfig.from_hf(raw)
        names = [f.name for f in dataclasses.fields(self) if f.compare]
        lost = [name for name in names if getattr(self, name) != getattr(read, name)]
        if lost:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in lost)
            raise UsageError(
                f"a {self.family} config.json cannot express {values}; change them or the family"
            )

    @property
    def rotary_dim(self) -> int:
        """Width of the part of each head to which rotary embedding is applied."""
        return self.rope.width(self.rotary_head)

    @property
    def rotary_head(self) -> int:
        """Width of the part of each head, its last, whose first numbers are rotated."""
        return self.head_dim if self.latent is None else self.latent.rotary

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def fused_fill(self) -> bool:
        """Whether the fused fill (kernels/fused_kv_fill) supports this model's way to make rows."""
        rms = self.norm in ("rms", "rms_plus_one") and self.norm_before
        turns = len(self.tables) == 1 and self.rotary_dim == self.head_dim and not self.rope.interleaved
        return rms and turns and not (self.clip_qkv or self.qk_norm_whole or self.sizes or self.latent)

    @property
    def kv_width(self) -> int:
        """Width of one token's keys (or values) in one row: kv heads x head_dim."""
        return self.num_kv_heads * self.head_dim


def plan_from_hf(source: Mapping | str | Path, slim: bool = True) -> KVPlan:
    """The plan that config.json describes: standard, or SwiftKV by its published fields. Rows have the forms
    that `slim_attention` lists, or with slim=False keys and values."""
    raw = with_llama_names(text_of(read_config_json(source))[0])
    layers = integer(raw, "num_hidden_layers")
    attentions = sizes_from_hf(FAMILIES[base_family(raw)].sizes, raw).get("attentions", ())
    without = [layer for layer, kind in enumerate(attentions) if kind != ROWS]
    plan = KVPlan.standard(layers, without)
    if is_swiftkv(raw):
        split = integer(raw, "num_key_value_layers", layers)
        share, tail = integer(raw, "key_value_group_size", 1), raw.get("swiftkv_tail") or 0
        plan = KVPlan.swiftkv(layers, split, share, without, tail)
    if FAMILIES[base_family(raw)].latent:
        return plan.stored_as("latent")
    forms, crossing = forms_from_hf(raw, len(plan.rows)), cross_forms_from_hf(raw, layers)
    plan = plan.stored_as(*forms) if slim else plan
    if FAMILIES[base_family(raw)].encoder is None:
        return plan
    return plan.with_cross(*crossing) if slim else plan.with_cross()
