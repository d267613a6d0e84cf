"""Axis letter -> mesh axis: the one table that places weights, activations and caches."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.kernels.causal_attention.shards import Shards

MESH_AXES = ("data", "fsdp", "context", "tensor")

# Weights: their model-width axis is split over `fsdp` (gathered for use), heads, ffn, experts and
# vocabulary over `tensor`. Activations: batch rows over `data` and `fsdp` together, the tokens of a row over
# `context`, their width ('.') not at all.
RULES: dict[str, str | tuple[str, ...]] = {
    "B": ("data", "fsdp"),
    "T": "context",
    "D": "fsdp",
    "N": "tensor",
    "K": "tensor",
    "E": "tensor",
    "F": "tensor",
    "V": "tensor",
    "X": "tensor",
}


def _names(letter: str) -> tuple[str, ...]:
    names = RULES[letter]
    return (names,) if isinstance(names, str) else names


# The part of the table for kernels that shard whole sequences.
SHARDS = Shards(rows=_names("B"), tokens=_names("T"), heads=_names("K"))


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, devices=None) -> Mesh:
    """A mesh over `devices` (default: all), with -1 standing for all remaining devices.

    Neighbours on a TPU's torus are neighbours on the mesh, with the axes that communicate most (`tensor`)
    first. Across several slices, or hosts connected by a network, the outermost axes are split.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size == 0 or size < -1 for size in sizes.values()):
        raise UsageError(f"mesh axes must be positive, at most one of them -1, not {sizes}")
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        raise UsageError(
            f"mesh data={data} x fsdp={fsdp} x context={context} x tensor={tensor} does not match "
            f"{len(devices)} device(s); "
            "choose axes whose product is the number of devices, or -1 for one of them"
        )
    return Mesh(_grid(sizes, devices), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _grid(sizes: dict[str, int], devices):
    """The devices in the shape of the mesh, following their interconnect."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    between, left = {}, slices
    for name, size in sizes.items():
        between[name] = math.gcd(size, left)
        left //= between[name]
    within = tuple(size // between[name] for name, size in sizes.items())
    if left > 1:
        raise UsageError(f"the axes of the mesh {sizes} cannot be shared out over {slices} slices or hosts")
    wired = {"devices": devices, "allow_split_physical_axes": True}
    try:
        if slices == 1:
            return mesh_utils.create_device_mesh(within, **wired)
        return mesh_utils.create_hybrid_device_mesh(within, tuple(between.values()), **wired)
    except (AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(f"these {len(devices)} devices cannot be the mesh {sizes}: {reason}") from None


def tensor_mesh(size: int) -> Mesh:
    """A mesh over the first `size` devices, each of which has its own heads."""
    devices = jax.devices()
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= len(devices):
        raise UsageError(
            f"tensor_parallel_size must be from 1 to {len(devices)}, the devices that JAX finds, not {size}"
        )
    return make_mesh(tensor=size, devices=devices[:size])


def mesh_axes(text: str) -> dict[str, int]:
    """The axes that a text such as "fsdp=2,tensor=4" names, and their sizes, for `make_mesh`."""
    parts = (part.partition("=") for part in text.split(","))
    axes = {name.strip(): size.strip() for name, _, size in parts}
    bad = [name for name, size in axes.items() if name not in MESH_AXES or not size.lstrip("-").isdecimal()]
    if bad:
        raise UsageError(f"{bad[0]!r} in mesh {text!r}: give axes of {', '.join(MESH_AXES)}, as in tensor=4")
    return {name: int(size) for name, size in axes.items()}


def spec(axes: str, shape: tuple[int, ...] | None = None, mesh: Mesh | AbstractMesh | None = None) -> P:
    """`spec("D N")` is `P("fsdp", "tensor")`; an axis whose size does not divide evenly stays whole."""
    names = [RULES.get(letter) for letter in axes.split()]
    if shape is not None and mesh is not None:
        names = [
            n if n and size % _extent(mesh, n) == 0 else None for n, size in zip(names, shape, strict=True)
        ]
    return P(*names)


def named(mesh: Mesh, axes: str, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding on `mesh` of an array of `shape` with these axis letters."""
    return NamedSharding(mesh, spec(axes, shape, mesh))


def put(tree: PyTree, place: jax.sharding.Sharding) -> PyTree:
    """Put host arrays, equal in all processes, whole on each device of `place`."""
    if place.is_fully_addressable:
        return jax.device_put(tree, place)
    whole = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, lambda at: x[at]), whole)


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Constrain an activation's sharding inside `jit`; without a mesh (`jax.set_mesh`) returns `x`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def on_own_heads(run: Callable, mesh: Mesh | None, cut: bool, axes, out) -> Callable:
    """`run` on each device of `mesh` by itself, on that device's heads.

    axes: for each argument, a prefix of its tree with axis letters as leaves ("." for an array without
    heads); out: the same for the result. Heads are sharded over `tensor`; unless `cut`, every device takes
    all of them. Inside, a kernel sees the arrays of one device, and there is no communication.
    """
    if mesh is None or mesh.size == 1:
        return run

    def place(letters: str) -> P:
        return P(*["tensor" if cut and RULES.get(letter) == "tensor" else None for letter in letters.split()])

    specs, outside = jax.tree.map(place, (axes, out))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outside, check_vma=False)


def under(run: Any, mesh: Mesh | None) -> Any:
    """`run`, if it is a function, with `mesh` as that of `jax.set_mesh`."""
    if run is None or mesh is None or mesh.size == 1:
        return run

    def inside(*args, **options):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(*args, **options)

    return inside


def pieces(letter: str, size: int) -> int:
    """How many parts the mesh of `jax.set_mesh` cuts an axis of this size into."""
    mesh = jax.sharding.get_abstract_mesh()
    count = 1 if mesh.empty else _extent(mesh, RULES[letter])
    return count if size % count == 0 else 1


def share_of_rows(mesh: Mesh, process: int) -> tuple[int, int]:
    """(index, count) of the share of each batch's rows that a process loads; others may load the same share.

    Processes whose devices hold the same rows (with heads or tokens sharded among them) need the same data.
    """
    rows = math.prod(mesh.shape[name] for name in SHARDS.rows)
    held: dict[int, list[int]] = {}
    for row, devices in enumerate(mesh.devices.reshape(rows, -1)):
        for other in {device.process_index for device in devices}:
            held.setdefault(other, []).append(row)
    shares = sorted({tuple(own) for own in held.values()})
    if sum(map(len, shares)) != rows or len({len(share) for share in shares}) > 1:
        raise UsageError(
            f"the mesh {dict(mesh.shape)} gives some processes a part of the rows of others: choose axes "
            "that are multiples of a process's devices, or divide them"
        )
    return shares.index(tuple(held[process])), len(shares)


def _extent(mesh: Mesh | AbstractMesh, names: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
