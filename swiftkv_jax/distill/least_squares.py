"""A closed-form start for a student: its upper rows fitted to the teacher's own, without a gradient step.

A SwiftKV maker sees the normalised stream at the split instead of its own layer's input. The best linear map
from that stream to the teacher's keys (before rotation) and values is a least-squares problem, one for each
kv head, in which a token counts as much as the teacher attends to it. The batches pass the teacher's upper
layers one layer at a time, so that the normal equations of one row exist at a time. They are summed in
float32 and solved in float64. The ridge, which shrinks the maps, is chosen on held-out batches.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import embed
from swiftkv_jax.core.layers import before, kernel_of, shared_norm_weights, unit_norm
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import PLAIN
from swiftkv_jax.core.scan import angles_and_segments, through
from swiftkv_jax.core.shapes import Array, Float, Hidden, Int, KeyValues, PyTree, Queries
from swiftkv_jax.core.sharding import constrain
from swiftkv_jax.core.surgery import pruned
from swiftkv_jax.distill.data.packing import Batch
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.causal_attention.segments import first_key
from swiftkv_jax.kernels.common.mask import capped, weights_of

_einsum = partial(jnp.einsum, precision="highest")
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # candidates tried on held-out batches, see `solve`
RIDGE = 1e-4  # used if there are too few batches to hold one out
_LEAST = 1e-9  # added to weights, so that they have an inverse; of their mean, and below their rounding
_HELD = 8  # every eighth batch is held out to choose ridges by
_PRECISION, _STEPS = 1e-9, 200  # of conjugate gradients: the relative error to reach; at most so many
_BLOCK = 128  # queries whose probabilities exist at a time


def received(
    q: Queries, k: KeyValues, segments: Int[Array, "B T"], window: int, softcap: float | None = None
) -> Float[Array, "B T K"]:
    """The squared attention probabilities that each key receives, summed over the queries of its kv head.

    Computed in blocks of queries, in float32. Arguments as of `causal_attention`.
    """
    length, first = q.shape[1], first_key(segments, window)
    size = min(length, _BLOCK)
    pieces, keys = -(-length // size), jnp.arange(length)
    cut = jnp.pad(q, ((0, 0), (0, pieces * size - length), (0, 0), (0, 0)))
    cut = cut.reshape(q.shape[0], pieces, size, k.shape[2], -1, q.shape[-1])

    def add(total, block):
        q, at = block
        seen = (keys <= at[:, None]) & (keys >= jnp.take(first, at, axis=1, mode="clip")[..., None])
        seen &= (at < length)[:, None]
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
        shares = weights_of(capped(scores * q.shape[-1] ** -0.5, softcap), seen[:, None, None])
        return total + jnp.sum(shares**2, axis=(2, 3)), None

    places = jnp.arange(pieces * size).reshape(pieces, size)
    zero = jnp.zeros((q.shape[0], k.shape[2], length), jnp.float32)
    return jnp.moveaxis(jax.lax.scan(add, zero, (jnp.moveaxis(cut, 1, 0), places))[0], 1, 2)


def one_layer(model: Transformer, params: PyTree, layer: int) -> tuple[Transformer, PyTree]:
    """(a model of this one layer, its parameters), of a standard model. Equal layers give equal models."""
    own, rows = range(layer, layer + 1), model.plan.read_by(layer)
    made = [range(row, row + 1) for row in rows]
    cut = {"layers": weights.recut(params["layers"], [own]), "rows": weights.recut(params["rows"], made)}
    return pruned(model, own), cut


def taught(
    model: Transformer, params: PyTree, x: Hidden, batch: Batch
) -> tuple[Hidden, tuple[KeyValues, KeyValues], Float[Array, "B T K"]]:
    """(hidden states leaving the layer, its keys before norm and rotation and its values [B, T, K, H], the
    weights of tokens), of a model of one layer and the hidden states `x` entering it; padding weighs 0."""
    at, segments = angles_and_segments(model.config, batch.tokens, batch.positions, batch.segments)
    weights_of_tokens = []

    def attention(q, k, v, segments, window, **options):
        weights_of_tokens.append(received(q, k, segments, window, **options))
        return causal_attention(q, k, v, segments, window, **options)

    passed = through(model, params, x, at, segments, keep=(0,), attention=attention)
    # Not clipped where the model clips them.
    keys, values = (y[0].reshape(*x.shape[:2], -1, model.config.head_dim) for y in passed.raw[0].arrays)
    return passed.x, (keys, values), weights_of_tokens[0] * (segments > 0)[..., None]


def products(
    n: Float[Array, "B T A"], weight: Float[Array, "B T K"], targets: Float[Array, "B T K *s H"]
) -> tuple[Array, Array]:
    """(gram [K, A, A] of the regressors `n`, cross [K, A, ..., H] with the targets), in float32: sums over
    tokens that count by `weight`, one kv head after another."""

    def head(parts):
        weight, y = parts
        seen = n * weight[..., None]
        return _einsum("bta,btc->ac", n, seen), _einsum("bta,bt...->a...", seen, y.astype(jnp.float32))

    gram, cross = jax.lax.map(head, (jnp.moveaxis(weight, 2, 0), jnp.moveaxis(targets, 2, 0)))
    return constrain(gram, "K D ."), constrain(cross, "K D" + " ." * (cross.ndim - 2))


def halves(made: Iterable[PyTree]) -> list[PyTree]:
    """The sums of the arrays that are made of each batch, on the host: of most batches and, if there are
    enough, of every eighth one, to choose ridges on. They are added on the devices, and fetched whole."""
    sums: list = [None, None]
    for number, arrays in enumerate(made):
        part = number % _HELD == _HELD - 1
        sums[part] = arrays if sums[part] is None else jax.tree.map(jnp.add, sums[part], arrays)
    return [jax.tree.map(np.asarray, _whole(part)) for part in sums if part is not None]


@jax.jit
def _whole(arrays: PyTree) -> PyTree:
    return jax.tree.map(lambda x: constrain(x, ". " * x.ndim), arrays)


class Problem(NamedTuple):
    """The normal equations of one head of a row that U layers read, in float64.

    Attributes:
      gram: [U, A, A] of the regressors. cross: [U, A, s, H], with s kinds of targets.
      cost: [s, U, H, H], symmetric: an error e of a layer's target counts as e cost e^T.
    """

    gram: np.ndarray
    cross: np.ndarray
    cost: np.ndarray

    def __add__(self, other: "Problem") -> "Problem":
        return Problem(self.gram + other.gram, self.cross + other.cross, self.cost)


def residuals(problem: Problem, maps: np.ndarray) -> np.ndarray:
    """[s]: the error of `maps` [A, s, H] on the tokens of a problem, minus the error of zero maps."""
    seen = np.einsum("uac,csh->uash", problem.gram, maps, optimize=True) - 2 * problem.cross
    return np.einsum("uash,suhi,asi->s", seen, problem.cost, maps, optimize=True)


def searched(solved: Problem, held: Problem, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(maps as `solve` gives them, their ridges [s]). For each kind of target, the ridge is the one of
    `RIDGES` with the least error on the held-out tokens; then all tokens are used to solve."""
    scores = np.stack([residuals(held, solve(solved, ridge, width)) for ridge in RIDGES])
    best, every = np.array(RIDGES)[scores.argmin(0)], solved + held
    found = {ridge: solve(every, ridge, width) for ridge in set(best)}
    return np.stack([found[ridge][:, kind] for kind, ridge in enumerate(best)], axis=1), best


def solve(problem: Problem, ridge: float, width: int) -> np.ndarray:
    """[A, s, H] float64: argmin over W of the sum over layers of |X W - Y|^2 + ridge * m * |W|^2, by cost.

    X [tokens, A] are a layer's regressors and Y its targets; m is the mean of the first `width` diagonal
    elements of X^T X, so that `ridge` has no unit. An intercept, after the first `width`, is not shrunk.
    Layers that cost differently are solved for by conjugate gradients, preconditioned by the sums.
    """
    from scipy import linalg  # here, since few processes that import this module fit anything

    gram, cross, cost = problem
    scale = np.einsum("uaa->u", gram[:, :width, :width]) / width
    shrink = np.where(np.arange(gram.shape[1]) < width, ridge * scale[:, None], 0.0)
    gram = gram + shrink[..., None] * np.eye(gram.shape[1])
    factor = linalg.lu_factor(gram.sum(0))

    def by_sums(y):
        return linalg.lu_solve(factor, y.reshape(len(y), -1)).reshape(y.shape)

    if len(gram) == 1:
        return by_sums(cross[0])
    size = np.einsum("suhh->s", cost) / cost[0, ..., 0].size
    least = _LEAST * np.where(size > 0, size, 1.0)
    cost = cost + least[:, None, None, None] * np.eye(cost.shape[-1])
    inverse = len(gram) * np.linalg.inv(cost.sum(1))

    def close(y):
        return np.einsum("ash,shi->asi", by_sums(y), inverse)

    left = np.einsum("uash,suhi->asi", cross, cost, optimize=True)
    found, rest = np.zeros_like(left), left
    step = near = close(rest)
    now = np.vdot(rest, near)
    enough = _PRECISION**2 * now
    for _ in range(_STEPS):
        if now <= enough:
            break
        moved = np.einsum("uac,csh,suhi->asi", gram, step, cost, optimize=True)
        length = now / np.vdot(step, moved)
        found, rest = found + length * step, rest - length * moved
        near = close(rest)
        now, last = np.vdot(rest, near), now
        step = near + now / last * step
    return found


@partial(jax.jit, static_argnums=0)
def output_weights(config: ModelConfig, kernel: Array) -> Array:
    """[K, H, H] float32: the weights of value errors of each kv head in the error of the attention output.

    They are O O^T, summed over the query heads that read the kv head, where O [H, D] is one query head's part
    of the output projection `kernel` [N * H, D].
    """
    o = kernel.astype(jnp.float32).reshape(config.num_kv_heads, -1, config.value_dim, config.hidden_size)
    return constrain(_einsum("kgid,kgjd->kij", o, o), ". . .")


def fit(
    student: Transformer,
    params: PyTree,
    teacher: Transformer,
    own_params: PyTree,
    batches: Iterable[Batch],
    ridge: float | None = None,
) -> PyTree:
    """`params` with the k and v of the rows made at the split solved, in float32, and a shared norm of ones.

    Tokens are weighted by the attention of the teacher that they receive. In a row that several layers read
    (AcrossKV) they count alike, and it minimises the error summed over them: for values after each layer's
    output projection, for keys directly. Where keys are normalised (Qwen3), the keys before the norm are
    fitted, and the gain stays that of `params`.

    The devices hold two streams of every batch, and up to three sets of the normal equations of one layer,
    [K, A, A + 2 H] in float32, with A = D (D + 1 with biases): 0.6 GB a set for Llama-3.1-8B, 2.2 GB for 70B.
    They are sharded over `fsdp` and `tensor`, but a set that is fetched is whole on each device. The host
    holds two sets for each layer that reads the row.

    Args:
      student: of a SwiftKV plan. params: its parameters, as `to_swiftkv` makes them.
      teacher, own: the teacher and its parameters from the split on, as `steps.teacher_of` gives them.
      batches: of training data; padding is left out.
      ridge: as in `solve`; None chooses one on held-out batches, for each head's keys and values by itself.

    Raises:
      UsageError: there are fewer tokens than regressors.
    """
    data, width = begun(student, params, batches, ridge), student.config.hidden_size
    every = each_row(student, teacher, own_params, data, step)
    solved = {row: row_of(layers, data.ridge, width) for row, layers in every}

    def fitted(numbers: range, stack: PyTree) -> PyTree:
        out = dict(stack)
        for kind, name in enumerate(PLAIN.projections):
            maps = np.stack([solved[row][:, kind] for row in numbers])  # [n, A, E]
            parts = {"kernel": maps[:, :width], "bias": maps[:, -1]}
            out[name] = {leaf: like(old, parts[leaf]) for leaf, old in stack[name].items()}
        return out

    return with_rows(student, params, fitted)


def with_rows(student: Transformer, params: PyTree, fitted: Callable[[range, PyTree], PyTree]) -> PyTree:
    """`params` with the rows made at the split as `fitted` gives each stack of them, and a shared norm of
    ones."""
    made = student.plan.made_at(student.plan.depth)
    stacks = zip(weights.ranges(params["rows"]), params["rows"], strict=True)
    rows = [fitted(numbers, stack) if numbers.start in made else stack for numbers, stack in stacks]
    norm = shared_norm_weights(student.config).items()
    shared = {name: like(params[name], np.full(weight.shape, weight.fill)) for name, weight in norm}
    return params | {"rows": rows} | shared


class Begun(NamedTuple):
    """The data of a fit: the batches, the hidden states entering the split, the ridge (None: to be chosen),
    and the number of real tokens."""

    batches: list[Batch]
    starts: list[Hidden]
    ridge: float | None
    tokens: int


def begun(student: Transformer, params: PyTree, batches: Iterable[Batch], ridge: float | None) -> Begun:
    """What `fit` begins with; it raises UsageError if there are fewer tokens than regressors."""
    enter = jax.jit(partial(entering, student))
    kept: list[Batch] = []
    starts: list[Hidden] = []
    tokens = [0, 0]  # as in `halves`
    for number, batch in enumerate(batches):
        x, count = enter(params, batch)
        kept.append(batch)
        starts.append(x)
        tokens[number % _HELD == _HELD - 1] += int(count)
    unknowns = student.config.hidden_size + student.config.qkv_bias
    if sum(tokens) < unknowns:
        given = f"{unknowns} unknowns an output and {sum(tokens)} tokens to find them by"
        raise UsageError(f"a least-squares start has {given}: raise plan.init_tokens, or plan.init=fold")
    if ridge is None and (not tokens[1] or tokens[0] < unknowns):
        ridge = RIDGE
    return Begun(kept, starts, ridge, sum(tokens))


def entering(student: Transformer, params: PyTree, batch: Batch) -> tuple[Hidden, Array]:
    """(the hidden states entering the split, the number of real tokens) of one batch."""
    angles, segments = angles_and_segments(student.config, batch.tokens, batch.positions, batch.segments)
    x = embed(student, params, batch.tokens, batch.positions)
    x = through(student, params, x, angles, segments, range(student.plan.depth)).x
    return x, (segments > 0).sum()


def each_row(
    student: Transformer, teacher: Transformer, own_params: PyTree, data: Begun, step: Callable
) -> Iterator[tuple[int, list[tuple[list[PyTree], np.ndarray]]]]:
    """(row, the `halves` of the sums of each layer that reads it, and that layer's `output_weights`) of each
    row made at the split. The batches pass one layer of the teacher at a time.

    step: a function of the arguments of `step`, which returns hidden states and sums.
    """
    config, plan, streams, found = student.config, student.plan, list(data.starts), {}

    def passed(layer: int, shared: bool) -> Iterator[PyTree]:
        model, own = one_layer(teacher, own_params, layer)
        for i, batch in enumerate(data.batches):
            streams[i], sums = step(config, model, shared, own, data.starts[i], streams[i], batch)
            yield sums

    for layer in range(plan.depth, plan.num_layers):
        if (row := plan.reads[layer]) is None:
            pairs = zip(streams, data.batches, strict=True)
            streams = [onward(teacher, layer, own_params, *each) for each in pairs]
            continue
        readers = plan.readers(row)
        o = kernel_of(weights.layer(own_params, layer)["attentions"][0]["o_proj"])
        cost = np.asarray(output_weights(config.at(layer), o), np.float64)
        found.setdefault(row, []).append((halves(passed(layer, len(readers) > 1)), cost))
        if layer == readers[-1]:
            yield row, found.pop(row)


@partial(jax.jit, static_argnums=(0, 1, 2))
def step(
    config: ModelConfig,
    model: Transformer,
    alike: bool,
    params: PyTree,
    start: Hidden,
    x: Hidden,
    batch: Batch,
) -> tuple[Hidden, tuple[Array, Array]]:
    """(hidden states leaving a layer of the teacher, the sums of its `products`) of one batch; `start`: those
    entering the split. `alike`: all real tokens count as 1."""
    n = regressors(config, start)
    x, pair, weight = taught(model, params, x, batch)
    if alike:
        weight = jnp.broadcast_to((batch.segments > 0)[..., None], weight.shape).astype(jnp.float32)
    return x, products(n, weight, jnp.stack(pair, axis=-2))


def regressors(config: ModelConfig, start: Hidden) -> Float[Array, "B T A"]:
    """The normalised stream at the split, and a column of ones where makers have biases."""
    n = before(config, unit_norm(config, jnp.float32), start.astype(jnp.float32))
    return jnp.concatenate([n, jnp.ones_like(n[..., :1])], axis=-1) if config.qkv_bias else n


@partial(jax.jit, static_argnums=(0, 1))
def onward(model: Transformer, layer: int, params: PyTree, x: Hidden, batch: Batch) -> Hidden:
    """The hidden states leaving a layer that has no attention."""
    at, segments = angles_and_segments(model.config, batch.tokens, batch.positions, batch.segments)
    return through(model, params, x, at, segments, range(layer, layer + 1)).x


def row_of(
    layers: Sequence[tuple[list[tuple[np.ndarray, ...]], np.ndarray]], ridge: float | None, width: int
) -> np.ndarray:
    """[A, 2, E] float64: the maps of a row, from the `halves` of each layer that reads it, and that layer's
    `output_weights`."""
    sums, costs = zip(*layers, strict=True)
    alike = np.eye(costs[0].shape[-1])

    def head(k: int) -> np.ndarray:
        cost = np.stack([[alike, by_output[k]] for by_output in costs], axis=1)
        parts = []
        for part in zip(*sums, strict=True):
            gram, cross = (
                np.stack([x[k] for x in each]).astype(np.float64) for each in zip(*part, strict=True)
            )
            parts.append(Problem(gram, cross, cost))
        if ridge is None:
            return searched(parts[0], parts[1], width)[0]
        return solve(functools.reduce(Problem.__add__, parts), ridge, width)

    return np.concatenate([head(k) for k in range(len(costs[0]))], axis=-1)


def like(leaf: Array, value: np.ndarray) -> Array:
    """`value` in float32, on the devices of `leaf`."""
    host = value.astype(np.float32)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])
