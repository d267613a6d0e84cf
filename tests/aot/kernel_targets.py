"""Kernels at their real shapes, compiled for chips that are not here."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftkv_jax.distill.compile_only import topology
from swiftkv_jax.kernels.fused_kv_fill import api as fill
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import api as k_cache
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.paged_attention import api as paged
from swiftkv_jax.kernels.paged_attention import cases as paged_cases

HERE = Path(__file__).parent
TPUS = {"v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}
HOPPER = "h100:1x1x1"
FILL = "fused_kv_fill"
KERNELS = {
    "paged_attention": (paged.paged_attention, paged_cases.REAL),
    "k_cache_attention": (k_cache.k_cache_attention, k_cache_cases.REAL),
    "x_cache_attention": (k_cache.x_cache_attention, k_cache_cases.INPUTS_REAL),
    FILL: (fill.fused_kv_fill, fill_cases.REAL),
}


@functools.cache
def mesh_of(where: str) -> Mesh:
    """One device of a topology."""
    return Mesh(np.array(topology(where)[1][:1]), ("x",))


def shapes(kernel: str, case: str) -> tuple[tuple, dict]:
    """Arguments and array options of a real case."""
    made = KERNELS[kernel][1][case].shapes()
    return (made, {}) if kernel == FILL else made


def pools(kernel: str, case: str):
    """The pools that a real case fills, or the one of keys that it reads."""
    return shapes(kernel, case)[0][4 if kernel == FILL else 1]


def size(tree) -> int:
    """Bytes of arrays or shapes."""
    return sum(leaf.size * jax.numpy.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def compiled(where: str, kernel: str, case: str, donate: bool = True, run=None, **options):
    """A real case, compiled: by `run`, or through the door with `options`; the fill's pools are donated.

    The abstract mesh tells kernels which chip they are for.
    """
    door, cases = KERNELS[kernel]
    call = functools.partial(run or door, **cases[case].options, **options)
    mesh = mesh_of(where)
    place = NamedSharding(mesh, PartitionSpec())
    args, arrays = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes(kernel, case)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(call, donate_argnums=(4,) if kernel == FILL and donate else ())
        return jitted.lower(*args, **arrays).compile()


def compiled_on_hopper(kernel: str, case: str) -> tuple[dict[str, int], str]:
    """Temporary, argument and aliased bytes of a real case compiled for an H100, and all that ptxas said.

    In a process of its own, with a time limit: a wrong layout of registers can make this compiler search for
    many minutes.
    """
    command = [sys.executable, str(HERE / "kernel_on_hopper.py"), kernel, case]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "PYTHONPATH": str(HERE.parents[1]),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    memory = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return memory, done.stdout + done.stderr
