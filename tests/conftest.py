"""The test session: CPU only, offline, few threads, and a compilation cache that outlives it."""

import os
from pathlib import Path

# Read when numpy, torch, JAX and the Hugging Face libraries are first imported, also in processes that tests
# start. Two threads of a BLAS in each of several pytest workers only wait for each other.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # its compiler, in several workers
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "jax-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # as commands.py does

import gc
import time

import hypothesis
import jax
import pytest

_UNTIL = float(os.environ.get("TESTS_UNTIL") or "inf")  # seconds since the epoch, see .ci/run
_QUICK = "jax_disable_most_optimizations"
# One module of LLVM for each program, not up to 32 side by side, for which several workers have no cores; and
# an older emitter of loops, which compiles faster. JAX 0.11 has the newer one alone.
_QUICK_XLA = "--xla_cpu_parallel_codegen_split_count=1"
_QUICK_XLA += " --xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""

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
    """Settings of JAX and XLA that differ between quick tests and others.

    Tests wait for the compiler, so they leave out most of LLVM's optimisations (XLA's own stay), also in the
    processes that they start: it halves a test of the engine. An older emitter of loops than users have takes
    another third, and one module of LLVM for each program a quarter of what is left. Tests that compile for
    other chips and soak tests run what users run; those that ask for `as_users_compile` have all
    optimisations, and that emitter on JAX 0.11 and in processes that they start.

    XLA has by default as many threads as there are cores. A Hopper kernel in interpretation holds one for
    each of its warpgroups that waits: of two none is left for the third, for which the others wait. So slow
    tests, among which those kernels are, have four; a process that one of them starts has one, since another
    worker keeps the other core busy.
    """
    marks = config.option.markexpr
    if marks == "slow":
        os.environ["NPROC"] = str(max(4, os.cpu_count() or 1))  # read when XLA's client is made
    if marks not in ("aot", "ray", "soak"):
        os.environ[_QUICK.upper()] = "1"
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = flags if _QUICK_XLA in flags else f"{flags} {_QUICK_XLA}".strip()
        jax.config.update(_QUICK, True)
    if marks == "slow":
        jax.devices()  # makes the client, which reads it
        os.environ["NPROC"] = "1"  # for processes that tests start


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`slow` with arguments marks the cases of these ids alone."""
    for item in items:
        case = getattr(item, "callspec", None)
        marks = [m for m in item.own_markers if m.name != "slow" or not m.args or case.id in m.args]
        item.own_markers[:] = marks


def pytest_collection_finish() -> None:
    """Leave what is imported by now to no later collection of garbage, and collect less often: looking for
    garbage took 6 % of a worker's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Skip a file of tests that imports PyTorch, itself or by a helper, where it is not installed."""
    report = yield
    if report.failed and "No module named 'torch'" in str(report.longrepr):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, "PyTorch is not installed")
    return report


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Skip a test that has not begun when the session's time is over."""
    if time.time() > _UNTIL:
        pytest.skip("TESTS_UNTIL is past")


@pytest.fixture(scope="module")
def as_users_compile():
    """Compile with all of XLA's optimisations, as users do."""
    quick = jax.config.read(_QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(_QUICK.upper(), raising=False)
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "").replace(_QUICK_XLA, ""))
        jax.config.update(_QUICK, False)
        yield
    jax.config.update(_QUICK, quick)


@pytest.fixture(autouse=True, scope="module")
def programs():
    """Compiled programs are kept for later modules until they are many: each maps memory, and a process may
    hold 65 530 maps (vm.max_map_count); beyond, XLA aborts it."""
    with open("/proc/self/maps", "rb") as maps:
        many = sum(1 for _ in maps) > 30_000
    if many:
        jax.clear_caches()
        gc.collect()
