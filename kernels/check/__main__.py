"""The process that checks: `python -m swiftkv_jax.kernels.check`. It takes one device, and little of it.

Nothing of its environment is anybody else's: it may be set here.
"""

import os
import sys

import jax

from swiftkv_jax.kernels.check.calls import examine
from swiftkv_jax.kernels.check.supervisor import answer_tasks


def main(folder: str, platform: str) -> None:
    """One GPU of those it may use, and of that what it needs; one chip of a TPU, without its other hosts.

    `folder` keeps what one process compiled for the next, if this one dies. Without a device of `platform`
    it ends at once: what another one finds says nothing.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ |= {
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if (found := jax.default_backend()) != platform:
        raise SystemExit(f"JAX found a {found} here, not a {platform}")
    answer_tasks({"examine": examine})


if __name__ == "__main__":
    main(*sys.argv[1:])
