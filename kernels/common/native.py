"""C++ kernels for CPUs: compiled for this machine on first use, and kept in the user's own cache.

XLA:CPU lowers attention to generic matmuls, which read keys and values well below memory bandwidth. These
kernels reach it. Without a C++ compiler the XLA implementation is used.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

from swiftkv_jax.common.folder import private

STORED = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")  # rows that the C++ reads and writes
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-DNDEBUG")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300  # time limit of the compiler
_LOG = logging.getLogger(__name__)


class NoLibraryError(RuntimeError):
    """The C++ cannot be compiled here; one line says why."""


def refuses(source: Path, **targets: str) -> str:
    """Why the C++ of `source` cannot be called here, or "" after registering each handler under its target.

    A handler is a symbol defined by XLA_FFI_DEFINE_HANDLER_SYMBOL (xla/ffi/api/ffi.h, included in jaxlib).
    """
    if (devices := jax.sharding.get_abstract_mesh().size) > 1:
        return f"a mesh of {devices} devices: one"
    return register(source, tuple(targets.items()))


@functools.cache  # a name is registered only once, and a failure is not retried with every call
def register(source: Path, targets: tuple[tuple[str, str], ...]) -> str:
    """Register handlers; the reason of a failure, which is logged once, or ""."""
    try:
        loaded = ctypes.CDLL(str(library(source)))
    except (NoLibraryError, OSError, RuntimeError) as error:
        _LOG.warning("%s by XLA, slower than in C++: %s", source.parent.name, error)
        return str(error)
    for handler, target in targets:
        function = jax.ffi.pycapsule(getattr(loaded, handler))
        jax.ffi.register_ffi_target(target, function, platform="cpu")
    return ""


def library(source: Path) -> Path:
    """The compiled `source`, from the cache if this compiler has compiled it for this processor before.

    Raises:
      NoLibraryError: no compiler, one that fails, or no folder that only the user can write to.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoLibraryError(f"no C++ compiler is installed: {', '.join(_COMPILERS)}")
    folder = (Path.home() / ".cache" / "swiftkv-jax" / "native").resolve()
    if not private(folder):  # its contents are executed
        raise NoLibraryError(
            f"{folder} must be writable by you alone (chmod 700), and nobody else may be able to rename it"
        )
    headers, cpuinfo = Path(__file__).parent, Path("/proc/cpuinfo")
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(headers.glob("*.h")))]
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    # The processor's properties that `-march=native` depends on, as far as the system tells.
    processor = next((x for x in lines if x.startswith(("flags", "Features"))), platform.processor())
    made_of = (*texts, _output([compiler, "--version"]), processor, version("jaxlib"), FLAGS)
    compiled = folder / f"{source.parent.name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if many processes start at once, one compiles
        if not compiled.exists():
            _LOG.info("compiling %s with %s", source.name, compiler)
            made = Path(scratch) / compiled.name
            folders = ("-I", str(headers), "-isystem", jax.ffi.include_dir())
            _output([compiler, *FLAGS, *folders, str(source), "-o", str(made)])
            os.replace(made, compiled)
    return compiled


def _output(command: list[str]) -> str:
    """The output of a command.

    Raises:
      NoLibraryError: it failed; the message is the line that says why.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibraryError(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        reason = next((x for x in lines if "error" in x), " ".join(lines[:1]))
        raise NoLibraryError(f"{command[0]} fails: {reason[:200]}")
    return done.stdout
