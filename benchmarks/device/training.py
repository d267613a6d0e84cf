"""The distillation step of a few layers of a model: its time, and whether its attention is right.

The last hidden states and the norm of the gradient are compared with those by XLA's attention.
"""

import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.engine import random_weights
from benchmarks.device.shapes import Shape, shape_of
from swiftkv_jax.analysis.flops import CHIPS
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LossConfig, OptimizerConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.kernels.check.calls import medians

NEAR = 5e-2  # largest relative distance of two kernels' bfloat16 results that counts as rounding
_PROBED = 32  # positions of a row


def packed(shape: Shape, documents: int) -> Batch:
    """Random tokens; each row holds documents of equal length, and the last half of each is learned."""
    size = (shape.rows, shape.row)
    tokens = np.random.default_rng(0).integers(2, shape.trained.vocab_size, size).astype(np.int32)
    place = np.arange(shape.row, dtype=np.int32)
    each = shape.row // documents
    positions, segments = (np.broadcast_to(x, size) for x in (place % each, place // each + 1))
    mask, targets = (positions >= each // 2).astype(np.float32), np.roll(tokens, -1, axis=1)
    return Batch(*map(jnp.asarray, (tokens, targets, positions, segments, mask)))


def train(shape: str, attention: str, documents: int, remat: bool) -> Iterator[dict]:
    """A step's results, its seconds, and its share of the chip's peak."""
    made = shape_of(shape)
    layers = made.trained.num_layers
    plan = KVPlan.swiftkv(layers, layers // 2)
    teacher = Transformer(made.trained, KVPlan.standard(layers), made.trained_dtype)
    params = random_weights(made.trained, teacher.plan, made.trained_dtype, (plan.depth,))
    student, trained, frozen = steps.prepare(teacher, params, plan, "fold", "swiftkv")
    # Queries and keys of about 1: smaller ones see all keys alike, and of larger ones rounding picks the key.
    size = (made.trained.hidden_size * jnp.var(params["embed"].astype(jnp.float32))) ** -0.5
    trained = jax.tree.map(lambda x: (size * x).astype(x.dtype), trained)
    recipe = steps.Recipe(student, LossConfig(), OptimizerConfig(), 1000, "swiftkv", remat, attention)
    batch, state = packed(made, documents), steps.init_state(recipe, trained)
    began = time.perf_counter()
    compiled = jax.jit(lambda *given: steps.train_step(recipe, *given)).lower(frozen, state, batch).compile()
    gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    yield {"compile_seconds": time.perf_counter() - began, "temporary_gib": gib}
    yield {"probe": probe(recipe, trained, frozen, batch)}
    metrics = compiled(frozen, state, batch)[1]
    yield {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    (seconds,) = medians([lambda: compiled(frozen, state, batch)])
    tokens = made.rows * made.row
    work = steps.flops_per_token(recipe, made.row // documents)[0] * tokens
    chip = CHIPS.get(jax.devices()[0].device_kind)
    rates = {"tokens_per_s": tokens / seconds, "tflops": work / seconds / 1e12}
    yield {"step_ms": 1e3 * seconds, **rates, "mfu": work / seconds / chip.flops if chip else None}


def probe(recipe: steps.Recipe, trained, frozen: steps.Frozen, batch: Batch) -> list[float]:
    """The student's last hidden states at some positions, each projected on one random direction."""
    h = jax.jit(lambda *given: steps.hidden_states(recipe, *given)[0][0])(trained, frozen, batch)
    at = np.linspace(0, h.shape[1] - 1, _PROBED).astype(np.int32)
    numbers = h[:, at].astype(jnp.float32) @ jax.random.normal(jax.random.key(1), h.shape[-1:])
    return np.asarray(numbers).ravel().tolist()


def agrees(line: Mapping, safe: Mapping) -> bool | None:
    """Whether a line's results are those of XLA's attention; None without either."""
    if "grad_norm" not in line or "grad_norm" not in safe:
        return None
    pairs = [tuple(np.append(x[key], []) for x in (line, safe)) for key in ("probe", "grad_norm")]
    return all(bool(np.linalg.norm(a - b) <= NEAR * np.linalg.norm(b)) for a, b in pairs)
