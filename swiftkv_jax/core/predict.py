"""KV prediction: a small model reads the prompt and writes the large model's cache (arXiv 2410.08391).

An auxiliary model reads a prompt; a linear map for each row of the base model turns the auxiliary's keys and
values into the base's; the base reads the prompt's last token and generates. The maps take keys before norm
and rotation; their output gets the base's norm and rotation (section 4.2; apple/corenet, kv_prediction.py).

    {"base": parameters, "auxiliary": parameters, "predictor": {"rows": [stack, ...]}}
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, Prediction
from swiftkv_jax.core import loop, sharding, surgery, weights
from swiftkv_jax.core.cache import Cache, make_batch
from swiftkv_jax.core.ends import embed, logits
from swiftkv_jax.core.form import Raw, filled
from swiftkv_jax.core.layers import Rotary, kernel_of, linear, linear_weights
from swiftkv_jax.core.loop import project_rows, run
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.pytree import pytree
from swiftkv_jax.core.rows import PLAIN
from swiftkv_jax.core.scan import STREAM, Passed, Stacked, angles_and_segments, of_rows, through, with_own
from swiftkv_jax.core.shapes import Array, Float, Int, Logits, PyTree, Tokens, Weight
from swiftkv_jax.core.sharding import constrain
from swiftkv_jax.kernels.causal_attention.api import causal_attention

_RAW, _CUT = ". B T E", ". B T K ."


class Predicted(nn.Module):
    """KV prediction (arXiv 2410.08391): an auxiliary model processes the prompts of a base model.

    Its parameters are a tree of arrays: {"base", "auxiliary", "predictor"}.

    Attributes:
      base: the model that generates. auxiliary: the model that processes prompts. prediction: which of its
        rows predicts which row of the base.

    Raises:
      UsageError: the two models and the map do not fit each other.
    """

    base: Transformer
    auxiliary: Transformer
    prediction: Prediction

    def __post_init__(self):
        _check(self.base, self.auxiliary, self.prediction)
        super().__post_init__()

    def __call__(self, tokens: Tokens) -> Logits:
        """Logits [B, T, V] in float32: at each position, as for a prompt that ends there."""
        params = self._params()
        return logits(self.base, params["base"], forward(self, params, tokens))

    @property
    def config(self) -> ModelConfig:
        """The base's config; `plan` and `dtype` are the base's too."""
        return self.base.config

    @property
    def plan(self) -> KVPlan:
        return self.base.plan

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @nn.compact
    def _params(self) -> PyTree:
        """The tree of parameters; `init` makes random ones, with corenet's start of the predictor."""
        if not self.is_initializing():
            return self.variables["params"]
        scope: Any = self.scope
        made = uniform(self, scope.rngs["params"].as_jax_rng(), jnp.dtype(self.dtype))
        parts = {"base": self.base._params(), "auxiliary": self.auxiliary._params()}
        return parts | {"predictor": self.param("predictor", lambda _: made)}


def _check(base: Transformer, auxiliary: Transformer, prediction: Prediction) -> None:
    reads, rows = prediction.reads, auxiliary.plan.num_rows
    for name, model in (("base", base), ("auxiliary", auxiliary)):
        plan, clip = model.plan, model.config.clip_qkv
        if plan.cross:
            raise UsageError(f"KV prediction is of decoders; the {name} reads an encoder's output")
        if plan.forms != ("kv",) or plan.merged:
            raise UsageError(f"KV prediction maps keys and values; the {name}'s rows are stored otherwise")
        if plan.tail:
            raise UsageError(f"KV prediction makes all rows of a prompt; the {name}'s plan has a tail")
        if clip is not None:
            raise UsageError(f"KV prediction maps keys and values; the {name} clips them at {clip}")
    if auxiliary.config.exit_head:
        raise UsageError("the auxiliary has an exit head: prune it with layer_pruned")
    if len(reads) != base.plan.num_rows:
        raise UsageError(f"reads names {len(reads)} rows; the base has {base.plan.num_rows}, one for each")
    if max(reads) >= rows:
        raise UsageError(f"reads names row {max(reads)}; the auxiliary's rows are 0 to {rows - 1}")
    context = base.config.max_position_embeddings
    if prediction.tail >= context:
        raise UsageError(f"tail must be below the base's context of {context} tokens, not {prediction.tail}")


def transformers(model: Transformer | Predicted) -> tuple[Transformer, ...]:
    """The generating model, then its auxiliary, if it has one."""
    return (model.base, model.auxiliary) if isinstance(model, Predicted) else (model,)


def cached(model: Transformer | Predicted) -> tuple[Transformer, ...]:
    """The models whose rows are cached: the generating one, then the auxiliary cut to the layers that run.

    The layer whose input the deepest needed row is made from does not run, and its own keys and values are
    not used otherwise. At least one layer is kept.
    """
    if not isinstance(model, Predicted):
        return (dataclasses.replace(model, plan=model.plan.of_tail),)
    last = model.auxiliary.plan.deepest(model.prediction.reads)
    return model.base, surgery.pruned(model.auxiliary, range(max(1, last)))


def generator(model: Transformer | Predicted, params: PyTree) -> tuple[Transformer, PyTree]:
    """The generating model and its parameters."""
    return (model.base, params["base"]) if isinstance(model, Predicted) else weights.of_tail(model, params)


def tail_of(model: Transformer | Predicted) -> int:
    """Tokens at a prompt's end that the generating model reads, where others are only read ahead of it (see
    `fill`); 0: it reads whole prompts."""
    return model.prediction.tail if isinstance(model, Predicted) else model.plan.tail


def described(model: Predicted, cuts: weights.Cuts = ()) -> PyTree:
    """The tree of `Weight`s; `cuts` as in `weights.partition`, for all three parts."""
    base, auxiliary = model.base, model.auxiliary
    stacks = [(*sizes, len(list(same))) for sizes, same in itertools.groupby(row_widths(model))]
    if cuts is None:
        stacks = [(*sizes, 1) for sizes in row_widths(model)]
    maps = [(linear_weights(("D", a), ("E", b), True, a**-0.5), n) for a, b, n in stacks]
    return {
        "base": weights.weights(base.config, base.plan, cuts),
        "auxiliary": weights.weights(auxiliary.config, auxiliary.plan, cuts),
        "predictor": {
            "rows": [
                {name: jax.tree.map(lambda w, n=n: w.stacked(n), projection) for name in PLAIN.projections}
                for projection, n in maps
            ]
        },
    }


def row_widths(model: Predicted) -> list[tuple[int, int]]:
    """(E of the auxiliary's row, E of the base's) of each map."""

    def width(part: Transformer, row: int) -> int:
        return part.config.at(part.plan.rows[row].maker).kv_width

    return [
        (width(model.auxiliary, read), width(model.base, row))
        for row, read in enumerate(model.prediction.reads)
    ]


def split_layers(model: Transformer | Predicted, params: PyTree) -> PyTree:
    """`params` cut at every layer and row, as serving needs them."""
    if not isinstance(model, Predicted):
        return weights.split_layers(model.config, model.plan, params)
    parts = (("base", model.base), ("auxiliary", model.auxiliary))
    cut = {name: weights.split_layers(part.config, part.plan, params[name]) for name, part in parts}
    every = [range(row, row + 1) for row in range(model.base.plan.num_rows)]
    return cut | {"predictor": {"rows": weights.recut(params["predictor"]["rows"], every)}}


def for_serving(model: Transformer | Predicted, params: PyTree) -> tuple[Any, PyTree]:
    """The model with rows as an engine stores them, cut at every layer."""
    params = split_layers(model, params)
    return (model, params) if isinstance(model, Predicted) else surgery.hadamard_inputs(model, params)


def for_mesh(model: Transformer | Predicted, params: PyTree, mesh: Mesh) -> tuple[Any, PyTree]:
    """The same model, cut at every layer, with at least as many kv heads as the mesh has devices on `tensor`.

    As `surgery.for_mesh`, for a base and its auxiliary. The predictor makes the base's repeated heads, and
    reads the first of each group of equal heads of the auxiliary.
    """
    if not isinstance(model, Predicted):
        return surgery.for_mesh(model, params, mesh)
    base, base_params = surgery.for_mesh(model.base, params["base"], mesh)
    try:
        auxiliary, auxiliary_params = surgery.for_mesh(model.auxiliary, params["auxiliary"], mesh)
    except UsageError as error:
        raise UsageError(f"the auxiliary model: {error}") from None
    wide, predictor = Predicted(base, auxiliary, model.prediction), params["predictor"]
    if wide != model:
        if base.config.sizes or auxiliary.config.sizes:
            raise UsageError(
                "one of the two models has layers with different numbers of heads, and the other fewer kv "
                "heads than there are devices: tensor parallelism takes a divisor of both models' kv heads"
            )
        made = described(wide, cuts=None)["predictor"]
        where = jax.tree.map(lambda w: sharding.named(mesh, w.axes, w.shape), made)
        predictor = jax.jit(partial(_widened, model, wide), out_shardings=where)(predictor)
    return wide, {"base": base_params, "auxiliary": auxiliary_params, "predictor": predictor}


def _widened(model: Predicted, wide: Predicted, predictor: PyTree) -> PyTree:
    """The predictor of `model` for `wide`, in which heads are repeated."""
    before, after = model.auxiliary.config, wide.auxiliary.config
    skipped = after.num_kv_heads // before.num_kv_heads - 1
    config, times = model.base.config, wide.base.config.num_kv_heads // model.base.config.num_kv_heads

    def repeated(x: Array) -> Array:
        heads = x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
        return jnp.repeat(heads, times, axis=-2).reshape(*x.shape[:-1], -1)

    def widened(p: PyTree) -> PyTree:
        rows, outside = p["kernel"].shape[0], p["kernel"].shape[-1]
        heads = p["kernel"].reshape(rows, before.num_kv_heads, 1, before.head_dim, outside)
        kernel = jnp.pad(heads, ((0, 0), (0, 0), (0, skipped), (0, 0), (0, 0)))
        return {"kernel": repeated(kernel.reshape(rows, -1, outside)), "bias": repeated(p["bias"])}

    return {"rows": [{name: widened(part) for name, part in stack.items()} for stack in predictor["rows"]]}


# ---- making one --------------------------------------------------------------------------------------


def identity(model: Predicted, dtype=jnp.float32) -> PyTree:
    """A predictor that gives the auxiliary's rows as they are."""
    for inside, outside in row_widths(model):
        if inside != outside:
            raise UsageError(
                f"an identity start needs rows of one width, not {inside} and {outside}: use least_squares"
            )

    def one(weight: Weight) -> Array:
        start = jnp.eye(weight.shape[-1]) if len(weight.shape) == 3 else jnp.zeros(())
        return jnp.broadcast_to(start, weight.shape).astype(dtype)

    return jax.tree.map(one, described(model)["predictor"])


def uniform(model: Predicted, key: Array, dtype=jnp.float32) -> PyTree:
    """A random predictor, each number in +-1 / sqrt(inputs): apple/corenet's start, which is PyTorch's."""
    stacks = described(model)["predictor"]["rows"]
    leaves, tree = jax.tree.flatten(stacks)
    keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))

    def one(p: PyTree, keys: PyTree) -> PyTree:
        bound = p["kernel"].shape[-2] ** -0.5
        return {name: jax.random.uniform(keys[name], w.shape, dtype, -bound, bound) for name, w in p.items()}

    pairs = zip(stacks, keys, strict=True)
    return {"rows": [{name: one(p[name], k[name]) for name in p} for p, k in pairs]}


# ---- full sequences: the definition, and training ----------------------------------------------------


def forward(
    model: Predicted,
    params: PyTree,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    own: bool = True,
    remat: bool = False,
    length: int | None = None,
    store: Callable = lambda made: made,
) -> Float[Array, "B T D"]:
    """The hidden states leaving the base's last layer, at every position of full sequences.

    own: True computes each position as if the prompt ended there: the base reads predicted rows of earlier
    tokens and its own row of the token itself (the paper's inference). False uses predicted rows throughout
    (its training and multiple-choice mode). Others as in `scan.forward`, for both models; predictions are
    made from rows that are not stored yet, and then stored.
    """
    if own and model.prediction.tail > 1:
        tail = model.prediction.tail
        raise UsageError(f"a tail of {tail} tokens needs more than one pass: use tail=1, or own=False")
    where = (tokens, positions, segments)
    reads = model.prediction.reads
    auxiliary_pass = read(
        model.auxiliary, params["auxiliary"], *where, reads, remat=remat, length=length, store=store
    )
    raw = predict_rows(model, params, of_rows(auxiliary_pass.raw, reads))
    angles, segments = angles_and_segments(model.base.config, *where, length)
    x = constrain(embed(model.base, params["base"], tokens, positions), STREAM)
    rows = finished(model.base, params["base"], raw, angles, store)
    run = partial(through, model.base, params["base"], x, angles, segments, remat=remat, store=store)
    return (run(beside=rows, attention=with_own) if own else run(rows=rows)).x


def read(
    model: Transformer,
    params: PyTree,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None,
    segments: Int[Array, "B T"] | None,
    rows: Iterable[int],
    whole: bool = False,
    remat: bool = False,
    attention: Callable = causal_attention,
    length: int | None = None,
    store: Callable = lambda made: made,
) -> Passed:
    """Run a model over full sequences and keep `rows` as their projections leave them.

    whole: run all layers; else only those that these rows need. Others as in `forward`.
    """
    rows = set(rows)
    last = model.plan.num_layers if whole else model.plan.deepest(rows)
    angles, segments = angles_and_segments(model.config, tokens, positions, segments, length)
    x = constrain(embed(model, params, tokens, positions), STREAM)
    options = {"remat": remat, "attention": attention, "store": store}
    passed = through(model, params, x, angles, segments, range(last), keep=rows, **options)
    due = [row for row in model.plan.made_at(last) if row in rows]
    raw = project_rows(model, params, due, last, passed.x)
    alone = {row: Stacked(jax.tree.map(lambda y: y[None], made), {}, 0) for row, made in raw.items()}
    return passed._replace(raw=passed.raw | alone)


def predict_rows(model: Predicted, params: PyTree, given: Raw) -> Raw:
    """The base's rows [R, B, T, E] as they would leave its projections, predicted from the auxiliary's rows
    [R, B, T, E]; narrower rows end in zeros, which are not read."""
    made = [
        jax.vmap(partial(_predicted, model))(stack, part)
        for stack, part in _by_stack(params["predictor"]["rows"], given, -2)
    ]
    widest = max(y[0].shape[-1] for y in made)
    parts = zip(*made, strict=True)
    return tuple(constrain(jnp.concatenate([filled(y, widest) for y in each]), _RAW) for each in parts)


def _predicted(model: Predicted, p: PyTree, raw: Raw) -> Raw:
    pairs = zip(PLAIN.projections, raw, strict=True)
    return tuple(linear(x.astype(model.base.dtype), p[name]) for name, x in pairs)


def finished(
    model: Transformer, params: PyTree, raw: Raw, angles: Rotary, store: Callable = lambda made: made
) -> dict[int, Stacked]:
    """All rows of a model as its layers read them, from the rows [R, B, T, E] as projections leave them.

    store: as in `through`.
    """
    out, finish = {}, partial(PLAIN.finish, model.config)
    for stack, part in _by_stack(params["rows"], raw):
        first = len(out)
        turn = angles.of(model.config, model.plan.rows[first].maker)
        arrays = jax.vmap(finish, in_axes=(0, 0, None))(stack, part, turn)
        arrays = store(tuple(constrain(y, _CUT) for y in arrays))
        out |= {first + i: Stacked(arrays, {}, i) for i in range(weights.length(stack))}
    return out


def heads(model: Transformer, params: PyTree, raw: Raw) -> list[Raw]:
    """The rows of each of a model's stacks [n, B, T, K, H], keys normed where it norms them, and not
    rotated."""
    made = [
        jax.vmap(partial(PLAIN.unturned, model.config))(stack, part)
        for stack, part in _by_stack(params["rows"], raw)
    ]
    return [tuple(constrain(y, _CUT) for y in each) for each in made]


def _by_stack(stacks: Sequence[PyTree], raw: Raw, axis: int = -1) -> list[tuple[PyTree, Raw]]:
    """Each stack of rows' weights, with its part of these rows, as wide as `axis` of its kernels."""
    out = []
    for stack, part in zip(stacks, weights.ranges(stacks), strict=True):
        width = kernel_of(stack[PLAIN.projections[0]]).shape[axis]
        out.append((stack, tuple(y[part.start : part.stop, ..., :width] for y in raw)))
    return out


# ---- caches: serving ---------------------------------------------------------------------------------


@pytree
class Caches:
    """The rows of the generating model and of its auxiliary, if it has one, in pages of one size under one
    page table."""

    base: Cache
    auxiliary: Cache | None = None

    def seen_by(self, table: Int[Array, "Q slots"]) -> "Caches":
        """The same rows under another page table."""
        return Caches(self.base.seen_by(table), self.auxiliary and self.auxiliary.seen_by(table))


def fill(
    model: Transformer | Predicted,
    params: PyTree,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    query_starts: Int[Array, " Q1"],
    caches: Caches,
) -> Caches:
    """Read a flat ragged batch of prompt tokens with the auxiliary; writes its rows and the base's predicted
    ones. Without an auxiliary, the layers below a plan's split read them, and rows are made there.

    Arguments as in `loop.step`; every token must lie before the last `tail` of its prompt; `caches` belong
    to the models that `cached` returns. Predictions use rows as they are made, before a cache rounds them, so
    that they do not depend on the chunking.
    """
    if not isinstance(model, Predicted):
        return Caches(loop.fill(model, params, tokens, positions, query_starts, caches.base)[-1])
    assert caches.auxiliary is not None
    aux, p, reads = model.auxiliary, params["auxiliary"], model.prediction.reads
    angles, auxiliary_angles = caches.base.angles.at(positions), caches.auxiliary.angles.at(positions)
    batch, last = make_batch(query_starts, positions), aux.plan.deepest(reads)
    x = embed(aux, p, tokens, positions)
    ran = run(aux, p, x, auxiliary_angles, batch, caches.auxiliary, range(last), keep=reads)
    due = [row for row in aux.plan.made_at(last) if row in reads]
    raw = ran.raw | project_rows(aux, p, due, last, ran.x)
    made = []
    for row, read in enumerate(reads):
        predicted = _predicted(model, weights.row(params["predictor"], row), raw[read])
        turn = angles.of(model.base.config, model.base.plan.rows[row].maker)
        made.append(PLAIN.finish(model.base.config, weights.row(params["base"], row), predicted, turn))
    return Caches(caches.base.write(range(len(reads)), made, batch), ran.cache)
