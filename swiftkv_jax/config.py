"""What a decoder is made of: read from a Hugging Face config.json, frozen, validated."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from swiftkv_jax import checks
from swiftkv_jax.config_json import (
    FAMILIES,
    FULL_ATTENTION,
    base_family,
    check_fields,
    fields_from_hf,
    forms_from_hf,
    integer,
    is_swiftkv,
    read_config_json,
    window_fields,
)
from swiftkv_jax.errors import UsageError
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.rope import RopeConfig

DTYPES = ("float32", "bfloat16", "float16")
_SIZES = (
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_position_embeddings"
).split()
_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One Llama-shaped decoder: pre-norm, rotary, grouped-query attention, gated SiLU MLP.

    Attributes:
      family: config.json's `model_type` of the base model, one of FAMILIES.
      windows: tokens each layer's attention sees, itself included; FULL_ATTENTION for all.
      dtype: the checkpoint's dtype, and the default for loading it.
      max_position_embeddings: context length in tokens.
      exit_head: whether a norm and an output head of their own read the stream entering `split`, for early
        exit (SwiftKV paper, B.4); of SwiftKV plans only.
      source: folder the model was read from, if its tokenizer, generation settings or token ids lie there. It
        is no part of what the model is: configs that differ in it alone are equal, and share programs.
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
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    dtype: str = "float32"
    exit_head: bool = False
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise UsageError(f"model_type {self.family!r} is not supported; known: {', '.join(FAMILIES)}")
        for name in _SIZES:
            checks.integer(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UsageError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is not supported; known: {', '.join(DTYPES)}")
        windows = self.windows or (FULL_ATTENTION,) * self.num_layers
        if len(windows) != self.num_layers or min(windows) < 1:
            raise UsageError(
                f"windows needs one positive number for each of {self.num_layers} layers, not {windows}"
            )
        object.__setattr__(self, "windows", windows)

    @classmethod
    def from_hf(cls, source: Mapping | str | Path) -> "ModelConfig":
        """From config.json (a dict, the file, or its folder), of a standard or a SwiftKV model.

        Raises:
          UsageError: the file cannot be read, the model type is unknown, or a field asks for something
            this decoder does not compute. An unknown field that might change the numbers is a UsageWarning.
        """
        raw = read_config_json(source)
        family = base_family(raw)
        check_fields(raw)
        fields = fields_from_hf(family, raw)
        return cls(**fields, rope=RopeConfig.from_hf(raw))

    def to_hf(self, plan: KVPlan) -> dict:
        """The published spelling of config.json; a SwiftKV plan gets `model_type` `<family>_swiftkv`.

        Raises:
          UsageError: no config.json says what this config and plan say (a hand-made mixture of families,
            an arbitrary row map).
        """
        split, share = plan.split_and_share
        out = {
            "model_type": self.family,
            "architectures": [
                _ARCHITECTURES[self.family] + ("SwiftKV" if plan.is_swiftkv else "") + "ForCausalLM"
            ],
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
            "rope_scaling": self.rope.to_hf(),
            "attention_dropout": 0.0,
            "torch_dtype": self.dtype,
        }
        out |= window_fields(self.family, self.windows)
        if self.family in ("llama", "qwen3"):
            out["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            out["mlp_bias"] = self.mlp_bias
        if plan.is_swiftkv:
            out |= {"model_type": f"{self.family}_swiftkv", "swiftkv": True}
            out |= {"num_key_value_layers": split, "key_value_group_size": share}
        if self.exit_head:
            out["exit_head"] = True  # ours: published checkpoints have none
        if plan.forms != ("kv",):
            out["slim_attention"] = {"version": 1, "forms": [row.form for row in plan.rows]}  # ours too
        self._check_says_all(out)
        return out

    def _check_says_all(self, raw: dict) -> None:
        read = ModelConfig.from_hf(raw)
        names = [f.name for f in dataclasses.fields(self) if f.compare]
        lost = [name for name in names if getattr(self, name) != getattr(read, name)]
        if lost:
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in lost)
            raise UsageError(f"a {self.family} config.json cannot say {values}; change them or the family")

    @property
    def kv_width(self) -> int:
        """Width of one token's keys (or values) in one row: kv heads x head_dim."""
        return self.num_kv_heads * self.head_dim


def plan_from_hf(source: Mapping | str | Path, slim: bool = True) -> KVPlan:
    """The plan that config.json describes: standard, or SwiftKV with its published fields; its rows in the
    forms of `slim_attention`, or with slim=False as keys and values."""
    raw = read_config_json(source)
    base_family(raw)
    layers = integer(raw, "num_hidden_layers")
    plan = KVPlan.standard(layers)
    if is_swiftkv(raw):
        split = integer(raw, "num_key_value_layers", layers)
        plan = KVPlan.swiftkv(layers, split, integer(raw, "key_value_group_size", 1))
    forms = forms_from_hf(raw, len(plan.rows))
    return plan.stored_as(*forms) if slim else plan
