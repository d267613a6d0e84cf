"""Compile one case of a Hopper kernel for an H100 that is not here; print its memory as a line of JSON.

    MOSAIC_GPU_DUMP_PTXAS=1 python tests/aot/kernel_on_hopper.py KERNEL CASE

A process of its own: `kernel_targets.compiled_on_hopper` says why.
"""

import json
import sys

from kernel_targets import HOPPER, compiled


def main(kernel: str, case: str) -> None:
    """Print temporary, argument and aliased bytes of `case`, compiled by name through the door."""
    memory = compiled(HOPPER, kernel, case, implementation="pallas_gpu").memory_analysis()
    sizes = {
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
    }
    print(json.dumps(sizes))


if __name__ == "__main__":
    main(*sys.argv[1:])
