"""The commands: `train.py` and `swiftkv-train`, `serve.py` and `swiftkv-serve`, `swiftkv-convert`, and
`swiftkv-eval`.

What belongs to a process and not to a library is here and nowhere else: the environment and `jax.config`.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

import jax

from swiftkv_jax import processes
from swiftkv_jax.errors import UsageWarning
from swiftkv_jax.folder import private
from swiftkv_jax.version import __version__


def train() -> int:
    """Distil a student; the exit code."""
    be_quiet()
    if "--compile-only" in sys.argv:  # compiling for another chip needs none of this machine's
        jax.config.update("jax_platforms", "cpu")
        os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from swiftkv_jax.distill.main import main

    code = main(join=lambda wanted: processes.start(wanted, os.environ))
    processes.leave(code)
    return code


def convert() -> int:
    """Make a student without training; the exit code."""
    be_quiet()
    cache_programs()
    from swiftkv_jax.convert import main

    return main()


def serve() -> int:
    """Generate a batch, or serve HTTP; the exit code."""
    be_quiet()
    cache_programs()
    claim_gpu_memory()
    from swiftkv_jax.server.main import main

    return main(api_key=os.environ.get("SWIFTKV_API_KEY"))


def evaluate() -> int:
    """lm-eval with our model in it; the exit code."""
    if "--version" in sys.argv[1:]:
        print(f"swiftkv-jax {__version__}")
        return 0
    be_quiet()
    try:
        from swiftkv_jax.lm_eval import main
    except ImportError as error:
        print(f"error: this needs {error.name}: pip install 'swiftkv-jax[eval]'", file=sys.stderr)
        return 2
    return main()


def be_quiet() -> None:
    """What is not for the user is not shown, and a warning about the input is one line."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch; we do not
    usual = warnings.formatwarning

    def line(message, category, *place, **source) -> str:
        own = issubclass(category, UsageWarning)
        return f"warning: {message}\n" if own else usual(message, category, *place, **source)

    warnings.formatwarning = line


def claim_gpu_memory() -> None:
    """JAX takes three quarters of a GPU by itself; a server wants what --memory-fraction says, unless the
    environment says how much, or that JAX is to take memory as it goes."""
    from swiftkv_jax.engine.settings import MEMORY_FRACTION

    own = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
    if any(name in os.environ for name in own):
        return
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument("--memory-fraction", type=float, default=MEMORY_FRACTION)
    try:
        given = reader.parse_known_args(sys.argv[1:])[0].memory_fraction
    except argparse.ArgumentError:  # told by the command's own parser, with the way out
        return
    if 0 < given <= 1:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(given)


def cache_programs() -> None:
    """Keep compiled programs where the environment says, or in the user's own cache; nowhere if others can
    write there: what lies there is run."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftkv-jax" / "xla"
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if named and "://" in named:  # a bucket: only its owner knows who may write there
        return
    cache = Path(named or own).resolve()
    kept = private(cache)
    jax.config.update("jax_compilation_cache_dir", str(cache) if kept else None)
    if not kept:
        print(
            f"warning: no compilation cache: {cache} must be yours alone (chmod 700), in a folder where "
            "nobody else can rename it",
            file=sys.stderr,
        )
