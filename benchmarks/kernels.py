"""Time of every kernel at its real shapes, as a share of a copy and a matmul measured in the same run.

    python -m benchmarks.kernels [--platform gpu|tpu|cpu] [--kernel NAME] [--case NAME] [--minutes 10]

Contenders of a case take turns; a time is the median over the rounds. Writes Markdown and JSON under
benchmarks/results/. On a CPU the cases are the tests' small ones, only to see that it runs.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.common import RESULTS, not_measured, write
from swiftkv_jax.kernels.fused_kv_fill import api as fill
from swiftkv_jax.kernels.fused_kv_fill import cases as fill_cases
from swiftkv_jax.kernels.k_cache_attention import api as k_cache
from swiftkv_jax.kernels.k_cache_attention import cases as k_cache_cases
from swiftkv_jax.kernels.paged_attention import api as paged
from swiftkv_jax.kernels.paged_attention import cases as paged_cases
from swiftkv_jax.kernels.prompt_attention import api as prompt
from swiftkv_jax.kernels.prompt_attention import cases as prompt_cases

# Small cases for a CPU, real ones for the rest.
CASES = {
    "fused_kv_fill": (fill_cases.SMALL, fill_cases.REAL),
    "paged_attention": (paged_cases.SMALL, paged_cases.REAL),
    "k_cache_attention": (k_cache_cases.SMALL, k_cache_cases.REAL),
    "x_cache_attention": (k_cache_cases.INPUTS_SMALL, k_cache_cases.INPUTS_REAL),
    "prompt_attention": (prompt_cases.SMALL, prompt_cases.REAL),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A name and a function of no arguments that starts one call and returns its arrays."""

    name: str
    call: Callable


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work of a case: operations, and bytes read and written."""

    flops: float
    bytes: float


def sample(call: Callable, inner: int) -> float:
    """Seconds of one call, from `inner` calls in a row."""
    start = time.perf_counter()
    out = None
    for _ in range(inner):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / inner


def measure(contenders: list[Contender], rounds: int, inner: int) -> dict[str, float | str]:
    """Median seconds of each contender, or why it did not run."""
    times: dict[str, list[float]] = {}
    failed: dict[str, float | str] = {}
    for contender in contenders:
        try:
            jax.block_until_ready(contender.call())
            times[contender.name] = []
        except Exception as error:  # a missing peer, or a shape that it refuses, becomes a line in the table
            failed[contender.name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    for _ in range(rounds):
        for contender in contenders:
            if contender.name in times:
                times[contender.name].append(sample(contender.call, inner))
    return {name: statistics.median(seconds) for name, seconds in times.items()} | failed


def ceilings(small: bool, rounds: int, inner: int) -> dict[str, float]:
    """Bytes per second of a copy and FLOP/s of a square bfloat16 matmul."""
    count, size = (1 << 22, 512) if small else (1 << 29, 8192)
    x = jnp.ones(count, jnp.bfloat16)
    a = jnp.ones((size, size), jnp.bfloat16)
    copy, matmul = jax.jit(lambda x: x + 1), jax.jit(jnp.matmul)
    seconds = measure(
        [Contender("copy", lambda: copy(x)), Contender("matmul", lambda: matmul(a, a))], rounds, inner
    )
    return {"bytes": 2 * x.nbytes / float(seconds["copy"]), "flops": 2 * size**3 / float(seconds["matmul"])}


def seen_keys(case) -> int:
    """Keys that are read, over all blocks."""
    window = case.window or max(case.lengths)
    return sum(min(length, window + case.queries - 1) for length in case.lengths)


def attention_work(case, kernel: str) -> Work:
    """Each key, and value if there is one, is read once; the scores and the sum take 2 FLOP an element."""
    stored, keys = jnp.dtype(case.stored).itemsize, seen_keys(case)
    rows = case.heads * case.queries
    if kernel == "k_cache_attention":
        width = case.heads * case.width
        weights = case.heads * width * case.width * jnp.dtype(case.computed).itemsize
        return Work(keys * rows * 2 * (case.width + width), keys * width * stored + weights)
    value = case.value or case.width
    scales = 8 if case.scaled else 0
    token = case.kv_heads * ((case.width + value) * stored + scales)
    return Work(keys * rows * 2 * (case.width + value), keys * token)


def fill_work(case) -> Work:
    """FLOPs of the projections; the stream and the weights are read once, the rows written once."""
    tokens, computed = len(case.live) * case.page, jnp.dtype(case.computed).itemsize
    columns = len(case.rows) * case.heads * (case.width + (case.value or case.width))
    moved = (tokens + columns) * case.dim * computed + tokens * columns * jnp.dtype(case.stored).itemsize
    return Work(2 * tokens * case.dim * columns, moved)


def prompt_work(case) -> Work:
    """Every seen pair of tokens takes 4 FLOP an element; q, k, v and the result move once."""
    window = case.window or case.tokens
    pairs = sum(min(n, window) * (min(n, window) + 1) / 2 + max(n - window, 0) * window for n in case.lengths)
    heads = 2 * case.heads + 2 * case.kv_heads
    moved = sum(case.lengths) * heads * case.width * jnp.dtype(case.computed).itemsize
    return Work(4 * pairs * case.heads * case.width, moved)


def inputs_work(case) -> Work:
    """Each cached row is read once, the absorbed weights too; scores and sum take 2 FLOP an element."""
    keys, item = sum(case.lengths), jnp.dtype(case.computed).itemsize
    weights = 2 * case.heads * case.inputs * case.width * item
    return Work(keys * case.heads * 4 * case.inputs, keys * case.inputs * item + weights)


def prompt_contenders(case) -> list[Contender]:
    """XLA's composition and cuDNN's flash attention, both by jax.nn."""
    args = case.make()
    runs = {
        name: jax.jit(functools.partial(prompt.prompt_attention, **case.options, implementation=name))
        for name in prompt.PROMPT_ATTENTION
        if name != "reference"
    }
    return [Contender(name, functools.partial(run, *args)) for name, run in runs.items()]


def attention_contenders(kernel: str, case) -> list[Contender]:
    """Our implementations for this platform, and other libraries' on contiguous keys and values."""
    table, call = {
        "paged_attention": (paged.PAGED_ATTENTION, paged_cases.call),
        "k_cache_attention": (k_cache.K_CACHE, k_cache_cases.call),
        "x_cache_attention": (k_cache.X_CACHE, k_cache_cases.call_inputs),
    }[kernel]
    args, arrays = case.make()
    out = []
    for name in table:
        if name != "reference":
            run = jax.jit(functools.partial(call, **case.options, implementation=name))
            out.append(Contender(name, functools.partial(run, *args, **arrays)))
    if kernel == "paged_attention" and not case.scaled and not case.window:
        out += peers(case)
    return out


def peers(case) -> list[Contender]:
    """jax.nn by XLA and cuDNN, the kernels for pages of cuDNN, JAX and the deprecated Triton, and torch."""
    blocks, keys = len(case.lengths), max(case.lengths)
    dtype = jnp.dtype(case.computed)

    def contiguous(name):
        q = jnp.ones((blocks, case.queries, case.heads, case.width), dtype)
        k = jnp.ones((blocks, keys, case.kv_heads, case.width), dtype)
        run = functools.partial(jax.nn.dot_product_attention, implementation=name)
        return functools.partial(jax.jit(run), q, k, k)

    makers = {f"jax.nn {name}, contiguous": functools.partial(contiguous, name) for name in ("xla", "cudnn")}
    makers |= {"cuDNN, pages": functools.partial(cudnn_paged, case)}
    makers |= {"Pallas Triton (deprecated)": functools.partial(triton_paged, case)}
    makers |= {"JAX TPU paged, pool as ours": functools.partial(tpu_paged, case)}
    makers |= {"JAX TPU ragged paged, its own pool": functools.partial(tpu_ragged, case)}
    makers |= {
        f"torch {name}": functools.partial(torch_dense, case, name) for name in ("SDPA", "FlexAttention")
    }
    return [Contender(name, lazily(make)) for name, make in makers.items()]


def lazily(make: Callable[[], Callable]) -> Callable:
    """A call that is built on first use, so that a peer that cannot be built fails like one that cannot
    run."""
    made = functools.cache(make)
    return lambda: made()()


def cudnn_paged(case) -> Callable:
    """cuDNN's paged attention, pages in order; its name in JAX is private."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    blocks, pages = len(case.lengths), len(case.lengths) * case.slots
    k = jnp.ones((pages, case.page, case.kv_heads, case.width), jnp.dtype(case.computed))
    q = jnp.ones((blocks, case.queries, case.heads, case.width), k.dtype)
    table = jnp.arange(pages, dtype=jnp.int32).reshape(blocks, 1, case.slots, 1)
    sizes = jnp.full(blocks, case.queries, jnp.int32), jnp.array(case.lengths, jnp.int32)
    run = functools.partial(paged_attention, scale=case.width**-0.5, mask_type=MaskType.PADDING)
    return functools.partial(jax.jit(run), q, k, k, *sizes, table, table)


def triton_paged(case) -> Callable:
    """JAX's deprecated Triton kernel: one sequence a block, one query each, pages in order."""
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    pages = len(case.lengths) * case.slots
    k = jnp.ones((case.kv_heads, pages, case.page, case.width), jnp.dtype(case.computed))
    q = jnp.ones((len(case.lengths), case.heads, case.width), k.dtype)
    table = jnp.arange(pages, dtype=jnp.int32).reshape(len(case.lengths), -1)
    run = jax.jit(triton.paged_attention)
    return functools.partial(run, q, k, k, table, jnp.array(case.lengths, jnp.int32))


def tpu_paged(case) -> Callable:
    """JAX's TPU kernel for pages. It expects heads first; here a row of all heads counts as one head, with
    each query at its own head's columns and zeros elsewhere."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    if case.queries > 1:
        raise ValueError("one query of a sequence")
    blocks, pages, row = len(case.lengths), len(case.lengths) * case.slots, case.kv_heads * case.width
    k = jnp.ones((1, pages, case.page, row), jnp.dtype(case.computed))
    q = jnp.ones((blocks, case.heads, case.width), k.dtype)
    table = jnp.arange(pages, dtype=jnp.int32).reshape(blocks, -1)

    def run(q, k, lengths, table):
        place = jnp.repeat(jnp.eye(case.kv_heads, dtype=q.dtype), case.heads // case.kv_heads, axis=0)
        spread = jnp.einsum("bnh,nk->bnkh", q, place).reshape(blocks, case.heads, row)
        out = paged_attention(spread, k, k, lengths, table, pages_per_compute_block=min(8, case.slots))
        return jnp.einsum("bnkh,nk->bnh", out.reshape(*out.shape[:2], case.kv_heads, -1), place)

    return functools.partial(jax.jit(run), q, k, jnp.array(case.lengths, jnp.int32), table)


def tpu_ragged(case) -> Callable:
    """JAX's ragged kernel with its own block sizes, keys and values head by head in one pool."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    blocks, pages = len(case.lengths), len(case.lengths) * case.slots
    kv = jnp.ones((pages, case.page, 2 * case.kv_heads, case.width), jnp.dtype(case.computed))
    q = jnp.ones((blocks * case.queries, case.heads, case.width), kv.dtype)
    table = jnp.arange(pages, dtype=jnp.int32).reshape(blocks, -1)
    starts = case.queries * jnp.arange(blocks + 1, dtype=jnp.int32)
    sizes = jnp.array(case.lengths, jnp.int32), table, starts, jnp.array([blocks], jnp.int32)
    run = functools.partial(ragged_paged_attention, sm_scale=case.width**-0.5)
    return functools.partial(jax.jit(run), q, kv, *sizes)


def torch_dense(case, name: str) -> Callable:
    """torch's scaled_dot_product_attention or FlexAttention on a GPU, keys and values contiguous."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.cuda.is_available():
        raise RuntimeError("torch has no GPU here")
    shape = (len(case.lengths), case.kv_heads, max(case.lengths), case.width)
    k = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    q = torch.ones((shape[0], case.heads, case.queries, case.width), dtype=k.dtype, device="cuda")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attend = sdpa if name == "SDPA" else torch.compile(flex_attention)

    def run():
        attend(q, k, k, enable_gqa=True)
        torch.cuda.synchronize()

    return run


def fill_contenders(case) -> list[Contender]:
    """Each implementation updates pools of its own in place."""
    out = []
    for name in fill.FUSED_KV_FILL:
        if name == "reference":
            continue
        x, makers, cos, sin, pools, names, live = case.make()
        run = jax.jit(
            functools.partial(fill_cases.call, **case.options, implementation=name), donate_argnums=4
        )
        state = {"pools": pools}

        def call(run=run, state=state, before=(x, makers, cos, sin), after=(names, live)):
            state["pools"] = run(*before, state["pools"], *after)
            return state["pools"]

        out.append(Contender(name, call))
    return out


def task(kernel: str, case) -> tuple[Work, list[Contender]]:
    """The least work of a case, and its contenders."""
    if kernel == "fused_kv_fill":
        return fill_work(case), fill_contenders(case)
    if kernel == "prompt_attention":
        return prompt_work(case), prompt_contenders(case)
    if kernel == "x_cache_attention":
        return inputs_work(case), attention_contenders(kernel, case)
    return attention_work(case, kernel), attention_contenders(kernel, case)


def run(platform: str, kernels: list[str], only: str | None, rounds: int, deadline: float) -> dict:
    """Every case of the kernels: seconds of each contender and the work they share."""
    small = platform == "cpu"
    inner = 2 if small else 20
    top = ceilings(small, rounds, inner)
    cases, missing = [], []
    for kernel in kernels:
        for name, case in CASES[kernel][0 if small else 1].items():
            if only not in (None, name):
                continue
            if time.perf_counter() > deadline:
                missing.append(f"{kernel} {name}")
                continue
            work, made = task(kernel, case)
            seconds = measure(made, rounds, inner)
            floor = max(work.flops / top["flops"], work.bytes / top["bytes"])
            cases.append(
                {
                    "kernel": kernel,
                    "case": name,
                    **dataclasses.asdict(work),
                    "floor": floor,
                    "seconds": seconds,
                }
            )
            print(f"{kernel} {name}: {seconds}", flush=True)
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "ceilings": top,
        "cases": cases,
        "no_time_for": missing,
    }


def markdown(result: dict) -> str:
    """The table: time, bandwidth, FLOP rate, and the share of the floor that the ceilings give."""
    top = result["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"# Kernels on {result['device']}",
        "",
        f"{result['date']}, {versions}. Measured ceilings: copy "
        f"{top['bytes'] / 1e9:.0f} GB/s, bfloat16 matmul {top['flops'] / 1e12:.1f} TFLOP/s. Share: the"
        " time these allow over the time taken.",
        "",
        "| kernel | case | by | ms | GB/s | TFLOP/s | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        for name, seconds in case["seconds"].items():
            start = f"| {case['kernel']} | {case['case']} | {name} |"
            if isinstance(seconds, str):
                lines.append(f"{start} not run: {seconds.replace('|', '/')} | | | |")
                continue
            rates = f"{case['bytes'] / seconds / 1e9:.1f} | {case['flops'] / seconds / 1e12:.3f}"
            lines.append(f"{start} {seconds * 1e3:.3f} | {rates} | {100 * case['floor'] / seconds:.1f} % |")
    if result["no_time_for"]:
        lines += ["", f"No time was left for: {', '.join(result['no_time_for'])}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--platform", choices=["gpu", "tpu", "cpu"])
    parser.add_argument("--kernel", choices=list(CASES), help="one kernel instead of all")
    parser.add_argument("--case", help="one case instead of all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no case begins (default 10)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    platform = options.platform or jax.default_backend()
    # A subset of the cases is written to another file, so that the whole table is kept.
    name = "_".join(filter(None, ("kernels", platform, options.kernel, options.case)))
    try:
        jax.devices(platform)
    except RuntimeError:
        command = f"python -m benchmarks.kernels --platform {platform}"
        print(
            not_measured(f"kernels_{platform}", f"Kernels on {platform}", platform, command, options.output)
        )
        return 1
    with jax.default_device(jax.devices(platform)[0]):
        kernels = [options.kernel] if options.kernel else list(CASES)
        deadline = time.perf_counter() + 60 * options.minutes
        result = run(platform, kernels, options.case, options.rounds, deadline)
    write(name, result, markdown(result), options.output)
    print(options.output / f"{name}.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
