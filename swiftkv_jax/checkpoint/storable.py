"""A training state as the flat dict of plain arrays that Orbax stores, and back.

Names are paths ("trainable/rows/0/k_proj/kernel"). The types of the containers do not matter, so optimiser
states, dataclasses and tuples need no support from Orbax. Arrays without elements are not stored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.core.shapes import PyTree

_LISTED = 10  # differences that one message names


def pack(state: PyTree) -> dict[str, Any]:
    """The arrays to store, by path; nothing is copied."""
    return {name: leaf for name, leaf in _named(state).items() if leaf.size}


def abstract(state: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings to restore for a state of arrays or `jax.ShapeDtypeStruct`s."""
    leaves = pack(state).items()
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_place(x)) for name, x in leaves}


def unpack(state: PyTree, arrays: dict[str, Any]) -> PyTree:
    """The inverse of `pack`: the tree of `state` with the values of `arrays`."""

    def empty(leaf: Any) -> jax.Array:
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), _place(leaf))

    values = [arrays[name] if leaf.size else empty(leaf) for name, leaf in _named(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), values)


def describe(state: PyTree) -> dict[str, str]:
    """`{"trainable/shared_norm": "float32[48]"}`, arrays without elements too."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(state).items()}


def differences(stored: dict[str, str], state: PyTree) -> list[str]:
    """Differences between a stored description and a state: at most 10, and a count of the rest."""
    here = describe(state)
    names = [name for name in sorted(stored | here) if stored.get(name) != here.get(name)]
    shown = [
        f"{n} ({stored.get(n, 'nothing')} saved, {here.get(n, 'nothing')} here)" for n in names[:_LISTED]
    ]
    return shown + ([f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else [])


def _named(tree: PyTree) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path: a dict key holds '/'")
    return leaves


def _place(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
