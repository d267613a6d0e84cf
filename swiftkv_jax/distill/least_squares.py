"""A closed-form start for a student: its upper rows fitted to the teacher's own, without a gradient step.

A SwiftKV maker sees the normalised stream at the split instead of its own layer's input. The best linear map
from that stream to the teacher's keys (before rotation) and values is a least-squares problem. One pass over
some of the training data gives its normal equations; they are summed and solved in float64. The ridge, which
shrinks the maps, is chosen on held-out batches.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.layers import before, shared_norm_weights, unit_norm
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import PLAIN
from swiftkv_jax.core.scan import angles_and_segments, of_rows, through
from swiftkv_jax.core.shapes import Array, PyTree
from swiftkv_jax.core.sharding import constrain
from swiftkv_jax.distill.data.packing import Batch

_einsum = partial(jnp.einsum, precision="highest")
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # candidates tried on held-out batches, see `solve`
RIDGE = 1e-4  # used if there are too few batches to hold one out
_LEAST = 1e-9  # added to weights, so that they have an inverse; of their mean, and below their rounding
_HELD = 8  # every eighth batch is held out to choose ridges by


@dataclasses.dataclass(frozen=True)
class Moments:
    """Sums over tokens, float64: `gram` [A, A] of the regressors, `cross` [U, A, 2, E] with the targets.

    A regressor is the normalised stream at the split (D numbers), and a 1 where the projections have
    biases. Targets: keys before rotation and values of each of the U layers from the split on.
    """

    gram: np.ndarray
    cross: np.ndarray
    tokens: int

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.gram + other.gram, self.cross + other.cross, self.tokens + other.tokens)


def batch_moments(
    student: Transformer, params: PyTree, teacher: Transformer, own_params: PyTree, batch: Batch
) -> tuple[Array, Array, Array]:
    """(gram, cross, tokens) of one batch, in float32; padding is left out.

    `teacher`, `own`: the teacher and its parameters from the split on, as `steps.teacher_of` gives them.
    """
    config, plan = student.config, student.plan
    angles, segments = angles_and_segments(config, batch.tokens, batch.positions, batch.segments)
    real = (segments > 0).astype(jnp.float32)
    x = embed(student, params, batch.tokens, batch.positions)
    x = through(student, params, x, angles, segments, range(plan.depth)).x
    n = before(config, unit_norm(config, jnp.float32), x.astype(jnp.float32))
    n = jnp.concatenate([n, jnp.ones_like(n[..., :1])], axis=-1) if config.qkv_bias else n
    n = n * real[..., None]
    upper = range(plan.depth, plan.num_layers)
    raw = through(teacher, own_params, x, angles, segments, upper, keep=upper).raw
    keys, values = of_rows(raw, upper)

    def products(row):
        return _einsum("bta,btse->ase", n, jnp.stack(row, axis=-2).astype(jnp.float32))

    cross = jax.lax.map(products, (keys, values))
    return constrain(_einsum("bta,btc->ac", n, n), ". ."), constrain(cross, ". . . ."), real.sum()


def moments(
    student: Transformer, params: PyTree, teacher: Transformer, own_params: PyTree, batches: Iterable[Batch]
) -> tuple[Moments, Moments]:
    """Two sums over real tokens: of most of the `batches`, and of every eighth one, to choose ridges on."""
    run = jax.jit(
        lambda params, own_params, batch: batch_moments(student, params, teacher, own_params, batch)
    )
    unknowns = student.config.hidden_size + student.config.qkv_bias
    parts = [Moments(np.zeros(()), np.zeros(()), 0) for _ in range(2)]
    for number, batch in enumerate(batches):
        gram, cross, count = (np.asarray(x, np.float64) for x in run(params, own_params, batch))
        parts[number % _HELD == _HELD - 1] += Moments(gram, cross, int(count))
    solved, held_out = parts
    if (tokens := solved.tokens + held_out.tokens) < unknowns:
        given = f"{unknowns} unknowns an output and {tokens} tokens to find them by"
        raise UsageError(f"a least-squares start has {given}: raise plan.init_tokens, or plan.init=fold")
    return solved, held_out


def residuals(sums: Moments, maps: np.ndarray) -> np.ndarray:
    """[U, 2]: the squared error of `maps` on the tokens of `sums`, by layer, of keys and of values, minus the
    error of zero maps."""
    layers, unknowns = maps.shape[:2]
    seen = (sums.gram @ maps.reshape(layers, unknowns, -1)).reshape(maps.shape)
    return np.einsum("uase,uase->us", seen - 2 * sums.cross, maps)


def searched(solved: Moments, held_out: Moments, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(maps as `solve` gives them, their ridges [U, 2]). For each layer's keys, and for its values, the ridge
    is the one of `RIDGES` with the least error on the held-out tokens; then all tokens are used to solve."""
    if not held_out.tokens or solved.tokens < len(solved.gram):
        maps = solve(solved + held_out, RIDGE, width)
        return maps, np.full((len(maps), 2), RIDGE)
    scores = np.stack([residuals(held_out, solve(solved, ridge, width)) for ridge in RIDGES])
    best, every = scores.argmin(0), solved + held_out
    maps = np.zeros(every.cross.shape)
    for number in np.unique(best):
        chosen = (best == number)[:, None, :, None]
        maps = np.where(chosen, solve(every, RIDGES[number], width), maps)
    return maps, np.array(RIDGES)[best]


def solve(sums: Moments, ridge: float, width: int) -> np.ndarray:
    """[U, A, 2, E] float64: argmin over W of |X W - Y|^2 + ridge * s * |W|^2, each layer's by itself.

    X [tokens, A] are the regressors and Y the targets; s is the mean of the first `width` diagonal elements
    of X^T X, so that `ridge` has no unit. An intercept, after the first `width`, is not shrunk.
    """
    scale = np.trace(sums.gram[:width, :width]) / width
    shrink = np.where(np.arange(len(sums.gram)) < width, ridge * scale, 0.0)
    layers, unknowns = sums.cross.shape[:2]
    flat = np.linalg.solve(sums.gram + np.diag(shrink), sums.cross.reshape(layers, unknowns, -1))
    return flat.reshape(sums.cross.shape)


def output_weights(student: Transformer, kernel: Array) -> Array:
    """[U, K, H, H] float32: the weights of value errors of each kv head in the error of the attention output.

    They are O O^T, summed over the query heads that read the kv head, where O [H, D] is one query head's part
    of the output projection `kernel` [U, N * H, D].
    """
    config = student.config
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    o = kernel.astype(jnp.float32).reshape(kernel.shape[0], *heads, config.hidden_size)
    return constrain(_einsum("ukgid,ukgjd->ukij", o, o), ". . . .")


def share(maps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The one map [A, E] of a group: argmin over W of the sum over its layers u of |X (W - maps[u])|^2, where
    an error e of a head counts as e weights[u] e^T.

    maps: [U, A, E], each layer's own solution. weights: [U, K, H, H], symmetric; where all are 0, as of a
    pruned head, the maps count alike.
    """
    if len(maps) == 1:
        return maps[0]
    heads, width = weights.shape[1:3]
    size = np.einsum("ukhh->k", weights) / (len(maps) * width)
    least = _LEAST * np.where(size > 0, size, 1.0)
    weights = weights + least[:, None, None] * np.eye(width)
    cut = maps.reshape(*maps.shape[:2], heads, width)
    mixed = np.einsum("uakh,ukhi->kia", cut, weights, optimize=True)
    return np.linalg.solve(weights.sum(0), mixed).transpose(2, 0, 1).reshape(maps.shape[1:])


def fit(
    student: Transformer,
    params: PyTree,
    teacher: Transformer,
    own_params: PyTree,
    batches: Iterable[Batch],
    ridge: float | None = None,
) -> PyTree:
    """`params` with the k and v of the rows made at the split solved, in float32, and a shared norm of ones.

    A row that several layers read (AcrossKV) minimises the error summed over them: for values after each
    layer's output projection, for keys directly. Where keys are normalised (Qwen3), the keys before the norm
    are fitted, and the gain stays that of `params`.

    Args:
      student: of a SwiftKV plan. params: its parameters, as `to_swiftkv` makes them.
      teacher, own: the teacher and its parameters from the split on, as `steps.teacher_of` gives them.
      batches: of training data; padding is left out.
      ridge: as in `solve`; None chooses one on held-out batches, for each layer's keys and values by itself.
    """
    config, plan = student.config, student.plan
    parts = moments(student, params, teacher, own_params, batches)
    if ridge is None:
        solved, _ = searched(*parts, config.hidden_size)
    else:
        solved = solve(parts[0] + parts[1], ridge, config.hidden_size)
    upper = range(plan.depth, plan.num_layers)
    kernels = [weights.layer(own_params, layer)["attentions"][0]["o_proj"]["kernel"] for layer in upper]
    by_output = np.asarray(jax.jit(partial(output_weights, student))(jnp.stack(kernels)), np.float64)
    alike = np.broadcast_to(np.eye(config.head_dim), by_output.shape)
    costs = dict(zip(PLAIN.projections, (alike, by_output), strict=True))

    def fitted(numbers: range, stack: PyTree) -> PyTree:
        groups = [[layer - plan.depth for layer in plan.readers(row)] for row in numbers]
        out = dict(stack)
        for which, (name, cost) in enumerate(costs.items()):
            maps = np.stack([share(solved[group, :, which], cost[group]) for group in groups])  # [n, A, E]
            parts = {"kernel": maps[:, : config.hidden_size], "bias": maps[:, -1]}
            out[name] = {leaf: like(old, parts[leaf]) for leaf, old in stack[name].items()}
        return out

    made = plan.made_at(plan.depth)
    stacks = zip(weights.ranges(params["rows"]), params["rows"], strict=True)
    rows = [fitted(numbers, stack) if numbers.start in made else stack for numbers, stack in stacks]
    unit = {name: np.full(weight.shape, weight.fill) for name, weight in shared_norm_weights(config).items()}
    shared = {name: like(params[name], value) for name, value in unit.items()}
    return params | {"rows": rows} | shared


def like(leaf: Array, value: np.ndarray) -> Array:
    """`value` in float32, on the devices of `leaf`."""
    host = value.astype(np.float32)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])
