"""The commands: `train.py` and `swiftkv-train`, `serve.py` and `swiftkv-serve`.

What belongs to a process and not to a library is here and nowhere else: the environment and `jax.config`.
"""

import os
import sys
from pathlib import Path

import jax

from swiftkv_jax.folder import private


def train() -> int:
    """Distil a student; the exit code."""
    _be_quiet()
    if "--compile-only" in sys.argv:  # compiling for another chip needs none of this machine's
        jax.config.update("jax_platforms", "cpu")
        os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from swiftkv_jax.distill.main import main

    return main()


def serve(root: Path = Path()) -> int:
    """Generate a batch, or serve HTTP; `root` is where demo/ lies. The exit code."""
    _be_quiet()
    _cache_programs()
    from swiftkv_jax.engine.main import main

    return main(root=root, api_key=os.environ.get("SWIFTKV_API_KEY"))


def _be_quiet() -> None:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch; we do not


def _cache_programs() -> None:
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
