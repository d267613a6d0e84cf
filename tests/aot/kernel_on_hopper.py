"""Compile one case of a Hopper kernel for an H100 that is not here; print its memory as JSON.

    MOSAIC_GPU_DUMP_PTXAS=1 python tests/aot/kernel_on_hopper.py CASE

A process of its own: a wrong register layout can make this compiler search for many minutes.
"""

import json
import sys

from kernel_targets import attention, compiled


def main(case: str) -> None:
    """Print temporary and argument bytes of `case`, compiled by name through the door."""
    memory = compiled("h100:1x1x1", *attention("paged_attention", case, "pallas_gpu")).memory_analysis()
    print(json.dumps({"temp": memory.temp_size_in_bytes, "arguments": memory.argument_size_in_bytes}))


if __name__ == "__main__":
    main(sys.argv[1])
