"""Cache sizes and reads per token of Whisper: the paper's table, also with the E-cache counted, and measured
tokens per second by kind of row.

    python -m benchmarks.whisper                    # the table (Slim attention paper, section 6), immediate
    python -m benchmarks.whisper --run --size base  # also times on this machine, with random weights

The paper does not count the encoder's output in the storage and reads of "option 2", as it may lie in on-chip
memory. A server of many requests keeps it in main memory, once for all layers, so there it counts.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import command, interleaved, machine
from swiftkv_jax import to_slim
from swiftkv_jax.checkpoint.generation import GenerationDefaults
from swiftkv_jax.common.errors import exit_code
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.speech import window_request

SOURCE, CONTEXT, VOCAB = 1500, 448, 51_865
BEGUN = {"decoder_start_token_id": 50_258}
FORMS = {"kv": ("kv", "kv"), "k": ("k", "k"), "x": ("x", "x")}
OUTPUTS, ROUNDS = 32, 3  # tokens that are decoded after a window's first, and rounds


# One published Whisper: decoder layers, width, heads; and the paper's numbers for it, in millions.
Size = namedtuple("Size", "layers width heads baseline option_2")
SIZES = {
    "tiny": Size(4, 384, 6, 6.0, 0.7),
    "base": Size(6, 512, 8, 12.0, 1.4),
    "small": Size(12, 768, 12, 35.9, 4.1),
    "medium": Size(24, 1024, 16, 95.7, 11.0),
    "large": Size(32, 1280, 20, 159.6, 18.4),
}


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts for one size, in millions of numbers: stored by a request, and read by a token of a batch.

    `encoder` is the E-cache, which all layers read in turn.
    """

    own: float
    cross: float
    encoder: float
    parameters: float

    @property
    def stored(self) -> float:
        return self.own + self.cross + self.encoder

    def read(self, batch: int, layers: int, on_chip: bool) -> float:
        """Numbers that a token reads. on_chip: reads of the encoder's output are not counted, as in the
        paper."""
        again = 0.0 if on_chip else layers * self.encoder
        return self.own + self.cross + again + self.parameters / batch


def counts(size: Size, form: str) -> Counts:
    """The counts with keys and values ("kv"), keys alone ("k"), or keys of own tokens and one row of inputs
    for the encoder's output that all layers read ("x", the paper's option 2)."""
    d, layers, mega = size.width, size.layers, 1e6
    own, cross = 2 * CONTEXT * d * layers / mega, 2 * SOURCE * d * layers / mega
    plain = (d * VOCAB + layers * (6 * d * d + 2 * d * 4 * d)) / mega
    more = layers * d * d / mega
    return {
        "kv": Counts(own, cross, 0.0, plain),
        "k": Counts(own / 2, cross / 2, 0.0, plain + more),
        "x": Counts(own / 2, 0.0, SOURCE * d / mega, plain + 2 * more),
    }[form]


def show_table() -> None:
    """Print the counts of all sizes and the paper's."""
    print("Numbers in the cache of a request, in millions, and times fewer than keys and values")
    print(f"{'':8}{'kv':>8}{'k':>8}{'x, E on chip':>15}{'paper':>8}{'x, E counted':>15}")
    for name, size in SIZES.items():
        kv, k, x = (counts(size, form) for form in FORMS)
        chip = x.own + x.cross
        left = f"{name:8}{kv.stored:8.1f}{k.stored:8.1f}{chip:8.1f} {kv.stored / chip:5.1f}x"
        print(f"{left}{size.option_2:8.1f}{x.stored:8.1f} {kv.stored / x.stored:5.1f}x")
    for batch in (1, 64):
        counted = "in millions, and times fewer than keys and values"
        print(f"\nNumbers read for a token at batch {batch}, {counted}")
        print(f"{'':8}{'kv':>8}{'k':>15}{'x, E on chip':>15}{'x, E counted':>15}")
        for name, size in SIZES.items():
            base = counts(size, "kv").read(batch, size.layers, True)
            cells = []
            for form, on_chip in (("k", True), ("x", True), ("x", False)):
                read = counts(size, form).read(batch, size.layers, on_chip)
                cells.append(f"{read:8.1f} {base / read:5.2f}x")
            print(f"{name:8}{base:8.1f}" + "".join(f"{cell:>15}" for cell in cells))


def make(size: Size, form: str, lanes: int) -> LLM:
    """An engine of this size with random weights."""
    raw = {"model_type": "whisper", "vocab_size": VOCAB, "d_model": size.width, "num_mel_bins": 80}
    raw |= {"max_source_positions": SOURCE, "max_target_positions": CONTEXT}
    for half in ("encoder", "decoder"):
        raw |= {f"{half}_layers": size.layers, f"{half}_attention_heads": size.heads}
        raw |= {f"{half}_ffn_dim": 4 * size.width}
    config = ModelConfig.from_hf(raw)
    plan = KVPlan.standard(size.layers).with_cross("kv")
    model = Transformer(config, plan)
    params = weights.init(config, plan, jax.random.key(0), jnp.float32, cuts=None)
    if form != "kv":
        model, params = to_slim(model, params, FORMS[form][0], cross_forms=FORMS[form][1])
    return LLM.from_model(model, params, generation=GenerationDefaults(**BEGUN), max_num_seqs=lanes)


def transcribe(llm: LLM, batch: int, outputs: int) -> None:
    """Generate `outputs` tokens for each of `batch` windows of noise."""
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    frames = [random.standard_normal((2 * SOURCE, 80)).astype(np.float32) for _ in range(batch)]
    for _ in llm.run([window_request(llm, one, None, "transcribe", params) for one in frames]):
        pass


def measured(size: Size, batch: int) -> dict[str, dict]:
    """Form -> a request's bytes of cache, milliseconds per window until the first tokens, and tokens per
    second after that: medians of interleaved rounds."""
    llms = {form: make(size, form, batch) for form in FORMS}
    keys = [(form, outputs) for form in llms for outputs in (1, 1 + OUTPUTS)]
    runs = {(form, n): partial(transcribe, llms[form], batch, n) for form, n in keys}
    seconds = interleaved(runs, ROUNDS)
    result = {}
    for form, llm in llms.items():
        first, all_of_them = seconds[form, 1], seconds[form, 1 + OUTPUTS]
        later = statistics.median(b - a for a, b in zip(first, all_of_them, strict=True))
        stats = llm.engine.stats
        stored = stats.cache_bytes_per_token * CONTEXT + stats.source_bytes_per_token * SOURCE
        times = {"first_ms": 1e3 * statistics.median(first) / batch, "tokens_per_s": batch * OUTPUTS / later}
        result[form] = {"cache_mb": stored / 1e6, **times, "kernels": llm.kernels}
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", action="store_true", help="time decoding here too, with random weights")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of the times")
    args = parser.parse_args()
    show_table()
    if not args.run:
        return
    result = {"machine": machine(command("whisper")), "size": args.size, "batches": {}}
    print(f"\nWhisper {args.size} here: " + ", ".join(f"{k} {v}" for k, v in result["machine"].items()))
    print(f"{'batch':>5}  {'rows':4}{'cache, MB':>11}{'first token, ms per window':>26}{'then tokens/s':>15}")
    for batch in args.batch:
        result["batches"][batch] = measured(SIZES[args.size], batch)
        for form, row in result["batches"][batch].items():
            times = f"{row['first_ms']:26.0f}{row['tokens_per_s']:15.1f}"
            print(f"{batch:5}  {form:4}{row['cache_mb']:11.1f}{times}")
        if args.output is not None:
            args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
