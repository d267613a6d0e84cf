"""Rewiring of a teacher's weights for another plan: the arrays that a student starts from."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import KVPlan, ascending
from swiftkv_jax.core import sharding, weights
from swiftkv_jax.core.layers import dequantised, effective_gain, norm_weights, shared_norm_weights
from swiftkv_jax.core.matrices import hadamard
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS, PLAIN
from swiftkv_jax.core.shapes import Array, PyTree
from swiftkv_jax.kernels.fused_kv_fill.api import fold_gain

INITS = ("fold", "copy")


def to_swiftkv(
    model: Transformer, params: PyTree, plan: KVPlan, init: str = "fold", exit_head: bool = False
) -> tuple[Transformer, PyTree]:
    """Make an untrained student of `model` under `plan`: SwiftKV and AcrossKV (arXiv 2410.03960, section 3).

    Each maker starts as the mean of the teacher's k and v over the layers that will read its row. Arrays of
    unchanged stacks (see `weights.partition`) are shared with the teacher.

    Args:
      model: the teacher, a standard model.
      params: its parameters.
      plan: the student's rows, such as `KVPlan.swiftkv(...)`.
      init: "fold" first multiplies each layer's input-norm gain into its k and v and starts `norm_swiftkv` at
        one, so that each projection keeps the gain that it was trained with. "copy" is the reference's start
        (ArcticTraining): `norm_swiftkv` copies layer `split`'s gain.
      exit_head: also give the student an exit head, a copy of the teacher's final norm and output head
        (SwiftKV paper, B.4).

    Returns:
      (student, student_params), in the dtype of `params`; all parameters but those of the makers are the
      teacher's.

    Raises:
      UsageError: the plan has another number of layers, or no split for an exit head, or the model is not a
        standard one.
    """
    if init not in INITS:
        raise UsageError(f"init must be one of {', '.join(INITS)}, not {init!r}")
    check_teacher(model)
    if not plan.is_plain:
        raise UsageError("to_swiftkv makes rows as its teacher's; convert the student with to_slim then")
    plan = plan.stored_as(*model.plan.forms)
    student = Transformer(
        dataclasses.replace(model.config, exit_head=exit_head, wrapper=None), plan, model.dtype
    )
    layers, rows = weights.partition(plan, model.config.kinds, weights.cuts_of(params))
    out = {name: value for name, value in params.items() if name in weights.ENDS}
    out["layers"] = weights.recut(params["layers"], layers)
    out["rows"] = [_makers(model.config, params, plan, numbers, init) for numbers in rows]
    if plan.is_swiftkv:
        first = next(row.maker for row in plan.rows if row.shared_norm)
        attention = weights.layer(params, first)["attentions"][0]
        for name, weight in shared_norm_weights(model.config).items():
            gain = attention[name.removeprefix("shared_")]
            out[name] = jnp.full_like(gain, weight.fill) if init == "fold" else gain
    if plan.tail:
        ranges = weights.tail_ranges(plan, model.config.kinds, weights.cuts_of(out))
        out["tail_rows"] = weights.recut(params["rows"], ranges)
    if exit_head:
        kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
        out["exit"] = {"lm_head": kernel} | {name: params[name] for name in norm_weights(model.config)}
    return student, out


def with_tail(
    model: Transformer, params: PyTree, teacher: Transformer, teacher_params: PyTree, tail: int
) -> tuple[Transformer, PyTree]:
    """A SwiftKV student of which the teacher itself reads the last `tail` tokens of a prompt, and generates:
    of what was trained, only the makers of rows at the split are kept. It needs no training of its own
    (docs/decisions.md).

    Raises:
      UsageError: `model` is no SwiftKV student of such a teacher, its rows are shared or converted, or it has
        an exit head.
    """
    check_teacher(teacher)
    plan = dataclasses.replace(model.plan, tail=integer("tail", tail, 1))
    if weights.weights(model.config, teacher.plan) != weights.weights(teacher.config, teacher.plan):
        raise UsageError("the student and its teacher have layers of different shapes")
    ranges = weights.tail_ranges(plan, model.config.kinds, weights.cuts_of(params))
    own = {
        "layers": weights.recut(teacher_params["layers"], weights.ranges(params["layers"])),
        "tail_rows": weights.recut(teacher_params["rows"], ranges),
    }
    return Transformer(model.config, plan, model.dtype), params | own


def check_teacher(model: Transformer) -> None:
    """Check that a student can be made from a model."""
    if model.plan.cross:
        raise UsageError(f"to_swiftkv has no students of models with an encoder, as {model.config.family}")
    if not model.plan.is_plain:
        raise UsageError(
            f"this model's rows are stored as {', '.join(model.plan.forms)}: convert last. Begin with the "
            "plain model (from_pretrained(..., slim=False)), and give the student to to_slim"
        )
    if model.plan != model.plan.full:
        raise UsageError("to_swiftkv starts from a standard model; this one's rows are shared or rewired")


def _makers(config: ModelConfig, params: PyTree, plan: KVPlan, numbers: range, init: str) -> PyTree:
    """The makers of consecutive rows, stacked: each the mean over its readers of the teacher's makers."""
    full = plan.full  # the teacher's
    groups = [[full.read_by(layer)[0] for layer in plan.readers(row)] for row in numbers]
    folded = [plan.rows[row].shared_norm and init == "fold" for row in numbers]
    if not any(folded) and all(len(group) == 1 for group in groups):
        return weights.recut(params["rows"], [range(groups[0][0], groups[-1][0] + 1)])[0]

    def one(group: Sequence[int], fold: bool) -> PyTree:
        rows = [dequantised(weights.row(params, row), params["embed"].dtype) for row in group]
        if fold:
            makers = [full.rows[row].maker for row in group]
            rows = [_folded(config, params, *each) for each in zip(rows, makers, strict=True)]
        return jax.tree.map(
            lambda *leaves: jnp.stack(leaves).astype(jnp.float32).mean(0).astype(leaves[0].dtype), *rows
        )

    made = [one(group, fold) for group, fold in zip(groups, folded, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)


def _folded(config: ModelConfig, params: PyTree, row: PyTree, layer: int) -> PyTree:
    """The makers `row` of a layer with the gain of its input norm multiplied into their kernels' rows."""
    attention = weights.layer(params, layer)["attentions"][0]
    if "norm" not in attention:
        return row
    gain = effective_gain(config, attention["norm"]).astype(jnp.float32)

    def projection(p: PyTree) -> PyTree:
        wide = p["kernel"].astype(jnp.float32)
        out = p | {"kernel": (wide * gain[:, None]).astype(p["kernel"].dtype)}
        if (
            "norm_bias" not in attention or "bias" not in p
        ):  # a bias of keys shifts all scores of a query alike
            return out
        bias = p["bias"].astype(jnp.float32) + attention["norm_bias"].astype(jnp.float32) @ wide
        return out | {"bias": bias.astype(p["bias"].dtype)}

    return row | {name: projection(row[name]) for name in FORMS[config.form].projections}


def to_slim(
    model: Transformer,
    params: PyTree,
    forms: str | Sequence[str] = "k",
    solved: Mapping[int, np.ndarray] | None = None,
    cross_forms: str | Sequence[str] = "x",
) -> tuple[Transformer, PyTree]:
    """Convert `model` to rows of other forms: Slim attention (arXiv 2503.05840), for multi-head models.

    "k" stores keys alone, and values are K W_KV; "v" values alone; "x" the layer's inputs; "kv" changes
    nothing. W_KV = W_K^-1 W_V (the right inverse where keys are wider than inputs) is solved in float64 on
    the host. In exact arithmetic the model is the same. Values recovered from rounded keys have an error that
    grows with the condition number of W_K; `swiftkv slim` measures it.

    Args:
      forms: one for all rows, or one for each. The upper layers of a SwiftKV student that store "x" share one
        row.
      solved: row of `model` -> its W_KV or W_VK, [E, E], in place of the exact one.
      cross_forms: forms of cross-attention's rows, one for all layers or one for each; all layers with "x"
        share one row.

    Raises:
      UsageError: this model cannot have such rows, W_K (W_V) of a row is singular, or its numbers are too
        large for float16; the message says why.
    """
    stored = {*model.plan.forms, *model.plan.cross_forms}
    if stored != {"kv"}:
        raise UsageError(f"to_slim converts rows of keys and values, not of {', '.join(sorted(stored))}")
    self_forms, cross = ([each] if isinstance(each, str) else each for each in (forms, cross_forms))
    plan = model.plan.stored_as(*self_forms)
    if model.plan.cross:
        plan = plan.with_cross(*cross)
    slim = Transformer(model.config, plan, model.dtype)
    layers, ranges = weights.partition(plan, model.config.kinds, weights.cuts_of(params))
    made_at = [(row.space, row.maker) for row in model.plan.rows]
    wide = partial(dequantised, dtype=params["embed"].dtype)
    was = [made_at.index((row.space, row.maker)) for row in plan.rows]
    given = [(solved or {}).get(row) for row in was]
    makers = []
    for made in ranges:
        plain = _rows(params["rows"], [was[row] for row in made])
        names = [plan.name(row) for row in made]
        form = FORMS[plan.rows[made.start].form]
        plain = plain if form is PLAIN else wide(plain)
        makers.append(form.convert(model.config, plain, given[made.start : made.stop], names))
    stacks = []  # of layers, with the projections that their attentions take over from their rows
    for numbers, stack in zip(layers, weights.recut(params["layers"], layers), strict=True):
        attentions = list(stack["attentions"])
        for i, row in enumerate(plan.read_by(numbers.start)):
            form = FORMS[plan.rows[row].form]
            if form.moved:
                taken = [weights.row(params, model.plan.read_by(layer)[i]) for layer in numbers]
                taken = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(wide, taken))
                attentions[i] = attentions[i] | form.convert_reader(model.config, taken)
        stacks.append(stack | {"attentions": attentions})
    return slim, params | {"layers": stacks, "rows": makers}


def _rows(stacks: Sequence[PyTree], wanted: list[int]) -> PyTree:
    """One stack of these rows, which may leave some out between them."""
    starts = [row for row in wanted if row - 1 not in wanted]
    stops = [row + 1 for row in wanted if row + 1 not in wanted]
    parts = weights.recut(stacks, map(range, starts, stops))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def hadamard_inputs(model: Transformer, params: PyTree) -> tuple[Transformer, PyTree]:
    """The same model, with rows of inputs as an engine stores them (see `rows.HadamardInputs`).

    In exact arithmetic nothing changes. The weights that read these rows are transformed and rounded to
    their dtype again, so checkpoints are made of the model that was given.
    """
    plan, served = model.plan, model.plan.served
    if served == plan:
        return model, params

    def read_by(stack: PyTree, layer: int) -> PyTree:
        attentions = list(stack["attentions"])
        for i, row in enumerate(plan.read_by(layer)):
            if plan.rows[row].form != served.rows[row].form:
                moved = {name: _transformed(attentions[i][name]) for name in FORMS["x"].moved}
                attentions[i] = attentions[i] | moved
        return stack | {"attentions": attentions}

    stacks = zip(params["layers"], weights.ranges(params["layers"]), strict=True)
    layers = [read_by(stack, numbers.start) for stack, numbers in stacks]
    return Transformer(model.config, served, model.dtype), params | {"layers": layers}


def _transformed(p: PyTree) -> PyTree:
    """A projection by head, [L, N, E, H], for inputs after `rows.hadamard`."""

    def transformed(kernel: Array) -> Array:
        by_row = jnp.swapaxes(kernel.astype(jnp.float32), -1, -2)
        return jnp.swapaxes(hadamard(by_row, inverse=True), -1, -2).astype(kernel.dtype)

    return p | {"kernel": jax.jit(transformed, out_shardings=p["kernel"].sharding)(p["kernel"])}


def is_trained(model: Transformer, tree: PyTree, which: str) -> PyTree:
    """Whether distillation trains each parameter of a student's tree, or of some of its subtrees.

    which: "swiftkv" (the makers of the rows made at the plan's depth, q of the layers from there on, the
    shared norm, the exit head: the paper's list; with a tail without q, which also reads rows of the layers'
    own), "upper" (those layers whole), or "all".
    """
    plan = model.plan
    starts: dict[tuple[str | int, ...], int] = {
        (name, i): numbers.start
        for name in ("layers", "rows")
        for i, numbers in enumerate(weights.ranges(tree.get(name, ())))
    }

    def trained(path, _) -> bool:
        keys = weights.keys(path)
        if which == "all" or keys[0] in ("shared_norm", "shared_norm_bias", "exit"):
            return True
        if keys[0] == "rows":
            return starts[keys[:2]] in plan.made_at(plan.depth)
        wanted = which == "upper" or (bool(_QUERIES & set(keys)) and not plan.tail)
        return keys[0] == "layers" and starts[keys[:2]] >= plan.depth and wanted

    return jax.tree_util.tree_map_with_path(trained, tree)


_QUERIES = {"q_proj", "q_norm", "q_a_proj", "q_a_norm", "q_b_proj"}


def check_experts(config: ModelConfig, parts: int) -> None:
    """Check that `parts` devices can have equally many experts."""
    if config.experts is not None and config.experts.count % parts:
        raise UsageError(
            f"{parts} devices cannot share {config.experts.count} experts: tensor parallelism takes a "
            "divisor of their number"
        )


def widened(model: Transformer, parts: int) -> Transformer:
    """The model with a kv head for each of `parts` devices, if it has fewer."""
    check_experts(model.config, parts)
    heads, kv_heads = model.config.num_heads, model.config.num_kv_heads
    if heads % parts or (kv_heads % parts and parts % kv_heads):
        fit = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise UsageError(
            f"{parts} devices cannot share {heads} query heads and {kv_heads} kv heads: tensor parallelism "
            f"takes {', '.join(map(str, fit))}"
        )
    if kv_heads % parts == 0:
        return model
    if model.config.sizes:
        raise UsageError(
            f"the layers of this model have different numbers of heads, and at most {kv_heads} kv heads, "
            f"which {parts} devices cannot share: tensor parallelism takes a divisor of {kv_heads}"
        )
    return Transformer(dataclasses.replace(model.config, num_kv_heads=parts), model.plan, model.dtype)


def for_mesh(model: Transformer, params: PyTree, mesh: Mesh) -> tuple[Transformer, PyTree]:
    """The same model with at least as many kv heads as the mesh has devices along `tensor`.

    If there are more devices than kv heads, each head is repeated for a group of devices; every query reads
    the same keys and values as before.
    """
    config, parts = model.config, mesh.shape.get("tensor", 1)
    wide, kv_heads = widened(model, parts), config.num_kv_heads
    if wide == model:
        return model, params

    names = [name for name in ("rows", "tail_rows") if name in params]

    def part(tree: PyTree) -> PyTree:
        return {name: tree[name] for name in names}

    axes = jax.tree.map(lambda weight: weight.axes, part(weights.described(config, model.plan, params)))

    def repeated(letters: str, leaf: Array) -> Array:
        if not letters.endswith("E"):
            return leaf
        by_head = leaf.reshape(*leaf.shape[:-1], kv_heads, config.head_dim)
        return jnp.repeat(by_head, parts // kv_heads, axis=-2).reshape(*leaf.shape[:-1], -1)

    placed = part(weights.described(wide.config, model.plan, params))
    where = jax.tree.map(lambda weight: sharding.named(mesh, weight.axes, weight.shape), placed)
    rows = jax.jit(lambda rows: jax.tree.map(repeated, axes, rows), out_shardings=where)(part(params))
    return wide, params | rows


def fold_shared_norm(model: Transformer, params: PyTree) -> PyTree:
    """`params` for the fused fill: the makers of rows with a shared norm in one stack, with the norm's gain
    multiplied in. `step` and `forward` accept both layouts."""
    due = [i for i, row in enumerate(model.plan.rows) if row.shared_norm]
    if not due or "shared_norm" not in params:
        return params
    ranges = weights.ranges(params["rows"])
    gain = effective_gain(model.config, params["shared_norm"])

    def folded(p: PyTree) -> PyTree:
        unscaled = dequantised(p, jnp.float32)
        return unscaled | {"kernel": fold_gain(gain, unscaled["kernel"]).astype(model.dtype)}

    names = FORMS[model.plan.rows[due[0]].form].projections
    rows = [
        stack | {name: folded(stack[name]) for name in names} if held.start in due else stack
        for held, stack in zip(ranges, params["rows"], strict=True)
    ]
    rest = {name: leaf for name, leaf in params.items() if name != "shared_norm"}
    together = [*(held for held in ranges if held.start not in due), range(due[0], due[-1] + 1)]
    return rest | {"rows": weights.recut(rows, together)}


def layer_pruned(model: Transformer, params: PyTree, keep: Sequence[int]) -> tuple[Transformer, PyTree]:
    """Make an auxiliary of some layers of `model`, with its embeddings, final norm and output head.

    Its rows are those that the kept layers read (KV prediction paper, arXiv 2410.08391, appendix A). Arrays
    of unchanged stacks are shared; with parameters cut at every layer, these are all arrays.

    Args:
      model: any decoder.
      params: its parameters.
      keep: indices of the kept layers, ascending.

    Returns:
      (auxiliary, its parameters).

    Raises:
      UsageError: `keep` is empty, out of order or out of range, or lacks the maker of a row that it reads.
    """
    auxiliary = pruned(model, keep)
    plan, shape = model.plan, auxiliary.config
    rows = list(dict.fromkeys(row for layer in keep for row in plan.own.read_by(layer)))
    starts, changes = weights.cuts_of(params), weights.changes(plan, params)
    cuts = {i for i, layer in enumerate(keep) if layer in starts}
    cuts |= {i for i, (a, b) in enumerate(itertools.pairwise(keep), 1) if {*range(a + 1, b + 1)} & changes}
    layers, made = weights.partition(auxiliary.plan, shape.kinds, cuts)
    out = {name: params[name] for name in weights.ENDS if name in params}
    if auxiliary.plan.has_shared_norm:
        out["shared_norm"] = params["shared_norm"]
    for name, numbers, ranges in (("layers", keep, layers), ("rows", rows, made)):
        alone = weights.recut(params[name], [range(number, number + 1) for number in numbers])
        out[name] = weights.recut(alone, ranges)
    return auxiliary, out


def pruned(model: Transformer, keep: Sequence[int]) -> Transformer:
    """The model that `layer_pruned` gives, without parameters; it raises the same."""
    plan, config = model.plan, model.config
    keep = ascending("keep", keep, plan.num_layers)
    lower = sum(layer < plan.split for layer in keep)
    rows = list(dict.fromkeys(row for layer in keep for row in plan.own.read_by(layer)))
    makers = [plan.rows[row].maker for row in rows if not plan.rows[row].shared_norm]
    absent = [f"layer {maker}, which makes a row that it reads" for maker in makers if maker not in keep]
    if not lower or absent:
        lacking = [*absent, "every layer below the split"][0]
        raise UsageError(f"keep {list(keep)} leaves out {lacking}")
    shape = dataclasses.replace(
        config,
        num_layers=len(keep),
        windows=tuple(config.windows[layer] for layer in keep),
        attentions=tuple(config.kinds[layer].attention for layer in keep),
        mlps=tuple(config.kinds[layer].mlp for layer in keep),
        ropes=tuple(config.kinds[layer].rope for layer in keep),
        sizes=tuple(config.kinds[layer].sizes for layer in keep),
        exit_head=False,
    )
    kept = KVPlan.from_rows([plan.reads[layer] for layer in keep], lower)
    return Transformer(shape, kept.stored_as(config.form), model.dtype)
