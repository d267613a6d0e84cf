"""The test session: CPU only, offline, few threads, and a compilation cache that outlives it."""

import os

# Read when numpy, torch, JAX and the Hugging Face libraries are first imported. Two threads of a BLAS in
# each of several pytest workers only wait for each other.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # its compiler, in several workers
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import gc
from pathlib import Path

import hypothesis
import jax
import pytest

_CACHE = Path(__file__).parent.parent / ".cache" / "jax-tests"

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The same examples in every run, and no deadline: the first example compiles.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """XLA's threads, by default as many as cores.

    A Hopper kernel in interpretation holds one for each of its warpgroups that waits: of two none is left for
    the third, for which the others wait. Elsewhere more threads than cores only get in each other's way, so
    this is for the slow tests, among which those kernels are.
    """
    if config.option.markexpr == "slow":
        os.environ["NPROC"] = str(max(4, os.cpu_count() or 1))  # read when XLA's client is made


@pytest.fixture(autouse=True, scope="module")
def programs():
    """Compiled programs live as long as their module: each maps memory, and a process may hold 65 530 maps
    (vm.max_map_count); beyond, XLA aborts it."""
    yield
    jax.clear_caches()
    gc.collect()
