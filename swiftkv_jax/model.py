"""A decoder as one loop over layers.

Before a layer runs, the rows whose source is its input are made; at the plan's depth only the survivors go
on, the tokens whose logits somebody wants; then the layer runs. `step` is that loop over a cache, for
prompts, chunks and decode tokens alike. `forward` is the definition, and what training runs: the same loop
over full sequences and all positions, with runs of equal layers as scans.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from swiftkv_jax import weights
from swiftkv_jax.cache import Batch, Cache, make_batch
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.fused_kv_fill.api import Makers, fold_gain
from swiftkv_jax.layers import Rotary, decoder_layer, rms_norm, rotary
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.rows import FORMS, Form
from swiftkv_jax.shapes import Array, Float, Hidden, Int, Logits, PyTree, Tokens
from swiftkv_jax.sharding import constrain

STREAM = "B T ."
_TURN = 4  # layers without rows of their own in one turn of the scan that runs them


class Transformer(nn.Module):
    """A decoder's shapes and names; its parameters are a plain tree (see weights.py).

    Attributes:
      config: the layers. plan: where cache rows come from. dtype: of activations and of `init`'s parameters.

    Raises:
      UsageError: config and plan do not fit each other.
    """

    config: ModelConfig
    plan: KVPlan
    dtype: str = "float32"

    def __post_init__(self):
        weights.check(self.config, self.plan)
        super().__post_init__()

    def __call__(self, tokens: Tokens) -> Logits:
        """Logits [B, T, V] in float32 at every position of full, causal sequences [B, T]."""
        params = self._params()
        return logits(self, params, forward(self, params, tokens))

    def step(self, tokens, positions, query_starts, survivors, cache: Cache):
        """The truncated step on a cache: `step` below, by `model.apply(..., method="step")`."""
        return step(self, self._params(), tokens, positions, query_starts, survivors, cache)

    @nn.compact
    def _params(self) -> PyTree:
        """The tree of parameters, in stacks of any length; `init` makes what `weights.init` does."""
        if not self.is_initializing():
            return self.variables["params"]
        scope: Any = self.scope
        key = scope.rngs["params"].as_jax_rng()  # not `make_rng`, whose key is another
        tree = weights.init(self.config, self.plan, key, jnp.dtype(self.dtype))
        return {name: self.param(name, lambda _, made=made: made) for name, made in tree.items()}


def embed(model: Transformer, params: PyTree, tokens: Int[Array, "*batch"]) -> Hidden:
    """Token embeddings in the model's dtype."""
    return params["embed"][tokens].astype(model.dtype)


def logits(model: Transformer, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the hidden states leaving the last layer: final norm, then the output head."""
    return head(params, rms_norm(x, params["norm"], model.config.rms_norm_eps))


def head(params: PyTree, h: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of normalised hidden states; a tied model reads its embeddings backwards."""
    kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
    return jnp.matmul(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)


def exit_logits(model: Transformer, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the exit head, on the hidden states entering `split` (SwiftKV paper, B.4)."""
    p = params["exit"]
    return head(p, rms_norm(x, p["norm"], model.config.rms_norm_eps))


# ---- full sequences: the definition, and training ----------------------------------------------------


class Made(NamedTuple):
    """A row of full sequences.

    Attributes:
      arrays: what its form stores, stacked with other rows: [n, B, T, heads, width] each. readers: what
        reading them needs, leaves [n, ...]. index: this row's place among the n.
    """

    arrays: tuple[Array, ...]
    readers: PyTree
    index: int


class Passed(NamedTuple):
    """What running some layers over full sequences gives.

    Attributes:
      x: [B, T, D] hidden states leaving the last of them. entering: those entering it.
      rows: row -> what was made of it, if later layers may read it.
    """

    x: Hidden
    entering: Hidden
    rows: dict[int, Made]


def forward(
    model: Transformer,
    params: PyTree,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    remat: bool = False,
    attention: Callable = causal_attention,
) -> Float[Array, "B T D"]:
    """The hidden states leaving the last layer, at every position of full sequences.

    Packed rows give `segments` (a token sees its own segment only) and `positions` that restart in each.
    """
    at, segments = angles_and_segments(model.config, tokens, positions, segments)
    x = constrain(embed(model, params, tokens), STREAM)
    return through(model, params, x, at, segments, remat=remat, attention=attention).x


def angles_and_segments(
    config: ModelConfig,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None,
    segments: Int[Array, "B T"] | None,
    length: int | None = None,
) -> tuple[Rotary, Int[Array, "B T"]]:
    """Of full sequences: positions count from 0, and each row is one segment, by default.

    `length` (tokens; by default the last position's) is what `dynamic` rotary scaling follows.
    """
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.ones_like(tokens) if segments is None else segments
    return rotary(config, positions, jnp.max(positions) + 1 if length is None else length), segments


def through(
    model: Transformer,
    params: PyTree,
    x: Float[Array, "B T D"],
    at: Rotary,
    segments: Int[Array, "B T"],
    layers: range | None = None,
    rows: dict[int, Made] | None = None,
    remat: bool = False,
    attention: Callable = causal_attention,
    store: Callable = lambda made: made,
) -> Passed:
    """Run `layers` (all by default) over full sequences.

    rows: those that earlier layers made. remat: recompute activations in the backward pass. attention: with
    the arguments of `causal_attention`. store: what becomes of a row's arrays before they are read, such as
    `rows.rounded`.
    """
    layers = range(model.plan.num_layers) if layers is None else layers
    passed = Passed(x, x, dict(rows or {}))
    for run, stack in zip(weights.ranges(params["layers"]), params["layers"], strict=True):
        part = range(max(run.start, layers.start), min(run.stop, layers.stop))
        if not part:
            continue
        if part != run:
            (stack,) = weights.recut(params["layers"], [part])
            run = part
        if model.plan.makes_own(run.start):
            passed = _run_own(model, params, passed, at, segments, run, stack, remat, attention, store)
        else:
            made = rows_at(model, params, run.start, passed.x, at, store)
            passed = passed._replace(rows=passed.rows | made)
            passed = _run_reading(model, passed, at, segments, run, stack, remat, attention)
    return passed


def _run_own(model, params, passed: Passed, at, segments, run, stack, remat, attention, store) -> Passed:
    """A run whose layers each make their own row, which no other reads."""
    config, plan = model.config, model.plan
    first = plan.reads[run.start]
    form, window = FORMS[plan.rows[first].form], config.windows[run.start]
    (makers,) = weights.recut(params["rows"], [range(first, first + len(run))])

    def layer(x, p):
        p, maker = p
        h = rms_norm(x, p["attentions"][0]["norm"], config.rms_norm_eps)
        made = store(form.make(config, maker, h, at))
        read = _reader(config, form, made, form.reader(maker), at, segments, window, attention)
        return decoder_layer(config, p, x, at, [read])

    x, entering = _scan(layer, passed.x, (stack, makers), remat)
    return passed._replace(x=x, entering=entering)


def _run_reading(model, passed: Passed, at, segments, run, stack, remat, attention) -> Passed:
    """A run whose layers read rows that are all made."""
    config, plan = model.config, model.plan
    form, window = FORMS[plan.rows[plan.reads[run.start]].form], config.windows[run.start]
    arrays, readers, index = _together([passed.rows[plan.reads[layer]] for layer in run])

    def layer(x, p):
        p, i = p
        made, reader = jax.tree.map(lambda y: y[i], (arrays, readers))
        read = _reader(config, form, made, reader, at, segments, window, attention)
        return decoder_layer(config, p, x, at, [read])

    # What the backward pass keeps of a turn goes through one stack for each of its arrays: longer turns copy
    # less. With remat there is next to nothing to keep.
    turn = 1 if remat else _TURN
    x, entering = _scan(layer, passed.x, (stack, jnp.array(index, jnp.int32)), remat, unroll=turn)
    return passed._replace(x=x, entering=entering)


def _reader(config, form: Form, made, reader, at, segments, window, attention):
    k, v = form.keys_values(config, reader, made, at)
    return lambda q: attention(q, k, v, segments, window)


def _together(rows: list[Made]) -> tuple[tuple[Array, ...], PyTree, list[int]]:
    """Arrays and readers that hold all these rows, and the place of each in them."""
    if all(row.arrays is rows[0].arrays for row in rows):
        return rows[0].arrays, rows[0].readers, [row.index for row in rows]
    alone = [jax.tree.map(lambda y, i=row.index: y[i], (row.arrays, row.readers)) for row in rows]
    arrays, readers = jax.tree.map(lambda *y: jnp.stack(y), *alone)
    return arrays, readers, list(range(len(rows)))


def rows_at(
    model: Transformer,
    params: PyTree,
    layer: int,
    x: Hidden,
    at: Rotary,
    store: Callable = lambda made: made,
) -> dict[int, Made]:
    """The rows made from `x`, the hidden states entering `layer`; those of one stack in one go.

    store: as in `through`.
    """
    plan, made = model.plan, {}
    due = plan.made_at(layer)
    for held in weights.ranges(params["rows"]):
        held = range(max(held.start, *due[:1]), min(held.stop, due[-1] + 1)) if due else range(0)
        if not held:
            continue
        (stack,), row = weights.recut(params["rows"], [held]), plan.rows[held.start]
        form, h = FORMS[row.form], normalised(model, params, row.shared_norm, layer, x)
        arrays = store(jax.vmap(partial(form.make, model.config), in_axes=(0, None, None))(stack, h, at))
        readers = form.reader(stack)
        made |= {i: Made(arrays, readers, i - held.start) for i in held}
    return made


def normalised(model: Transformer, params: PyTree, shared: bool, layer: int, x: Hidden) -> Hidden:
    """The hidden states entering `layer` as the makers of rows see them.

    Behind the shared norm (SwiftKV paper, equation 2), whose gain `fold_shared_norm` may have moved into the
    makers, or else behind the layer's own input norm.
    """
    if not shared:
        gain = weights.layer(params, layer)["attentions"][0]["norm"]
    else:
        gain = params["shared_norm"] if "shared_norm" in params else jnp.ones(x.shape[-1], x.dtype)
    return rms_norm(x, gain, model.config.rms_norm_eps)


def _scan(layer, x, stack, remat: bool, unroll: int = 1):
    """Run `layer` over a stack, `unroll` at a turn; the last hidden states and those before them."""
    if weights.length(stack) == 1 and not remat:
        alone = jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, 0, keepdims=False), stack)
        return constrain(layer(x, alone), STREAM), x

    def body(carry, p):
        x, _ = carry
        return (constrain(layer(x, p), STREAM), x), None

    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    return jax.lax.scan(body, (x, x), stack, unroll=unroll)[0]


# ---- a cache: serving --------------------------------------------------------------------------------


def step(
    model: Transformer,
    params: PyTree,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    query_starts: Int[Array, " Q1"] | None,
    survivors: Int[Array, " M"] | None,
    cache: Cache,
) -> tuple[Float[Array, "M V"], Cache]:
    """Add a flat ragged batch to the cache; logits at the survivors.

    A prompt, a chunk of one and a decode token are the same call. Sequence s owns tokens
    [query_starts[s], query_starts[s+1]) and page-table row s; tokens from query_starts[-1] on are padding.
    `survivors` are ascending indices into `tokens`; an index of T pads, and its logits mean nothing.
    None in their place: every sequence has one token, and every token survives.
    Positions index the cache, so they must lie in [0, cache.capacity): the caller checks.
    """
    at, batch = cache.angles.at(positions), make_batch(query_starts, positions)
    survive = None
    if query_starts is not None and survivors is not None:
        survive = partial(survivors_of, positions, query_starts, survivors)
    x, cache = run(model, params, embed(model, params, tokens), at, batch, cache, survive=survive)
    return logits(model, params, x), cache


def run(
    model: Transformer,
    params: PyTree,
    x: Float[Array, "T D"],
    at: Rotary,
    batch: Batch,
    cache: Cache,
    layers: range | None = None,
    survive: Callable | None = None,
    made: bool = False,
) -> tuple[Float[Array, "M D"], Cache]:
    """Run `layers` (all by default) over a flat ragged batch, and make the rows that are due before each.

    survive: what of (x, at) goes on at the plan's depth, as (x, at, batch); all of it by default. made: the
    rows due before the first of `layers` are in the cache already.
    Returns the hidden states leaving the last layer, and the cache with the batch's rows.
    """
    config, plan = model.config, model.plan
    layers = range(plan.num_layers) if layers is None else layers
    for layer in layers:
        if layer > layers.start or not made:
            cache = make_rows(model, params, layer, x, at, batch, cache)
        if survive is not None and layer == plan.depth:
            x, at, batch = survive(x, at)
        row = plan.reads[layer]
        reader = FORMS[plan.rows[row].form].reader(weights.row(params, row))
        read = partial(cache.attend, row, reader, batch=batch, window=config.windows[layer])
        x = decoder_layer(config, weights.layer(params, layer), x, at, [read])
    return x, cache


def make_rows(
    model: Transformer,
    params: PyTree,
    layer: int,
    x: Float[Array, "T D"],
    at: Rotary,
    batch: Batch,
    cache: Cache,
) -> Cache:
    """The cache with the rows of a flat batch that are made from `x`, the hidden states entering `layer`."""
    config, plan = model.config, model.plan
    groups: dict[tuple[str, bool], list[int]] = {}
    for i in plan.made_at(layer):
        groups.setdefault((plan.rows[i].form, plan.rows[i].shared_norm), []).append(i)
    for (form, shared), due in groups.items():
        if shared and form == "kv" and cache.fill is not None:
            cache = cache.write_pages(due, _makers(params, due), config.rms_norm_eps, x, at, batch)
            continue
        h = normalised(model, params, shared, layer, x)
        made = [FORMS[form].make(config, weights.row(params, i), h, at) for i in due]
        cache = cache.write(due, made, batch)
    return cache


def survivors_of(
    positions: Int[Array, " T"], query_starts: Int[Array, " Q1"], survivors: Int[Array, " M"], x, at: Rotary
) -> tuple[Float[Array, "M D"], Rotary, Batch]:
    """The survivors of a flat ragged batch: their (hidden states, angles, batch)."""
    alive = jnp.clip(survivors, 0, x.shape[0] - 1)
    starts = jnp.searchsorted(survivors, query_starts, method="compare_all")  # without a loop
    starts = starts.astype(query_starts.dtype)
    return x[alive], at.at(alive), make_batch(starts, positions[alive])


def fold_shared_norm(model: Transformer, params: PyTree) -> PyTree:
    """`params` as the fused fill takes them: the makers of rows with a shared norm in one stack, with the
    norm's gain in them. `step` and `forward` take either."""
    due = [i for i, row in enumerate(model.plan.rows) if row.shared_norm]
    if not due or "shared_norm" not in params:
        return params
    held = [r for r in weights.ranges(params["rows"]) if r.start not in due]
    stacks = weights.recut(params["rows"], [*held, range(due[0], due[-1] + 1)])
    folded = {n: p for n, p in stacks[-1].items()}
    for name in folded.keys() & {"k_proj", "v_proj"}:
        kernel = fold_gain(params["shared_norm"], folded[name]["kernel"]).astype(model.dtype)
        folded[name] = folded[name] | {"kernel": kernel}
    rest = {name: leaf for name, leaf in params.items() if name != "shared_norm"}
    return rest | {"rows": [*stacks[:-1], folded]}


def _makers(params: PyTree, due: list[int]) -> Makers:
    """Weights of the fused fill, of rows with a shared norm."""
    (p,) = weights.recut(params["rows"], [range(due[0], due[-1] + 1)])
    kernels = [p[name]["kernel"] for name in ("k_proj", "v_proj")]
    if "shared_norm" in params:
        kernels = [fold_gain(params["shared_norm"], kernel) for kernel in kernels]
    return Makers(*kernels, p["k_proj"].get("bias"), p["v_proj"].get("bias"), p.get("k_norm"))
