"""Kernels at their real shapes, compiled for chips that are not here."""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swiftkv_jax.distill.compile_only import topology
from swiftkv_jax.kernels.check.calls import OPERATIONS

HERE = Path(__file__).parent
TPUS = {"v4": "v4:2x2x1", "v5p": "v5p:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}
HOPPER = "h100:1x1x1"
FILL = "fused_kv_fill"
END = "-- end --"  # of what is said about a case
KERNELS = {
    name: OPERATIONS[name].real
    for name in ("paged_attention", "k_cache_attention", "x_cache_attention", FILL)
}


@functools.cache
def mesh_of(where: str) -> Mesh:
    """One device of a topology."""
    return Mesh(np.array(topology(where)[1][:1]), ("x",))


def shapes(kernel: str, case: str) -> tuple[tuple, dict]:
    """Arguments and array options of a real case."""
    return KERNELS[kernel][case].shapes()


def pools(kernel: str, case: str):
    """The pools that a real case fills, or the one of keys that it reads."""
    return shapes(kernel, case)[0][4 if kernel == FILL else 1]


def size(tree) -> int:
    """Bytes of arrays or shapes."""
    return sum(leaf.size * jax.numpy.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def lowered(where: str, kernel: str, case: str, donate: bool = True, run=None, implementation: str = ""):
    """A real case, to compile: by `run`, or by an implementation; the fill's pools are donated.

    The abstract mesh tells kernels which chip they are for.
    """
    made = KERNELS[kernel][case]
    call = functools.partial(run, **made.options) if run else made.by(implementation)
    mesh = mesh_of(where)
    place = NamedSharding(mesh, PartitionSpec())
    args, arrays = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes(kernel, case)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(call, donate_argnums=made.donated if donate else ())
        return jitted.lower(*args, **arrays)


def compiled(*what, **options):
    """Compile what `lowered` returns."""
    return lowered(*what, **options).compile()


class Compiler:
    """A process that compiles for an H100, case after case: it starts once, and again after what it fails at.

    It has a time limit for each case: a wrong layout of registers can make this compiler search for many
    minutes. A kernel that two cases share is compiled once, with the first of them, and ptxas speaks of it
    then: what it said is kept for the second.
    """

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._said: dict[str, str] = {}

    def compile(self, kernel: str, case: str) -> tuple[dict[str, int], str]:
        """Temporary, argument and aliased bytes of a real case, and all that ptxas said of its kernels.

        Raises:
          AssertionError: it did not compile, or ptxas did not report on each new kernel once.
        """
        said = self.ask(kernel, case)
        found = [line for line in said.splitlines() if line.startswith("{")]
        if not found:
            self.close()
            raise AssertionError(f"{kernel} {case}: {said[-2000:]}")
        sizes = json.loads(found[0])
        names = sizes.pop("kernels")
        fresh = set(names) - set(self._said)
        self._said |= dict.fromkeys(fresh, said)
        reports = said.count("bytes stack frame")
        assert names and reports == len(fresh), f"{kernel} {case}: {reports} reports on {len(fresh)} kernels"
        return sizes, "\n".join(dict.fromkeys(self._said[name] for name in names))

    def ask(self, kernel: str, case: str, seconds: float = 120) -> str:
        """All that was said about one case."""
        self._process = process = self._process or self._start()
        pipe, deadline = process.stdout.fileno(), time.monotonic() + seconds
        os.write(process.stdin.fileno(), f"{kernel} {case}\n".encode())
        said = b""
        while not said.endswith(f"{END}\n".encode()):
            ready = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready or not (more := os.read(pipe, 1 << 16)):
                self.close()
                raise AssertionError(
                    f"{kernel} {case}: nothing after {seconds} s, or it died: {said[-2000:]!r}"
                )
            said += more
        return said.decode()

    def _start(self) -> subprocess.Popen:
        env = {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONPATH": str(HERE.parents[1])}
        return subprocess.Popen(
            [sys.executable, str(HERE / "kernel_on_hopper.py")],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._said.clear()


_COMPILER = Compiler()
atexit.register(_COMPILER.close)
compiled_on_hopper = _COMPILER.compile
