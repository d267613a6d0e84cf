"""The sizes that are measured: Llama-3.1-8B's, and small ones that a CPU runs in a minute."""

import dataclasses
from pathlib import Path

from swiftkv_jax.config import ModelConfig

_LLAMA_8B = Path(__file__).parents[2] / "configs" / "architectures" / "llama8b.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes to check and to time.

    Attributes:
      config: of the model. computed: dtype of activations.
      lengths: of the sequences whose decoding is checked. decodes: (sequences, tokens of each) timed.
      ragged: (cached, new) tokens of the sequences whose chunks are checked.
      chunk: tokens of one that is timed, at (cached tokens, capacity of the page table) of `contexts`.
      keys: (sequences, tokens) of the K-cache that is timed, `key_heads` heads.
      filled: tokens and rows of the fill that is timed.
      layers: of the models that the engine runs, one after the other. requests, prompt, outputs: of a run.
      copied, multiplied: elements copied, and side of the matrices, of the ceilings.
    """

    config: ModelConfig
    computed: str
    lengths: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    ragged: tuple[tuple[int, int], ...]
    chunk: int
    contexts: tuple[tuple[int, int], ...]
    keys: tuple[int, int]
    key_heads: int
    filled: tuple[int, int]
    layers: tuple[int, ...]
    requests: int
    prompt: int
    outputs: int
    copied: int
    multiplied: int

    def model(self, layers: int) -> ModelConfig:
        """The model with so many layers."""
        return dataclasses.replace(self.config, num_layers=layers, windows=())


def shape(name: str) -> Shape:
    """The shape of this name."""
    if name == "tiny":
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_layers": 4}
        return Shape(
            config=ModelConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=64, dtype="bfloat16"),
            computed="bfloat16",
            lengths=(0, 1, 63, 65, 200),
            decodes=((2, 256), (1, 512)),
            ragged=((0, 1), (63, 5), (130, 40), (0, 0)),
            chunk=128,
            contexts=((0, 256), (128, 256)),
            keys=(2, 128),
            key_heads=4,
            filled=(128, 2),
            layers=(4,),
            requests=2,
            prompt=128,
            outputs=8,
            copied=1 << 20,
            multiplied=256,
        )
    return Shape(
        config=ModelConfig.from_hf(_LLAMA_8B),
        computed="bfloat16",
        lengths=(0, 1, 63, 64, 65, 127, 128, 129, 1000, 4001),
        decodes=((64, 8192), (1, 32768)),
        ragged=((0, 1), (0, 64), (63, 5), (128, 128), (129, 700), (4001, 333), (0, 0)),
        chunk=2048,
        contexts=((0, 8448), (6144, 8448), (30720, 32896)),
        keys=(16, 8192),
        key_heads=32,
        filled=(2048, 16),
        layers=(8, 32),
        requests=16,
        prompt=8192,
        outputs=256,
        copied=1 << 29,
        multiplied=8192,
    )
