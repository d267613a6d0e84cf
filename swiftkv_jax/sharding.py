"""Axis letter -> mesh axis: the one table that places weights, activations and caches."""

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from swiftkv_jax.errors import UsageError

MESH_AXES = ("data", "fsdp", "tensor")

# Weights: their model-width axis is split over `fsdp` (gathered for use), heads, ffn and vocabulary over
# `tensor`. Activations: batch rows over `data` and `fsdp` together, their width ('.') not at all.
RULES: dict[str, str | tuple[str, ...]] = {
    "B": ("data", "fsdp"),
    "D": "fsdp",
    "N": "tensor",
    "K": "tensor",
    "E": "tensor",
    "F": "tensor",
    "V": "tensor",
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over `devices` (default: all), with one -1 meaning "whatever is left".

    Raises:
      UsageError: the product of the axes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size == 0 or size < -1 for size in sizes.values()):
        raise UsageError(f"mesh axes must be positive, at most one of them -1, not {sizes}")
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        raise UsageError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} does not match {len(devices)} device(s); "
            "choose axes whose product is the number of devices, or -1 for one of them"
        )
    grid = np.asarray(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(axes: str, shape: tuple[int, ...] | None = None, mesh: Mesh | AbstractMesh | None = None) -> P:
    """`spec("D N")` is `P("fsdp", "tensor")`; an axis whose size does not divide evenly stays whole."""
    names = [RULES.get(letter) for letter in axes.split()]
    if shape is not None and mesh is not None:
        names = [
            n if n and size % _extent(mesh, n) == 0 else None for n, size in zip(names, shape, strict=True)
        ]
    return P(*names)


def named(mesh: Mesh, axes: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where an array of `shape` with these axis letters lies on `mesh`."""
    return NamedSharding(mesh, spec(axes, shape, mesh))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Pin an activation's layout inside `jit`; without a mesh (`jax.set_mesh`) it is `x`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def _extent(mesh: Mesh | AbstractMesh, names: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
