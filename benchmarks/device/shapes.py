"""The sizes that are measured: Llama-3.1-8B's, and small ones that a CPU runs in minutes."""

import dataclasses
from collections.abc import Mapping

from swiftkv_jax.common.folder import CONFIGS
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.kernels.check.calls import CANDIDATES, UNFUSED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one model; by default those of Llama-3.1-8B's lines.

    Attributes:
      config: of the model. dtype: of its weights and activations. trained, trained_dtype: likewise, of the
        model that is distilled.
      fp8: dtype of the rows that are read as 8-bit ones.
      budget: tokens of a step. requests: (sequences, prompt tokens of each) of the engine's lines. outputs:
        tokens that each generates.
      heads: of the attention that reads keys, or inputs, alone.
      row: tokens of a packed row of training, rows: of a step, documents: in a row.
      chats: that the student's teacher writes, words: tokens of the longest answer, batch: rows of the
        student's steps. steps: of its distillation; None: as many as there is time for.
      copied, multiplied: elements copied, and side of the matrices, of the ceilings.
      candidates: implementations by kind of call, the safe one first.
    """

    config: ModelConfig
    trained: ModelConfig
    dtype: str = "bfloat16"
    trained_dtype: str = "bfloat16"
    budget: int = 2048
    requests: tuple[tuple[int, int], ...] = ((16, 8192), (2, 32768))
    outputs: int = 256
    heads: int = 32
    row: int = 8192
    rows: int = 2
    documents: int = 8
    chats: int = 128
    words: int = 192
    batch: int = 16
    steps: int | None = None
    copied: int = 1 << 29
    multiplied: int = 8192
    candidates: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: CANDIDATES["gpu"])
    fp8: str = "float8_e4m3fn"


# Replacements on a CPU, only to see that the benchmark runs.
_ON_A_CPU = {
    "decode": ("xla_one_turn", "xla"),
    "chunk": ("xla_one_turn", "xla"),
    "fill": (UNFUSED, "xla"),
    "train": ("xla", "reference"),
}


def shape_of(name: str) -> Shape:
    """ "llama8b", or "tiny"."""
    if name == "llama8b":
        config = ModelConfig.from_hf(CONFIGS / "architectures" / "llama8b.json")
        return Shape(config=config, trained=dataclasses.replace(config, num_layers=4, windows=()))
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    config = ModelConfig(**sizes, num_layers=3, num_heads=4, num_kv_heads=2, dtype="bfloat16")
    few = {
        "outputs": 8,
        "heads": 4,
        "row": 64,
        "documents": 2,
        "chats": 2,
        "words": 8,
        "batch": 1,
        "steps": 2,
    }
    few |= {"budget": 64, "requests": ((2, 128), (1, 256)), "copied": 1 << 20, "multiplied": 256}
    return Shape(config=config, trained=config, trained_dtype="float32", candidates=_ON_A_CPU, **few)
