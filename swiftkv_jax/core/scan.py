"""A decoder as one loop over layers, on full sequences: its definition, and how it is trained.

Runs of equal layers are scans. Rows can be given (an encoder's, an auxiliary model's predictions), and handed
out as they are made.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.plan import SELF, Row
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Encoded
from swiftkv_jax.core.ends import Decoder, embed, normalised
from swiftkv_jax.core.form import Form, Pair, filled
from swiftkv_jax.core.layers import MLPS, Rotary, before, causal_bias, decoder_layer, rotary, see_all
from swiftkv_jax.core.rows import FORMS, reader_of
from swiftkv_jax.core.shapes import Array, Bool, Float, Hidden, Int, PyTree, Tokens
from swiftkv_jax.core.sharding import constrain
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.causal_attention.segments import first_key
from swiftkv_jax.kernels.common.mask import capped, weights_of

STREAM = "B T ."
_BLOCK = 512  # queries whose scores exist at a time
_UNROLL = 4  # layers in one iteration of the scan over layers without rows of their own


class Stacked(NamedTuple):
    """A row of full sequences, in a stack of rows.

    Attributes:
      arrays: of its form, or as projections leave it: [n, B, T, ...] each. readers: the weights needed to
        read them, leaves [n, ...]. index: this row's place among the n.
    """

    arrays: tuple[Array, ...]
    readers: PyTree
    index: int


class Passed(NamedTuple):
    """The result of running some layers over full sequences.

    Attributes:
      x: [B, T, D] hidden states leaving the last of them. entering: those entering it.
      rows: row -> itself, if later layers may read it.
      raw: row -> itself as its projections leave it, of the rows that were asked for.
      streams: of each run, [n, B, T, D] the hidden states entering its layers; empty if not asked for.
    """

    x: Hidden
    entering: Hidden
    rows: dict[int, Stacked]
    raw: dict[int, Stacked]
    streams: list[Float[Array, "n B T D"]]


class Entering(NamedTuple):
    """Full sequences between two layers.

    Attributes:
      x: [B, T, D] hidden states entering the next layer. angles, segments: of their positions.
      rows: row -> (arrays, readers) of one that later layers may read, in a stack of one.
      encoded: what an encoder makes of their sources, or None.
    """

    x: Hidden
    angles: Rotary
    segments: Int[Array, "B T"]
    rows: PyTree
    encoded: Encoded | None


def forward(
    model: Decoder,
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
    Under a plan with a tail, each token is the last of a prompt, see `upper`. `remat`, `attention` and
    `store` as in `through`, `length` as in `angles_and_segments`.
    """
    if (encoded is None) != (model.config.encoder is None):
        has = "has no encoder" if encoded is not None else "reads an encoder's output: give it `encoded`"
        raise UsageError(f"{model.config.family} {has}")
    at, segments = angles_and_segments(model.config, tokens, positions, segments, length)
    x = constrain(embed(model, params, tokens, positions), STREAM)
    run = partial(through, model, params, x, at, segments, remat=remat, attention=attention, store=store)
    if model.plan.tail:
        below = run(range(model.plan.depth))
        return upper(model, params, below, at, segments, None, remat, attention, store).x
    if encoded is None:
        return run().x
    return run(rows=cross_rows(model, params, encoded.x, store), sources=encoded.lengths).x


def cross_rows(
    model: Decoder, params: PyTree, x: Float[Array, "B S D"], store: Callable = lambda made: made
) -> dict[int, Stacked]:
    """The rows made from an encoder's output, without a norm before them; store: as in `through`."""
    due = tuple(sorted(set(model.plan.cross)))
    unturned = rotary(model.config, jnp.zeros((), jnp.int32), 1)
    return _made_together(model, params, due, lambda row: x, unturned, store)[0]


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
    model: Decoder,
    params: PyTree,
    x: Float[Array, "B T D"],
    at: Rotary,
    segments: Int[Array, "B T"],
    layers: range | None = None,
    rows: Mapping[int, Stacked] | None = None,
    remat: bool = False,
    attention: Callable = causal_attention,
    store: Callable = lambda made: made,
    sources: Int[Array, " B"] | None = None,
    beside: Mapping[int, Stacked] | None = None,
    ahead: Bool[Array, "B T"] | None = None,
    keep: Container[int] = (),
    tap: bool = False,
) -> Passed:
    """Run `layers` (all by default) over full sequences.

    Args:
      rows: rows that exist already and are not made: those of earlier layers, those given in place of the
        model's own, and those made from an encoder's output, of which each sequence sees the first `sources`
        positions.
      remat: recompute activations in the backward pass.
      attention: a function with the arguments of `causal_attention`.
      store: applied to a row's arrays before they are read, such as `rows.rounded`.
      beside: rows that are read beside those made: `attention` gets their keys and values as `beside`.
      ahead: the tokens whose rows `beside` are read in place of those made; then `attention` gets one kind.
      keep: rows to return as their projections leave them; a run's rows are kept together.
      tap: return the hidden states entering every layer.
    """
    plan, beside = model.plan, beside or {}
    layers = range(plan.num_layers) if layers is None else layers
    passed = Passed(x, x, dict(rows or {}), {}, [])
    if model.config.relative_buckets and not model.config.bidirectional:
        attention = partial(attention, bias=causal_bias(model.config, params["relative"], x.shape[1]))
    if model.config.attention_softcap:
        attention = partial(attention, softcap=model.config.attention_softcap)
    options = {"remat": remat, "attention": attention, "store": store, "sources": sources}
    others = {"beside": (beside, ahead), "keep": keep, "tap": tap}
    run_equal = partial(_run, model, params, at, segments, **others, **options)
    for run, stack in zip(weights.ranges(params["layers"]), params["layers"], strict=True):
        part = range(max(run.start, layers.start), min(run.stop, layers.stop))
        if not part:
            continue
        if part != run:
            (stack,) = weights.recut(params["layers"], [part])
        due = [] if plan.makes_own(part.start) else plan.made_at(part.start)
        if due := [row for row in due if row not in passed.rows]:
            h = partial(_input, model, params, part.start, passed.x)
            made, raw = _made_together(model, params, due, h, at, store)
            kept = {row: raw[row] for row in due if row in keep}
            passed = passed._replace(rows=passed.rows | made, raw=passed.raw | kept)
        passed = run_equal(passed, part, stack)
    return passed


def upper(
    model: Decoder,
    params: PyTree,
    below: Passed,
    at: Rotary,
    segments: Int[Array, "B T"],
    ahead: Bool[Array, "B T"] | None = None,
    remat: bool = False,
    attention: Callable = causal_attention,
    store: Callable = lambda made: made,
) -> Passed:
    """The layers from the plan's depth on, over what the layers `below` give; others as in `through`.

    Under a plan with a tail, the tokens `ahead` have rows made at the split, and others of the layers' own.
    Without `ahead` each token is the last of a prompt: it reads its own row, and rows of earlier tokens made
    at the split.
    """
    depth, plan = model.plan.depth, model.plan
    rest = (below.x, at, segments, range(depth, plan.num_layers), below.rows, remat)
    if not plan.tail:
        return through(model, params, *rest, attention, store)
    h = partial(_input, model, params, depth, below.x)
    made, _ = _made_together(model, params, plan.made_at(depth), h, at, store)
    attention = with_own if ahead is None else attention
    return through(*weights.of_tail(model, params), *rest, attention, store, beside=made, ahead=ahead)


def walk(
    model: Decoder, params: PyTree, batches: Iterable[tuple[Tokens, Encoded | None]]
) -> Iterator[list[Entering]]:
    """All batches before each layer, in the order of the layers: one layer's hidden states are alive at a
    time, where those of all layers do not fit."""
    states = []
    for tokens, encoded in batches:
        at, segments = angles_and_segments(model.config, tokens, None, None)
        states.append(Entering(embed(model, params, tokens, None), at, segments, {}, encoded))
    for layer in range(model.plan.num_layers):
        yield states
        states = [_past(model, layer, params, state) for state in states]


@partial(jax.jit, static_argnums=(0, 1))
def _past(model: Decoder, layer: int, params: PyTree, state: Entering) -> Entering:
    plan, lengths = model.plan, None
    known = {row: Stacked(arrays, readers, 0) for row, (arrays, readers) in state.rows.items()}
    if state.encoded is not None:  # of this layer alone: those of all would not fit
        row, lengths = plan.cross[layer], state.encoded.lengths
        source = state.encoded.x
        known |= _made_together(model, params, (row,), lambda _: source, state.angles, lambda made: made)[0]
    passed = through(
        model, params, state.x, state.angles, state.segments, range(layer, layer + 1), known, sources=lengths
    )
    rows = {
        row: jax.tree.map(lambda y, i=made.index: y[i : i + 1], (made.arrays, made.readers))
        for row, made in passed.rows.items()
        if plan.rows[row].space == SELF
    }
    return state._replace(x=passed.x, rows=rows)


def _run(
    model, params, at, segments, passed, run, stack, remat, attention, store, sources, beside, keep, tap
) -> Passed:
    """Run equal layers. Each makes its own row, or reads one that exists."""
    config, plan, (beside, ahead) = model.config, model.plan, beside
    kind = config.kinds[run.start]
    if not plan.read_by(run.start):

        def alone(x, p):
            out = decoder_layer(config, p, x, at, [None] * len(p["attentions"]), MLPS[kind.mlp])
            return out, x if tap else None

        x, entering, streams = _scan(alone, passed.x, stack, remat)
        return Passed(x, entering, passed.rows, passed.raw, passed.streams + [streams] * tap)
    reads = [plan.read_by(layer)[0] for layer in run]
    at = at.of(config, plan.rows[reads[0]].maker)
    form = FORMS[plan.rows[reads[0]].form]
    scanned, picks, own = {"layer": stack}, {}, reads[0] not in passed.rows
    if own:
        (scanned["maker"],) = weights.recut(params["rows"], [range(reads[0], reads[-1] + 1)])
    else:
        scanned["row"], picks["row"] = _one_each([passed.rows[read] for read in reads])
    if reads[0] in beside:
        scanned["beside"], picks["beside"] = _one_each([beside[read] for read in reads])
    if plan.cross:
        scanned["cross"], picks["cross"] = _one_each([passed.rows[plan.cross[layer]] for layer in run])

    def pair(form: Form, row, attention):
        arrays, reader = row
        return form.keys_values(config, reader_of(form, reader, attention), arrays, at)

    def layer(x, p):
        attentions, raw = p["layer"]["attentions"], None
        if own:
            raw = form.project(p["maker"], before(config, attentions[0], x))
            made = store(form.finish(config, p["maker"], raw, at)), form.reader(p["maker"])
        else:
            made = picks["row"](p["row"])
        k, v = pair(form, made, attentions[0])
        also = {"beside": pair(form, picks["beside"](p["beside"]), attentions[0])} if "beside" in p else {}
        if ahead is not None:
            pairs = zip(also.pop("beside"), (k, v), strict=True)
            k, v = (jnp.where(ahead[..., None, None], early, late) for early, late in pairs)
        attends = [lambda q: attention(q, k, v, segments, kind.window, **also)]
        if plan.cross:
            theirs = FORMS[plan.cross_forms[run.start]]
            keys, values = pair(theirs, picks["cross"](p["cross"]), attentions[1])
            attends.append(lambda q: see_all(q, keys, values, sources))
        out = decoder_layer(config, p["layer"], x, at, attends, MLPS[kind.mlp])
        return out, (raw if own and any(read in keep for read in reads) else None, x if tap else None)

    # The backward pass stacks the arrays that it keeps of each iteration, so longer iterations copy less.
    # With remat there is almost nothing to keep.
    unroll = 1 if remat or own else _UNROLL
    x, entering, (raw, streams) = _scan(layer, passed.x, scanned, remat, unroll)
    kept = {} if raw is None else {read: Stacked(raw, {}, i) for i, read in enumerate(reads)}
    streams = [] if streams is None else [streams]
    return Passed(x, entering, passed.rows, passed.raw | kept, passed.streams + streams)


def _one_each(rows: Sequence[Stacked]) -> tuple[PyTree, Callable]:
    """What a scan over layers takes so that each reads one of `rows`, and a function that gives (arrays,
    readers) of its row to a layer."""
    arrays, readers, index = together(rows)
    if index == list(range(len(jax.tree.leaves(arrays)[0]))):
        return (arrays, readers), lambda row: row
    return jnp.array(index, jnp.int32), lambda i: jax.tree.map(lambda y: y[i], (arrays, readers))


def together(rows: Sequence[Stacked]) -> tuple[tuple[Array, ...], PyTree, list[int]]:
    """Arrays and readers that hold all these rows, and each row's index in them."""
    if all(row.arrays is rows[0].arrays for row in rows):
        return rows[0].arrays, rows[0].readers, [row.index for row in rows]
    alone = [jax.tree.map(lambda y, i=row.index: y[i], (row.arrays, row.readers)) for row in rows]
    arrays, readers = jax.tree.map(lambda *y: jnp.stack(y), *alone)
    return arrays, readers, list(range(len(rows)))


def of_rows(kept: Mapping[int, Stacked], rows: Iterable[int]) -> tuple[Array, ...]:
    """The arrays [n, B, T, E] of these rows, in this order; narrower rows end in zeros."""
    found = [kept[row] for row in rows]
    widest = max(row.arrays[0].shape[-1] for row in found)
    if any(row.arrays[0].shape[-1] < widest for row in found):
        found = [
            Stacked(tuple(filled(y[row.index][None], widest) for y in row.arrays), {}, 0) for row in found
        ]
    arrays, _, index = together(found)
    whole = index == list(range(arrays[0].shape[0]))
    return tuple(constrain(y if whole else y[jnp.array(index)], ". B T E") for y in arrays)


def _input(model: Decoder, params: PyTree, layer: int, x: Hidden, row: Row) -> Hidden:
    return normalised(model, params, row.shared_norm, layer, x)


def _made_together(
    model, params, due: Sequence[int], h: Callable, at: Rotary, store: Callable
) -> tuple[dict[int, Stacked], dict[int, Stacked]]:
    """Neighbouring rows, one at least, each from the input that `h` returns for it, and the same as their
    projections leave them; rows of one stack are made together."""
    plan, made, kept = model.plan, {}, {}
    for held in weights.ranges(params["rows"]):
        held = range(max(held.start, due[0]), min(held.stop, due[-1] + 1))
        if not held:
            continue
        (stack,), row = weights.recut(params["rows"], [held]), plan.rows[held.start]
        form = FORMS[row.form]
        raw = jax.vmap(form.project, in_axes=(0, None))(stack, h(row))
        finish = jax.vmap(partial(form.finish, model.config), in_axes=(0, 0, None))
        arrays = store(finish(stack, raw, at.of(model.config, row.maker)))
        made |= {i: Stacked(arrays, form.reader(stack), i - held.start) for i in held}
        kept |= {i: Stacked(raw, {}, i - held.start) for i in held}
    return made, kept


def with_own(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segments: Int[Array, "B T"],
    window: int,
    beside: Pair,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention over the keys and values `beside`, except that each query sees its own at its place.

    Computed in blocks of queries, with softmax in float32.
    """
    keys, values = beside
    length, size = q.shape[1], min(q.shape[1], _BLOCK)
    blocks = -(-length // size)
    first = first_key(segments, window)

    def cut(x):
        whole = jnp.pad(x, ((0, 0), (0, blocks * size - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(whole.reshape(x.shape[0], blocks, size, *x.shape[2:]), 1, 0)

    def attended(block):
        start, q, k, v, first = block
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        queries, places = start + jnp.arange(size), jnp.arange(length)
        here = places == queries[:, None]
        seen = (places <= queries[:, None]) & (places >= first[..., None])
        scores = jnp.einsum("bckgh,bskh->bkgcs", grouped, keys, preferred_element_type=jnp.float32)
        alone = jnp.einsum("bckgh,bckh->bkgc", grouped, k, preferred_element_type=jnp.float32)
        scores = capped(jnp.where(here, alone[..., None], scores) * q.shape[-1] ** -0.5, softcap)
        shares = weights_of(scores, seen[:, None, None])
        before = jnp.where(here, 0, shares).astype(values.dtype)
        mixed = jnp.einsum("bkgcs,bsku->bckgu", before, values)
        mine = jnp.where(here, shares, 0).sum(-1).astype(v.dtype)
        mixed += jnp.einsum("bkgc,bcku->bckgu", mine, v)
        return mixed.reshape(*q.shape[:3], -1).astype(q.dtype)

    parts = (size * jnp.arange(blocks), *map(cut, (q, k, v, first)))
    out = jnp.moveaxis(jax.lax.map(jax.checkpoint(attended), parts), 0, 1)
    return out.reshape(out.shape[0], blocks * size, *out.shape[3:])[:, :length]


def _scan(layer, x, stack, remat: bool, unroll: int = 1):
    """Scan `layer` over a stack, `unroll` layers an iteration: (final hidden states, the last layer's input,
    what the layers give out)."""
    if weights.length(stack) == 1 and not remat:
        out, given = layer(x, jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, 0, keepdims=False), stack))
        return constrain(out, STREAM), x, jax.tree.map(lambda y: y[None], given)

    def body(carry, p):
        x, _ = carry
        out, given = layer(x, p)
        return (constrain(out, STREAM), x), given

    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    (x, entering), given = jax.lax.scan(body, (x, x), stack, unroll=unroll)
    return x, entering, given
