"""The candidates by kind of call; the first of a kind is the safe one, which the others must beat.

A module named by `--candidates` adds to them: it has `CANDIDATES`, and `register()` if their implementations
have to be put into the tables of `kernels/*/api.py` first.
"""

import dataclasses
import functools
import importlib

import jax

KINDS = ("decode", "chunk", "fp8 decode", "fill", "keys")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to make one kind of call.

    Attributes:
      kind: of `KINDS`. implementation: its name in the table of its operation.
      page: tokens. block: queries of a block, of a chunk; 0: the whole chunk is one.
      limit: seconds that a line of its own may take.
    """

    kind: str
    implementation: str
    page: int = 64
    block: int = 1
    limit: float = 40.0

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.implementation}, page {self.page}"


HOPPER = (
    Candidate("decode", "xla"),
    Candidate("decode", "xla in turns"),
    Candidate("decode", "pallas_gpu"),
    Candidate("decode", "pallas_gpu", page=128),
    Candidate("chunk", "xla", block=128),
    Candidate("chunk", "xla in turns", block=128),
    Candidate("chunk", "xla_one_turn", block=0),
    Candidate("chunk", "pallas_gpu", block=128),
    Candidate("chunk", "pallas_gpu", page=128, block=128),
    Candidate("chunk", "cudnn", block=0),
    Candidate("chunk", "cudnn", page=128, block=0),
    Candidate("fp8 decode", "xla"),
    Candidate("fp8 decode", "pallas_gpu"),
    Candidate("fp8 decode", "pallas_gpu", page=128),
    Candidate("fill", "xla"),
    Candidate("fill", "pallas_gpu"),
    Candidate("fill", "pallas_gpu_once"),
    Candidate("keys", "xla"),
    Candidate("keys", "pallas_gpu"),
)
# Replacements on a CPU, only to see that the benchmark runs.
HERE = (
    Candidate("decode", "xla"),
    Candidate("decode", "xla in turns"),
    Candidate("decode", "xla_one_turn"),
    Candidate("decode", "pallas_gpu interpreted"),
    Candidate("chunk", "xla", block=128),
    Candidate("chunk", "xla_one_turn", block=0),
    Candidate("chunk", "cudnn by xla", block=0),
    Candidate("fp8 decode", "xla"),
    Candidate("fp8 decode", "xla_one_turn"),
    Candidate("fill", "xla"),
    Candidate("fill", "reference"),
    Candidate("keys", "xla"),
    Candidate("keys", "reference"),
)


def of(shape: str, module: str | None) -> tuple[Candidate, ...]:
    """The candidates of a shape, and those of a module."""
    own = HERE if shape == "tiny" else HOPPER
    return (*own, *importlib.import_module(module).CANDIDATES) if module else own


@functools.cache
def register(module: str | None) -> None:
    """Register implementations of candidates from outside of the library in its tables."""
    from swiftkv_jax.kernels.common.dispatch import Implementation
    from swiftkv_jax.kernels.paged_attention import api, jax_nn, pallas_gpu, xla

    in_turns = functools.partial(xla.paged_attention, one_turn=False)  # a loop whose length the device knows
    api.PAGED_ATTENTION["xla in turns"] = Implementation(in_turns)
    if jax.default_backend() == "cpu":
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpreted = functools.partial(pallas_gpu.paged_attention, interpret=InterpretGPUParams())
        api.PAGED_ATTENTION["pallas_gpu interpreted"] = Implementation(interpreted, pallas_gpu.refuses)
        in_parts = functools.partial(jax_nn.paged_attention, by="xla")
        api.PAGED_ATTENTION["cudnn by xla"] = Implementation(in_parts, jax_nn.refuses)
    if module:
        getattr(importlib.import_module(module), "register", lambda: None)()
