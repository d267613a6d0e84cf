"""The parts of a decoder layer, as functions of parameters and arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.config.experts import Experts
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.config.rope import NONE, RopeConfig
from swiftkv_jax.core.pytree import pytree, static
from swiftkv_jax.core.shapes import Angles, Array, Float, Hidden, Int, PyTree, Queries, Weight
from swiftkv_jax.core.sharding import SHARDS
from swiftkv_jax.kernels.common.dispatch import device
from swiftkv_jax.kernels.common.mask import weights_of
from swiftkv_jax.kernels.expert_mlp.api import expert_mlp

_BY_TOKEN = "by_token"  # name of an empty array beside an 8-bit kernel: see `by_token`


def linear(x: Float[Array, "*batch i"], p: PyTree) -> Float[Array, "*batch o"]:
    """x @ kernel (+ bias), in x's dtype. Only this function and `kernel_of` touch kernels.

    Master weights in float32 are rounded here, where they are used. An 8-bit kernel has a `scale`, a float32
    factor for each output column; x is rounded to 8 bits too, with a scale for each token, if `by_token` was
    applied to the parameters.
    """
    kernel = p["kernel"]
    if _BY_TOKEN in p:
        wide, integers = x.astype(jnp.float32), kernel.dtype == jnp.int8
        most = 127.0 if integers else float(jnp.finfo(kernel.dtype).max)
        peak = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
        scale = jnp.where(peak > 0, peak / most, 1.0)
        q = (jnp.round(wide / scale) if integers else wide / scale).astype(kernel.dtype)
        y = jnp.matmul(q, kernel, preferred_element_type=jnp.int32 if integers else jnp.float32)
        y = (y.astype(jnp.float32) * scale * p["scale"]).astype(x.dtype)
    elif "scale" in p:
        y = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        y = (y * p["scale"]).astype(x.dtype)
    else:
        y = jnp.matmul(x, kernel.astype(x.dtype))
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def linear_weights(inside: tuple[str, int], outside: tuple[str, int], bias: bool, std: float) -> PyTree:
    """The `Weight`s of one `linear`; `inside` and `outside` are its input and output (axis letter, width)."""
    kernel = Weight((inside[1], outside[1]), f"{inside[0]} {outside[0]}", std)
    return {"kernel": kernel} | ({"bias": Weight((outside[1],), outside[0])} if bias else {})


def head_norm(config: ModelConfig, letter: str, width: int) -> Weight:
    """The gain of a norm of queries or keys, whose heads are `width` wide together and have axis `letter`."""
    fill = 0.0 if config.norm == "rms_plus_one" else 1.0
    shape, axis = ((width,), letter) if config.qk_norm_whole else ((config.head_dim,), ".")
    return Weight(shape, axis, fill=fill)


def kernel_of(p: PyTree, dtype=None, scaled: bool = True) -> Array:
    """A kernel, or a stack of them, for products that `linear` does not compute, with its scale multiplied
    in, or as stored. It is in `dtype`; by default in its own, or in float32 if it is an 8-bit kernel."""
    kernel = p["kernel"]
    if "scale" in p and scaled:
        kernel = kernel.astype(jnp.float32) * p["scale"][..., None, :]
    return kernel if dtype is None else kernel.astype(dtype)


def is_linear(part: PyTree) -> bool:
    """Whether a part of a tree is one projection's: its kernel, with its bias or scale if it has them."""
    return isinstance(part, dict) and "kernel" in part


def dequantised(tree: PyTree, dtype) -> PyTree:
    """The same parameters with their 8-bit kernels in `dtype`, without scales."""

    def one(p: PyTree) -> PyTree:
        if not is_linear(p) or "scale" not in p:
            return p
        return {name: p[name] for name in p.keys() - {"scale", _BY_TOKEN}} | {"kernel": kernel_of(p, dtype)}

    return jax.tree.map(one, tree, is_leaf=is_linear)


def by_token(tree: PyTree) -> PyTree:
    """The same parameters, whose 8-bit kernels `linear` multiplies with activations in 8 bits: faster where a
    chip has such products (int8 on TPUs, e4m3 on Hopper), and less exact."""

    def one(p: PyTree) -> PyTree:
        return p | {_BY_TOKEN: p["scale"][..., :0]} if is_linear(p) and "scale" in p else p

    return jax.tree.map(one, tree, is_leaf=is_linear)


def rms_norm(x: Float[Array, "*batch w"], gain: Float[Array, " w"], eps: float) -> Float[Array, "*batch w"]:
    """Root-mean-square norm, computed in float32 and rounded before the gain, as the checkpoints expect."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * gain.astype(x.dtype)


def layer_norm(
    x: Float[Array, "*batch w"], gain: Float[Array, " w"] | None, bias: Float[Array, " w"] | None, eps: float
) -> Float[Array, "*batch w"]:
    """LayerNorm in float32: mean 0 and variance 1, then the gain and the bias, if there are any."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if gain is not None and bias is not None:
        wide = wide * gain.astype(jnp.float32) + bias.astype(jnp.float32)
    return wide.astype(x.dtype)


LATENT_EPS = 1e-6  # of the norms of latents, whatever config.json says
SHARED, AFTER = "shared_", "after_"  # before a norm's leaves: of SwiftKV's rows; of a norm behind its part


def norm_weights(config: ModelConfig, prefix: str = "") -> dict[str, Weight]:
    """Name -> the `Weight` of each leaf of one norm of the stream; the leaves lie beside the part's own."""
    if config.norm == "layer_plain":
        return {}
    gain = Weight((config.hidden_size,), ".", fill=0.0 if config.norm == "rms_plus_one" else 1.0)
    bias = {f"{prefix}norm_bias": Weight((config.hidden_size,), ".")} if config.norm == "layer" else {}
    return {f"{prefix}norm": gain} | bias


def shared_norm_weights(config: ModelConfig) -> dict[str, Weight]:
    """The same for the norm that SwiftKV rows share, by top-level names; empty if no norm precedes a part."""
    return norm_weights(config, SHARED) if config.norm_before else {}


def unit_norm(config: ModelConfig, dtype, prefix: str = "") -> PyTree:
    """The leaves of a norm that only normalises."""
    found = norm_weights(config, prefix).items()
    return {name: jnp.full(weight.shape, weight.fill, dtype) for name, weight in found}


def effective_gain(config: ModelConfig, gain: Float[Array, "*n w"]) -> Float[Array, "*n w"]:
    """The factor that a norm multiplies by, from its `gain` leaf."""
    return 1.0 + gain.astype(jnp.float32) if config.norm == "rms_plus_one" else gain


def norm(config: ModelConfig, p: PyTree, x: Hidden, prefix: str = "") -> Hidden:
    """Normalise the stream, or heads, with the leaves that `norm_weights` names."""
    gain, bias = (p.get(f"{prefix}{name}") for name in ("norm", "norm_bias"))
    if not config.norm.startswith("rms"):
        return layer_norm(x, gain, bias, config.rms_norm_eps)
    wide = x.astype(jnp.float32) if config.norm == "rms_plus_one" else x
    return rms_norm(wide, effective_gain(config, p[f"{prefix}norm"]), config.rms_norm_eps).astype(x.dtype)


def before(config: ModelConfig, p: PyTree, x: Hidden, prefix: str = "") -> Hidden:
    """The input of a part of a layer (its attention or its MLP), from the stream `x`."""
    return norm(config, p, x, prefix) if config.norm_before else x


def after(config: ModelConfig, p: PyTree, y: Hidden) -> Hidden:
    """The residual update of the stream, from the output `y` of a part of a layer."""
    y = norm(config, p, y, AFTER) if config.norm_after else y
    return y if config.residual_scale == 1 else y * jnp.asarray(config.residual_scale, y.dtype)


@pytree
class Rotary:
    """The rotary angles of tokens, by each of a model's tables: cos and sin, [..., rotary_dim / 2] in
    float32. `stretch`: factors of the queries by position, [..., 1]; None where the table has none."""

    cos: tuple[Angles, ...]
    sin: tuple[Angles, ...]
    stretch: tuple[Angles | None, ...]
    ropes: tuple[RopeConfig, ...] = static()

    def at(self, index: Int[Array, "*batch"]) -> "Rotary":
        """The angles at these indices of a table of angles, or of a flat batch."""
        return jax.tree.map(lambda x: x[index], self)

    def of(self, config: ModelConfig, maker: int) -> "Rotary":
        """The one table by which a row that layer `maker` makes is rotated, and the queries that read it."""
        if len(self.ropes) == 1:
            return self
        i = self.ropes.index(config.kinds[maker].rope)
        return Rotary((self.cos[i],), (self.sin[i],), (self.stretch[i],), (self.ropes[i],))


def inverse_frequencies(
    config: ModelConfig, length: int | Int[Array, ""], rope: RopeConfig | None = None
) -> Float[Array, " half"]:
    """Rotary inverse frequencies of `rope`, by default of the config's own; `length` (tokens, traced or not)
    matters to `dynamic` and `longrope` scaling only."""
    rope = rope or config.rope
    dim = rope.width(config.rotary_head)
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    match rope.rope_type:
        case "none":
            return jnp.zeros_like(exponent)
        case "linear":
            return 1.0 / rope.rope_theta**exponent / rope.factor
        case "dynamic":
            context = config.max_position_embeddings
            grown = jnp.maximum(jnp.asarray(length, jnp.float32), context)
            stretch = rope.factor * grown / context - (rope.factor - 1)
            return 1.0 / (rope.rope_theta * stretch ** (dim / (dim - 2))) ** exponent
        case "llama3":
            return _llama3(1.0 / rope.rope_theta**exponent, rope)
        case "yarn":
            return _yarn(rope.rope_theta**exponent, rope, dim)
        case "longrope":
            long = length > rope.original_max_position_embeddings
            factors = jnp.where(long, *(jnp.array(each) for each in (rope.long_factor, rope.short_factor)))
            return 1.0 / (factors * rope.rope_theta**exponent)
        case _:
            return 1.0 / rope.rope_theta**exponent


def _llama3(freq: Float[Array, " half"], rope: RopeConfig) -> Float[Array, " half"]:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_position_embeddings / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = (1 - smooth) * freq / rope.factor + smooth * freq
    out = jnp.where(turns < rope.low_freq_factor, freq / rope.factor, freq)
    return jnp.where((turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor), ramp, out)


def _yarn(period: Float[Array, " half"], rope: RopeConfig, dim: int) -> Float[Array, " half"]:
    """Interpolated below `beta_slow` turns, kept above `beta_fast`, a linear ramp between (arXiv
    2309.00071)."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
    return ramp / (rope.factor * period) + (1 - ramp) / period


def rotary(config: ModelConfig, positions: Int[Array, "*batch"], length: int | Int[Array, ""]) -> Rotary:
    """The angles of tokens at `positions`; `length` as in `inverse_frequencies`."""
    found = [_angles(config, rope, positions, length) for rope in config.tables]
    cos, sin = (tuple(each) for each in zip(*found, strict=True))
    wide = positions[..., None].astype(jnp.float32)
    stretch = tuple(
        1 + rope.llama_4_scaling_beta * jnp.log1p(wide // rope.original_max_position_embeddings)
        if rope.llama_4_scaling_beta
        else None
        for rope in config.tables
    )
    return Rotary(cos, sin, stretch, config.tables)


def _angles(config: ModelConfig, rope: RopeConfig, positions, length) -> tuple[Angles, Angles]:
    angle = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, length, rope)
    factor = rope.attention_factor

    def turned() -> tuple[Angles, Angles]:
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor

    def unturned() -> tuple[Angles, Angles]:
        return jnp.full_like(angle, factor), jnp.zeros_like(angle)

    if device()[0] != "cpu":
        return turned()
    # XLA:CPU would recompute the cosines in every layer; it keeps the result of a conditional.
    return jax.lax.cond(jnp.any(positions != 0), turned, unturned)


def rotate(x: Float[Array, "*batch heads H"], at: Rotary) -> Float[Array, "*batch heads H"]:
    """Rotate the two halves of each head (the published Llama convention), in float32. In a head wider than
    the angles only its first part is rotated.

    Where neighbours are pairs, they are moved into two halves first and stay there: scores do not change, as
    queries and keys are reordered alike.
    """
    (cos,), (sin,), (rope,) = at.cos, at.sin, at.ropes
    width, whole = 2 * cos.shape[-1], x
    x = x[..., :width].astype(jnp.float32)
    a, b = (x[..., ::2], x[..., 1::2]) if rope.interleaved else jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    x = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(whole.dtype)
    return x if width == whole.shape[-1] else jnp.concatenate([x, whole[..., width:]], axis=-1)


def turned(x: Float[Array, "*batch heads H"], at: Rotary, first: int = 0) -> Float[Array, "*batch heads H"]:
    """Rotated heads, by one table, but for their `first` numbers; unchanged where there is no rotary
    embedding."""
    (rope,) = at.ropes
    if rope.rope_type == NONE:
        return x
    return jnp.concatenate([x[..., :first], rotate(x[..., first:], at)], axis=-1) if first else rotate(x, at)


def query_weights(config: ModelConfig) -> PyTree:
    """The `Weight`s that make an attention's queries."""
    width, heads = ("D", config.hidden_size), ("N", config.num_heads * config.head_dim)
    if config.latent is None:
        norm = {"q_norm": head_norm(config, *heads)} if config.qk_norm else {}
        return {"q_proj": linear_weights(width, heads, config.qkv_bias, 0.02)} | norm
    if not config.latent.query_rank:
        return {"q_proj": linear_weights(width, heads, False, 0.02)}
    made = (".", config.latent.query_rank)
    return {
        "q_a_proj": linear_weights(width, made, config.qkv_bias, 0.02),
        "q_a_norm": Weight((made[1],), ".", fill=1.0),
        "q_b_proj": linear_weights(made, heads, False, 0.02),
    }


def queries(config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> Queries:
    """Rotated queries of the normalised input `h`, for scores scaled by the root of their width."""
    if "q_a_proj" in p:
        h = rms_norm(linear(h, p["q_a_proj"]), p["q_a_norm"], LATENT_EPS)
    q = in_heads(config, linear(h, p["q_b_proj" if "q_a_proj" in p else "q_proj"]))
    q = norm_heads(config, q, p["q_norm"]) if "q_norm" in p else q
    if config.attention_scale is not None:
        q = q * jnp.asarray(config.attention_scale * config.head_dim**0.5, q.dtype)
    (stretch,) = at.stretch
    q = q if stretch is None else q * stretch[..., None].astype(q.dtype)
    return turned(q, at, config.head_dim - config.rotary_head)


def norm_heads(
    config: ModelConfig, x: Float[Array, "*batch heads H"], gain: Float[Array, " w"]
) -> Float[Array, "*batch heads H"]:
    """Queries or keys normed, each head by itself or all together."""
    whole = x.reshape(*x.shape[:-2], -1) if config.qk_norm_whole else x
    return norm(config, {"norm": gain}, whole).reshape(x.shape)


def in_heads(config: ModelConfig, y: Float[Array, "*batch E"]) -> Float[Array, "*batch K H"]:
    """A projection of queries, keys or values, clipped where the model clips them, cut into heads.

    Without the barrier XLA:TPU lays out the product by head, and so copies the weight into another layout at
    every launch: 42 MB a layer of Llama-3.1-8B, on v5p. On a GPU the barrier would cost a kernel launch.
    """
    y = y if config.clip_qkv is None else jnp.clip(y, -config.clip_qkv, config.clip_qkv)
    y = jax.lax.optimization_barrier(y) if device()[0] == "tpu" else y
    return y.reshape(*y.shape[:-1], -1, config.head_dim)


def relative_bias(
    config: ModelConfig, table: Float[Array, "buckets N"], ahead: np.ndarray
) -> Float[Array, "N n"]:
    """T5's bias of the scores by head, for keys `ahead` [n] tokens of their query (negative: behind it). Half
    of the buckets hold one distance each; the others widen with distance."""
    buckets = config.relative_buckets // (2 if config.bidirectional else 1)
    first = np.where(ahead > 0, buckets, 0) if config.bidirectional else 0
    far = np.abs(ahead) if config.bidirectional else np.maximum(-ahead, 0)
    exact = buckets // 2
    # In float32, as checkpoints were trained: bucket borders fall on whole distances, so rounding matters.
    grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    grown = grown / np.float32(math.log(config.relative_distance / exact)) * np.float32(buckets - exact)
    large = np.minimum(exact + grown.astype(np.int32), buckets - 1)
    return table[first + np.where(far < exact, far, large)].T.astype(jnp.float32)


def causal_bias(config: ModelConfig, table: Float[Array, "buckets N"], length: int) -> Float[Array, "N S"]:
    """`relative_bias` of keys less than `length` tokens back, indexed by how far back they are."""
    return relative_bias(config, table, -np.arange(length))


def see_all(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    lengths: Int[Array, " B"],
    bias: Float[Array, "N n"] | None = None,
) -> Float[Array, "B T N U"]:
    """Attention in which every query sees all keys of its row, the first of `lengths`.

    bias: [N, 2 S - 1] of the scores, by head and by how far ahead a key is, from 1 - S on. Queries are
    processed in blocks, so that the scores of all never exist at once.
    """
    length, keys = q.shape[1], k.shape[1]
    seen = jnp.arange(keys) < lengths[:, None]
    v = jnp.where(seen[..., None, None], v, 0)  # unseen values may be NaN, and 0 x NaN is NaN

    def some(first, q):
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
        scores = scores * q.shape[-1] ** -0.5
        if bias is not None:
            ahead = jnp.arange(keys) - (first + jnp.arange(q.shape[1]))[:, None]
            scores = scores + bias[:, jnp.clip(ahead + keys - 1, 0, 2 * keys - 2)].reshape(scores.shape[1:])
        weights = weights_of(scores, seen[:, None, None, None]).astype(v.dtype)
        return jnp.einsum("bkgts,bsku->btkgu", weights, v).reshape(*q.shape[:3], -1)

    if length <= _TOGETHER:
        return some(0, q)
    pieces = -(-length // _TOGETHER)
    cut = jnp.pad(q, ((0, 0), (0, pieces * _TOGETHER - length), (0, 0), (0, 0)))
    cut = jnp.moveaxis(cut.reshape(q.shape[0], pieces, _TOGETHER, *q.shape[2:]), 1, 0)
    out = jax.lax.map(lambda x: some(*x), (_TOGETHER * jnp.arange(pieces), cut))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *out.shape[3:])[:, :length]


_TOGETHER = 512  # queries of a sequence whose scores exist at a time
_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


@runtime_checkable
class Mlp(Protocol):
    """A kind of MLP: its weights, and itself as a function of the normalised input."""

    def weights(self, config: ModelConfig) -> PyTree:
        """The tree of `Weight`s of one layer's, without its norm."""
        ...

    def __call__(self, config: ModelConfig, p: PyTree, h: Hidden) -> Hidden: ...


class Dense:
    """A feed-forward network, gated where the model's are."""

    def weights(self, config: ModelConfig) -> PyTree:
        width, ffn = ("D", config.hidden_size), ("F", config.intermediate_size)
        inner = {name: linear_weights(width, ffn, config.mlp_bias, 0.02) for name in _INNER[config.gated]}
        return inner | {"down_proj": linear_weights(ffn, width, config.mlp_bias, residual_std(config))}

    def __call__(self, config: ModelConfig, p: PyTree, h: Hidden) -> Hidden:
        activation = _ACTIVATIONS[config.activation]
        if not config.gated:
            return linear(activation(linear(h, p["up_proj"])), p["down_proj"])
        return linear(activation(linear(h, p["gate_proj"])) * linear(h, p["up_proj"]), p["down_proj"])


_INNER = {True: ("gate_proj", "up_proj"), False: ("up_proj",)}


class ExpertMlp:
    """Gated MLPs of which each token runs some, and one that all tokens run, if the model has it."""

    def weights(self, config: ModelConfig) -> PyTree:
        experts = experts_of(config)
        count, width, ffn = experts.count, config.hidden_size, experts.width
        inner = {"kernel": Weight((count, width, ffn), "X D .", 0.02)}
        outer = {"kernel": Weight((count, ffn, width), "X . D", residual_std(config))}
        tree = {
            "router": linear_weights(("D", width), (".", count), False, 0.02),
            "experts": {"gate_proj": inner, "up_proj": inner, "down_proj": outer},
        }
        if experts.router == "noaux_tc":
            tree["choice"] = Weight((count,), ".", dtype="float32")
        if experts.shared:
            tree["shared"] = Dense().weights(shared_mlp(config))
        if experts.shared_gate:
            tree["shared_gate"] = linear_weights(("D", width), (".", 1), False, 0.02)
        return tree

    def __call__(self, config: ModelConfig, p: PyTree, h: Hidden) -> Hidden:
        experts, rows = experts_of(config), h if h.ndim == 3 else h[None]
        wide = rows.astype(jnp.float32)
        scores = jnp.matmul(wide, kernel_of(p["router"], jnp.float32), precision="highest")
        chosen, shares = route(experts, scores, p.get("choice"))
        parts = [p["experts"][name] for name in ("gate_proj", "up_proj", "down_proj")]
        scales = [part["scale"] for part in parts if "scale" in part]
        if len(scales) == len(parts):
            kernels = [kernel_of(part, scaled=False) for part in parts] + scales
        else:
            kernels = [kernel_of(part, h.dtype) for part in parts]
        options = {"activation": _ACTIVATIONS[config.activation], "shards": SHARDS}
        out = expert_mlp(rows, chosen, shares, *kernels, **options).reshape(h.shape)
        if not experts.shared:
            return out
        common = Dense()(shared_mlp(config), p["shared"], h)
        gate = jax.nn.sigmoid(linear(h, p["shared_gate"])) if experts.shared_gate else 1
        return out + gate * common


def experts_of(config: ModelConfig) -> Experts:
    assert config.experts is not None  # see `ModelConfig`
    return config.experts


def shared_mlp(config: ModelConfig) -> ModelConfig:
    """The config of the MLP that all tokens run beside their experts."""
    return dataclasses.replace(config, sizes=(), intermediate_size=experts_of(config).shared)


def route(
    experts: Experts, scores: Float[Array, "*batch X"], bias: Float[Array, " X"] | None
) -> tuple[Int[Array, "*batch k"], Float[Array, "*batch k"]]:
    """Each token's experts and their weights, by the router's `scores` and the `bias` of "noaux_tc", in
    float32."""
    by_sigmoid = experts.router == "noaux_tc"
    likely = jax.nn.sigmoid(scores) if by_sigmoid else jax.nn.softmax(scores, axis=-1)
    ranked = likely if bias is None else likely + bias.astype(jnp.float32)
    if experts.router != "greedy":
        groups = ranked.reshape(*ranked.shape[:-1], experts.groups, -1)
        best = jnp.sum(jax.lax.top_k(groups, 2 if by_sigmoid else 1)[0], axis=-1)
        _, kept = jax.lax.top_k(best, experts.top_groups)
        alive = jnp.any(kept[..., None] == jnp.arange(experts.groups), axis=-2)
        ranked = jnp.where(alive[..., None], groups, -jnp.inf).reshape(ranked.shape)
    _, chosen = jax.lax.top_k(ranked, experts.per_token)
    shares = jnp.take_along_axis(likely, chosen, axis=-1)
    if experts.normalise:
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + 1e-20)
    return chosen, shares * experts.scale


class LinearMap:
    """One linear map in the place of an MLP."""

    def weights(self, config: ModelConfig) -> PyTree:
        return {"linear_mlp": linear_map(config)}

    def __call__(self, config: ModelConfig, p: PyTree, h: Hidden) -> Hidden:
        return linear(h, p["linear_mlp"])


# By the names in `ModelConfig.mlps`.
MLPS: dict[str, Mlp | None] = {"dense": Dense(), "experts": ExpertMlp(), "linear": LinearMap(), "none": None}


def linear_map(config: ModelConfig) -> PyTree:
    """The `Weight`s of one linear map in the place of a layer's attention or MLP."""
    return linear_weights(("D", config.hidden_size), (".", config.hidden_size), False, residual_std(config))


def residual_std(config: ModelConfig) -> float:
    """The initial standard deviation of what writes to the stream: residual branches start small (GPT-2)."""
    return 0.02 / (2 * config.num_layers) ** 0.5


def decoder_layer(
    config: ModelConfig,
    p: PyTree,
    x: Hidden,
    at: Rotary,
    reads: Sequence[Callable[[Queries], Queries] | None],
    mlp: Callable[[ModelConfig, PyTree, Hidden], Hidden] | None,
) -> Hidden:
    """One layer: its attentions in order, then its MLP, if it has these.

    at: the angles of the table that rotates the row that it reads. reads: for each attention of the layer,
    the function from its queries [*batch, N, H] to its output; None: a linear map is in its place.
    """
    for attention, read in zip(p["attentions"], reads, strict=True):
        h = before(config, attention, x)
        if read is None:
            mixed = linear(h, attention["linear_attn"])
        else:
            mixed = read(queries(config, attention, h, at))
            mixed = linear(mixed.reshape(*x.shape[:-1], -1), attention["o_proj"])
        x = x + after(config, attention, mixed)
    if mlp is None:
        return x
    return x + after(config, p["mlp"], mlp(config, p["mlp"], before(config, p["mlp"], x)))
