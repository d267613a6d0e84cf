"""The forward passes for training KV prediction, over packed rows, with scans over layers.

`predict.forward` is the definition, one layer after the other. Here one pass over a model keeps every row as
it leaves the projections; all rows of the base are predicted at once; and the base runs over given rows.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swiftkv_jax import weights
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.layers import Rotary, before, decoder_layer, linear, norm_heads, rotate
from swiftkv_jax.model import STREAM, Transformer, angles_and_segments, embed
from swiftkv_jax.predict import Predicted, Raw, finished, projected
from swiftkv_jax.rows import Pair
from swiftkv_jax.shapes import Array, Float, Hidden, Int, PyTree, Tokens
from swiftkv_jax.sharding import constrain

Rows = tuple[Float[Array, "n B T E"], Float[Array, "n B T E"]]  # as projections leave them
Heads = tuple[Float[Array, "n B T K H"], Float[Array, "n B T K H"]]
_RAW, _CUT = ". B T E", ". B T K ."


class Kept(NamedTuple):
    """The result of a pass over full sequences.

    Attributes:
      x: hidden states leaving the last layer that ran. raw: [n, B, T, E] keys, before norm and rotation, and
        values of all rows that were made. place: row -> its index among the n.
    """

    x: Hidden
    raw: Rows
    place: dict[int, int]

    def of(self, rows: Iterable[int]) -> Rows:
        """The keys and values of these rows, in this order."""
        return _taken(self.raw, [self.place[row] for row in rows])


def read(
    model: Transformer,
    params: PyTree,
    tokens: Tokens,
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    last: int | None = None,
    remat: bool = False,
    attention: Callable = causal_attention,
) -> Kept:
    """Run a model over packed rows and keep its rows.

    last: the layer from whose input the deepest needed rows are made; it does not run. None: all layers run.
    `remat` and `attention` as in `model.through`.
    """
    plan, config = model.plan, model.config
    end = plan.num_layers if last is None else last
    at, segments = angles_and_segments(config, tokens, positions, segments)
    x = constrain(embed(model, params, tokens, positions), STREAM)
    kept: list[tuple[Iterable[int], Rows]] = []
    ready: dict[int, Pair] = {}

    def project(layer: int) -> dict[int, Raw]:
        made = projected(model, params, layer, x)
        kept.append((made, jax.tree.map(lambda *each: jnp.stack(each), *made.values())))
        return made

    for run, stack in zip(weights.ranges(params["layers"]), params["layers"], strict=True):
        part = range(run.start, min(run.stop, end))
        if not part:
            break
        (stack,) = weights.recut([stack], [range(len(part))])
        attend = _attend(config, segments, run.start, attention)
        if plan.makes_own(run.start):
            numbers = plan.reads[part.start : part.stop]
            (makers,) = weights.recut(params["rows"], [range(numbers[0], numbers[-1] + 1)])
            x, raw = _making(config, stack, makers, x, at, attend, remat)
            kept.append((numbers, raw))
        else:
            made = project(run.start) if plan.made_at(run.start) else {}
            ready |= {row: finished(config, weights.row(params, row), raw, at) for row, raw in made.items()}
            given = [ready[row] for row in plan.reads[part.start : part.stop]]
            rows = jax.tree.map(lambda *each: jnp.stack(each), *given)
            x = _reading(config, stack, x, rows, at, attend, remat)
    if last is not None:
        project(last)
    place = {row: i for i, row in enumerate(row for rows, _ in kept for row in rows)}
    raw = jax.tree.map(lambda *each: jnp.concatenate(each), *(raw for _, raw in kept))
    return Kept(x, jax.tree.map(lambda y: constrain(y, _RAW), raw), place)


def predict_rows(model: Predicted, params: PyTree, given: tuple[Array, Array]) -> Rows:
    """The base's rows [R, B, T, E] as they would leave its projections, predicted from the auxiliary's
    rows."""
    rows = range(model.base.plan.num_rows)
    (maps,) = weights.recut(params["predictor"]["rows"], [rows])
    keys, values = (x.astype(model.base.dtype) for x in given)
    mapped = jax.vmap(linear)(keys, maps["k_proj"]), jax.vmap(linear)(values, maps["v_proj"])
    return jax.tree.map(lambda y: constrain(y, _RAW), mapped)


def normed(model: Transformer, params: PyTree, raw: Rows) -> Heads:
    """All rows of a model [R, B, T, K, H], keys normed where it norms them, and not rotated."""
    config = model.config
    keys, values = (x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim) for x in raw)
    if config.qk_norm:
        gains = jnp.stack([weights.row(params, row)["k_norm"] for row in range(model.plan.num_rows)])
        keys = jax.vmap(lambda k, gain: norm_heads(config, k, gain))(keys, gains)
    return constrain(keys, _CUT), constrain(values, _CUT)


def run_over(
    model: Transformer,
    params: PyTree,
    rows: Heads,
    tokens: Tokens,
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    remat: bool = False,
    attention: Callable = causal_attention,
) -> Hidden:
    """The hidden states leaving the last layer of a model whose rows are all given, as `normed` returns
    them."""
    config = model.config
    at, segments = angles_and_segments(config, tokens, positions, segments)
    keys, values = constrain(rotate(rows[0], at), _CUT), rows[1]
    x = constrain(embed(model, params, tokens, positions), STREAM)
    for run, stack in zip(weights.ranges(params["layers"]), params["layers"], strict=True):
        given = _taken((keys, values), model.plan.reads[run.start : run.stop])
        x = _reading(config, stack, x, given, at, _attend(config, segments, run.start, attention), remat)
    return x


def differences(got: Heads, want: Heads, real: Float[Array, "B T"]) -> Float[Array, ""]:
    """Sum over rows, real tokens, and keys and values, of the mean absolute difference over heads and widths,
    in float32."""

    def one(a, b):
        gap = a.astype(jnp.float32) - b.astype(jnp.float32)
        gap *= jax.lax.stop_gradient(jnp.sign(gap))  # jnp.abs has a slope of 1 at 0; equal rows have none
        return jnp.sum(jnp.mean(gap, axis=(-2, -1)) * real)

    return one(got[0], want[0]) + one(got[1], want[1])


def _taken(arrays, index):
    """Select `index` from stacked arrays; if that is all of them, the arrays themselves are returned."""
    if list(index) == list(range(arrays[0].shape[0])):
        return arrays
    chosen = jnp.array(list(index))
    return arrays[0][chosen], arrays[1][chosen]


def _attend(config: ModelConfig, segments, layer: int, attention: Callable) -> Callable:
    window = config.windows[layer]
    return lambda q, k, v: attention(q, k, v, segments, window)


def _making(config: ModelConfig, stack, makers, x, at: Rotary, attend, remat: bool) -> tuple[Hidden, Rows]:
    """A run whose layers each make their own row: the hidden states leaving it, and the rows."""

    def layer(x, p):
        p, maker = p
        h = before(config, p["attentions"][0], x)
        raw = linear(h, maker["k_proj"]), linear(h, maker["v_proj"])
        k, v = finished(config, maker, raw, at)
        return decoder_layer(config, p, x, at, [lambda q: attend(q, k, v)]), raw

    return _scan(layer, x, (stack, makers), remat)


def _reading(config: ModelConfig, stack, x, rows: Heads, at: Rotary, attend, remat: bool) -> Hidden:
    """A run whose layers read these rows, one each."""

    def layer(x, p):
        p, (k, v) = p
        return decoder_layer(config, p, x, at, [lambda q: attend(q, k, v)]), None

    return _scan(layer, x, (stack, rows), remat)[0]


def _scan(layer: Callable, x: Hidden, stack: PyTree, remat: bool):
    def body(x, p):
        x, out = layer(x, p)
        return constrain(x, STREAM), out

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False) if remat else body, x, stack)
