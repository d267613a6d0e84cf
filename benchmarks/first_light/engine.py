"""The engine at a model's real shape, with the winning kernels: prefill, then decoding of all prompts
together."""

import functools
import gc
import math
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import swiftkv_jax as skv
from benchmarks.common import timed
from benchmarks.first_light.candidates import Candidate, register
from benchmarks.first_light.shapes import shape as shape_of
from swiftkv_jax import cache, weights
from swiftkv_jax.kernels.common import dispatch
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

PLANS = {"standard": None, "SwiftKV 50 %": 1, "+ 2-way AcrossKV": 2}  # layers that share a row
_WINNERS = "winners"  # the name of both together


def plan_of(name: str, layers: int) -> skv.KVPlan:
    """The plan of a name in `PLANS`."""
    share = PLANS[name]
    return skv.KVPlan.standard(layers) if share is None else skv.KVPlan.swiftkv(layers, layers // 2, share)


def register_winners(decode: Candidate, chunk: Candidate) -> str:
    """Register paged attention that runs `decode` for single queries and `chunk` for others; returns its
    name."""

    def of(q) -> str:
        return (decode if q.shape[1] == 1 else chunk).implementation

    def run(q, *args, **options):
        return dispatch.call("paged_attention", PAGED_ATTENTION, of(q), (q, *args), options)

    def refuses(q, *args, **options) -> str:
        return PAGED_ATTENTION[of(q)].refuses(q, *args, **options)

    PAGED_ATTENTION[_WINNERS] = dispatch.Implementation(run, refuses)
    return _WINNERS


def set_block(queries: int) -> None:
    """Set the most queries of a prompt's block, for which there is no setting yet."""
    cache.QUERY_BLOCK = queries


def measure(
    shape: str,
    module: str | None,
    layers: int,
    plan: str,
    cache_dtype: str,
    decode: dict,
    chunk: dict,
    fill: str | None,
    ceilings: dict,
) -> Iterator[dict]:
    """Time to the first token of one prompt, prompts read together, tokens decoded together."""
    gc.collect()  # the model of the line before
    register(module)
    sizes, budget = shape_of(shape), shape_of(shape).chunk
    by = Candidate(**decode), Candidate(**chunk)
    set_block(by[1].block or budget)
    config, rows = sizes.model(layers), plan_of(plan, layers)
    model = skv.Transformer(config, rows, sizes.computed)
    began = time.perf_counter()
    dtype = jnp.dtype(sizes.computed)
    init = functools.partial(weights.init, config, rows, jax.random.key(0), dtype, cuts=None)
    read_once = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(init)))
    read_once -= config.vocab_size * config.hidden_size * jnp.dtype(sizes.computed).itemsize  # embeddings
    outputs, requests, length, page = sizes.outputs, sizes.requests, sizes.prompt, by[0].page
    llm = skv.LLM.from_model(
        model,
        jax.jit(init)(),
        max_model_len=length + outputs + page,
        max_num_seqs=requests,
        max_num_batched_tokens=budget,
        page_size=page,
        num_pages=(requests + 1) * (-(-(length + outputs) // page) + 1),
        cache_dtype=cache_dtype,
        kernels="xla",  # for kernels that are not named, so that no check runs during this one
        attention=register_winners(*by),
        fill=fill if rows.has_fill else None,
    )
    _ = llm.engine
    yield {"load_seconds": round(time.perf_counter() - began, 1), "by": [c.implementation for c in by]}
    draw = np.random.default_rng(layers)

    def prompts(count: int) -> list[list[int]]:
        """New prompts, of which nothing is in the cache."""
        return draw.integers(2, config.vocab_size, (count, length)).tolist()

    began = time.perf_counter()
    timed(llm, prompts(1), 1)
    yield {"first_call_seconds": round(time.perf_counter() - began, 1)}
    first = statistics.median(timed(llm, prompts(1), 1) for _ in range(3))
    yield {"ttft_ms": 1e3 * first}
    some = prompts(requests)
    read = timed(llm, some, 1)
    flops = skv.flops_table(config, context=length)["total"] * 1e9
    rate = requests * length / read
    yield {
        "prompt_tokens_per_s": rate,
        "normalised_tflops": rate * flops / 1e12,
        "matmul_share": rate * flops / ceilings["flops"] if "flops" in ceilings else None,
    }
    began = time.perf_counter()
    timed(llm, some, outputs)
    yield {"first_decode_seconds": round(time.perf_counter() - began, 1)}
    decoded = timed(llm, some, outputs)  # except for their ends, these prompts are in the cache
    steps = max(1, llm.stats["decoded_steps"])
    step = llm.stats["decode_seconds"] / steps
    moved = read_once + requests * (length + outputs / 2) * llm.cache_bytes_per_token * layers / rows.num_rows
    yield {
        "tpot_ms": 1e3 * step,
        "host_ms_per_step": 1e3 * llm.stats["decode_host_seconds"] / steps,
        "copy_share": moved / step / ceilings["bytes"] if "bytes" in ceilings else None,
        "tokens_per_s": requests * (length + outputs) / (read + decoded),
    }
