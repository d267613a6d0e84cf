"""Multi-head latent attention: what config.json says of it, read and written."""

import dataclasses
import math
from collections.abc import Mapping

from swiftkv_jax.common import checks
from swiftkv_jax.config.rope import RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values are linear maps of one latent for all heads (DeepSeek-V2, arXiv
    2405.04434, section 2.1).

    Attributes:
      rank: width of the latent. query_rank: of the latent that queries are made from; 0: they are made from
        the layer's input.
      plain, rotary: widths of the two parts of each head's query and key; the rotary part of a key is the
        same for all heads, and is made beside the latent. value: width of each head's value.
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    value: int


_NAMES = {
    "rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "plain": "qk_nope_head_dim",
    "rotary": "qk_rope_head_dim",
    "value": "v_head_dim",
}
FIELDS = tuple(_NAMES.values())  # of config.json


def latent_from_hf(raw: Mapping, heads: int, rope: RopeConfig) -> dict:
    """ModelConfig's fields of a model with latent attention.

    raw: the fields of config.json. rope: its rotary embedding, from whose `mscale_all_dim` the scale of the
    scores follows.

    Raises:
      UsageError: a field is missing or wrong.
    """
    least = {"query_rank": 0}
    given = {
        field: checks.integer(f"config.json: {name}", raw.get(name) or 0, least.get(field, 1))
        for field, name in _NAMES.items()
    }
    latent = Latent(**given)
    width, grown = latent.plain + latent.rotary, 1.0
    if rope.mscale_all_dim and rope.factor > 1:
        grown = (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    scale = None if grown == 1 else width**-0.5 * grown
    return {"latent": latent, "head_dim": width, "num_kv_heads": heads, "attention_scale": scale}


def latent_written(latent: Latent | None) -> dict:
    """The published fields of a latent attention."""
    if latent is None:
        return {}
    fields = {name: getattr(latent, field) for field, name in _NAMES.items()}
    return fields | {"q_lora_rank": latent.query_rank or None}
