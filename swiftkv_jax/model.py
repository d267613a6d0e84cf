"""A decoder as one loop over layers.

Before a layer runs, the rows whose source is its input are made. From the plan's depth on only the survivors
continue, the tokens whose logits are needed. `step` is that loop over a cache, for prompts, chunks and decode
tokens alike. `forward` is the definition, and is used in training: the same loop over full sequences and all
positions, with runs of equal layers as scans.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from swiftkv_jax import weights
from swiftkv_jax.cache import Batch, Cache, Encoded, make_batch
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.errors import UsageError
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.layers import (
    Rotary,
    before,
    causal_bias,
    decoder_layer,
    norm,
    norm_weights,
    rotary,
    see_all,
    unit_norm,
)
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.rows import FORMS, Form, reader_of
from swiftkv_jax.shapes import Array, Float, Hidden, Int, Logits, PyTree, Tokens
from swiftkv_jax.sharding import constrain

STREAM = "B T ."
_TURN = 4  # layers in one iteration of the scan over layers without rows of their own


class Transformer(nn.Module):
    """A decoder, as a Flax Linen module; its parameters are a plain tree of arrays (see weights.py).

    Attributes:
      config: the layers. plan: where the rows of the cache come from. dtype: of activations, and of the
        parameters that `init` makes.

    Raises:
      UsageError: config and plan do not fit each other.
    """

    config: ModelConfig
    plan: KVPlan
    dtype: str = "float32"

    def __post_init__(self):
        weights.check(self.config, self.plan)
        super().__post_init__()

    def __call__(self, tokens: Tokens, encoded: Encoded | None = None) -> Logits:
        """Logits [B, T, V] in float32 at every position of full, causal sequences [B, T]. A model with an
        encoder also takes its output for each sequence's source (`encoder.encode`)."""
        params = self._params()
        return logits(self, params, forward(self, params, tokens, encoded=encoded))

    def step(self, tokens, positions, query_starts, survivors, cache: Cache):
        """The truncated step on a cache: `step` below, by `model.apply(..., method="step")`."""
        return step(self, self._params(), tokens, positions, query_starts, survivors, cache)

    @nn.compact
    def _params(self) -> PyTree:
        """The tree of parameters, in stacks of any length; `init` makes the same as `weights.init`."""
        if not self.is_initializing():
            return self.variables["params"]
        scope: Any = self.scope
        key = scope.rngs["params"].as_jax_rng()  # not `make_rng`, which derives another key
        tree = weights.init(self.config, self.plan, key, jnp.dtype(self.dtype))
        return {name: self.param(name, lambda _, made=made: made) for name, made in tree.items()}


def embed(
    model: Transformer,
    params: PyTree,
    tokens: Int[Array, "*batch"],
    positions: Int[Array, "*batch"] | None,
) -> Hidden:
    """The input of the first layer, in the model's dtype: embeddings, plus learned positions if it has any.

    positions: of the tokens; None: each row begins at 0.

    Raises:
      UsageError: a row is longer than the table of positions.
    """
    config = model.config
    x = params["embed"][tokens].astype(model.dtype)
    if config.learned_positions:
        if positions is None:
            _check_length(config, tokens.shape[-1])
            positions = jnp.arange(tokens.shape[-1])
        x = x + params["positions"][positions + config.unused_positions].astype(model.dtype)
    return x * jnp.asarray(model.config.hidden_size**0.5, x.dtype) if model.config.scaled_embedding else x


def _check_length(config: ModelConfig, length: int) -> None:
    if length > config.max_position_embeddings:
        raise UsageError(
            f"{length} tokens in a row, and {config.family} has embeddings for "
            f"{config.max_position_embeddings} positions: cut the rows, or give positions that begin again"
        )


def logits(model: Transformer, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the hidden states leaving the last layer: final norm, then the output head."""
    h = norm(model.config, params, x)
    return head(params, h * jnp.asarray(x.shape[-1] ** -0.5, h.dtype) if model.config.scaled_logits else h)


def head(params: PyTree, h: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of normalised hidden states; a tied model uses its transposed embeddings."""
    kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
    return jnp.matmul(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)


def exit_logits(model: Transformer, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the exit head, on the hidden states entering `split` (SwiftKV paper, B.4)."""
    p = params["exit"]
    return head(p, norm(model.config, p, x))


# ---- full sequences: the definition, and training ----------------------------------------------------


class Made(NamedTuple):
    """A row of full sequences.

    Attributes:
      arrays: the arrays of its form, stacked with other rows: [n, B, T, heads, width] each. readers: the
        weights needed to read them, leaves [n, ...]. index: this row's place among the n.
    """

    arrays: tuple[Array, ...]
    readers: PyTree
    index: int


class Passed(NamedTuple):
    """The result of running some layers over full sequences.

    Attributes:
      x: [B, T, D] hidden states leaving the last of them. entering: those entering it.
      rows: row -> its `Made`, if later layers may read it.
      sources: [B] how many positions of the encoder's output each sequence sees; None without an encoder.
    """

    x: Hidden
    entering: Hidden
    rows: dict[int, Made]
    sources: Int[Array, " B"] | None = None


def forward(
    model: Transformer,
    params: PyTree,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    remat: bool = False,
    attention: Callable = causal_attention,
    encoded: Encoded | None = None,
    store: Callable = lambda made: made,
    length: int | None = None,
) -> Float[Array, "B T D"]:
    """The hidden states leaving the last layer, at every position of full sequences.

    Packed rows give `segments` (a token sees its own segment only) and `positions` that restart in each.
    `store` as in `through`, for an encoder's rows too: with `rows.rounded` this defines what `step` computes
    on a cache that rounds. `length` as in `angles_and_segments`.

    Raises:
      UsageError: the model has an encoder but `encoded` is None, or the other way round.
    """
    if (encoded is None) != (model.config.encoder is None):
        has = "has no encoder" if encoded is not None else "reads an encoder's output: give it `encoded`"
        raise UsageError(f"{model.config.family} {has}")
    at, segments = angles_and_segments(model.config, tokens, positions, segments, length)
    x = constrain(embed(model, params, tokens, positions), STREAM)
    run = partial(through, model, params, x, at, segments, remat=remat, attention=attention, store=store)
    if encoded is None:
        return run().x
    return run(rows=cross_rows(model, params, encoded.x, store), sources=encoded.lengths).x


def cross_rows(
    model: Transformer, params: PyTree, x: Float[Array, "B S D"], store: Callable = lambda made: made
) -> dict[int, Made]:
    """The rows made from an encoder's output, without a norm before them; store: as in `through`."""
    due = tuple(sorted(set(model.plan.cross)))
    unturned = rotary(model.config, jnp.zeros((), jnp.int32), 1)
    return _rows_of(model, params, due, lambda row: x, unturned, store)


def angles_and_segments(
    config: ModelConfig,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None,
    segments: Int[Array, "B T"] | None,
    length: int | None = None,
) -> tuple[Rotary, Int[Array, "B T"]]:
    """(angles, segments) of full sequences. By default positions count from 0, and each row is one segment.

    `dynamic` rotary scaling depends on `length` (in tokens; by default up to the last position).
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
    sources: Int[Array, " B"] | None = None,
) -> Passed:
    """Run `layers` (all by default) over full sequences.

    rows: those that earlier layers made, and those made from an encoder's output, of which each sequence sees
    the first `sources` positions. remat: recompute activations in the backward pass. attention: a function
    with the arguments of `causal_attention`. store: applied to a row's arrays before they are read, such as
    `rows.rounded`.
    """
    layers = range(model.plan.num_layers) if layers is None else layers
    passed = Passed(x, x, dict(rows or {}), sources)
    if model.config.relative_buckets and not model.config.bidirectional:
        attention = partial(attention, bias=causal_bias(model.config, params["relative"], x.shape[1]))
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
    """Run layers that each make their own row, which no other layer reads."""
    config, plan = model.config, model.plan
    first = plan.reads[run.start]
    form, window = FORMS[plan.rows[first].form], config.windows[run.start]
    (makers,) = weights.recut(params["rows"], [range(first, first + len(run))])

    crossing, read_source = _crossing(model, passed, run, at)

    def layer(x, p):
        p, maker, turn = p
        own = p["attentions"][0]
        made = store(form.make(config, maker, before(config, own, x), at))
        reader = reader_of(form, form.reader(maker), own)
        read = _reader(config, form, made, reader, at, segments, window, attention)
        return decoder_layer(config, p, x, at, [read, *read_source(p, turn)])

    x, entering = _scan(layer, passed.x, (stack, makers, crossing), remat)
    return passed._replace(x=x, entering=entering)


def _crossing(model, passed: Passed, run, at) -> tuple[Array, Callable]:
    """(a number for each layer of a run, a function from (the layer's weights, its number) to a list with the
    layer's reader of its source, empty without an encoder)."""
    config, plan = model.config, model.plan
    if not plan.cross:
        return jnp.zeros(len(run), jnp.int32), lambda p, turn: []
    form = FORMS[plan.cross_forms[run.start]]
    arrays, readers, index = _together([passed.rows[plan.cross[layer]] for layer in run])
    assert passed.sources is not None  # beside the rows of their output
    lengths = passed.sources

    def read_source(p, turn):
        made, reader = jax.tree.map(lambda y: y[turn], (arrays, readers))
        k, v = form.keys_values(config, reader_of(form, reader, p["attentions"][1]), made, at)
        return [lambda q: see_all(q, k, v, lengths)]

    return jnp.array(index, jnp.int32), read_source


def _run_reading(model, passed: Passed, at, segments, run, stack, remat, attention) -> Passed:
    """Run layers whose rows have all been made."""
    config, plan = model.config, model.plan
    form, window = FORMS[plan.rows[plan.reads[run.start]].form], config.windows[run.start]
    arrays, readers, index = _together([passed.rows[plan.reads[layer]] for layer in run])

    crossing, read_source = _crossing(model, passed, run, at)

    def layer(x, p):
        p, i, turn = p
        made, reader = jax.tree.map(lambda y: y[i], (arrays, readers))
        reader = reader_of(form, reader, p["attentions"][0])
        read = _reader(config, form, made, reader, at, segments, window, attention)
        return decoder_layer(config, p, x, at, [read, *read_source(p, turn)])

    # The backward pass stacks the arrays that it keeps of each iteration, so longer iterations copy less.
    # With remat there is almost nothing to keep.
    turn = 1 if remat else _TURN
    x, entering = _scan(layer, passed.x, (stack, jnp.array(index, jnp.int32), crossing), remat, unroll=turn)
    return passed._replace(x=x, entering=entering)


def _reader(config, form: Form, made, reader, at, segments, window, attention):
    k, v = form.keys_values(config, reader, made, at)
    return lambda q: attention(q, k, v, segments, window)


def _together(rows: list[Made]) -> tuple[tuple[Array, ...], PyTree, list[int]]:
    """Arrays and readers that hold all these rows, and each row's index in them."""
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
    """The rows made from `x`, the hidden states entering `layer`; rows of one stack are made together.

    store: as in `through`.
    """

    def h(row):
        return normalised(model, params, row.shared_norm, layer, x)

    return _rows_of(model, params, model.plan.made_at(layer), h, at, store)


def _rows_of(
    model, params, due: tuple[int, ...], h: Callable, at: Rotary, store: Callable
) -> dict[int, Made]:
    """Some neighbouring rows, each from the input that `h` returns for it; rows of one stack are made
    together."""
    plan, made = model.plan, {}
    for held in weights.ranges(params["rows"]):
        held = range(max(held.start, *due[:1]), min(held.stop, due[-1] + 1)) if due else range(0)
        if not held:
            continue
        (stack,), row = weights.recut(params["rows"], [held]), plan.rows[held.start]
        form = FORMS[row.form]
        arrays = store(jax.vmap(partial(form.make, model.config), in_axes=(0, None, None))(stack, h(row), at))
        readers = form.reader(stack)
        made |= {i: Made(arrays, readers, i - held.start) for i in held}
    return made


def normalised(model: Transformer, params: PyTree, shared: bool, layer: int, x: Hidden) -> Hidden:
    """The hidden states entering `layer` as the makers of rows see them.

    They pass the shared norm (SwiftKV paper, equation 2), whose gain `fold_shared_norm` may have moved into
    the makers, or else the layer's own input norm.
    """
    config = model.config
    if not shared:
        return before(config, weights.layer(params, layer)["attentions"][0], x)
    given = {name: params[f"shared_{name}"] for name in norm_weights(config) if f"shared_{name}" in params}
    return before(config, given or unit_norm(config, x.dtype), x)


def _scan(layer, x, stack, remat: bool, unroll: int = 1):
    """Scan `layer` over a stack, `unroll` layers an iteration: (final hidden states, the last layer's
    input)."""
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
    """Add a flat ragged batch to the cache, and compute logits at the survivors.

    A whole prompt, a chunk of one and a decode token are the same call. Tokens that do not survive run only
    the layers up to `plan.depth` (SwiftKV paper, section 3.2).

    Args:
      tokens: [T] int32 ids of all sequences, one sequence after the other.
      positions: [T] int32 positions in their sequences, in [0, cache.capacity); the caller checks this.
      query_starts: [sequences + 1] int32. Sequence s owns tokens [query_starts[s], query_starts[s+1]) and
        row s of the page table; tokens from query_starts[-1] on are padding.
      survivors: [M] ascending indices into `tokens`; an index of T is padding, with meaningless logits.
        If this and `query_starts` are None, every sequence has one token, and every token survives.
      cache: with pages for these positions in its table.

    Returns:
      Logits [M, V] in float32, and the cache with the rows of these tokens.
    """
    at, batch = cache.angles.at(positions), make_batch(query_starts, positions)
    survive = None
    if query_starts is not None and survivors is not None:
        survive = partial(survivors_of, positions, query_starts, survivors)
    x, cache = run(model, params, embed(model, params, tokens, positions), at, batch, cache, survive=survive)
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

    survive: selects from (x, at) what continues at the plan's depth, as (x, at, batch); all by default. made:
    the rows due before the first of `layers` are in the cache already.
    Returns the hidden states leaving the last layer, and the cache with the batch's rows.
    """
    config, plan = model.config, model.plan
    layers = range(plan.num_layers) if layers is None else layers
    bias = causal_bias(config, params["relative"], cache.capacity) if config.relative_buckets else None
    for layer in layers:
        if layer > layers.start or not made:
            cache = make_rows(model, params, layer, x, at, batch, cache)
        if survive is not None and layer == plan.depth:
            x, at, batch = survive(x, at)
        p = weights.layer(params, layer)
        rows = (plan.reads[layer], *plan.cross[layer : layer + 1])
        readers = [_row_reader(plan, params, *each) for each in zip(rows, p["attentions"], strict=True)]
        window = config.windows[layer]
        reads = [partial(cache.attend, rows[0], readers[0], batch=batch, window=window, bias=bias)]
        if plan.cross:
            reads.append(partial(cache.attend_source, rows[1], readers[1], batch=batch))
        x = decoder_layer(config, p, x, at, reads)
    return x, cache


def _row_reader(plan: KVPlan, params: PyTree, row: int, attention: PyTree) -> PyTree:
    """The weights that an attention needs to read a row."""
    form = FORMS[plan.rows[row].form]
    return reader_of(form, form.reader(weights.row(params, row)), attention)


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
        if shared and form == "kv" and cache.fill is not None and config.fused_fill:
            cache = cache.write_pages(
                due, weights.fill_makers(config, params, due), config.rms_norm_eps, x, at, batch
            )
            continue
        h = normalised(model, params, shared, layer, x)
        made = []
        for i in due:
            # XLA would merge the products of all rows, and for that copy their weights into one array.
            h = jax.lax.optimization_barrier(h) if made else h
            made.append(FORMS[form].make(config, weights.row(params, i), h, at))
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
