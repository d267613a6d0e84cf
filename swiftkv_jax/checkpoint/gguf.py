"""The weights in a GGUF file under their Hugging Face names, read and dequantised when asked for."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.gguf import ROPE_FACTORS
from swiftkv_jax.config.gguf_header import Header, Stored

# llama.cpp's name of a part -> the published one.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_GEMMA3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)
_ROWS = 4096  # dequantised at a time: the `gguf` package needs several times their size in memory


class Slice:
    """A float32 tensor that is read when it is indexed, with the interface of safetensors' slices.

    `turned` is the width of a head whose rows llama.cpp has reordered: it stores a rotary pair side by side,
    transformers half a head apart. 1: the rows were not reordered. `less` is subtracted from all values.
    """

    def __init__(self, header: Header, name: str, turned: int, less: int = 0):
        self.header, self.name, self.turned, self.less = header, name, turned, less
        self.stored: Stored = header.tensors[name]

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, spans: tuple[slice, ...]) -> np.ndarray:
        """[rows, columns] or [elements]: the values of some contiguous rows, and some of their columns."""
        vector = len(self.stored.shape) == 1
        first, last, _ = spans[0].indices(self.stored.shape[0])
        begin, end = first // self.turned * self.turned, -(-last // self.turned) * self.turned
        values = self._rows(0, 1).T[begin:end] if vector else self._rows(begin, end)
        if self.turned > 1:
            pairs = values.reshape(-1, self.turned // 2, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        values = values[first - begin : last - begin] - self.less
        return values[:, 0] if vector else values[:, spans[1]]

    def _rows(self, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) as they lie in the file, [rows, columns]; a vector is one row."""
        quants = _package()
        kind = quants.GGMLQuantizationType(self.stored.kind)
        *outer, width = self.stored.shape
        size = (self.stored.end - self.stored.start) // math.prod(outer)
        out = np.empty((end - begin, width), np.float32)
        for start in range(begin, end, _ROWS):
            stop = min(end, start + _ROWS)
            raw = self.header.read(self.stored, start * size, (stop - start) * size).reshape(-1, size)
            with np.errstate(all="ignore"):
                out[start - begin : stop - begin] = quants.dequantize(raw, kind)
        if not np.isfinite(out).all():
            raise UsageError(f"{self.header.path}: {self.name} holds values that are not finite")
        return out


def open_tensors(header: Header, fields: Mapping) -> dict[str, tuple[Path, Slice]]:
    """Hugging Face's name of a tensor -> (the file, a slice of it that reads nothing yet).

    A name that is not known stays as it is. `fields`: the config.json of the same file.
    """
    _package()
    architecture = header.metadata["general.architecture"]
    turned = fields["head_dim"] if architecture == "llama" else 1
    parts = _PARTS | _OF_GEMMA3 if architecture == "gemma3" else _PARTS
    out: dict[str, tuple[Path, Slice]] = {}
    for name in header.tensors:
        if name == ROPE_FACTORS:  # config.json's rope_scaling has the same information
            continue
        match = _NAME.fullmatch(name)
        layer, part, kind = match.group("layer", "part", "kind") if match else (None, "", "")
        new = name
        if layer and part in parts:
            new = f"model.layers.{int(layer)}.{parts[part]}.{kind}"
        elif not layer and part in _TOP:
            new = f"{_TOP[part]}.{kind}"
        if new in out:
            raise UsageError(f"{header.path}: {name[:60]!r} occurs twice, under two names")
        permuted = turned if layer and part in ("attn_q", "attn_k") else 1
        less = int(architecture == "gemma3" and part.endswith("norm"))  # llama.cpp stores whole gains
        out[new] = header.path, Slice(header, name, permuted, less)
    return out


def _package():
    try:
        import gguf
    except ImportError as error:
        raise UsageError(f"GGUF needs the package {error.name}: pip install 'swiftkv-jax[gguf]'") from None
    return gguf
