"""One grouped product on Hopper, by JAX's own kernel (jax.experimental.pallas.ops.gpu.ragged_dot_mgpu).

On an H200, 2048 tokens of a layer of DeepSeek-V2-Lite take 1.1 ms, 193 TFLOP/s; XLA's tiles take 10.7 ms.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.kernels.expert_mlp import xla

_BLOCKS: dict[str, Any] = {"block_m": 64, "block_n": 128, "block_k": 64}
_BLOCKS |= {"max_concurrent_steps": 4, "grid_block_n": 1}
_ROWS = 8  # their number is a multiple of a tile's in shared memory


def expert_mlp(x, chosen, weights, gate, up, down, *, activation):
    """As `xla.expert_mlp`; its gradient is that of the tiles."""
    if len(x) <= xla.FEW:
        return xla.expert_mlp(x, chosen, weights, gate, up, down, activation=activation)
    return _grouped(activation, x, chosen, weights, gate, up, down)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(activation, *arrays):
    return xla.by_groups(*arrays, activation=activation, product=_product)


_grouped.defvjp(lambda activation, *arrays: (_grouped(activation, *arrays), arrays), xla.backward)


@jax.jit  # lowered once for all layers
def _product(rows, experts, count):
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # which imports JAX's test tools

    padded = jnp.pad(rows, ((0, -len(rows) % _ROWS), (0, 0)))
    return ragged_dot(padded, experts, group_sizes=count, **_BLOCKS)[: len(rows)]


def refuses(x, chosen, weights, gate, *_, **__) -> str:
    """Name the unsupported part of a call and what is supported instead, or return ""."""
    if x.dtype != jnp.bfloat16 or gate.dtype != x.dtype:
        return f"{x.dtype} tokens, {gate.dtype} experts: both bfloat16"
    if any(size % 64 for size in gate.shape[1:]):
        return f"experts of {gate.shape[1]} x {gate.shape[2]}: multiples of 64"
    return ""
