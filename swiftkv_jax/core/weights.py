"""Every weight described once, as a tree of `Weight`s that mirrors the parameters.

    {"embed", "positions"?, "norm", "lm_head"?, "exit"?, "shared_norm"?,
     "layers": [stack, ...],    consecutive layers, leaves [n, ...]
     "rows": [stack, ...],      what makes (and reads) consecutive rows, leaves [n, ...]
     "tail_rows"?: [stack, ...], what makes those from the split on of the tokens that run every layer
     "relative"?, "encoder"?}   the bias by distance; an encoder, a tree of the same structure

Stacks are as long as the plan's runs of equal layers allow, so that a scan can run them; `cuts` ask for
shorter ones. Serving cuts at every layer: then each layer's arrays are its own, and no program slices a
stack. `layer` and `row` are the views that code uses, whatever the stacks.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax.config.model import Kind, ModelConfig
from swiftkv_jax.config.plan import SELF, KVPlan
from swiftkv_jax.core import sharding
from swiftkv_jax.core.layers import (
    AFTER,
    MLPS,
    effective_gain,
    linear_map,
    linear_weights,
    norm_weights,
    query_weights,
    residual_std,
    shared_norm_weights,
)
from swiftkv_jax.core.rows import FORMS, PLAIN, check
from swiftkv_jax.core.shapes import Array, PyTree, Weight
from swiftkv_jax.kernels.fused_kv_fill.api import Makers

# The parts before the first layer and after the last.
ENDS = ("embed", "positions", "norm", "norm_bias", "lm_head")
# Layers before which stacks are cut, in addition to the necessary cuts; None: before every layer.
Cuts = Iterable[int] | None
Keys = tuple[str | int, ...]  # from the root of a tree to one of its parts
Model = TypeVar("Model", bound=Any)  # a Transformer


def partition(
    plan: KVPlan, kinds: Sequence[Kind], cuts: Cuts = ()
) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """(layers, rows) of each stack: the plan's runs, and the rows made in one run or together.

    cuts: layers before which stacks of layers are also cut. If a layer begins a stack, the row that it makes
    begins one too, so the rows' stacks follow from those of the layers.
    """
    every = range(plan.num_layers)
    cuts = set(every) if cuts is None else set(cuts) & set(every)
    tables = [(kind.rope, kind.sizes.num_kv_heads) for kind in kinds]
    starts = sorted({run.start for run in plan.runs(kinds, tables)} | cuts)
    layers = tuple(range(a, b) for a, b in zip(starts, [*starts[1:], plan.num_layers], strict=True))

    def group(number: int):
        row = plan.rows[number]
        if row.space != SELF:
            return row.space, row.form, sum(row.maker >= start for start in starts)
        if plan.makes_own(row.maker):
            return sum(row.maker >= start for start in starts)
        return "together", row.source, row.form, tables[row.maker]

    begins = [row.maker in starts or not i or group(i) != group(i - 1) for i, row in enumerate(plan.rows)]
    first = [i for i, yes in enumerate(begins) if yes]
    made = tuple(range(a, b) for a, b in zip(first, [*first[1:], len(plan.rows)], strict=True))
    return layers, made


def tail_ranges(plan: KVPlan, kinds: Sequence[Kind], cuts: Cuts = ()) -> list[range]:
    """The rows of each stack of "tail_rows"; none without a tail."""
    if not plan.tail:
        return []
    cuts = None if cuts is None else {*cuts, plan.split}
    made = partition(plan.of_tail, kinds, cuts)[1]
    return [held for held in made if plan.rows[held.start].shared_norm]


def of_tail(model: Model, params: PyTree) -> tuple[Model, PyTree]:
    """The model of a prompt's tail and of generated tokens, on the same arrays: without a tail, `model`."""
    plan = model.plan
    if not plan.tail:
        return model, params
    held = zip(ranges(params["rows"]), params["rows"], strict=True)
    below = [stack for numbers, stack in held if not plan.rows[numbers.start].shared_norm]
    gone = ("tail_rows", "shared_norm", "shared_norm_bias")
    rest = {name: part for name, part in params.items() if name not in gone}
    return dataclasses.replace(model, plan=plan.of_tail), rest | {"rows": below + params["tail_rows"]}


def weights(config: ModelConfig, plan: KVPlan, cuts: Cuts = ()) -> PyTree:
    """The tree of `Weight`s of one model; `cuts` as in `partition`. An encoder is cut at every layer."""
    check(config, plan)
    layers, made = partition(plan, config.kinds, cuts)
    vocab, width = ("V", config.vocab_size), ("D", config.hidden_size)
    norm = norm_weights(config)

    def makers(held: range) -> PyTree:
        row = plan.rows[held.start]
        return _stack(FORMS[row.form].weights(config.at(row.maker)), len(held))

    tree = {
        "layers": [_stack(_layer(config.at(run.start), plan, run.start), len(run)) for run in layers],
        "rows": [makers(held) for held in made],
        **norm,
    }
    if tail := tail_ranges(plan, config.kinds, cuts):
        tree["tail_rows"] = [makers(held) for held in tail]
    if config.learned_positions:
        length = config.max_position_embeddings + config.unused_positions
        tree["positions"] = Weight((length, width[1]), ". D", 0.02)
    if config.relative_buckets:
        tree["relative"] = Weight((config.relative_buckets, config.num_heads), ". N", 0.02)
    if config.bidirectional:
        return tree | (_convolutions(config) if config.mels else {})
    tree["embed"] = Weight((vocab[1], width[1]), "V D", 0.02)
    if config.encoder is not None:
        within = config.encoder
        tree["encoder"] = weights(within, within.plan(), None)
    head = {"lm_head": Weight((width[1], vocab[1]), "D V", 0.02)}
    if plan.has_shared_norm:
        tree |= shared_norm_weights(config)
    if config.exit_head:
        tree["exit"] = head | norm
    return tree if config.tie_word_embeddings else tree | head


def _convolutions(config: ModelConfig) -> PyTree:
    """The two convolutions that turn audio frames into hidden states, each of width three: [out, in, 3]."""
    width, tree = config.hidden_size, {}
    for name, inputs in (("conv1", config.mels), ("conv2", width)):
        tree[name] = Weight((width, inputs, 3), "D . .", (3 * inputs) ** -0.5)
        tree[f"{name}_bias"] = Weight((width,), ".")
    return tree


def _layer(config: ModelConfig, plan: KVPlan, number: int) -> PyTree:
    """One layer, without the projections that make rows."""
    width = ("D", config.hidden_size)
    mixed = ("N", config.num_heads * config.value_dim)
    norms = (norm_weights(config) if config.norm_before else {}) | (
        norm_weights(config, AFTER) if config.norm_after else {}
    )
    kind, mlp = config.kinds[number], MLPS[config.kinds[number].mlp]
    # An empty array, so that a stack of layers without any weights still gives their number.
    tree: PyTree = {
        "attentions": [],
        "mlp": norms | mlp.weights(config) if mlp else {"nothing": Weight((0,), ".")},
    }
    if kind.attention == "linear":
        return tree | {"attentions": [norms | {"linear_attn": linear_map(config)}]}
    if kind.attention == "none":
        return tree
    attention: PyTree = {
        **norms,
        **query_weights(config),
        "o_proj": linear_weights(mixed, width, config.o_bias, residual_std(config)),
    }
    forms = [FORMS[plan.rows[row].form] for row in plan.read_by(number)]
    return tree | {"attentions": [attention | form.reader_weights(config) for form in forms]}


def _stack(tree: PyTree, n: int) -> PyTree:
    return jax.tree.map(lambda weight: weight.stacked(n), tree)


def init(config: ModelConfig, plan: KVPlan, key: Array, dtype=jnp.float32, cuts: Cuts = ()) -> PyTree:
    """Random parameters; each weight's key depends on its place in the tree only."""
    leaves, tree = jax.tree.flatten(weights(config, plan, cuts))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [w.init(k, dtype) for w, k in zip(leaves, keys, strict=True)])


def in_8_bits(tree: PyTree, dtype: Callable[[Keys, Weight], str | None]) -> PyTree:
    """A tree of `Weight`s with 8-bit kernels, and their scales beside them, where `dtype` of (the path of a
    kernel's part, the kernel) is not None."""

    def one(part: PyTree, path: Keys) -> PyTree:
        if isinstance(part, list):
            return [one(each, (*path, i)) for i, each in enumerate(part)]
        if not isinstance(part, dict):
            return part
        if (kernel := part.get("kernel")) is None:
            return {name: one(each, (*path, name)) for name, each in part.items()}
        if (name := dtype(path, kernel)) is None:
            return part
        *letters, _, outputs = kernel.axes.split()
        kernel = dataclasses.replace(kernel, dtype=name, scale_axes=" ".join([*letters, outputs]))
        return part | {"kernel": kernel, "scale": kernel.scale}

    return one(tree, ())


def is_rounded(path: Keys, kernel: Weight) -> bool:
    """Whether a kernel may be in 8 bits: those [in, out], in stacks of layers and experts or not, but for
    routers. Those by head, which Slim attention reads rows with, stay wide."""
    return path[-1] != "router" and len(kernel.axes.removeprefix("L ").removeprefix("X ").split()) == 2


def all_in_8_bits(tree: PyTree, dtype: str | None) -> PyTree:
    """A tree of `Weight`s with the kernels that may be in this 8-bit dtype in it; None: as it is."""
    return in_8_bits(tree, lambda path, kernel: dtype if is_rounded(path, kernel) else None)


def like(tree: PyTree, params: PyTree) -> PyTree:
    """A tree of `Weight`s with 8-bit kernels where the same tree of arrays has them."""
    held = {keys(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}

    def dtype(path: Keys, _: Weight) -> str | None:
        return held[*path, "kernel"].dtype.name if (*path, "scale") in held else None

    return in_8_bits(tree, dtype)


def changes(plan: KVPlan, params: PyTree) -> set[int]:
    """The layers before which stacks must be cut, because other kernels are in 8 bits than before, in a layer
    or in the row that it makes; params: arrays or `Weight`s."""

    def dtypes(stack: PyTree) -> dict:
        pairs = jax.tree_util.tree_flatten_with_path(stack)[0]
        return {path: str(leaf.dtype) for path, leaf in pairs if path[-1].key in ("kernel", "scale")}

    def starts(stacks: Sequence[PyTree]) -> list[int]:
        pairs = itertools.pairwise(map(dtypes, stacks))
        return [held.start for held, (a, b) in zip(ranges(stacks)[1:], pairs, strict=False) if a != b]

    tail = params.get("tail_rows", [])
    first = len(plan.rows) - sum(map(length, tail))
    rows = starts(params["rows"]) + [first + row for row in starts(tail)]
    return {*starts(params["layers"]), *(plan.rows[row].maker for row in rows)}


def described(config: ModelConfig, plan: KVPlan, params: PyTree) -> PyTree:
    """The tree of `Weight`s that mirrors a model's parameters, with the cuts and 8-bit kernels they have."""
    return like(weights(config, plan, cuts_of(params)), params)


def abstract(
    config: ModelConfig,
    plan: KVPlan,
    dtype,
    mesh: Mesh | None = None,
    cuts: Cuts = (),
    eight_bit: str | None = None,
) -> PyTree:
    """Shapes, dtypes and (with a mesh) shardings of the parameters, without their values; eight_bit: as in
    `all_in_8_bits`."""
    return shapes(all_in_8_bits(weights(config, plan, cuts), eight_bit), dtype, mesh)


def shapes(tree: PyTree, dtype, mesh: Mesh | None) -> PyTree:
    """Shapes, dtypes and (with a mesh) shardings of the arrays that a tree of `Weight`s describes."""

    def one(w: Weight) -> jax.ShapeDtypeStruct:
        place = sharding.named(mesh, w.axes, w.shape) if mesh is not None else None
        return jax.ShapeDtypeStruct(w.shape, jnp.dtype(w.dtype or dtype), sharding=place)

    return jax.tree.map(one, tree)


def size(tree: PyTree, dtype) -> int:
    """Bytes of the parameters that a tree of `Weight`s describes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(w.shape) * jnp.dtype(w.dtype or dtype).itemsize for w in leaves)


def count(tree: PyTree) -> int:
    """Number of parameters in a tree of arrays or `Weight`s."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def length(stack: PyTree) -> int:
    """How many layers or rows a stack holds."""
    return jax.tree.leaves(stack)[0].shape[0]


def ranges(stacks: Sequence[PyTree]) -> list[range]:
    """The range of layers or rows that each of consecutive stacks holds."""
    ends = itertools.accumulate(map(length, stacks), initial=0)
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def layer(params: PyTree, index: int) -> PyTree:
    """The weights of one layer, without their stack axis."""
    return _at(params["layers"], index)


def row(params: PyTree, index: int) -> PyTree:
    """The weights of one row, without their stack axis."""
    return _at(params["rows"], index)


def _at(stacks: Sequence[PyTree], index: int) -> PyTree:
    stack, where = next(
        (stack, index - held.start)
        for stack, held in zip(stacks, ranges(stacks), strict=True)
        if index in held
    )
    return jax.tree.map(lambda leaf: leaf[where], stack)


def cuts_of(params: PyTree) -> list[int]:
    """The cuts that `params` has: the first layer of each stack."""
    return [held.start for held in ranges(params.get("layers", []))]


def keys(path) -> Keys:
    """A JAX key path as plain keys and indices."""
    return tuple(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key for key in path)


def recut(stacks: Sequence[PyTree], wanted: Iterable[range]) -> list[PyTree]:
    """The same layers or rows in other stacks; the arrays of an unchanged stack are returned as they are."""
    held = list(zip(ranges(stacks), stacks, strict=True))

    def one(want: range) -> PyTree:
        parts = []
        for have, stack in held:
            first, last = max(want.start, have.start), min(want.stop, have.stop)
            if first >= last:
                continue
            if (first, last) == (have.start, have.stop):
                parts.append(stack)
            else:
                cut = slice(first - have.start, last - have.start)
                parts.append(jax.tree.map(lambda leaf, cut=cut: leaf[cut], stack))
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return [one(want) for want in wanted]


def split_layers(config: ModelConfig, plan: KVPlan, params: PyTree) -> PyTree:
    """`params` for serving: cut at every layer, without the weights of rows that only checkpoints keep."""
    layers, made = partition(plan, config.kinds, None)
    rows = [
        {name: part for name, part in stack.items() if name not in FORMS[plan.rows[held.start].form].kept}
        for held, stack in zip(made, recut(params["rows"], made), strict=True)
    ]
    out = params | {"layers": recut(params["layers"], layers), "rows": rows}
    if tail := params.get("tail_rows"):
        alone = [range(row, row + 1) for row in range(sum(map(length, tail)))]
        out["tail_rows"] = recut(tail, alone)
    return out


def fill_makers(config: ModelConfig, params: PyTree, due: list[int]) -> Makers:
    """Weights of the fused fill, for rows with a shared norm."""
    (p,) = recut(params["rows"], [range(due[0], due[-1] + 1)])
    gain = effective_gain(config, params["shared_norm"]) if "shared_norm" in params else None
    return PLAIN.fused(config, p, gain)
