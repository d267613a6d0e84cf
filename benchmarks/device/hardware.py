"""The machine: its hardware and its peak rates."""

import functools
import os
import subprocess
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from benchmarks.device.shapes import shape_of
from swiftkv_jax.kernels.check.calls import medians
from swiftkv_jax.kernels.check.machine import versions

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas", "flax", "numpy")
QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def seconds_of(call: Callable) -> float:
    """Median seconds of a call, from several in a row."""
    return medians([call])[0]


def hardware() -> Iterator[dict]:
    """Devices, driver, versions and flags."""
    device = jax.devices()[0]
    try:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    found = {"platform": device.platform, "device": device.device_kind, "devices": len(jax.devices())}
    found |= {"cores": os.cpu_count(), "memory": memory, "driver": driver, "versions": versions(PACKAGES)}
    yield found | {"xla_flags": os.environ.get("XLA_FLAGS", "")}


def ceilings(shape: str) -> Iterator[dict]:
    """Bytes per second of a copy, read and written, as the driver makes it or as a kernel does, and of a sum,
    which only reads; FLOP/s of a square matmul of random numbers."""
    sizes = shape_of(shape)
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], sizes.copied, jnp.bfloat16)
    side = (sizes.multiplied, sizes.multiplied)
    a, b = (jax.random.normal(key, side, jnp.bfloat16) for key in keys[1:])
    copies, matmul = map(jax.jit, (jnp.copy, lambda x: x + 1)), jax.jit(jnp.matmul)
    yield {"bytes": max(2 * x.nbytes / seconds_of(functools.partial(copy, x)) for copy in copies)}
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    yield {"read_bytes": x.nbytes / seconds_of(lambda: total(x))}
    yield {"flops": 2 * sizes.multiplied**3 / seconds_of(lambda: matmul(a, b))}
