"""The first distillation steps on a GPU: which attention is right, and its share of the chip's FLOPs.

    python -m benchmarks.first_train --minutes 9 --output benchmarks/results

The model has four layers of Llama-3.1-8B's widths under SwiftKV, half of them below the split, with random
weights. A line is a kernel, a way to pack a row, and whether activations are recomputed. It has milliseconds
of a step, tokens per second, and MFU: the FLOPs that a step must do over what the chip could do in that time.
The last hidden states and the norm of the gradient are compared with those by XLA's attention. The JSON is
written after every line.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import RESULTS, not_measured, table
from benchmarks.first_light import machine
from swiftkv_jax import weights
from swiftkv_jax.analysis.flops import CHIPS
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import AttentionConfig, LossConfig, OptimizerConfig
from swiftkv_jax.distill.data import Batch
from swiftkv_jax.folder import CONFIGS
from swiftkv_jax.kernels.check.supervisor import Book, Line, answer_tasks, write_whole
from swiftkv_jax.kernels.check.timing import medians
from swiftkv_jax.model import Transformer
from swiftkv_jax.plan import KVPlan

WORKER = (sys.executable, "-m", "benchmarks.first_train", "--worker")
TITLE = "First training steps"
PACKINGS = {"one document a row": 1, "eight documents a row": 8}
NEAR = 5e-2  # largest relative distance of two kernels' bfloat16 results that counts as rounding
_PROBED = 32  # positions of a row


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of the training: tokens of a row, rows of a step, and the dtype of frozen weights."""

    config: ModelConfig
    length: int
    rows: int
    dtype: str


def shape_of(name: str) -> Shape:
    """ "llama8b", four layers of it, or "tiny", for trying this out on a CPU."""
    if name == "tiny":
        small = ModelConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            max_position_embeddings=256,
        )
        return Shape(small, length=64, rows=2, dtype="float32")
    whole = ModelConfig.from_hf(CONFIGS / "architectures/llama8b.json")
    return Shape(dataclasses.replace(whole, num_layers=4, windows=()), length=8192, rows=2, dtype="bfloat16")


def packed(shape: Shape, documents: int) -> Batch:
    """Random tokens; each row holds documents of equal length, and the last half of each is learned."""
    size = (shape.rows, shape.length)
    tokens = np.random.default_rng(0).integers(2, shape.config.vocab_size, size).astype(np.int32)
    place = np.arange(shape.length, dtype=np.int32)
    each = shape.length // documents
    positions, segments = (np.broadcast_to(x, size) for x in (place % each, place // each + 1))
    return Batch(
        tokens=jnp.asarray(tokens),
        targets=jnp.asarray(np.roll(tokens, -1, axis=1)),
        positions=jnp.asarray(positions),
        segments=jnp.asarray(segments),
        mask=jnp.asarray(positions >= each // 2, jnp.float32),
    )


def train(shape: str, attention: str, documents: int, remat: bool) -> Iterator[dict]:
    """The results of a step, its seconds, and its share of the chip's peak."""
    made = shape_of(shape)
    layers, dtype = made.config.num_layers, jnp.dtype(made.dtype)
    plan = KVPlan.swiftkv(layers, layers // 2)
    teacher = Transformer(made.config, KVPlan.standard(layers), made.dtype)
    init = functools.partial(weights.init, made.config, teacher.plan, jax.random.key(0), dtype)
    student, trained, frozen = steps.prepare(teacher, jax.jit(init)(), plan, "fold", "swiftkv")
    trained = jax.tree.map(lambda x: 8 * x, trained)  # large enough that the set of keys a query sees matters
    kernels = AttentionConfig(**{jax.devices()[0].platform: attention})
    recipe = steps.Recipe(student, LossConfig(), OptimizerConfig(), 1000, "swiftkv", remat, kernels)
    batch, state = packed(made, documents), steps.init_state(recipe, trained)
    began = time.perf_counter()
    step = jax.jit(functools.partial(steps.train_step, recipe)).lower(frozen, state, batch).compile()
    memory = step.memory_analysis()
    yield {
        "compile_seconds": round(time.perf_counter() - began, 1),
        "temporary_gib": memory.temp_size_in_bytes / 2**30,
    }
    yield {"probe": probe(recipe, trained, frozen, batch)}
    metrics = step(frozen, state, batch)[1]
    yield {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    (seconds,) = medians([lambda: step(frozen, state, batch)])
    tokens = made.rows * made.length
    work = steps.flops_per_token(recipe, made.length // documents) * tokens
    chip = CHIPS.get(jax.devices()[0].device_kind)
    yield {
        "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens / seconds,
        "tflops": work / seconds / 1e12,
        "mfu": work / seconds / chip.flops if chip else None,
    }


def probe(recipe: steps.Recipe, trained, frozen: steps.Frozen, batch: Batch) -> list[float]:
    """The student's last hidden states at some positions, each projected on one random direction."""
    h = jax.jit(lambda *given: steps.hidden_states(recipe, *given)[0][0])(trained, frozen, batch)
    at = np.linspace(0, h.shape[1] - 1, _PROBED).astype(np.int32)
    found = h[:, at].astype(jnp.float32) @ jax.random.normal(jax.random.key(1), h.shape[-1:])
    return np.asarray(found).ravel().tolist()


def is_right(lines: dict, name: str, attention: str) -> bool | None:
    """Whether a line's results are those of XLA's attention; None without either."""
    own, safe = (lines.get(n, {}) for n in (name, name.replace(f"{attention},", "xla,", 1)))
    if "grad_norm" not in own or "grad_norm" not in safe:
        return None
    pairs = [tuple(np.append(x[key], []) for x in (own, safe)) for key in ("probe", "grad_norm")]
    return all(bool(np.linalg.norm(a - b) <= NEAR * np.linalg.norm(b)) for a, b in pairs)


def markdown(result: dict) -> str:
    """The measurements as Markdown, line by line."""
    lines = result["lines"]
    where, top = lines.get("hardware", {}), lines.get("ceilings", {}).get("flops")
    head = ["line", "correct", "ms per step", "tokens/s", "TFLOP/s", "MFU", "of the matmul ceiling", "GiB"]
    rows = []
    for name, line in lines.items():
        if not name.startswith("step: "):
            continue
        right = is_right(lines, name, name.removeprefix("step: ").split(",")[0])
        said = {None: "-", True: "yes", False: "NO"}[right]
        if "step_ms" not in line:
            rows.append([name, said, line.get("reason", line["status"]), *["-"] * 5])
            continue
        share = f"{line['tflops'] * 1e12 / top:.0%}" if top else "-"
        mfu = f"{line['mfu']:.0%}" if line["mfu"] is not None else "-"
        numbers = [f"{line['step_ms']:.1f}", f"{line['tokens_per_s']:.0f}", f"{line['tflops']:.1f}"]
        rows.append([name, said, *numbers, mfu, share, f"{line['temporary_gib']:.1f}"])
    about = f"{where.get('device', '?')}, {where.get('driver', '')}, {where.get('versions', {})}"
    return f"# {TITLE}\n\n`{result['command']}`, {result['date']}. {about}.\n\n{table(head, rows)}\n"


def save(path: Path, result: dict) -> None:
    """Write the result as JSON and as Markdown."""
    write_whole(path, json.dumps(result, indent=1) + "\n")
    write_whole(path.with_suffix(".md"), markdown(result))


def run(args: argparse.Namespace, env: dict[str, str]) -> int:
    """Run all lines, XLA's attention first."""
    tiny = args.shape == "tiny"
    name, command = "first_train_tiny" if tiny else "first_train", "python -m benchmarks.first_train"
    head = {"command": " ".join([command, *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d")}
    book = Book(WORKER, lambda result: None, args.minutes, head, os.environ | env)
    try:
        where = book.run(Line("hardware", "hardware", {}, 60.0, 0.0, "train"))
        if not tiny and where.get("platform") != "gpu":
            print(not_measured(name, TITLE, "GPU", command, args.output))
            return 1
        args.output.mkdir(parents=True, exist_ok=True)
        book.save = functools.partial(save, args.output / f"{name}.json")
        book.run(Line("ceilings", "ceilings", {"shape": args.shape}, 60.0, 5.0, "train"))
        for packing, documents in PACKINGS.items():
            for remat in (False, True):
                for attention in args.attention:
                    how = f"step: {attention}, {packing}, {'remat' if remat else 'all kept'}"
                    given = {"shape": args.shape, "attention": attention}
                    given |= {"documents": documents, "remat": remat}
                    book.run(Line(how, "train", given, 240.0, 20.0, "train"))
    finally:
        book.close()
    print((args.output / f"{name}.md").read_text())
    return 0


def main() -> int:
    """The command line."""
    p = argparse.ArgumentParser(prog="first_train", description=__doc__.splitlines()[0])
    p.add_argument("--shape", choices=("llama8b", "tiny"), default="llama8b")
    p.add_argument("--minutes", type=float, default=9.0, help="time limit of the run (default 9)")
    p.add_argument("--output", type=Path, default=RESULTS)
    p.add_argument(
        "--attention", nargs="+", default=["xla", "cudnn"], metavar="NAME", help="XLA's goes first"
    )
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        tasks = {"hardware": machine.hardware, "ceilings": machine.ceilings, "train": train}
        answer_tasks(tasks)
        return 0
    if args.minutes <= 0:
        p.error(f"--minutes must be positive, not {args.minutes:g}")
    with tempfile.TemporaryDirectory() as folder:
        env = {"JAX_COMPILATION_CACHE_DIR": folder}
        env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")}
        return run(args, env | ({"JAX_PLATFORMS": "cpu"} if args.shape == "tiny" else {}))


if __name__ == "__main__":
    raise SystemExit(main())
