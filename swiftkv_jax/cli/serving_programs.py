"""`swiftkv plan MODEL --compile-serving`: an engine's programs, compiled for chips that are not here."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import jax

from swiftkv_jax.analysis import flops, hlo
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.families import FAMILIES
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.config.quantization import DTYPES
from swiftkv_jax.core import weights
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.sharding import make_mesh
from swiftkv_jax.core.surgery import widened
from swiftkv_jax.distill.compile_only import compiled, gib, topology
from swiftkv_jax.engine.runner import MODES, Runner, allocated, described
from swiftkv_jax.engine.settings import MEMORY_FRACTION, Settings, empty_pool, resolve
from swiftkv_jax.engine.validate import usual_dtype

# What the check on the device is expected to choose.
KERNELS = {"tpu": "attention=pallas_tpu,write=pallas_tpu", "gpu": "attention=pallas_gpu"}
_ROW = "{:<24}{:>12}{:>10}{:>9}  {}"


def report(
    name: str, config: ModelConfig, plan: KVPlan, context: int, where: str, quantization: str | None = None
) -> None:
    """Compile what an engine of default settings runs with the heads over all chips of a topology, and print
    a table. Where a chip does not run the kernels that are expected to win, the safe ones are compiled."""
    kind, devices = topology(where)
    platform, memory = devices[0].platform, flops.CHIPS[kind].memory
    major = int(float(getattr(devices[0], "compute_capability", 9)))
    dtype, _ = usual_dtype(config.dtype, platform, (major, 0), FAMILIES[config.family].wide, True)
    model = widened(Transformer(config, plan, dtype), len(devices))
    mesh = make_mesh(tensor=len(devices), devices=devices)
    params = weights.abstract(
        model.config, plan, dtype, mesh, cuts=None, eight_bit=DTYPES.get(quantization or "")
    )
    leaves = jax.tree.leaves(params)
    used = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    if used > MEMORY_FRACTION * memory:
        raise UsageError(f"{name} does not fit {where}: {gib(used)} of weights, and a chip has {gib(memory)}")
    stats = {"bytes_limit": memory, "bytes_in_use": used}
    chip = SimpleNamespace(platform="described", process_index=0, memory_stats=lambda: stats)

    def taken(settings: Settings) -> int:
        smallest = dataclasses.replace(settings, num_pages=settings.pages_per_sequence)
        return max(_compiled(Runner(model, params, mesh, smallest, described)))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        settings, kernels = Settings(max_model_len=context), "the safe ones"
        named = dataclasses.replace(settings, kernels=KERNELS[platform])
        with contextlib.suppress(UsageError):
            resolve(dataclasses.replace(named, num_pages=context), model, [], mesh)
            settings, kernels = named, KERNELS[platform]
        show(f"{name}, split {plan.depth}, {plan.num_rows} rows, on {where}: heads over {len(devices)} chips")
        show(f"kernels: {kernels} (assumed; the check on the device decides)\n")
        show(_ROW.format("program", "temporary", "launches", "compile", "collectives of a step"))
        try:
            settings = resolve(settings, model, [chip], mesh, taken)
        except MemoryError as error:
            raise UsageError(f"{name} does not fit {where}: {error}") from None
        pool = jax.eval_shape(partial(empty_pool, model, settings, mesh))
    assert settings.num_pages is not None  # see `resolve`
    cache = f"cache {gib(pool.bytes_on_each)} ({settings.num_pages * settings.page_size:,} tokens)"
    show(f"\non each chip: weights {gib(used)}, {cache}, of {gib(memory)}")


def _compiled(runner: Runner) -> Iterator[int]:
    """Compile its programs and print their rows of the table; yield the bytes that each takes."""
    lanes, size = runner.lanes, runner.budget
    step, _, loop = runner.largest(mode=MODES[0])
    programs = {
        f"decode, {lanes} sequences": loop,
        f"prompt, {size} tokens of 1": runner.largest(1, MODES[0])[0],
        f"step, {size} tokens of {lanes}": step,
    }
    for name, call in programs.items():
        begin = time.perf_counter()
        with working(show, f"compiling {name}"):
            made, text = compiled(call.func.lower(*call.args, **call.keywords))
        seconds = f"{time.perf_counter() - begin:.0f} s"
        launches = sum(inside or call is not loop for *_, inside in hlo.launched(text)[0])
        counts = [f"{n} {kind} ({size / 1e6:,.1f} MB)" for kind, (n, size) in hlo.collectives(text).items()]
        show(_ROW.format(name, gib(allocated(made)), launches, seconds, ", ".join(counts) or "none"))
        yield allocated(made)
