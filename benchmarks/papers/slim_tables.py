"""The tables of the Slim attention paper (arXiv 2503.05840), computed.

    python -m benchmarks.papers.slim_tables

Table 1 and the appendix's list of multi-head models: numbers in the cache at the longest context, from the
forms' own arrays, beside the paper's (`*` marks differences). Table 2: operations and reads of one decoded
token. Table 3: operations per byte of chips, the paper's and those of `analysis.flops`. Section 5: weights
that are not square.
"""

import math
import sys
from collections import namedtuple
from typing import NamedTuple

from swiftkv_jax.analysis import flops
from swiftkv_jax.analysis.flops import cache_bytes_per_token
from swiftkv_jax.common.errors import Parser, exit_code
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan

K = 1024


# A row of the paper: shapes, tokens in the cache at most, and the cache it prints, in numbers.
Published = namedtuple("Published", "name hidden layers heads width tokens printed", defaults=(0, ""))
WHISPER = 1500 + 448  # encoder's and decoder's tokens
TABLE_1 = (
    Published("CodeLlama-7B", 4096, 32, 32, 128, 16 * K, "4.3B"),
    Published("CodeLlama-13B", 5120, 40, 40, 128, 16 * K, "6.7B"),
    Published("CodeGemma-7B", 3072, 28, 16, 256, 8 * K, "1.9B"),
    Published("aya-23-35B", 8192, 40, 64, 128, 8 * K, "5.4B"),
    Published("SmolLM2-1.7B", 2048, 24, 32, 64, 8 * K, "0.8B"),
    Published("SmolVLM", 2048, 24, 32, 64, 16 * K, "1.6B"),
    Published("Evo-1-131k", 4096, 32, 32, 128, 128 * K, "34.4B"),
    Published("Phi-3-mini-128k", 3072, 32, 32, 96, 128 * K, "25.8B"),
    Published("bitnet_b1_58-3B", 3200, 26, 32, 100, 2 * K, "0.3B"),
    Published("DCLM-7B", 4096, 32, 32, 128, 2 * K, "0.5B"),
    Published("OLMo-1B", 2048, 16, 16, 128, 4 * K, "0.3B"),
    Published("OLMo-2-1124-13B", 5120, 40, 40, 128, 4 * K, "1.7B"),
    Published("Chronos-Bolt-tiny", 256, 4, 4, 64, K // 2, "1M"),
    Published("Chronos-Bolt-base", 768, 12, 12, 64, K // 2, "9.4M"),
    Published("Qwen2-Audio-7B", 4096, 32, 32, 128, 8 * K, "2.1B"),
    Published("llava-next-video-7B", 4096, 32, 32, 128, 4 * K, "1.1B"),
    Published("llava-vicuna-13B", 5120, 40, 40, 128, 4 * K, "1.7B"),
    Published("Vicuna-7B-16k", 4096, 32, 32, 128, 16 * K, "4.3B"),
    Published("Vicuna-13B-16k", 5120, 40, 40, 128, 16 * K, "6.7B"),
    Published("Flan-T5-base", 768, 12, 12, 64, K // 2, "9.4M"),
    Published("Flan-T5-XXL", 4096, 24, 64, 64, K // 2, "101M"),
    Published("Whisper-tiny", 384, 4, 6, 64, WHISPER, "6M"),
    Published("Whisper-large-v3", 1280, 32, 20, 64, WHISPER, "160M"),
    Published("GPT-2 XL", 1600, 48, 25, 64, K, "157M"),
)
APPENDIX = (
    Published("METAGENE-1", 4096, 32, 32, 128),
    Published("OLMoE-1B-7B-0125", 2048, 16, 16, 128),
    Published("Moonshine-base", 416, 8, 8, 52),
    Published("Moondream-2", 2048, 24, 32, 64),
    Published("Stable-Code-3B", 2560, 32, 32, 80),
    Published("Stable-LM2-1.6B", 2048, 24, 32, 64),
    Published("OpenMath-CodeLlama-13B", 5120, 40, 40, 128),
    Published("MAIRA-2", 4096, 32, 32, 128),
    Published("Rocket-3B", 2560, 32, 32, 80),
    Published("OpenLLaMA-13B", 5120, 40, 40, 128),
    Published("TimesFM-1.0-200M", 1280, 20, 16, 80),
    Published("MetricX-24-hybrid-XXL", 4096, 24, 64, 64),
    Published("DeepSeek-vl2-tiny", 1280, 12, 10, 128),
    Published("MiniCPM-V2", 2304, 40, 36, 64),
    Published("UltraLM-65B", 8192, 80, 64, 128),
    Published("LLaMA-2-7B-32K", 4096, 32, 32, 128),
    Published("Dolly-v2-12B", 5120, 36, 40, 128),
    Published("MPT-7B-8K", 4096, 32, 32, 128),
    Published("MPT-30B", 7168, 48, 64, 112),
    Published("BLOOM", 14336, 70, 112, 128),
)
WIDE = (
    Published("CodeGemma-7B", 3072, 28, 16, 256),
    Published("T5-3B", 1024, 24, 32, 128),
    Published("T5-11B", 1024, 24, 128, 128),
)
CHIPS = {  # TOPS in int8, GB/s, operations per byte: as printed
    "Rockchip RK3588": (6, 19, 316),
    "Apple A18": (35, 60, 583),
    "Apple M4 Max": (38, 410, 93),
    "Google TPU v4": (275, 1200, 229),
    "Google TPU v5p": (918, 2765, 332),
    "NVIDIA H200": (1980, 4800, 413),
    "NVIDIA B200": (4500, 8000, 563),
}


class Cost(NamedTuple):
    """Cost of one decoded token in one layer: operations and numbers read, in projections and in
    attention."""

    projections: int
    weights: int
    attention: int
    cache: int

    def intensities(self) -> tuple[float, float]:
        """Operations per number read, of projections and of attention."""
        return self.projections / self.weights, self.attention / self.cache


def numbers_per_token(shape: Published, form: str) -> int:
    """Numbers that a token takes in the cache of a model whose rows all have one form."""
    heads = {"num_heads": shape.heads, "num_kv_heads": shape.heads, "head_dim": shape.width}
    sizes = {"vocab_size": 1, "hidden_size": shape.hidden, "intermediate_size": 1}
    config = ModelConfig(**sizes, num_layers=shape.layers, **heads)
    return cache_bytes_per_token(config, KVPlan.standard(shape.layers).stored_as(form), "bfloat16") // 2


def decoding(hidden: int, heads: int, tokens: int, width: int | None = None) -> dict[str, Cost]:
    """The cost of a decoded token that sees `tokens`, by the order of multiplications: Table 2.

    "kv": keys and values are stored. "k, values first": keys alone, values of all tokens recomputed (figure
    3b). "k": the weighted sum of whole rows, then W_KV (figure 3c). "x": inputs alone, W_K moved to the query
    and W_V after the sum (figure 4). `width` is that of a head, hidden / heads by default. A product of
    [m, n] and [n, p] counts 2 m n p.
    """
    d, n, w = hidden, tokens, width or hidden // heads
    e = heads * w
    into, out = 2 * d * e, 2 * e * d  # q, k or v; o
    scores, summed = heads * 2 * w * n, heads * 2 * n * w
    return {
        "kv": Cost(3 * into + out, 4 * d * e, scores + summed, 2 * n * e),
        "k, values first": Cost(2 * into + out + 2 * n * e * e, 3 * d * e + e * e, scores + summed, n * e),
        "k": Cost(2 * into + out + heads * 2 * e * w, 3 * d * e + e * e, scores + heads * 2 * n * e, n * e),
        "x": Cost(into + out + heads * 4 * w * d, 4 * d * e, heads * 4 * d * n, n * d),
    }


def short(number: int | float) -> str:
    """A number in the paper's notation: 4.3B, 101M, 9.4M."""
    scale, letter = (1e9, "B") if number >= 2e8 else (1e6, "M")
    value = number / scale
    digits = 1 if letter == "B" or (value < 10 and round(value, 1) != round(value)) else 0
    return f"{value:.{digits}f}{letter}"


def agrees(number: int | float, printed: str) -> bool:
    """Whether a number rounds to what is printed."""
    scale = {"B": 1e9, "M": 1e6}[printed[-1]]
    digits = len(printed[:-1].partition(".")[2])
    return math.isclose(round(number / scale, digits), float(printed[:-1]))


def intensity(operations: int | float, bandwidth: int | float) -> int:
    """Operations per byte, halves rounded up."""
    return math.floor(operations / bandwidth + 0.5)


def show() -> None:
    """Print all tables."""
    print("Table 1: numbers in the cache at the longest context (* differs from the paper)")
    print(f"{'model':24}{'d':>7}{'layers':>7}{'h':>5}{'d_k':>5}{'tokens':>8}{'kv':>9}{'printed':>9}{'k':>9}")
    for m in TABLE_1:
        kv, k = (numbers_per_token(m, form) * m.tokens for form in ("kv", "k"))
        mark = "" if agrees(kv, m.printed) else " *"
        shape = f"{m.name:24}{m.hidden:7}{m.layers:7}{m.heads:5}{m.width:5}{m.tokens:8}"
        print(f"{shape}{short(kv):>9}{m.printed:>9}{short(k):>9}{mark}")
    print("\nAppendix: numbers of one token")
    for m in APPENDIX:
        kv, k = (numbers_per_token(m, form) for form in ("kv", "k"))
        print(f"{m.name:24}{m.hidden:7}{m.layers:7}{m.heads:5}{m.width:5}{kv:>11,}{k:>11,}")
    d, h, n = 4096, 32, 16 * K
    print(f"\nTable 2: a decoded token in one layer, d {d}, h {h}, n {n} (in millions), and per number read")
    for name, cost in decoding(d, h, n).items():
        a, b = cost.intensities()
        values = "".join(f"{value / 1e6:12,.1f}" for value in cost)
        print(f"{name:18}{values}   {a:8.0f} {b:4.0f}")
    print("\nTable 3: operations per byte: the paper's in int8, then bfloat16 of analysis.flops")
    for chip, (tops, bandwidth, printed) in CHIPS.items():
        per_byte = intensity(tops * 1e12, bandwidth * 1e9)
        print(
            f"{chip:24}{tops:7}{bandwidth:7}{per_byte:7}" + ("" if per_byte == printed else f" * {printed}")
        )
    for chip, ours in flops.CHIPS.items():
        per_byte = intensity(ours.flops, ours.bandwidth)
        print(f"{chip:24}{ours.flops / 1e12:7.0f}{ours.bandwidth / 1e9:7.0f}{per_byte:7}")
    print("\nSection 5: e = d_k h > d. Cache of kv, k and x; W_V and W_KV, in numbers")
    for m in WIDE:
        e = m.heads * m.width
        kv, k, x = (numbers_per_token(m, form) for form in ("kv", "k", "x"))
        reductions = f"1, {kv / k:.0f}, {kv / x:.1f}"
        shape = f"{m.name:24}{m.hidden:7}{e:7}  r {e / m.hidden:4.1f}"
        print(f"{shape}  {reductions:12} {m.hidden * e:>12,} {e * e:>12,}")


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    about = "The Slim attention paper's tables."
    p = Parser(prog="python -m benchmarks.papers.slim_tables", description=about)
    return exit_code(lambda: show() if p.parse_args(argv) else None)


if __name__ == "__main__":
    sys.exit(main())
