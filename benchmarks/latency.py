"""Time to first token and time per output token of models side by side: medians of interleaved rounds.

    python -m benchmarks.latency demo/teacher runs/demo/swiftkv/export

The first model also runs at full depth for every prompt token, as other systems do. Floors are FLOPs over the
matmul rate measured in the same run. A KV prediction adapter may be given like any other model. `--forms k`
adds the first model with its rows in another form (Slim attention, by the exact inverse). With `--engine` all
tokens come from engines, one sequence at a time. Full depth is a bare program there too, since no engine runs
layers whose output is not needed.
"""

import argparse
import dataclasses
import statistics
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import command, in_rounds, interleaved, machine, ratio, seconds_of, shown
from benchmarks.papers.compare.times import empty, reader
from benchmarks.papers.prediction_flops import Sizes, prediction_table
from swiftkv_jax import LLM, SamplingParams
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.checkpoint.adapter import from_pretrained
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Cache
from swiftkv_jax.core.loop import step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, generator
from swiftkv_jax.core.surgery import to_slim
from swiftkv_jax.kernels.common import dispatch


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model to be timed; `full_depth` runs every layer for every prompt token."""

    name: str
    model: Transformer | Predicted
    params: dict
    full_depth: bool = False


def load(name: str, folder: str | Path, dtype: str = "float32") -> Contender:
    return Contender(name, *from_pretrained(folder, dtype=dtype, cuts=None))


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode(model: Transformer, params, cache: Cache, start, count: int):
    """`count` greedy tokens for every sequence of the cache, from position `start` on, in one launch."""
    sequences = cache.table.shape[0]

    def turn(i, carry):
        token, cache = carry
        out, cache = step(model, params, token, jnp.full(sequences, start + i), None, None, cache)
        return jnp.argmax(out, -1).astype(token.dtype), cache

    return jax.lax.fori_loop(0, count, turn, (jnp.zeros(sequences, jnp.int32), cache))


def time_per_output_token(
    contenders, context: int, batch: int, rounds: int, count: int = 16
) -> dict[str, list[float]]:
    """Seconds per decode step of `batch` sequences at about `context` tokens each."""

    def runner(c: Contender):
        model, params = generator(c.model, c.params)
        held = [empty(model, params, batch, context)]

        def run():
            token, held[0] = decode(model, params, held[0], context - count, count)
            token.block_until_ready()

        return run

    timed = interleaved({c.name: runner(c) for c in contenders}, rounds)
    return {name: [s / count for s in seconds] for name, seconds in timed.items()}


def through_engines(contenders: list[Contender], length: int, rounds: int, outputs: int = 65) -> dict:
    """Medians in milliseconds, and ratios to the first two: TTFT of one prompt of `length` tokens in one
    chunk, and TPOT of the `outputs` tokens after it; each round of each contender."""
    vocab = contenders[0].model.config.vocab_size
    prompt = np.random.default_rng(length).integers(2, vocab, length).tolist()
    first, more = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, outputs))
    sizes = {"max_model_len": length + outputs, "max_num_seqs": 1, "max_num_batched_tokens": length}
    ttft, tpot, kernels = {}, {}, {}
    for c in contenders:
        if c.full_depth:
            ttft[c.name] = partial(seconds_of, reader(c.model, c.params, 1, length, whole=True))
            continue
        llm = LLM.from_model(c.model, c.params, prefix_caching=False, **sizes)
        kernels[c.name] = llm.kernels
        ttft[c.name] = lambda llm=llm: llm.generate([prompt], first, use_tqdm=False)[0].metrics.ttft
        tpot[c.name] = lambda llm=llm: llm.generate([prompt], more, use_tqdm=False)[0].metrics.tpot
    out: dict = {"kernels": kernels}
    for kind, runs in (("ttft", ttft), ("tpot", tpot)):
        out[kind] = compared(in_rounds(runs, rounds), list(runs)[:2])
    return out


def matmul_rate(size: int = 1024, rounds: int = 5) -> float:
    """Measured FLOP/s of a square float32 matmul, from which the floors are computed."""
    a, run = jnp.ones((size, size)), jax.jit(lambda a: a @ a)
    run(a).block_until_ready()
    return 2 * size**3 / min(seconds_of(lambda: run(a).block_until_ready()) for _ in range(rounds))


def prompt_flops(c: Contender, length: int) -> float:
    """FLOPs of a prompt's tokens in the layers that run; the head, for one token, is left out."""
    if isinstance(c.model, Predicted):
        base, auxiliary = (Sizes.of(part.config) for part in (c.model.base, c.model.auxiliary))
        return prediction_table(base, auxiliary, c.model.prediction, length)["total"] * 1e9 * length
    layers = c.model.config.num_layers if c.full_depth else c.model.plan.depth
    table = flops_table(c.model.config, c.model.plan, context=length, layers=layers)
    return (table["total"] - table["vocab"]) * 1e9 * length


def measure(contenders: list[Contender], lengths, rounds: int, decode_rounds: int, decodes) -> dict:
    """Medians in milliseconds, ratios to the first contender, and floors; every key is a string."""
    rate = matmul_rate()
    out = {"kernels": dispatch.unnamed(), "matmul_gflops": rate / 1e9, "ttft": {}, "tpot": {}}
    for length in lengths:
        # From a prompt of random tokens to its first output token.
        reads = {c.name: reader(c.model, c.params, 1, length, c.full_depth) for c in contenders}
        seconds = interleaved(reads, rounds)
        figures = compared(seconds, [base.name for base in contenders[:2]])
        floors = {c.name: {"floor_ms": 1e3 * prompt_flops(c, length) / rate} for c in contenders}
        out["ttft"][str(length)] = {name: row | floors[name] for name, row in figures.items()}
    standard = [c for c in contenders if not c.full_depth]
    for context, batch in decodes:
        seconds = time_per_output_token(standard, context, batch, decode_rounds, 16 if batch == 1 else 4)
        out["tpot"][f"{batch}x{context}"] = compared(seconds, [standard[0].name])
    return out


def compared(seconds: dict[str, list[float]], bases: list[str]) -> dict[str, dict[str, float]]:
    """Median milliseconds of each contender, and its ratios to some."""
    medians = {name: {"ms": 1e3 * statistics.median(times)} for name, times in seconds.items()}
    return {n: row | {f"vs_{base}": ratio(seconds, n, base) for base in bases} for n, row in medians.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="+", help="folders; the first is the standard model")
    p.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--decode-rounds", type=int, default=30)
    p.add_argument(
        "--forms", nargs="+", default=[], metavar="F", help="the first model's rows as k, v or x too"
    )
    p.add_argument("--engine", action="store_true", help="TTFT at the first length, and TPOT, of engines")
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    first, *rest = args.models
    standard = load("standard", first)
    contenders = [dataclasses.replace(standard, name="full_depth", full_depth=True), standard]
    for form in args.forms:  # without the weights that only files keep
        model, params = to_slim(standard.model, standard.params, form)
        params = weights.split_layers(model.config, model.plan, params)
        contenders.append(Contender(f"as {form}", model, params))
    for folder in map(Path, rest):
        name = folder.parent.name if folder.name == "export" else folder.name
        contenders.append(load(name, folder))
    decodes = [(256, 1), (2048, 1), (256, 16), (2048, 16)]
    if args.engine:
        result = through_engines(contenders, args.lengths[0], args.rounds)
    else:
        result = measure(contenders, args.lengths, args.rounds, args.decode_rounds, decodes)
    shown({"machine": machine(command("latency")), **result}, args.output)


if __name__ == "__main__":
    main()
