"""Rows of keys alone against keys and values on one core, both in C++: decoding attention, or a prompt.

    python -m benchmarks.slim_attention [--heads 4 8 16 32] [--sequences 16] [--tokens 2048] [--prompt]

With --prompt it measures the time to the first token of a prompt, through engines of a random model of 4
layers. Both kinds take turns, attention reads more than a processor's caches hold, and W_KV is included. A
ratio is the median over the rounds of the time of keys and values over that of keys: CPU time of the process,
which has one core and so one thread, and wall time.
"""

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

HEAD = 64  # numbers of a head
PAGE = 64  # tokens


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt", action="store_true", help="time to the first token instead")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts the cores
    for heads in args.heads:
        sizes = (args.tokens, args.dtype)
        made = prompts(heads, *sizes) if args.prompt else calls(heads, args.sequences, *sizes)
        seconds = measure(made, args.rounds)
        print(json.dumps({"heads": heads, "dtype": args.dtype, **summary(seconds)}), flush=True)
    return 0


def calls(heads: int, sequences: int, tokens: int, dtype: str) -> dict[str, Callable]:
    """Name -> the call, compiled when it is first made."""
    from swiftkv_jax.kernels.k_cache_attention import cases as keys
    from swiftkv_jax.kernels.paged_attention import cases as both

    sizes = {"lengths": (tokens,) * sequences, "heads": heads, "width": HEAD, "page": PAGE, "stored": dtype}
    made = {"k": keys.Case(**sizes), "kv": both.Case(kv_heads=heads, **sizes)}
    return {name: case.timed("native_cpu") for name, case in made.items()}


def prompts(heads: int, tokens: int, dtype: str) -> dict[str, Callable]:
    """Name -> a prompt of `tokens` and its first token, by engines on the same weights."""
    import jax
    import numpy as np

    import swiftkv_jax as skv
    from swiftkv_jax.core import weights

    width, layers = heads * HEAD, 4
    shape = {"vocab_size": 1024, "hidden_size": width, "intermediate_size": 8 * width // 3}
    shape |= {"num_layers": layers, "num_heads": heads, "num_kv_heads": heads, "head_dim": HEAD}
    config = skv.ModelConfig(**shape, max_position_embeddings=tokens + 1)
    plan = skv.KVPlan.standard(layers)
    model, params = skv.Transformer(config, plan), weights.init(config, plan, jax.random.key(0))
    made = {"kv": (model, params), "k": skv.to_slim(model, params, "k")}
    prompt = np.random.default_rng(0).integers(0, 1024, tokens).tolist()
    first = skv.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": tokens}
    sizes |= {"prefix_caching": False, "cache_dtype": dtype}
    return {
        name: functools.partial(skv.LLM.from_model(*pair, **sizes).generate, [prompt], first, use_tqdm=False)
        for name, pair in made.items()
    }


def measure(by_name: dict[str, Callable], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU, wall) seconds of each call, in interleaved rounds."""
    import jax

    for call in by_name.values():
        jax.block_until_ready(call())  # compiles
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in by_name}
    for _ in range(rounds):
        for name, call in by_name.items():
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return seconds


def summary(seconds: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Median milliseconds of each, and ratios, by clock."""
    out: dict[str, float] = {}
    for i, clock in enumerate(("cpu", "wall")):
        of = {name: [pair[i] for pair in pairs] for name, pairs in seconds.items()}
        out |= {f"{name} {clock} ms": round(1e3 * statistics.median(x), 2) for name, x in of.items()}
        ratios = [a / b for a, b in zip(of["kv"], of["k"], strict=True)]
        out[f"{clock} ratio"] = round(statistics.median(ratios), 2)
    return out


if __name__ == "__main__":
    raise SystemExit(main())
