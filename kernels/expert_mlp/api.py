"""Gated MLPs of which each token runs some. A named implementation runs or raises; None picks by platform."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Int8

from swiftkv_jax.kernels.causal_attention.shards import WHOLE, Shards
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.common.dispatch import Implementation
from swiftkv_jax.kernels.expert_mlp import mosaic, reference, xla

EXPERT_MLP = {
    "reference": Implementation(reference.expert_mlp),
    "xla": Implementation(xla.expert_mlp),
    "xla_groups": Implementation(xla.by_groups, xla.refuses_groups),
    "mosaic_groups": Implementation(mosaic.expert_mlp, mosaic.refuses),
}


def expert_mlp(
    x: Float[Array, "B T D"],
    chosen: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    gate: Float[Array, "X D F"] | Int8[Array, "X D F"],
    up: Float[Array, "X D F"] | Int8[Array, "X D F"],
    down: Float[Array, "X F D"] | Int8[Array, "X F D"],
    *scales: Float[Array, "X _"],
    activation: Callable = jax.nn.silu,
    implementation: str | None = None,
    shards: Shards = WHOLE,
) -> Float[Array, "B T D"]:
    """Each token's weighted sum of its experts: exactly, without a capacity and without a dropped token. It
    can be differentiated by `x`, `weights` and, without scales, the experts.

    Args:
      x: [B, T, D] tokens.
      chosen: [B, T, k] the experts of each, in [0, X) and all different.
      weights: [B, T, k] float32 factors of their outputs.
      gate, up: [X, D, F] and down: [X, F, D], in x's dtype: an expert is down(activation(gate x) * up x).
      scales: float32 factors of the outputs of gate, up [X, F] and down [X, D], which are then in 8 bits.
      implementation: "reference", "xla" (a loop over tiles of one expert's tokens), "xla_groups"
        (`lax.ragged_dot`, for TPUs; no 8 bits), "mosaic_groups" (JAX's kernel, for bfloat16 on Hopper), or
        None.
      shards: the axes of the mesh that tokens are cut over, and as `heads` those of X. Each device runs its
        own experts on its own tokens, and one all-reduce adds up the devices' sums.

    Returns:
      [B, T, D] in x's dtype.

    Raises:
      dispatch.UnsupportedError: shapes that disagree, experts that the mesh does not divide, or a call that
        the named implementation cannot run.
    """
    dispatch.expect(
        x_and_gate=(x.shape[-1:], gate.shape[1:2]),
        x_and_chosen=(x.shape[:2], chosen.shape[:2]),
        chosen_and_weights=(chosen, weights),
        gate_and_up=(gate, up),
        gate_and_down=((gate.shape[0], gate.shape[2], gate.shape[1]), down),
    )
    count = shards.count(shards.heads)
    if len(gate) % count:
        raise dispatch.UnsupportedError(f"{len(gate)} experts do not divide among {count} devices")
    cut = shards.of(x.shape[0], x.shape[1], len(gate))

    def own(x, chosen, *rest):
        """What one device's experts add to its tokens."""
        weights, *experts = rest
        held = len(experts[0])
        first = lax.axis_index(cut.heads) * held if cut.heads else 0
        here = (chosen >= first) & (chosen < first + held)
        chosen = jnp.where(here, chosen - first, held)
        flat = (y.reshape(-1, y.shape[-1]) for y in (x, chosen, weights))
        args, options = (*flat, *experts), {"activation": activation}
        return dispatch.call("expert_mlp", EXPERT_MLP, implementation, args, options).reshape(x.shape)

    arrays = (x, chosen, weights, gate, up, down, *scales)
    if cut == WHOLE:
        return own(*arrays)
    tokens, experts = PartitionSpec(cut.rows or None, cut.tokens or None), PartitionSpec(cut.heads or None)

    @jax.custom_vjp
    def added(y):
        return lax.psum(y, cut.heads) if cut.heads else y

    # Each device gets the slope of the sum over `count`. The gradient of `psum` would add these up again.
    added.defvjp(lambda y: (added(y), None), lambda _, slope: (slope * slope.dtype.type(count),))
    specs = {
        "in_specs": (*(tokens,) * 3, *(experts,) * len(arrays[3:])),
        "out_specs": tokens,
        "check_vma": False,
    }
    return jax.shard_map(lambda *args: added(own(*args)), **specs)(*arrays)
