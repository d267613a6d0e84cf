"""Time to first token and time per output token of models side by side: medians of interleaved rounds.

    python -m benchmarks.latency demo/teacher runs/demo/swiftkv/export

The first model also runs at full depth for every prompt token, which is what other systems do. Floors:
FLOPs over the matmul rate measured in the same run.
"""

import argparse
import dataclasses
import json
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import interleaved, ratio
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.cache import Cache, make_batch
from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.engine.runner import new_cache
from swiftkv_jax.model import Transformer, embed, logits, step
from swiftkv_jax.model import run as run_layers


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model to be timed; `full_depth` runs every layer for every prompt token."""

    name: str
    model: Transformer
    params: dict
    full_depth: bool = False


def load(name: str, folder: str | Path, dtype: str = "float32") -> Contender:
    return Contender(name, *from_pretrained(folder, dtype=dtype, cuts=None))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def first_token(model: Transformer, full_depth: bool, params, tokens, cache: Cache):
    """Greedy first token of one prompt, and the cache."""
    length = tokens.shape[0]
    at, starts = jnp.arange(length), jnp.array([0, length])
    if not full_depth:
        out, cache = step(model, params, tokens, at, starts, jnp.array([length - 1]), cache)
        return jnp.argmax(out[0]), cache
    angles, batch = cache.angles.at(at), make_batch(starts, at)
    x, cache = run_layers(model, params, embed(model, params, tokens), angles, batch, cache)
    return jnp.argmax(logits(model, params, x[-1:])[0]), cache


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode(model: Transformer, params, cache: Cache, start, count: int):
    """`count` greedy tokens for every sequence of the cache, from position `start` on, in one launch."""
    sequences = cache.table.shape[0]

    def turn(i, carry):
        token, cache = carry
        out, cache = step(model, params, token, jnp.full(sequences, start + i), None, None, cache)
        return jnp.argmax(out, -1).astype(token.dtype), cache

    return jax.lax.fori_loop(0, count, turn, (jnp.zeros(sequences, jnp.int32), cache))


def _dense(c: Contender, sequences: int, capacity: int) -> Cache:
    make = partial(Cache.dense, c.model.config, c.model.plan, sequences, capacity, jnp.dtype(c.model.dtype))
    return new_cache(c.params, make)


def time_to_first_token(contenders: list[Contender], length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from a prompt of `length` random tokens to its first output token, each round of each
    contender."""
    tokens = jnp.asarray(
        np.random.default_rng(length).integers(2, contenders[0].model.config.vocab_size, length)
    )

    def runner(c: Contender):
        held = [_dense(c, 1, length + 64)]

        def run():
            token, held[0] = first_token(c.model, c.full_depth, c.params, tokens, held[0])
            token.block_until_ready()

        return run

    return interleaved({c.name: runner(c) for c in contenders}, rounds)


def time_per_output_token(
    contenders, context: int, batch: int, rounds: int, count: int = 16
) -> dict[str, list[float]]:
    """Seconds per decode step of `batch` sequences at about `context` tokens each."""

    def runner(c: Contender):
        held = [_dense(c, batch, context)]

        def run():
            token, held[0] = decode(c.model, c.params, held[0], context - count, count)
            token.block_until_ready()

        return run

    timed = interleaved({c.name: runner(c) for c in contenders}, rounds)
    return {name: [s / count for s in seconds] for name, seconds in timed.items()}


def matmul_rate(size: int = 1024, rounds: int = 5) -> float:
    """FLOP/s of a square float32 matmul here and now: the ceiling of the floors."""
    a = jnp.ones((size, size))
    run = jax.jit(lambda a: a @ a)
    run(a).block_until_ready()
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        run(a).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def prompt_flops(c: Contender, length: int) -> float:
    """FLOPs of a prompt's tokens in the layers that run; the head, for one token, is left out."""
    layers = c.model.config.num_layers if c.full_depth else c.model.plan.depth
    table = flops_table(c.model.config, c.model.plan, context=length, layers=layers)
    return (table["total"] - table["vocab"]) * 1e9 * length


def measure(contenders: list[Contender], lengths, rounds: int, decode_rounds: int, decodes) -> dict:
    """Medians in milliseconds, ratios to the first contender, and floors; every key is a string."""
    rate = matmul_rate()
    out = {"matmul_gflops": rate / 1e9, "ttft": {}, "tpot": {}}
    for length in lengths:
        seconds = time_to_first_token(contenders, length, rounds)
        out["ttft"][str(length)] = {
            c.name: {
                "ms": 1e3 * statistics.median(seconds[c.name]),
                "floor_ms": 1e3 * prompt_flops(c, length) / rate,
                **{f"vs_{base.name}": ratio(seconds, c.name, base.name) for base in contenders[:2]},
            }
            for c in contenders
        }
    standard = [c for c in contenders if not c.full_depth]
    for context, batch in decodes:
        seconds = time_per_output_token(standard, context, batch, decode_rounds, 16 if batch == 1 else 4)
        out["tpot"][f"{batch}x{context}"] = {
            c.name: {
                "ms": 1e3 * statistics.median(seconds[c.name]),
                f"vs_{standard[0].name}": ratio(seconds, c.name, standard[0].name),
            }
            for c in standard
        }
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="+", help="folders; the first is the standard model")
    p.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048])
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--decode-rounds", type=int, default=30)
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    first, *rest = args.models
    standard = load("standard", first)
    contenders = [dataclasses.replace(standard, name="full_depth", full_depth=True), standard]
    contenders += [load(Path(folder).parent.name or folder, folder) for folder in rest]
    decodes = [(256, 1), (2048, 1), (256, 16), (2048, 16)]
    text = json.dumps(measure(contenders, args.lengths, args.rounds, args.decode_rounds, decodes), indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
