"""A fingerprint of a model's weights: cached rows, and a resumed batch's answers, are of one model."""

import hashlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, transformers
from swiftkv_jax.core.shapes import PyTree

_SEEN = 64  # numbers of each array, and of each layer where an array has several


def fingerprint(model: Transformer | Predicted, params: PyTree, mesh: Mesh | None) -> str:
    """16 hex digits that change with the architecture, the plan, the dtype, or training of any part.

    It runs one small program, which all processes of the `mesh` take part in.
    """
    leaves = [leaf for leaf in jax.tree.leaves(params) if leaf.size]
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    seen = jax.device_get(jax.jit(_begin, out_shardings=whole)(leaves))
    names = [repr((part.config, part.plan, part.dtype)) for part in transformers(model)]
    names += [repr(model.prediction)] if isinstance(model, Predicted) else []
    return hashlib.sha256("".join(names).encode() + seen.tobytes()).hexdigest()[:16]


def _begin(arrays: list[jax.Array]) -> jax.Array:
    """The first numbers of the last axis of each array, as one array: one transfer for all.

    Kernels of several layers have a first axis of layers, and something of each is taken. A slice gathers
    nothing of an array that is cut over devices but itself.
    """

    def first(x: jax.Array) -> jax.Array:
        layers = slice(None) if x.ndim > 2 else 0
        at = x[(layers, *(0,) * (x.ndim - 2))] if x.ndim > 1 else x
        return jnp.ravel(at[..., :_SEEN].astype(jnp.float32))

    return jnp.concatenate([first(x) for x in arrays])
