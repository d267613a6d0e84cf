"""The dtype that "auto" stands for: the checkpoint's, if this machine computes in it."""

import os
import re
import subprocess

import jax

from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.engine import kernels
from swiftkv_jax.kernels.check import machine as machines

AMPERE = (8, 0)  # the first compute capability with bfloat16 matrix units


def usual_dtype(
    stored: str,
    platform: str,
    capability: tuple[int, int] | None = None,
    wide: bool = False,
    fits: bool = True,
) -> tuple[str, str]:
    """(The dtype to compute in; why it is not the checkpoint's, "" if it is, or on a CPU, where float32 is
    faster and loses nothing).

    Args:
      stored: the checkpoint's dtype. capability: of a GPU; None: unknown, and taken to be enough.
      wide: whether the model's activations exceed float16's range, see `Family`.
      fits: whether float32 weights fit into a CPU's memory.
    """
    if platform == "cpu" and stored != "float32" and fits:
        return "float32", ""
    if platform == "gpu" and stored == "bfloat16" and capability is not None and capability < AMPERE:
        major, minor = capability
        lacks = f"a GPU of compute capability {major}.{minor} has no bfloat16 units"
        if wide:
            return "float32", f"{lacks}, and activations of this family exceed float16's range"
        return "float16", f"{lacks}; if answers are not finite, take float32"
    if platform == "tpu" and stored == "float16":
        return "bfloat16", "a TPU has no float16 units"
    return stored, ""


def dtype_here(config: ModelConfig, plan: KVPlan) -> tuple[str, str]:
    """`usual_dtype` of a checkpoint on this machine. JAX gets no devices by it."""
    platform = kernels.this_machine().platform
    least = capability() if platform == "gpu" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = 2 * 4 * weights.count(weights.weights(config, plan)) <= memory  # with as much room for the rest
    return usual_dtype(config.dtype, platform, least, FAMILIES[config.family].wide, fits)


def capability() -> tuple[int, int] | None:
    """The least compute capability of this machine's GPUs; None if neither JAX nor nvidia-smi tells."""
    if machines.taken():
        said = [str(getattr(device, "compute_capability", "")) for device in jax.local_devices()]
    else:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        said = done.stdout.splitlines()
    found = [re.fullmatch(r"(\d+)\.(\d+)", line.strip()) for line in said]
    return min(((int(each[1]), int(each[2])) for each in found if each), default=None)
