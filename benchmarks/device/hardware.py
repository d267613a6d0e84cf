"""The machine: its hardware, its peak rates, and the cost of a launch and of a loop iteration."""

import functools
import os
import subprocess
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


def launches(count: int) -> Iterator[dict]:
    """Microseconds of a call from the host, of one of `count` kernels in a program, and of an iteration of a
    loop whose length only the device knows, with 1 and with 8 kernels in it."""
    x = jnp.zeros(1024)

    def kernels(x, count):
        for _ in range(count):
            x = lax.optimization_barrier(x + 1)  # which nothing is fused across
        return x

    def loop(x, turns, each):
        return lax.fori_loop(0, turns, lambda _, x: kernels(x, each), x)

    one, many = jax.jit(lambda x: kernels(x, 1)), jax.jit(lambda x: kernels(x, count))
    single = seconds_of(lambda: one(x))
    yield {"call_us": 1e6 * single}
    yield {"kernel_us": 1e6 * (seconds_of(lambda: many(x)) - single) / (count - 1)}
    for each in (1, 8):
        run = jax.jit(functools.partial(loop, each=each))
        few, more = (seconds_of(functools.partial(run, x, np.int32(n))) for n in (10, 10 + count))
        yield {f"turn_of_{each}_us": 1e6 * (more - few) / count}
