"""Layers over a dense cache with gaps: the common part of the systems compared with KV prediction.

A ragged batch of B rows is padded behind each row's end. A token's slot in the cache is its position, whether
or not the tokens before it are there. Two arrays of static shapes say which tokens run a layer (their
positions; S, the number of slots, stands for none) and which slots they may see. The methods differ only in
how they compute these two.

Of a SwiftKV student, the tokens that reach the split make the rows of the later layers there, and only the
last token of each sequence goes on.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.papers.prediction_flops import Sizes
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core import weights
from swiftkv_jax.core.ends import logits, normalised
from swiftkv_jax.core.layers import MLPS, Rotary, before, decoder_layer, queries, rotary
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.pytree import pytree
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.core.shapes import Array, Bool, Float, Int, PyTree, Queries
from swiftkv_jax.kernels.common.mask import capped, visible, weights_of

Positions = Int[Array, "B n"]
Slots = Bool[Array, "B S"]


@pytree
class Held:
    """A row of the plan: keys and values [B, S, K, H], and which slots are filled, [B, S]."""

    keys: Array
    values: Array
    held: Array


@pytree
class State:
    """A batch between two steps.

    Attributes:
      rows: those of the plan. length: [B] tokens of each sequence so far, those left out included.
      left: of LazyLLM, for each layer: [B, S, D] hidden states of tokens that did not enter it, or None.
    """

    rows: tuple[Held, ...]
    length: Array
    left: tuple[Array | None, ...] = ()


@pytree
class Work:
    """Work done for each sequence, by layer, [L, B] int32 ([B] of one layer): keys and values made of what
    enters it, tokens through its attention, tokens through its MLP (FFN), and pairs of a query and a key that
    it saw."""

    made: Array
    tokens: Array
    mlps: Array
    pairs: Array


Step = tuple[Float[Array, "B V"], State, Work]  # logits of each sequence's next token, state to continue from


def empty(model: Transformer, sequences: int, slots: int) -> tuple[Held, ...]:
    """The rows of the plan, with nothing in them."""
    shape = (sequences, slots, model.config.num_kv_heads, model.config.head_dim)
    nothing = jnp.zeros(shape, model.dtype)
    return (Held(nothing, nothing, jnp.zeros((sequences, slots), bool)),) * model.plan.num_rows


def run_layer(
    model: Transformer,
    params: PyTree,
    layer: int,
    x: Float[Array, "B n D"],
    at: Positions,
    rows: tuple[Held, ...],
    last: Int[Array, " B"] | None = None,
    active: Slots | None = None,
    mlp: Callable = MLPS["dense"],
) -> tuple[Float[Array, "B m D"], Int[Array, "B m"], tuple[Held, ...], Work]:
    """(hidden states leaving `layer`, their positions, the rows with those made of what enters it, the work).

    last: the position of each sequence's last token, which alone goes on at a student's split; None: all do.
    active: the slots that queries may see, these tokens' own included; by default all that hold a row.
    """
    config, plan, p = model.config, model.plan, weights.layer(params, layer)
    slots, due = rows[0].held.shape[1], plan.made_at(layer)
    angles = _angles(config, at, rows[0])
    for row in due:
        h = normalised(model, params, plan.rows[row].shared_norm, layer, x)
        turn = angles.of(config, plan.rows[row].maker)
        keys, values = FORMS["kv"].make(config, weights.row(params, row), h, turn)
        new = Held(keys, values, jnp.ones_like(at, bool))
        added = jax.tree.map(lambda old, new: put(old, new, at), rows[row], new)
        rows = (*rows[:row], added, *rows[row + 1 :])
    made = (at < slots).sum(1) * len(due)
    if layer == plan.split and last is not None:
        x, at = only(x, at, last), last[:, None]
        angles = _angles(config, at, rows[0])
    read = rows[plan.reads[layer]]
    seen = _seen(config, layer, at, read, active)

    def attend(q: Queries) -> Queries:
        shares = _shares(config, q, read.keys, seen).astype(q.dtype)
        mixed = jnp.einsum("bkgns,bsku->bnkgu", shares, read.values)
        return mixed.reshape(q.shape)

    ran = (at < slots).sum(1)
    work = Work(made, ran, ran, seen.sum((1, 2)))
    turn = angles.of(config, plan.rows[plan.reads[layer]].maker)
    return decoder_layer(config, p, x, turn, [attend], mlp), at, rows, work


def importance(
    model: Transformer,
    params: PyTree,
    layer: int,
    x: Float[Array, "B 1 D"],
    at: Int[Array, "B 1"],
    rows: Held,
    active: Slots | None = None,
) -> Float[Array, "B S"]:
    """Attention weight that one token gives to each slot in `layer`, averaged over heads.

    x: what enters the layer; `rows` hold that token already (see `run_layer`).
    """
    config, p = model.config, weights.layer(params, layer)["attentions"][0]
    turn = _angles(config, at, rows).of(config, model.plan.rows[model.plan.reads[layer]].maker)
    q = queries(config, p, before(config, p, x), turn)
    return _shares(config, q, rows.keys, _seen(config, layer, at, rows, active)).mean((1, 2, 3))


def _angles(config: ModelConfig, at: Positions, rows: Held) -> Rotary:
    return rotary(config, at, max(config.max_position_embeddings, rows.held.shape[1]))


def _seen(config: ModelConfig, layer: int, at, rows: Held, active) -> Bool[Array, "B n S"]:
    slots = rows.held.shape[1]
    there = rows.held if active is None else rows.held & active
    return visible(at, slots, config.windows[layer]) & there[:, None] & (at < slots)[..., None]


def _shares(config: ModelConfig, q, keys, seen) -> Float[Array, "B K G n S"]:
    """Attention probabilities, in float32."""
    grouped = q.reshape(*q.shape[:2], keys.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("bnkgh,bskh->bkgns", grouped, keys, preferred_element_type=jnp.float32)
    scores = capped(scores * q.shape[-1] ** -0.5, config.attention_softcap)
    return weights_of(scores, seen[:, None, None])


def run_layers(
    model: Transformer,
    params: PyTree,
    x: Float[Array, "B n D"],
    at: Positions,
    rows: tuple[Held, ...],
    last: Int[Array, " B"],
) -> tuple[Float[Array, "B V"], tuple[Held, ...], Work]:
    """The same tokens through all layers: (the logits of the last of each sequence, rows, work)."""
    works = []
    for layer in range(model.config.num_layers):
        x, at, rows, work = run_layer(model, params, layer, x, at, rows, last)
        works.append(work)
    return last_logits(model, params, x, at, last), rows, by_layer(works)


def by_layer(works: Sequence[Work]) -> Work:
    """The work of all layers, from that of each."""
    return jax.tree.map(lambda *each: jnp.stack(each), *works)


def put(into: Array, new: Array, at: Positions) -> Array:
    """`into` [B, S, ...] with `new` [B, n, ...] in the slots `at`; those past the end are dropped."""
    sequence = jnp.arange(len(at))[:, None]
    return into.at[sequence, at].set(new.astype(into.dtype), mode="drop")


def take(x: Float[Array, "B S D"], at: Positions) -> Float[Array, "B n D"]:
    """Entries of `x` in the slots `at`; undefined for slots past the end."""
    return jnp.take_along_axis(x, jnp.minimum(at, x.shape[1] - 1)[..., None], axis=1)


def in_order(chosen: Slots, most: int) -> Int[Array, "B most"]:
    """The chosen slots in ascending order, at most `most` of each sequence; S behind the last."""
    slots = jnp.arange(chosen.shape[1])
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, most)
    return put(jnp.full((len(chosen), most), len(slots)), jnp.broadcast_to(slots, chosen.shape), place)


def best(scores: Float[Array, "B S"], among: Slots, count: Int[Array, " B"] | int) -> Slots:
    """The `count` slots with the highest scores `among` some slots; ties go to the first."""
    slots = jnp.arange(scores.shape[1])
    mine, other = scores[:, :, None], scores[:, None, :]
    before = (other > mine) | ((other == mine) & (slots < slots[:, None]))
    rank = (before & among[:, None, :]).sum(2)
    return among & (rank < jnp.broadcast_to(count, len(scores))[:, None])


def counts(share: float, most: int) -> Int[np.ndarray, " n"]:
    """The number of tokens that a share of 0, 1, ..., `most` tokens is: rounded up, at least one."""
    return np.array([min(n, max(1, math.ceil(share * n - 1e-9))) for n in range(most + 1)], np.int32)


def one(slots: int, at: Int[Array, " B"]) -> Slots:
    """The slot `at` of each sequence alone."""
    return jnp.arange(slots) == at[:, None]


def last_logits(
    model: Transformer, params: PyTree, x: Float[Array, "B n D"], at: Positions, last: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Float32 logits of the tokens at positions `last`, which are among those `at`."""
    return logits(model, params, only(x, at, last)[:, 0])


def only(x: Float[Array, "B n D"], at: Positions, last: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """The hidden states of the tokens at positions `last`, which are among those `at`."""
    place = jnp.argmax(at == last[:, None], axis=1)
    return jnp.take_along_axis(x, place[:, None, None], axis=1)


def flops(config: ModelConfig, work: Work) -> Float[np.ndarray, " B"]:
    """FLOPs of each sequence in the layers, counted as in analysis/flops.py; no embedding, no output head."""
    sizes = Sizes.of(config)
    mlp = sizes.matrices * config.hidden_size * config.intermediate_size
    each = (work.made, sizes.made(0)), (work.tokens, sizes.dense(0) - mlp), (work.mlps, mlp)
    pairs = np.asarray(work.pairs, np.float64).sum(0)
    products = sum(2 * size * np.asarray(count, np.float64).sum(0) for count, size in each)
    return products + 4 * config.num_heads * config.head_dim * pairs
