"""The engine at a model's real shape with random weights: prompts, then decoding of all prompts together."""

import gc
import statistics
import time
from collections.abc import Iterator

import jax
import numpy as np

import swiftkv_jax as skv
from benchmarks.common import timed
from benchmarks.device import profile
from benchmarks.device.shapes import shape_of
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.shapes import PyTree, Weight
from swiftkv_jax.engine.runner import MODES, Runner

PROFILED = 65  # tokens of each prompt that are decoded while the profiler runs
PLANS = {"standard": None, "SwiftKV 50 %": 1, "+ 2-way AcrossKV": 2}  # layers that share a row


def plan_of(name: str, config: ModelConfig) -> skv.KVPlan:
    """The plan of a name in `PLANS`."""
    share = PLANS[name]
    return config.plan() if share is None else config.plan(config.num_layers // 2, share)


def random_weights(config: ModelConfig, plan: skv.KVPlan, dtype: str, cuts: weights.Cuts = None) -> PyTree:
    """Random parameters, by one program for each kind of array: one program for all of them takes minutes to
    compile. `cuts` as of `weights.partition`; None: as an engine has them."""
    make = jax.jit(Weight.init, static_argnums=(0, 2))
    leaves, tree = jax.tree.flatten(weights.weights(config, plan, cuts))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [make(w, k, dtype) for w, k in zip(leaves, keys, strict=True)])


def measure(
    shape: str,
    plan: str,
    cache_dtype: str,
    page: int,
    requests: int,
    prompt: int,
    decode: str,
    chunk: str,
    fill: str | None,
) -> Iterator[dict]:
    """Time to the first token of one prompt, prompts read together, tokens decoded together."""
    gc.collect()  # the model of the line before
    sizes = shape_of(shape)
    config, outputs = sizes.config, sizes.outputs
    rows = plan_of(plan, config)
    began = time.perf_counter()
    params = random_weights(config, rows, sizes.dtype)
    yield {"weights_seconds": time.perf_counter() - began}
    read_once = sum(x.nbytes for x in jax.tree.leaves(params)) - params["embed"].nbytes
    settings = {"max_model_len": prompt + outputs, "max_num_seqs": requests, "cache_dtype": cache_dtype}
    settings |= {"max_num_batched_tokens": sizes.budget, "page_size": page}
    settings |= {"num_pages": 1 + (requests + 1) * (-(-(prompt + outputs) // page) + 1)}
    # XLA for kernels that are not named, so that no check runs inside this line.
    fill = fill if fill and rows.has_fill else "unfused"
    settings |= {"kernels": f"decode={decode},chunk={chunk},fill={fill},write=xla"}
    llm = skv.LLM.from_model(skv.Transformer(config, rows, sizes.dtype), params, **settings)
    began = time.perf_counter()
    compile_programs(llm.engine.runner, requests * page)
    yield {"compile_seconds": time.perf_counter() - began}
    draw = np.random.default_rng(0)

    def prompts(count: int) -> list[list[int]]:
        """New prompts, of which nothing is in the cache."""
        return draw.integers(2, config.vocab_size, (count, prompt)).tolist()

    timed(llm, prompts(1), 1)
    yield {"ttft_ms": 1e3 * statistics.median(timed(llm, prompts(1), 1) for _ in range(3))}
    some = prompts(requests)
    read = timed(llm, some, 1)
    yield {"prompt_tokens_per_s": requests * prompt / read}
    decoded = timed(llm, some, outputs)  # all but the last page of each prompt is in the cache
    stats = llm.stats
    steps = max(1, stats["decoded_steps"])
    seen = requests * (prompt + outputs / 2) * llm.cache_bytes_per_token * config.num_layers / rows.num_rows
    times = {"tpot_ms": stats["decode_seconds"], "host_ms_per_step": stats["decode_host_seconds"]}
    figures = {name: 1e3 * seconds / steps for name, seconds in times.items()}
    figures |= {"tokens_per_s": requests * (prompt + outputs) / (read + decoded)}
    yield figures | {"bytes_per_step": read_once + seen}
    if jax.default_backend() == "gpu":
        yield {"prompt_profile": profile.kernels(lambda: timed(llm, prompts(1), 1))}
        yield {"decode_profile": profile.kernels(lambda: timed(llm, some, PROFILED))}


def compile_programs(runner: Runner, tail: int) -> None:
    """Compile all that is launched: a chunk of one prompt, the last `tail` tokens of all prompts, and the
    loop that decodes."""
    one, lanes, mode = runner.rows(1), runner.lanes, MODES[0]
    programs = {program.key for program in runner.programs()}
    wanted = {("step", lanes, min(runner.budget, 1 << (tail - 1).bit_length()))}
    chunk = ("step", one, runner.budget)
    wanted |= {chunk if chunk in programs else ("step", lanes, runner.budget)}
    wanted |= {("loop", lanes, mode), ("draw", one, mode), ("draw", lanes, mode)} & programs
    compile_several(runner, wanted)
    runner.clear([0])


def compile_several(runner: Runner, wanted: set[tuple]) -> None:
    """Compile these programs, several at once; from now on launches use them alone."""
    warming = runner.begin_warm_up(wanted)
    while not warming.done:
        warming.take()
