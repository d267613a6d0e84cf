"""A decoder in three parts: two stacks of layers and, between them, the makers of the upper rows.

    tokens -> lower (every token) -> fill (rows of the upper layers) -> upper -> logits

`forward` is the definition: full sequences, every position. `step` adds tokens to a cache, and gives
`upper` only the survivors: the positions whose logits somebody wants. A plain transformer is the plan
in which only its last layer is `upper`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from swiftkv_jax import page_fill
from swiftkv_jax import params as weights
from swiftkv_jax.cache import Cache, make_batch
from swiftkv_jax.config import ModelConfig
from swiftkv_jax.kernels.causal_attention.api import causal_attention
from swiftkv_jax.kernels.dense import rms_norm
from swiftkv_jax.kernels.fused_kv_fill.api import Makers
from swiftkv_jax.layers import (
    Rotary,
    decoder_layer,
    keys_values,
    rotary,
    rotate,
)
from swiftkv_jax.plan import KVPlan
from swiftkv_jax.shapes import Array, Float, Hidden, Int, Logits, PyTree, Tokens
from swiftkv_jax.sharding import constrain

STREAM = "B T ."
_TURN = 4  # upper layers in one turn of the scan that runs them


class Transformer(nn.Module):
    """A decoder's shapes and names; its parameters are a plain nested dict (see params.py).

    Attributes:
      config: the layers. plan: where cache rows come from. dtype: of activations and of `init`'s parameters.
    """

    config: ModelConfig
    plan: KVPlan
    dtype: str = "float32"

    @nn.compact
    def __call__(self, tokens: Tokens) -> Logits:
        """Logits [B, T, V] in float32 at every position of full, causal sequences [B, T]."""
        tree = {
            name: self.param(name, partial(_init_subtree, self, name))
            for name in weights.weights(self.config, self.plan)
        }
        return logits(self, tree, forward(self, tree, tokens))


def _init_subtree(model: Transformer, name: str, key: Array) -> PyTree:
    leaves, tree = jax.tree.flatten(weights.weights(model.config, model.plan)[name])
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [w.init(k, jnp.dtype(model.dtype)) for w, k in zip(leaves, keys, strict=True)]
    )


def embed(model: Transformer, params: PyTree, tokens: Int[Array, "*batch"]) -> Hidden:
    """Token embeddings in the model's dtype."""
    return params["embed"][tokens].astype(model.dtype)


def logits(model: Transformer, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the stream leaving the last layer: final norm, then the output head."""
    return head(params, rms_norm(x, params["norm"], model.config.rms_norm_eps))


def head(params: PyTree, h: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of normalised hidden states; a tied model reads its embeddings backwards."""
    kernel = params["lm_head"] if "lm_head" in params else params["embed"].T
    return jnp.matmul(h, kernel.astype(h.dtype), preferred_element_type=jnp.float32)


def exit_logits(model: Transformer, params: PyTree, x: Hidden) -> Float[Array, "*batch V"]:
    """Float32 logits of the exit head, on the stream entering `split` (SwiftKV paper, B.4)."""
    p = params["exit"]
    return head(p, rms_norm(x, p["norm"], model.config.rms_norm_eps))


def forward(
    model: Transformer,
    params: PyTree,
    tokens: Tokens,
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B T D"]:
    """The stream leaving the last layer, at every position of full sequences.

    Packed rows give `segments` (a token sees its own segment only) and `positions` that restart in each.
    """
    at, segments = place(model, tokens, positions, segments)
    x = constrain(embed(model, params, tokens), STREAM)
    if not model.plan.stackable:
        return forward_layers(model, params, x, at, segments)
    x = lower(model, params, x, at, segments, remat)
    return upper(model, params, x, fill(model, params, x, at), at, segments, remat)[0]


def place(model, tokens, positions, segments) -> tuple[Rotary, Int[Array, "B T"]]:
    """Rotary angles and segments of full sequences; positions count from 0, one segment a row by default."""
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.ones_like(tokens) if segments is None else segments
    return rotary(model.config, positions, jnp.max(positions) + 1), segments


def lower(model: Transformer, params: PyTree, x, at: Rotary, segments, remat: bool = False):
    """The stream entering layer `plan.depth`: each layer makes its own row and reads it."""
    stack = (params["lower"], params["lower_rows"])
    return own_rows(model.config, stack, 0, x, at, segments, remat)[0]


def own_rows(config: ModelConfig, stack, first: int, x, at: Rotary, segments, remat: bool = False):
    """Consecutive layers from `first` on, each with its own maker; `stack` is (layers, makers), equally long.

    Returns the stream leaving the last of them and the stream entering it.
    """
    windows = jnp.array(config.windows[first : first + len(stack[0]["input_norm"])], jnp.int32)

    def layer(x, p):
        p, maker, window = p
        k, v = keys_values(config, maker, rms_norm(x, p["input_norm"], config.rms_norm_eps), at)
        return decoder_layer(config, p, x, at, lambda q: causal_attention(q, k, v, segments, window))

    return _scan(layer, x, (*stack, windows), remat)


def _scan(layer, x, stack, remat: bool, unroll: int = 1):
    """Run `layer` over a stack, `unroll` at a turn; the last stream and the one before it."""

    def body(carry, p):
        x, _ = carry
        return (constrain(layer(x, p), STREAM), x), None

    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    return jax.lax.scan(body, (x, x), stack, unroll=unroll)[0]


def fill(model: Transformer, params: PyTree, x: Float[Array, "*batch D"], at: Rotary):
    """Every upper row's keys and values, [..., rows, K, H], by one stacked matmul on the stream `x`.

    SwiftKV normalises the stream once with `norm_swiftkv` (SwiftKV paper, equation 2); otherwise the one
    maker here is the last layer, behind its own input norm. Makers that `page_fill.fold` made have that
    norm's gain in them.
    """
    config, p = model.config, params["fill"]
    if isinstance(p, Makers):
        k, v = page_fill.rows_of_stream(p, config.num_kv_heads, config.rms_norm_eps, x, at)
        return k.astype(x.dtype), v.astype(x.dtype)
    scale = p["norm_swiftkv"] if model.plan.is_swiftkv else weights.layer(params["upper"], 0)["input_norm"]
    h = rms_norm(x, scale, config.rms_norm_eps)
    heads = (config.num_kv_heads, config.head_dim)

    def project(p):
        y = jnp.einsum("...d,dre->...re", h, p["kernel"].astype(h.dtype))
        y = y + p["bias"].astype(h.dtype) if "bias" in p else y
        return y.reshape(*y.shape[:-1], *heads)

    k, v = project(p["k_proj"]), project(p["v_proj"])
    if "k_norm" in p:
        k = rms_norm(k, jnp.ones(heads[1], k.dtype), config.rms_norm_eps)
        k = k * p["k_norm"].astype(k.dtype)[:, None]
    return rotate(k, Rotary(at.cos[..., None, :], at.sin[..., None, :])), v


def upper(model: Transformer, params: PyTree, x, rows, at: Rotary, segments, remat: bool = False):
    """Every layer from `plan.depth` on, reading filled rows; returns as `own_rows` does."""
    config, plan = model.config, model.plan
    reads = jnp.array([plan.upper_rows.index(row) for row in plan.rows[plan.depth :]], jnp.int32)
    windows = jnp.array(config.windows[plan.depth :], jnp.int32)
    k, v = (jnp.moveaxis(y, -3, 0) for y in rows)

    def layer(x, p):
        p, row, window = p
        return decoder_layer(
            config, p, x, at, lambda q: causal_attention(q, k[row], v[row], segments, window)
        )

    # What the backward pass keeps of a turn goes through one stack for each of its arrays: longer turns copy
    # less. With remat there is next to nothing to keep.
    return _scan(layer, x, (params["upper"], reads, windows), remat, unroll=1 if remat else _TURN)


class _Rows(dict):
    """Full-sequence rows by number, with a cache's two verbs; `attention` as `causal_attention`."""

    def __init__(self, rows=(), attention=causal_attention):
        super().__init__(rows)
        self.attention = attention

    def write(self, rows, k, v, batch):
        new = (
            {rows: (k, v)}
            if isinstance(rows, int)
            else {row: (k[..., i, :, :], v[..., i, :, :]) for i, row in enumerate(rows)}
        )
        return _Rows(self | new, self.attention)

    def attend(self, row, q, batch, window):
        k, v = self[row]
        return self.attention(q, k, v, batch, window)


def forward_layers(model, params, x, at, segments, attention=causal_attention):
    """`forward` for a row map that no scan can run: layer by layer, exactly as `step` does."""
    x, rows = run_lower(model, params, x, at, segments, _Rows(attention=attention))
    rows = rows.write(model.plan.upper_rows, *fill(model, params, x, at), segments)
    return run_upper(model, params, x, at, segments, rows)


def run_lower(model: Transformer, params: PyTree, x: Hidden, at: Rotary, batch, cache):
    """Layers [0, depth), each maker writing its row of `cache` before its layer reads."""
    config, plan = model.config, model.plan
    for j in range(plan.depth):
        p = weights.layer(params["lower"], j)
        if j in plan.lower_makers:
            maker = weights.layer(params["lower_rows"], plan.lower_makers.index(j))
            k, v = keys_values(config, maker, rms_norm(x, p["input_norm"], config.rms_norm_eps), at)
            cache = cache.write(plan.rows[j], k, v, batch)
        attend = partial(cache.attend, plan.rows[j], batch=batch, window=config.windows[j])
        x = decoder_layer(config, p, x, at, attend)
    return x, cache


def run_upper(model: Transformer, params: PyTree, x: Hidden, at: Rotary, batch, cache) -> Hidden:
    """Layers [depth, L), reading rows that are all there."""
    config, plan = model.config, model.plan
    for j in range(plan.depth, plan.num_layers):
        attend = partial(cache.attend, plan.rows[j], batch=batch, window=config.windows[j])
        x = decoder_layer(config, weights.layer(params["upper"], j - plan.depth), x, at, attend)
    return x


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
    x, at, batch, cache = read(model, params, tokens, positions, query_starts, cache)
    if query_starts is not None and survivors is not None:
        x, at, batch = survive(x, at, positions, query_starts, survivors)
    return logits(model, params, run_upper(model, params, x, at, batch, cache)), cache


def read(model: Transformer, params: PyTree, tokens, positions, query_starts, cache: Cache):
    """The half of `step` that every token runs: all its rows are in the cache it returns.

    Returns (the stream entering the upper layers, its angles, its batch, the cache).
    """
    at = rotary(model.config, positions, cache.capacity)
    batch = make_batch(query_starts, positions)
    x, cache = run_lower(model, params, embed(model, params, tokens), at, batch, cache)
    return x, at, batch, write_upper(model, params, x, at, batch, cache)


def write_upper(model: Transformer, params: PyTree, x: Float[Array, "T D"], at: Rotary, batch, cache: Cache):
    """The cache with the upper rows of a flat batch in it, made from the stream `x` as `cache.fill` says.

    A named fused fill takes `params` as `page_fill.fold` makes them.
    """
    rows = model.plan.upper_rows
    if cache.fill is None:
        return cache.write(rows, *fill(model, params, x, at), batch)
    return page_fill.write(params["fill"], rows, model.config.rms_norm_eps, x, at, batch, cache)


def survive(x: Float[Array, "T D"], at: Rotary, positions, query_starts, survivors):
    """The survivors of a flat ragged batch: their (stream, angles, batch)."""
    alive = jnp.clip(survivors, 0, x.shape[0] - 1)
    starts = jnp.searchsorted(survivors, query_starts).astype(query_starts.dtype)
    return x[alive], Rotary(at.cos[alive], at.sin[alive]), make_batch(starts, positions[alive])
