"""The checking process: `python -m swiftkv_jax.kernels.check`. It takes one device, and little of its memory.

The environment is this process's own, so it may be changed here.
"""

import os
import sys

import jax

from swiftkv_jax.kernels.check.calls import examine
from swiftkv_jax.kernels.check.supervisor import tasks


def main(folder: str, platform: str) -> None:
    """Use one of the permitted GPUs and only the memory it needs, or one TPU chip without other hosts.

    `folder` caches compiled programs for the next process, if this one dies. Without a device of `platform`
    the process ends at once, since results of another platform would be meaningless.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    bounds = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1")
    os.environ |= {"TPU_VISIBLE_CHIPS": "0"} | bounds
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if (backend := jax.default_backend()) != platform:
        raise SystemExit(f"JAX found a {backend} here, not a {platform}")
    for _, args, send in tasks():
        send(examine(**args))


if __name__ == "__main__":
    main(*sys.argv[1:])
