"""A decoder as one loop over layers, on a cache: how it is served.

Before a layer runs, the rows whose source is its input are made. From the plan's depth on only the survivors
continue, the tokens whose logits are needed; without any, no weight of these layers is read. Prompts, chunks
of them and decode tokens are the same call. Its definition is `scan.forward`, the same loop over full
sequences.
"""

from collections.abc import Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Batch, Cache, make_batch
from swiftkv_jax.core.ends import Decoder, embed, exit_logits, logits, normalised
from swiftkv_jax.core.form import Raw
from swiftkv_jax.core.layers import MLPS, Rotary, causal_bias, decoder_layer
from swiftkv_jax.core.rows import FORMS, reader_of
from swiftkv_jax.core.shapes import Array, Float, Int, PyTree
from swiftkv_jax.core.sharding import under


class Ran(NamedTuple):
    """The result of running some layers over a flat ragged batch.

    Attributes:
      x: [T, D] the hidden states leaving the last of them. cache: with the rows of the batch.
      raw: row -> itself as its projections leave it, of the rows that were asked for.
    """

    x: Float[Array, "T D"]
    cache: Cache
    raw: dict[int, Raw]


def step(
    model: Decoder,
    params: PyTree,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    query_starts: Int[Array, " Q1"] | None,
    survivors: Int[Array, " M"] | None,
    cache: Cache,
    exits: bool = False,
) -> tuple[Any, Cache]:
    """Add a flat ragged batch to the cache, and compute logits at the survivors.

    A whole prompt, a chunk of one and a decode token are the same call. Tokens that do not survive run only
    the layers up to `plan.depth` (SwiftKV paper, section 3.2). Under a plan with a tail, `fill` reads a
    prompt up to its tail, and a step by `weights.of_tail` what follows.

    Args:
      tokens: [T] int32 ids of all sequences, one sequence after the other.
      positions: [T] int32 positions in their sequences, in [0, cache.capacity); the caller checks this.
      query_starts: [sequences + 1] int32. Sequence s owns tokens [query_starts[s], query_starts[s+1]) and
        row s of the page table; tokens from query_starts[-1] on are padding.
      survivors: [M] ascending indices into `tokens`; an index of T is padding, with meaningless logits. If
        all are padding, as in a chunk that does not end its prompt, no layer from `plan.depth` on runs. If
        this and `query_starts` are None, every sequence has one token, and every token survives.
      cache: with pages for these positions in its table.
      exits: also return the logits of the exit head.

    Returns:
      Logits [M, V] in float32, with `exits` a pair of them, and the cache with the rows of these tokens.
    """
    x, at, batch, cache = fill(model, params, tokens, positions, query_starts, cache)
    depth, due = model.plan.depth, model.plan.made_at(model.plan.depth)

    def finish() -> Any:
        chosen = x, at, batch
        if query_starts is not None and survivors is not None:
            chosen = survivors_of(positions, query_starts, survivors, x, at)
        upper = range(depth, model.plan.num_layers)
        own = logits(model, params, run(model, params, *chosen, cache, upper, given=due).x)
        return (own, exit_logits(model, params, chosen[0])) if exits else own

    if survivors is None:
        return finish(), cache
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(finish))
    return jax.lax.cond(survivors[0] < tokens.shape[0], finish, lambda: nothing), cache


def fill(
    model: Decoder,
    params: PyTree,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    query_starts: Int[Array, " Q1"] | None,
    cache: Cache,
) -> tuple[Float[Array, "T D"], Rotary, Batch, Cache]:
    """Run the layers below `plan.depth`, and make all rows of a flat ragged batch. Returns the hidden states
    entering that layer, their angles, the batch, and the cache; arguments as in `step`."""
    at, batch = cache.angles.at(positions), make_batch(query_starts, positions)
    x, depth = embed(model, params, tokens, positions), model.plan.depth
    x, cache, _ = run(model, params, x, at, batch, cache, range(depth))
    cache, _ = make_rows(model, params, model.plan.made_at(depth), depth, x, at, batch, cache)
    return x, at, batch, cache


def run(
    model: Decoder,
    params: PyTree,
    x: Float[Array, "T D"],
    at: Rotary,
    batch: Batch,
    cache: Cache,
    layers: range | None = None,
    given: Container[int] = (),
    keep: Container[int] = (),
) -> Ran:
    """Run `layers` (all by default) over a flat ragged batch, and make the rows that are due before each.

    given: rows of the batch that are in the cache already. keep: rows to return as their projections leave
    them.
    """
    config, plan, raw = model.config, model.plan, {}
    layers = range(plan.num_layers) if layers is None else layers
    bias = causal_bias(config, params["relative"], cache.capacity) if config.relative_buckets else None
    for layer in layers:
        due = [row for row in plan.made_at(layer) if row not in given]
        cache, made = make_rows(model, params, due, layer, x, at, batch, cache, keep)
        raw |= made
        p, kind, rows = weights.layer(params, layer), config.kinds[layer], plan.read_by(layer)
        mlp = under(MLPS[kind.mlp], cache.mesh)
        if not rows:
            x = decoder_layer(config, p, x, at, [None] * len(p["attentions"]), mlp)
            continue
        forms = [FORMS[plan.rows[row].form] for row in rows]
        own = [form.reader(weights.row(params, row)) for form, row in zip(forms, rows, strict=True)]
        readers = [reader_of(*each) for each in zip(forms, own, p["attentions"], strict=True)]
        maker = plan.rows[rows[0]].maker
        reads: list[Any] = [
            partial(cache.attend, rows[0], readers[0], batch=batch, window=kind.window, bias=bias)
        ]
        if plan.cross:
            reads.append(partial(cache.attend_source, rows[1], readers[1], batch=batch))
        x = decoder_layer(config, p, x, at.of(config, maker), reads, mlp)
    return Ran(x, cache, raw)


def make_rows(
    model: Decoder,
    params: PyTree,
    due: Sequence[int],
    layer: int,
    x: Float[Array, "T D"],
    at: Rotary,
    batch: Batch,
    cache: Cache,
    keep: Container[int] = (),
) -> tuple[Cache, dict[int, Raw]]:
    """The cache with the rows `due` of a flat batch, made from `x`, the hidden states entering `layer`; and
    those of `keep` as their projections leave them."""
    config, plan, kept = model.config, model.plan, {}
    groups: dict[tuple[str, bool], list[int]] = {}
    for i in due:
        groups.setdefault((plan.rows[i].form, plan.rows[i].shared_norm), []).append(i)
    for (form, shared), rows in groups.items():
        if shared and form == "kv" and cache.fill is not None and config.fused_fill:
            makers = weights.fill_makers(config, params, rows)
            cache = cache.write_pages(rows, makers, config.rms_norm_eps, x, at, batch)
            continue
        raw = project_rows(model, params, rows, layer, x)
        made = [
            FORMS[form].finish(config, weights.row(params, i), raw[i], at.of(config, plan.rows[i].maker))
            for i in rows
        ]
        cache = cache.write(rows, made, batch)
        kept |= {i: raw[i] for i in rows if i in keep}
    return cache, kept


def project_rows(
    model: Decoder, params: PyTree, due: Sequence[int], layer: int, x: Float[Array, "*batch D"]
) -> dict[int, Raw]:
    """Rows made from `x`, the hidden states entering `layer`, as their projections leave them."""
    raw, inputs = {}, {}
    for i in due:
        row = model.plan.rows[i]
        if row.shared_norm in inputs:
            # XLA would merge the products of all rows, and for that copy their weights into one array.
            h = jax.lax.optimization_barrier(inputs[row.shared_norm])
        else:
            h = normalised(model, params, row.shared_norm, layer, x)
        inputs[row.shared_norm] = h
        raw[i] = FORMS[row.form].project(weights.row(params, i), h)
    return raw


def survivors_of(
    positions: Int[Array, " T"], query_starts: Int[Array, " Q1"], survivors: Int[Array, " M"], x, at: Rotary
) -> tuple[Float[Array, "M D"], Rotary, Batch]:
    """The survivors of a flat ragged batch: their (hidden states, angles, batch)."""
    alive = jnp.clip(survivors, 0, x.shape[0] - 1)
    starts = jnp.searchsorted(survivors, query_starts, method="compare_all")  # without a loop
    starts = starts.astype(query_starts.dtype)
    return x[alive], at.at(alive), make_batch(starts, positions[alive])
