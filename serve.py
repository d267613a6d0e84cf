"""Generate a batch: `python serve.py --model DIR --input prompts.jsonl --output out.jsonl`.

Or serve OpenAI's API: `python serve.py --model DIR --http 127.0.0.1:8000`; the variable SWIFTKV_API_KEY may
hold a key.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses PyTorch; we do not
    import jax

    from swiftkv_jax.folder import private

    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swiftkv-jax" / "xla"
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not (named and "://" in named):  # of a bucket only its owner knows who may write there
        cache = Path(named or own).resolve()
        if private(cache):  # who writes there can run code here
            jax.config.update("jax_compilation_cache_dir", str(cache))
        else:
            jax.config.update("jax_compilation_cache_dir", None)
            print(
                f"warning: no compilation cache: {cache} must be yours alone (chmod 700), in a folder where "
                "nobody else can rename it",
                file=sys.stderr,
            )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    from swiftkv_jax.engine.main import main

    key = os.environ.get("SWIFTKV_API_KEY")
    sys.exit(main(root=Path(__file__).resolve().parent, api_key=key))
