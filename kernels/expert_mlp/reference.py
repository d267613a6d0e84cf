"""The definition of an expert MLP.

Letters: T tokens, k experts of each, X experts, D width of the stream, F of an expert.
"""

import jax
import jax.numpy as jnp


def expert_mlp(x, chosen, weights, gate, up, down, *scales, activation):
    """As `api.expert_mlp` of tokens [T, D], in at least float32: every expert runs on every token."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if scales:
        pairs = zip((gate, up, down), scales, strict=True)
        gate, up, down = (w.astype(wide) * scale[:, None] for w, scale in pairs)

    def product(text: str, a, b):
        return jnp.einsum(text, a.astype(wide), b.astype(wide), precision="highest")

    share = jnp.sum(jax.nn.one_hot(chosen, len(gate), dtype=wide) * weights.astype(wide)[..., None], axis=1)
    hidden = activation(product("td,xdf->txf", x, gate)) * product("td,xdf->txf", x, up)
    each = product("txf,xfd->txd", hidden, down)
    return jnp.einsum("txd,tx->td", each, share, precision="highest").astype(x.dtype)
