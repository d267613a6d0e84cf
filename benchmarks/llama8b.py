"""Llama-3.1-8B's shape end to end, random bfloat16 weights: standard, SwiftKV, AcrossKV, fp8, transformers.

    python -m benchmarks.llama8b [--lengths 2048 8192 32768] [--minutes 10]
    python -m benchmarks.llama8b --shape tiny      # on a CPU: that it runs, not how fast

Weights are made on the device, so nothing is downloaded, and speed does not depend on them. Prompts are read
and answers of forced length decoded by the engine; transformers (SDPA, static cache, compiled) runs first, in
a process of its own, where torch has a GPU. Rounds of a row repeat until they are enough or its time is up.
Normalised FLOP/s: what the standard model would spend on the same prompt tokens, as the SwiftKV paper counts,
over the time taken; the ceilings are a matmul and a copy measured in the same run.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import swiftkv_jax as skv
from benchmarks.kernels import ceilings
from benchmarks.throughput import RESULTS, machine, not_measured, table, timed, write
from swiftkv_jax import params as weights
from swiftkv_jax.analysis.flops import flops_table
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.model import Transformer

PEER = "transformers"
COLUMNS = {
    "prompt_tokens_per_s": ("prompt tokens/s", "{:,.0f}"),
    "normalised_tflops": ("normalised TFLOP/s", "{:.2f}"),
    "matmul_share": ("of the matmul ceiling", "{:.1%}"),
    "ttft_ms": ("TTFT ms", "{:.1f}"),
    "tpot_ms": ("TPOT ms", "{:.2f}"),
    "copy_share": ("decode, of the copy ceiling", "{:.1%}"),
    "tokens_per_s": ("combined tokens/s", "{:,.0f}"),
    "gain": ("over standard", "{:.2f}"),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model to measure. batch: prompts at once, by prompt length; others get as many tokens as the last."""

    config: ModelConfig
    lengths: tuple[int, ...]
    outputs: int
    batch: dict[int, int]

    def requests(self, length: int) -> int:
        """How many prompts of `length` run at once."""
        last = max(self.batch)
        return self.batch.get(length, max(1, last * self.batch[last] // length))


def shapes() -> dict[str, Shape]:
    """The real one, and one that a CPU runs in seconds."""
    from configs.llama8b import architecture

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_layers": 8, "num_heads": 8}
    small = ModelConfig(**sizes, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    return {
        "llama8b": Shape(architecture, (2048, 8192, 32768), 256, {2048: 32, 8192: 16, 32768: 4}),
        "tiny": Shape(small, (24,), 8, {24: 3}),
    }


@dataclasses.dataclass(frozen=True)
class Variant:
    """A plan and the dtype of its rows."""

    name: str
    plan: skv.KVPlan
    cache_dtype: str = "auto"


def variants(layers: int) -> list[Variant]:
    """Each adds to the one before."""
    half = layers // 2
    return [
        Variant("standard", skv.KVPlan.standard(layers)),
        Variant("SwiftKV 50 %", skv.KVPlan.swiftkv(layers, half)),
        Variant("+ 4-way AcrossKV", skv.KVPlan.swiftkv(layers, half, 4)),
        Variant("+ fp8", skv.KVPlan.swiftkv(layers, half, 4), "float8_e4m3fn"),
    ]


def load(shape: Shape, variant: Variant, context: int, requests: int) -> skv.LLM:
    """An LLM of random weights, made on the device."""
    make = jax.jit(partial(weights.init, shape.config, variant.plan, dtype=jnp.bfloat16))
    model = Transformer(shape.config, variant.plan, "bfloat16")
    settings = {"max_num_seqs": requests, "max_model_len": context, "page_size": 128, "prefix_caching": False}
    params = weights.unstack(make(jax.random.key(0)))
    return skv.LLM.from_model(model, params, cache_dtype=variant.cache_dtype, **settings)


def rounds_of(run, deadline: float, most: int = 3) -> list[float]:
    """Seconds of `run()` a few times, after once that compiles; at least once more."""
    run()
    seconds: list[float] = []
    while not seconds or (len(seconds) < most and time.perf_counter() < deadline):
        seconds.append(run())
    return seconds


def measure(shape: Shape, variant: Variant, length: int, top: dict[str, float], deadline: float) -> dict:
    """One row of the table."""
    outputs, requests = shape.outputs, shape.requests(length)
    llm = load(shape, variant, length + outputs, requests)
    prompts = np.random.default_rng(length).integers(2, shape.config.vocab_size, (requests, length)).tolist()
    first = statistics.median(rounds_of(lambda: timed(llm, prompts[:1], 1), deadline))
    read = statistics.median(rounds_of(lambda: timed(llm, prompts, 1), deadline))
    whole = statistics.median(rounds_of(lambda: timed(llm, prompts, outputs), deadline))
    step = llm.stats["decode_seconds"] / max(1, llm.stats["decoded_steps"])
    rate = requests * length / read
    standard = flops_table(shape.config, context=length)["total"] * 1e9
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.params)) - llm.params["embed"].nbytes
    moved = stored + requests * (length + outputs / 2) * read_bytes(llm)
    return {
        "requests": requests,
        "prompt_tokens_per_s": rate,
        "normalised_tflops": rate * standard / 1e12,
        "matmul_share": rate * standard / top["flops"],
        "ttft_ms": 1e3 * first,
        "tpot_ms": 1e3 * step,
        "copy_share": moved / step / top["bytes"],
        "tokens_per_s": requests * (length + outputs) / whole,
    }


def read_bytes(llm: skv.LLM) -> float:
    """Bytes of the cache that a decoded token reads for each token before it: a shared row, once a layer."""
    return llm.cache_bytes_per_token * llm.model.plan.num_layers / llm.model.plan.num_rows


def theirs(shape: Shape, length: int, device: str, compiled: bool) -> dict:
    """The row of transformers: SDPA, static cache, `torch.compile`d on a GPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config, requests, outputs = shape.config, shape.requests(length), shape.outputs
    made = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=length + outputs,
        attn_implementation="sdpa",
        dtype="bfloat16",
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = LlamaForCausalLM(made).to(torch.bfloat16).eval()
    if compiled:
        model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids = torch.randint(2, config.vocab_size, (requests, length), device=device)

    def run(ids, count: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                cache_implementation="static",
            )
        assert out.shape == (len(ids), length + count)
        out.cpu()
        return time.perf_counter() - began

    first, read, whole = (
        statistics.median(rounds_of(lambda ids=ids, n=n: run(ids, n), time.perf_counter()))
        for ids, n in ((ids[:1], 1), (ids, 1), (ids, outputs))
    )
    return {
        "requests": requests,
        "prompt_tokens_per_s": requests * length / read,
        "ttft_ms": 1e3 * first,
        "tpot_ms": 1e3 * (whole - read) / (outputs - 1),
        "tokens_per_s": requests * (length + outputs) / whole,
        "versions": f"torch {torch.__version__}",
    }


def peer(name: str, length: int, seconds: float) -> dict:
    """`theirs` in a process of its own, so that its memory is given back; or why it did not run."""
    command = [sys.executable, "-m", "benchmarks.llama8b", "--shape", name, "--peer", str(length)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:160]}
    return json.loads(done.stdout.splitlines()[-1])


def run_peer(shape: Shape, length: int) -> int:
    """The process of `peer`: one line of JSON, or one line that says why not."""
    import torch

    if not torch.cuda.is_available():
        print("torch has no GPU here", file=sys.stderr)
        return 1
    print(json.dumps(theirs(shape, length, "cuda", compiled=True)))
    return 0


def row(shape: Shape, variant: Variant, length: int, top, deadline: float) -> dict:
    """`measure`, or why it did not run."""
    left = deadline - time.perf_counter()
    if left <= 0:
        return {"failed": "no time left"}
    try:
        return measure(shape, variant, length, top, time.perf_counter() + left / 4)
    except Exception as error:  # one that does not fit must not lose the others
        return {"failed": (str(error).splitlines() or [type(error).__name__])[0][:160]}


def run(name: str, shape: Shape, lengths: list[int], minutes: float) -> dict:
    """Every row, in order of length; transformers takes a third of the time at most."""
    began = time.perf_counter()
    share = 60 * minutes / 3 / len(lengths)
    found: dict[str, dict] = {str(n): {PEER: peer(name, n, share)} for n in lengths}
    top = ceilings(jax.default_backend() == "cpu", rounds=3, inner=3)
    kinds = variants(shape.config.num_layers)
    for i, length in enumerate(lengths):
        for j, kind in enumerate(kinds):
            rows_left = (len(lengths) - i) * len(kinds) - j
            now = time.perf_counter()
            deadline = now + (began + 60 * minutes - now) / rows_left
            found[str(length)][kind.name] = row(shape, kind, length, top, deadline)
            print(length, kind.name, found[str(length)][kind.name], flush=True)
        standard = found[str(length)]["standard"].get("tokens_per_s")
        for line in found[str(length)].values():
            if standard and "tokens_per_s" in line:
                line["gain"] = line["tokens_per_s"] / standard
    made = machine(f"python -m benchmarks.llama8b --shape {name}")
    return {"machine": made, "outputs": shape.outputs, "ceilings": top, "lengths": found}


def report(result: dict) -> str:
    """The result as Markdown."""
    info, top = result["machine"], result["ceilings"]
    parts = [
        f"{info['command']}, {info['device']}, jax {info['jax']}, {info['date']}. Measured ceilings: bfloat16"
        f" matmul {top['flops'] / 1e12:.2f} TFLOP/s, copy {top['bytes'] / 1e9:.0f} GB/s. Random weights.\n"
    ]
    for length, rows in result["lengths"].items():
        parts.append(f"{length} tokens in, {result['outputs']} out\n")
        lines = []
        for name, line in rows.items():
            if "failed" in line:
                lines.append(
                    [name, f"not run: {line['failed']}".replace("|", "/"), *[""] * (len(COLUMNS) - 1)]
                )
                continue
            cells = (form.format(line[key]) if key in line else "" for key, (_, form) in COLUMNS.items())
            lines.append([f"{name}, {line['requests']} at once", *cells])
        parts.append(table(["", *(title for title, _ in COLUMNS.values())], lines) + "\n")
    return "\n".join(parts)


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--shape", choices=("llama8b", "tiny"), default="llama8b")
    p.add_argument("--lengths", type=int, nargs="+", help="prompt tokens (default 2048 8192 32768)")
    p.add_argument("--minutes", type=float, default=10.0, help="what the run may take (default 10)")
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    shape = shapes()[args.shape]
    if args.peer:
        return run_peer(shape, args.peer)
    if min(args.lengths or [1]) < 1 or args.minutes <= 0:
        p.error("--lengths and --minutes must be positive")
    # By default JAX takes most of a GPU's memory at its first look at it, and the peer needs that memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.shape == "llama8b" and jax.default_backend() == "cpu":
        what = "Llama-3.1-8B's shape", "accelerator", "python -m benchmarks.llama8b"
        print(not_measured("llama8b", *what, args.output))
        return 1
    result = run(args.shape, shape, args.lengths or list(shape.lengths), args.minutes)
    text = report(result)
    print(text)
    write("llama8b" if args.shape == "llama8b" else "llama8b_tiny", result, text, args.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
