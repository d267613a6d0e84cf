"""`serve.py` as if on a GPU, where nearly all candidates for decoding are faulty; in truth on this CPU.

    python faulty_served.py FOLDER serve.py [flags]

FOLDER keeps the decision.
"""

import dataclasses
import runpy
import sys
from pathlib import Path

import faulty_kernels

from swiftkv_jax.engine import kernels
from swiftkv_jax.kernels.check import decide
from swiftkv_jax.kernels.check.machine import Machine

SAFE = "xla_one_turn"
CANDIDATES = {"decode": (SAFE, *faulty_kernels.FAULTY), "chunk": (SAFE,)}


def on_this_cpu(calls, machine, _, **more):
    """Decide about a GPU's calls, within the limits that are given."""
    here, how = dataclasses.replace(machine, platform="cpu"), {"candidates": CANDIDATES}
    return decide.decide(calls, here, Path(folder), **more | how, module=faulty_kernels.__name__)


if __name__ == "__main__":
    _, folder, *sys.argv = sys.argv
    faulty_kernels.register()
    kernels.this_machine = lambda: Machine("gpu", "a GPU", "1.2.3")
    kernels.decide = on_this_cpu
    runpy.run_path(sys.argv[0], run_name="__main__")
