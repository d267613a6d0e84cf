"""The rows of the fill as XLA composes them: matmuls of the normalised stream, norm, rotary embedding."""

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.common.dispatch import device
from swiftkv_jax.kernels.fused_kv_fill import reference
from swiftkv_jax.kernels.fused_kv_fill.reference import Makers


def rows_of(x, makers: Makers, cos, sin, heads: int, eps: float) -> tuple[jax.Array, jax.Array]:
    """Float32 keys [T, F, K * H] and values [T, F, K * U] of the stream [T, D]: matmuls in its dtype.

    For one product of all rows XLA transposes the weights, and XLA:TPU does for one product of a row that it
    may lay out by head: so one for each row, behind a barrier. XLA:GPU would merge these and copy all weights
    for that: there it is a batched product, which reads them in place.
    """
    wide = x.astype(jnp.float32)
    h = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)

    def project(w, bias):
        if device()[0] == "gpu":
            each = jnp.broadcast_to(h, (len(w), *h.shape))
            y = jnp.einsum("ftd,fde->fte", each, w, preferred_element_type=jnp.float32).swapaxes(0, 1)
        else:
            y = [jnp.dot(h, row, preferred_element_type=jnp.float32) for row in w]
            y = jnp.stack(jax.lax.optimization_barrier(y) if device()[0] == "tpu" else y, axis=1)
        return y if bias is None else y + bias.astype(jnp.float32)

    k, v = project(makers.w_k, makers.b_k), project(makers.w_v, makers.b_v)
    return reference.finish_keys(k.reshape(*k.shape[:2], heads, -1), makers.k_norm, cos, sin, eps), v
