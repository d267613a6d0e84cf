"""Kernels compiled for chips that are not here: `compiled(chip, call, arguments)`."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftkv_jax.distill.compile_only import topology
from swiftkv_jax.kernels.fused_kv_fill import api as fused
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import api as k_cache
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.paged_attention import api as paged
from swiftkv_jax.kernels.paged_attention import cases as paged_cases

TPUS = {"v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}


@functools.cache
def mesh_of(where: str) -> Mesh:
    """One device of a topology."""
    return Mesh(np.array(topology(where)[1][:1]), ("x",))


def compiled(where: str, call, args, arrays, donate=()):
    """`call(*args, **arrays)` of shapes, compiled; the abstract mesh tells kernels which chip it is for."""
    mesh = mesh_of(where)
    place = NamedSharding(mesh, PartitionSpec())
    args, arrays = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), (args, arrays)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(call, donate_argnums=donate).lower(*args, **arrays).compile()


def attention(kernel: str, case: str, implementation: str):
    """(call, arguments, array options) of a real case of one of the attention kernels."""
    api, cases = {
        "paged_attention": (paged.paged_attention, paged_cases.REAL),
        "k_cache_attention": (k_cache.k_cache_attention, k_cache_cases.REAL),
        "x_cache_attention": (k_cache.x_cache_attention, k_cache_cases.INPUTS_REAL),
    }[kernel]
    chosen = cases[case]
    args, arrays = chosen.shapes()
    return functools.partial(api, **chosen.options, implementation=implementation), args, arrays


def fill(case: str, implementation: str):
    """(call, arguments, array options) of a real case of the fused fill; argument 4 is to be donated."""
    chosen = fill_cases.REAL[case]
    call = functools.partial(fused.fused_kv_fill, **chosen.options, implementation=implementation)
    return call, chosen.shapes(), {}
