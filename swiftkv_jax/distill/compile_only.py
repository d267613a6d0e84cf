"""Compile the real training step for a chip that is not here: does it fit, and what does it communicate?

This proves that the step compiles, fits and communicates as planned. It also gives lower bounds of the step's
time: its FLOPs at the chip's peak, and its bytes at the full memory bandwidth.
"""

import dataclasses
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from swiftkv_jax.analysis import flops, hlo
from swiftkv_jax.common.errors import UsageError, first_line, suggest
from swiftkv_jax.config.quantization import DTYPES
from swiftkv_jax.core import sharding, weights
from swiftkv_jax.distill import start
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.distill.kernels import candidates
from swiftkv_jax.kernels.causal_attention import stand_in
from swiftkv_jax.kernels.common.dispatch import UnsupportedError


class _Gpu(NamedTuple):
    """A GPU: its compute capability; its multiprocessors, and the float32 units, threads and bytes of shared
    memory of each; the most of these bytes for one block; bytes of L2 cache; GHz."""

    capability: tuple[int, int]
    cores: int
    units: int
    threads: int
    shared: int
    block: int
    cache: int
    clock: float


_HOPPER = _Gpu((9, 0), 132, 128, 2048, 233472, 232448, 52428800, 1.98)
# Chip -> (JAX's device kind: the key of the table in analysis/flops.py; what describes a GPU).
CHIPS = {
    "v4": ("TPU v4", None),
    "v5p": ("TPU v5", None),
    "v5e": ("TPU v5 lite", None),
    "v6e": ("TPU v6 lite", None),
    "t4": ("Tesla T4", _Gpu((7, 5), 40, 64, 1024, 65536, 65536, 4194304, 1.59)),
    "a100": ("NVIDIA A100-SXM4-80GB", _Gpu((8, 0), 108, 64, 2048, 167936, 166912, 41943040, 1.41)),
    "l4": ("NVIDIA L4", _Gpu((8, 9), 58, 128, 1536, 102400, 101376, 50331648, 2.04)),
    "h100": ("NVIDIA H100 80GB HBM3", _HOPPER),
    "h200": ("NVIDIA H200", _HOPPER),
    "b200": ("NVIDIA B200", _Gpu((10, 0), 148, 128, 2048, 233472, 232448, 132644864, 1.965)),
}
_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared} threads_per_core_limit: {gpu.threads} core_count: {gpu.cores}
  fpus_per_core: {gpu.units} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth:.0f} l2_cache_size: {gpu.cache} clock_rate_ghz: {gpu.clock}
  device_memory_size: {chip.memory:.0f} shared_memory_per_block_optin: {gpu.block}
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""  # as XLA:GPU's `target_config` wants it

_STAND_IN = """\
                    estimated from the arrays it reads and writes, since only its GPU can compile it
                    (with XLA's attention: --set attention=xla)"""


def topology(text: str):
    """(device kind, devices) of `v5p:2x2x4` (TPU: chips along each dimension) or `h100:1x1x8` (slices x
    hosts x devices)."""
    chip, _, shape = text.partition(":")
    if chip not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        known = f"{', '.join(CHIPS)}{suggest(chip, CHIPS)}"
        raise UsageError(f"topology {text!r} is not like v5p:2x2x4 or h100:1x1x8; chips: {known}")
    kind, gpu = CHIPS[chip]
    if gpu is None:
        # Both TensorCores of a v4 chip are one device, as JAX has them there.
        target = {"topology_name": text} | ({"chip_config_name": "megacore"} if chip == "v4" else {})
    else:
        description = _TARGET.format(name=kind, gpu=gpu, chip=flops.CHIPS[kind])
        target = {"topology_name": chip.upper(), "topology": shape, "target_config": description}
    try:
        return kind, topologies.get_topology_desc(platform="cuda" if gpu else "tpu", **target).devices
    except Exception as error:  # compilers raise many types; to the user they all mean: not available
        advice = "pip install 'swiftkv-jax[aot]' brings the compilers"
        raise UsageError(f"cannot describe {text}: {first_line(error, 200)} ({advice})") from None


def compile_step(experiment: Experiment, devices):
    """(compiled train step, its HLO text, recipe, mesh) on a mesh over `devices`; no array is made."""
    recipe = start.make_recipe(experiment, start.abstract_student(experiment), experiment.steps or 1000)
    mesh = sharding.make_mesh(**dataclasses.asdict(experiment.mesh), devices=devices)
    state, frozen = steps.abstract_run(recipe, mesh, eight_bit=DTYPES.get(experiment.quantization or ""))
    shape = (experiment.data.batch_size, experiment.data.seq_len)
    place = NamedSharding(mesh, sharding.spec("B .", shape, mesh))
    dtypes = {f.name: jnp.float32 if f.name == "mask" else jnp.int32 for f in dataclasses.fields(Batch)}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, dtype in dtypes.items()}
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    capable = float(getattr(devices[0], "compute_capability", 9)) >= 9
    with jax.set_mesh(mesh), stand_in.for_cudnn(capable):
        steps.check(experiment, mesh)
        step = jax.jit(partial(steps.train_step, recipe), donate_argnums=1, out_shardings=(places, None))
        return *compiled(step.lower(frozen, state, Batch(**arrays))), recipe, mesh


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """(the compiled program, its text after all optimisations).

    The text is dumped by the target's own compiler: this jaxlib cannot always read a newer libtpu's program.

    Raises:
      MemoryError: the chip has too little memory.
    """
    with tempfile.TemporaryDirectory() as dump:
        try:
            made = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
                raise
            raise MemoryError(first_line(error)) from None
        texts = Path(dump).glob("*after_optimizations.txt")
        return made, max(texts, key=lambda path: path.stat().st_size).read_text()


def report(experiment: Experiment, where: str, say=print) -> int:
    """Compile and print bytes per device, FLOPs and collectives; 0 if it fits the chip's memory, else 1."""
    kind, devices = topology(where)
    chip = flops.CHIPS[kind]
    try:
        attention, (step, text, recipe, mesh) = with_attention(experiment, devices)
    except MemoryError as error:
        say(f"{where}: does not fit: {error}")
        return 1
    memory = step.memory_analysis()
    assert memory is not None  # the compilers of all these chips report it
    trained, frozen = recipe.method.trees(recipe.student, recipe.trainable)
    total = weights.count((trained, frozen.student))
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    used = arguments + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes
    size = " x ".join(f"{name} {extent}" for name, extent in mesh.shape.items())
    tokens = experiment.data.batch_size * experiment.data.seq_len
    per_token = recipe.method.flops(recipe, experiment.data.seq_len)
    work, again = (each * tokens / mesh.size for each in per_token)
    moved = hlo.bytes_moved(text)
    best, busy, wait = work / chip.flops, (work + again) / chip.flops, moved / chip.bandwidth
    collectives = ", ".join(f"{n} {name}" for name, (n, _) in hlo.collectives(text).items())
    fits = used <= chip.memory
    advice = "  does NOT fit: more fsdp or tensor shards, a smaller data.batch_size, or optimizer.accumulate"
    lines = f"""\
{experiment.name} on {where}: {mesh.size} devices, mesh {size}
  attention         {attention}
{_STAND_IN if attention.startswith("cudnn") else ""}
  parameters        {total / 1e9:.3f} B
  trained           {weights.count(trained) / 1e6:,.1f} M
  per device        arguments {gib(arguments)}, temporaries {gib(temporaries)}
  needed / memory   {gib(used)} of {gib(chip.memory)} ({used / chip.memory:.0%})
  FLOPs per device  {work:.3e} a step of {tokens:,} tokens; {best:.2f} s at the chip's bf16 peak
  recomputed        {again:.3e} (remat); {busy:.2f} s with them
  bytes per device  {moved / 1e9:,.1f} GB moved; {wait:.2f} s at the full bandwidth of its memory
  bound on MFU      {best / max(busy, wait):.0%} if memory traffic and matmuls overlap, \
{best / (busy + wait):.0%} if they never overlap
  collectives       {collectives or "none"}
{"  fits" if fits else advice}"""
    for line in filter(None, lines.splitlines()):
        say(line)
    return 0 if fits else 1


def with_attention(experiment: Experiment, devices):
    """(the kernel of attention and where it comes from, what `compile_step` returns).

    If the experiment names no kernel, the one that the check is expected to choose on the device is assumed;
    the safe one, if that does not support the step's calls.
    """
    named = experiment.attention
    names = [named] if named else [*candidates(experiment, devices[0].platform)]
    while True:
        name = names.pop()
        try:
            made = compile_step(dataclasses.replace(experiment, attention=name), devices)
        except UnsupportedError as error:
            if not names:
                raise UsageError(f"{error}; choose another by attention") from None
        else:
            return f"{name} ({'named' if named else 'assumed; the check on the device decides'})", made


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
