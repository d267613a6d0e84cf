"""A training state as the flat dict of plain arrays that Orbax stores, and back.

Names are paths ("params/fill/k_proj/kernel"). How the containers are made does not matter, so optimiser
states, dataclasses and tuples need no support from Orbax. Typed PRNG keys are stored as their key data;
arrays without elements are not stored.
"""

from typing import Any

import jax
import jax.numpy as jnp

from swiftkv_jax.shapes import PyTree

_LISTED = 10  # differences that one message names


def pack(state: PyTree) -> dict[str, Any]:
    """What to store: no copies, but for PRNG keys."""
    leaves = {name: leaf for name, leaf in _named(state).items() if leaf.size}
    return {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}


def abstract(state: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read back for a state of arrays or `jax.ShapeDtypeStruct`s, and where to put it."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=_place(leaf))

    return {name: one(leaf) for name, leaf in _named(state).items() if leaf.size}


def unpack(state: PyTree, arrays: dict[str, Any]) -> PyTree:
    """The tree of `state` with the values that `pack` made of it."""
    values = [_value(leaf, arrays.get(name)) for name, leaf in _named(state).items()]
    return jax.tree.unflatten(jax.tree.structure(state), values)


def describe(state: PyTree) -> dict[str, str]:
    """`{"params/norm": "float32[48]"}`; PRNG keys keep their type, arrays without elements are there."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(state).items()}


def differences(stored: dict[str, str], state: PyTree) -> list[str]:
    """Where a stored description and a state disagree, at most 10 of them and a count of the rest."""
    here = describe(state)
    names = [name for name in sorted(stored | here) if stored.get(name) != here.get(name)]
    rest = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    absent = "nothing"
    return [
        f"{n} ({stored.get(n, absent)} saved, {here.get(n, absent)} here)" for n in names[:_LISTED]
    ] + rest


def _named(tree: PyTree) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path: a dict key holds '/'")
    return leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _place(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _value(leaf: Any, data: Any) -> Any:
    if data is None:
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), _place(leaf))
    if not _is_key(leaf):
        return data
    implementation = []  # `key_impl` takes no ShapeDtypeStruct, but a tracer of one
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(data, impl=implementation[0])
