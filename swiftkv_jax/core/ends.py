"""The ends of a decoder, before its first layer and after its last, and the norm before rows are made."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.layers import SHARED, before, norm, unit_norm
from swiftkv_jax.core.shapes import Array, Float, Hidden, Int, PyTree
from swiftkv_jax.kernels.common.mask import capped


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
            if (length := tokens.shape[-1]) > (most := config.max_position_embeddings):
                advice = "cut the rows, or give positions that begin again"
                raise UsageError(
                    f"{length} tokens in a row, {config.family} embeds {most} positions: {advice}"
                )
            positions = jnp.arange(length)
        x = x + params["positions"][positions + config.unused_positions].astype(model.dtype)
    return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)


def logits(model: Decoder, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the hidden states leaving the last layer: final norm, then the output head."""
    return head(model.config, params, norm(model.config, params, x))


def head(config: ModelConfig, params: PyTree, h: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of normalised hidden states; a tied model uses its transposed embeddings."""
    kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
    h = h if config.logits_scale == 1 else h * jnp.asarray(config.logits_scale, h.dtype)
    return capped(_float32_product(h, kernel.astype(h.dtype)), config.logits_softcap)


@jax.custom_vjp
def _float32_product(h, kernel):
    """[..., D] @ [D, V], in float32. JAX would multiply its float32 gradient with float32 copies of h and
    kernel, at half the speed of bfloat16 on a GPU; here the gradient is rounded to their dtype first."""
    return jnp.matmul(h, kernel, preferred_element_type=jnp.float32)


_float32_product.defvjp(
    lambda h, kernel: (_float32_product(h, kernel), (h, kernel)),
    lambda saved, gradient: jax.vjp(jnp.matmul, *saved)[1](gradient.astype(saved[0].dtype)),
)


def exit_logits(model: Decoder, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the exit head, on the hidden states entering `split` (SwiftKV paper, B.4)."""
    p = params["exit"]
    return head(model.config, p, norm(model.config, p, x))


def normalised(model: Decoder, params: PyTree, shared: bool, layer: int, x: Hidden) -> Hidden:
    """The hidden states entering `layer` as the makers of rows see them.

    They pass the shared norm (SwiftKV paper, equation 2), whose gain `fold_shared_norm` may have moved into
    the makers, or else the layer's own input norm.
    """
    config = model.config
    if not shared:
        return before(config, weights.layer(params, layer)["attentions"][0], x)
    given = params if f"{SHARED}norm" in params else unit_norm(config, x.dtype, SHARED)
    return before(config, given, x, SHARED)
