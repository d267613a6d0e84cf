"""Compile cases of a Hopper kernel for an H100 that is not here; print each one's memory as a line of JSON.

    MOSAIC_GPU_DUMP_PTXAS=1 python tests/aot/kernel_on_hopper.py KERNEL CASE

A process of its own: a wrong register layout can make this compiler search for many minutes.
"""

import json
import sys

from kernel_targets import attention, compiled, fill


def main(kernel: str, case: str) -> None:
    """Print temporary, argument and aliased bytes of `case`, compiled by name through the door."""
    filling = kernel == "fused_kv_fill"
    call = fill(case, "pallas_gpu") if filling else attention(kernel, case, "pallas_gpu")
    memory = compiled("h100:1x1x1", *call, donate=(4,) if filling else ()).memory_analysis()
    sizes = {
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
    }
    print(json.dumps(sizes))


if __name__ == "__main__":
    main(*sys.argv[1:])
