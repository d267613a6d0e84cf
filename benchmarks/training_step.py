"""One distillation step with the lower half shared, against two separate forward passes, interleaved.

    python -m benchmarks.training_step --model demo/teacher

The two-forward step is the reference's way: the whole teacher, then the whole student. Loss, chunks and
optimiser are the same, and the two losses are compared before anything is timed. The floor is the ratio of
counted FLOPs.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.common import command, interleaved, machine, ratio, shown
from swiftkv_jax.analysis.flops import training_flops_per_token
from swiftkv_jax.checkpoint.hf import from_pretrained
from swiftkv_jax.config.plan import KVPlan
from swiftkv_jax.core.ends import head
from swiftkv_jax.core.layers import norm
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.scan import forward
from swiftkv_jax.distill import loss as losses
from swiftkv_jax.distill import step as steps
from swiftkv_jax.distill.config import LossConfig, OptimizerConfig
from swiftkv_jax.distill.data.loader import Batch
from swiftkv_jax.kernels.common import dispatch


def two_forwards_step(
    recipe: steps.Recipe, teacher: Transformer, teacher_params, frozen, state, batch: Batch
):
    """`steps.train_step` for the plain KL, with teacher and student each run from the embeddings."""

    def loss(trained):
        params = steps.merge(trained, frozen.student)

        def run(model, params):
            x = forward(model, params, batch.tokens, batch.positions, batch.segments, recipe.remat)
            return norm(model.config, params, x)

        t, s = run(teacher, teacher_params), run(recipe.student, params)
        to_logits = partial(head, params)
        chunk = steps.chunk_of(recipe, batch)
        kl = losses.kl_sum(to_logits, to_logits, s, t, batch.mask, recipe.loss.temperature, chunk)
        return kl / batch.mask.sum()

    value, grads = jax.value_and_grad(loss)(state.trainable)
    optimizer = steps.optimizer(recipe.optimizer, recipe.steps)
    updates, opt = optimizer.update(grads, state.optimizer, state.trainable)
    trained = optax.apply_updates(state.trainable, updates)
    return steps.TrainState(state.step + 1, trained, opt), {"loss": value}


def measure(folder: str, rows: int, length: int, chunk_mib: float, rounds: int) -> dict:
    """Median seconds of both steps, and the median of the rounds' ratios."""
    teacher, params = from_pretrained(folder, dtype="float32")
    layers = teacher.config.num_layers
    plan = KVPlan.swiftkv(layers, layers // 2)
    student, trained, frozen = steps.prepare(teacher, params, plan, "fold", "swiftkv")
    loss = LossConfig(chunk_mib=chunk_mib)
    recipe = steps.Recipe(student, loss, OptimizerConfig(), 1000, "swiftkv", remat=False)
    tokens = np.random.default_rng(0).integers(2, teacher.config.vocab_size, (rows, length))
    tokens, whole = jnp.asarray(tokens, jnp.int32), jnp.ones((rows, length), jnp.int32)
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    batch = Batch(
        tokens=tokens, targets=tokens, positions=place, segments=whole, mask=whole.astype(jnp.float32)
    )
    state = steps.init_state(recipe, trained)
    shared = jax.jit(partial(steps.train_step, recipe))
    apart = jax.jit(partial(two_forwards_step, recipe, teacher, params))
    first, second = shared(frozen, state, batch)[1]["loss"], apart(frozen, state, batch)[1]["loss"]
    np.testing.assert_allclose(first, second, rtol=1e-4)
    runs = {
        "shared": lambda: jax.block_until_ready(shared(frozen, state, batch)),
        "two_forwards": lambda: jax.block_until_ready(apart(frozen, state, batch)),
    }
    seconds = interleaved(runs, rounds)
    count = partial(training_flops_per_token, teacher.config, plan, length)
    times = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in seconds.items()}
    speedup = {"speedup": ratio(seconds, "two_forwards", "shared")}
    speedup |= {"speedup_by_flops": count(shared_lower=False) / count(shared_lower=True)}
    return {"kernels": dispatch.unnamed(), "tokens_per_step": rows * length} | times | speedup


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="demo/teacher")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--chunk-mib", type=float, default=4.0, help="MiB of logits at a time (in tiny.py: 4)")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--output", type=Path)
    args = p.parse_args()
    about = machine(command("training_step"))
    result = measure(args.model, args.rows, args.length, args.chunk_mib, args.rounds)
    shown({"machine": about, **result}, args.output)


if __name__ == "__main__":
    main()
