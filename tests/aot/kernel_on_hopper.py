"""Compile cases of Hopper kernels for an H100 that is not here, one for each line of stdin.

    echo KERNEL CASE | MOSAIC_GPU_DUMP_PTXAS=1 python tests/aot/kernel_on_hopper.py

For each: what the compiler says, the program's kernels and bytes as a line of JSON or a traceback, and the
line END. A process of its own: `kernel_targets.Compiler` says why.
"""

import ctypes
import json
import re
import sys
import traceback

import jax
from kernel_targets import END, HOPPER, lowered


def answer(kernel: str, case: str) -> None:
    """Print temporary, argument and aliased bytes of `case`, compiled by name through the door, and the
    hashes by which the compiler knows its kernels."""
    program = lowered(HOPPER, kernel, case, implementation="pallas_gpu")
    memory = program.compile().memory_analysis()
    told = {
        "kernels": re.findall(r'kernel_hash = "([^"]*)"', program.as_text()),
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
    }
    print(json.dumps(told))


def main() -> None:
    for line in sys.stdin:
        try:
            answer(*line.split())
        except Exception:
            traceback.print_exc()
        jax.clear_caches()
        ctypes.CDLL(None).fflush(None)  # the compiler's own, before the line that ends it
        print(END, flush=True)


if __name__ == "__main__":
    main()
