"""The ends of a decoder, before its first layer and after its last, and the norm before rows are made."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.layers import before, norm, norm_weights, unit_norm
from swiftkv_jax.core.shapes import Array, Float, Hidden, Int, PyTree


@runtime_checkable
class Decoder(Protocol):
    """A model as the loops see it: its layers, where its rows come from, and the dtype of activations."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def plan(self) -> KVPlan: ...

    @property
    def dtype(self) -> str: ...


def embed(
    model: Decoder,
    params: PyTree,
    tokens: Int[Array, "*batch"],
    positions: Int[Array, "*batch"] | None,
) -> Hidden:
    """The input of the first layer, in the model's dtype: embeddings, plus learned positions if it has any.

    positions: of the tokens; None: each row begins at 0.
    """
    config = model.config
    x = params["embed"][tokens].astype(model.dtype)
    if config.learned_positions:
        if positions is None:
            _check_length(config, tokens.shape[-1])
            positions = jnp.arange(tokens.shape[-1])
        x = x + params["positions"][positions + config.unused_positions].astype(model.dtype)
    return x * jnp.asarray(model.config.hidden_size**0.5, x.dtype) if model.config.scaled_embedding else x


def _check_length(config: ModelConfig, length: int) -> None:
    if length > config.max_position_embeddings:
        raise UsageError(
            f"{length} tokens in a row, and {config.family} has embeddings for "
            f"{config.max_position_embeddings} positions: cut the rows, or give positions that begin again"
        )


def logits(model: Decoder, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the hidden states leaving the last layer: final norm, then the output head."""
    h = norm(model.config, params, x)
    return head(params, h * jnp.asarray(x.shape[-1] ** -0.5, h.dtype) if model.config.scaled_logits else h)


def head(params: PyTree, h: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of normalised hidden states; a tied model uses its transposed embeddings."""
    kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
    return jnp.matmul(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)


def exit_logits(model: Decoder, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the exit head, on the hidden states entering `split` (SwiftKV paper, B.4)."""
    p = params["exit"]
    return head(p, norm(model.config, p, x))


def normalised(model: Decoder, params: PyTree, shared: bool, layer: int, x: Hidden) -> Hidden:
    """The hidden states entering `layer` as the makers of rows see them.

    They pass the shared norm (SwiftKV paper, equation 2), whose gain `fold_shared_norm` may have moved into
    the makers, or else the layer's own input norm.
    """
    config = model.config
    if not shared:
        return before(config, weights.layer(params, layer)["attentions"][0], x)
    given = {name: params[f"shared_{name}"] for name in norm_weights(config) if f"shared_{name}" in params}
    return before(config, given or unit_norm(config, x.dtype), x)
