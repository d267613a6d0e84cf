"""A stand-in for cuDNN, to compile a step and count its costs without the GPU that cuDNN needs.

Its results are meaningless. Forward it reads q, k and v and writes an output and a float32 number for each
query and head; backward it reads all of these and the output's gradient, and writes three gradients: the
arrays that a flash attention moves. Barriers keep the compiler from fusing it with its neighbours.
"""

import contextlib
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from swiftkv_jax.kernels.causal_attention import cudnn
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.common.dispatch import Implementation


@contextlib.contextmanager
def for_cudnn(capable: bool = True) -> Iterator[None]:
    """Context in which "cudnn" compiles for any chip, or for one that is not `capable` of it is refused; the
    compiled programs must not be run."""
    real = CAUSAL_ATTENTION["cudnn"]
    run = partial(cudnn.causal_attention, attend=lambda q, k, v, *_: _attend(q, k, v))
    CAUSAL_ATTENTION["cudnn"] = Implementation(run, partial(cudnn.refuses, capable=capable))
    try:
        yield
    finally:
        CAUSAL_ATTENTION["cudnn"] = real


@jax.custom_vjp
def _attend(q, k, v):
    return _forward(q, k, v)[0]


def _forward(q, k, v):
    q, k, v = optimization_barrier((q, k, v))
    out = q + k + v
    out, sums = optimization_barrier((out, out[..., 0].astype(jnp.float32)))
    return out, (q, k, v, out, sums)


def _backward(kept, slope):
    q, k, v, out, sums, slope = optimization_barrier((*kept, slope))
    mixed = q + k + v + out + slope + sums[..., None].astype(q.dtype)
    return optimization_barrier((mixed, -mixed, 2 * mixed))


_attend.defvjp(_forward, _backward)
