"""Properties of TPU generations that kernels need: on-chip memory, cores, and bytes to take at a time."""

import dataclasses

from swiftkv_jax.kernels.common import dispatch


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU generation.

    Attributes:
      vmem_limit: bytes of VMEM a kernel may ask for. A larger number is accepted silently, and fails only
        when it is used.
      tile: bytes of cached rows that one grid step takes; two steps are in flight.
      keys: in a block of splash attention, which sets no limit and so has less VMEM than `vmem_limit`.
      cores: TensorCores that one device drives.
      smem: bytes of scalar memory for page tables and work lists.
    """

    vmem_limit: int
    tile: int
    keys: int
    cores: int
    smem: int = (1 << 20) - (32 << 10)  # 2**20 whole does not fit beside the compiler's own


_MIB = 1 << 20


def current() -> Chip:
    """The chip to compile for; the smallest one on anything but a TPU (interpretation)."""
    platform, kind, cores = dispatch.device()
    if platform != "tpu" or kind == "TPU v4":
        cores = cores if platform == "tpu" else 1
        return Chip(vmem_limit=16 * _MIB, tile=2 * _MIB, keys=1024, cores=cores)
    limit = 60 * _MIB if kind in ("TPU v5", "TPU v5p") else 96 * _MIB
    return Chip(vmem_limit=limit, tile=4 * _MIB, keys=2048, cores=cores)
