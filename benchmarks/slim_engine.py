"""Rows of keys against rows of keys and values, served at Llama-2-7B's shape: 16 sequences of 8192 tokens.

    python -m benchmarks.slim_engine [--layers 16] [--forms k] [--workload 8192:64] [--requests 16]

Weights are random, since time does not depend on them. Both engines are in memory at once and run in turn;
ratios are medians over the rounds. With all 32 layers they take 123 GB in bfloat16, with 16 layers half of
that. `--shape tiny` tries the command out on a CPU.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp

import swiftkv_jax as skv
from benchmarks.common import RESULTS, command, machine, not_measured, write
from benchmarks.throughput import measure, report, workload
from swiftkv_jax.core import weights

NAME, TITLE = "slim_engine", "Slim attention, served"
_HEADS = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128}
_LLAMA2_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_layers": 32,
    **_HEADS,
}
_FEW_HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
_TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, **_FEW_HEADS}
SHAPES = {
    "llama2_7b": skv.ModelConfig(**_LLAMA2_7B, max_position_embeddings=16384, dtype="bfloat16"),
    "tiny": skv.ModelConfig(**_TINY),
}


def served(config: skv.ModelConfig, form: str, context: int, requests: int, chunk: int) -> skv.LLM:
    """An engine of random weights whose rows are of one form, with room for all requests."""
    plan, dtype = skv.KVPlan.standard(config.num_layers).stored_as(form), jnp.dtype(config.dtype)
    init = functools.partial(weights.init, config, plan, jax.random.key(0), dtype, cuts=None)
    params = weights.split_layers(config, plan, jax.jit(init)())
    page, model = 64, skv.Transformer(config, plan, config.dtype)
    sizes = {"max_model_len": context, "max_num_seqs": requests, "max_num_batched_tokens": chunk}
    sizes |= {"page_size": page, "num_pages": requests * -(-context // page) + 1}
    return skv.LLM.from_model(model, params, **sizes, prefix_caching=False)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shape", choices=SHAPES, default="llama2_7b")
    p.add_argument("--layers", type=int, help="number of layers, to fit in less memory")
    p.add_argument("--forms", nargs="+", default=["k"], metavar="F", help="beside kv (k)")
    p.add_argument("--workload", type=workload, default=(8192, 64), metavar="IN:OUT")
    p.add_argument("--requests", type=int, default=16)
    p.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--output", type=Path, default=RESULTS)
    args = p.parse_args()
    if args.shape != "tiny" and jax.default_backend() == "cpu":
        print(not_measured(NAME, TITLE, "GPU or TPU", command(NAME), args.output))
        return 1
    config, (length, outputs) = SHAPES[args.shape], args.workload
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers, windows=())
    sizes = length + outputs, args.requests, args.chunk
    names = {"standard": "kv"} | {form: form for form in args.forms}
    llms = {name: served(config, form, *sizes) for name, form in names.items()}
    figures = {f"{length}:{outputs}": measure(llms, length, outputs, args.requests, args.rounds)}
    result = {"machine": machine(command(NAME)), "workloads": figures, "budgets": {}}
    text = f"# {TITLE}\n\n{report(result)}"
    print(text)
    write(NAME if args.shape != "tiny" else f"{NAME}_tiny", result, text, args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
