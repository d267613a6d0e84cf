"""The parts of a decoder layer, as functions of parameters and arrays: rotary, projections."""

import math

import jax.numpy as jnp

from swiftkv_jax.config import ModelConfig, RopeConfig
from swiftkv_jax.kernels.after_attention.api import after_attention
from swiftkv_jax.kernels.dense import linear, rms_norm
from swiftkv_jax.kernels.rotary_angles.api import rotary_angles
from swiftkv_jax.pytree import pytree
from swiftkv_jax.shapes import Angles, Array, Float, Hidden, Int, KeyValues, PyTree, Queries


@pytree
class Rotary:
    """cos and sin of each token's rotary angles, [..., head_dim / 2] in float32."""

    cos: Angles
    sin: Angles


def inverse_frequencies(config: ModelConfig, length: int | Int[Array, ""]) -> Float[Array, " half"]:
    """Rotary inverse frequencies; `length` (tokens, traced or not) matters to `dynamic` scaling only."""
    rope, dim = config.rope, config.head_dim
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    match rope.rope_type:
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
    frequency = inverse_frequencies(config, length)
    return Rotary(*rotary_angles(positions, frequency, factor=config.rope.attention_factor))


def rotate(x: Float[Array, "*batch heads H"], at: Rotary) -> Float[Array, "*batch heads H"]:
    """Rotate the two halves of each head (the published Llama convention), in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = at.cos[..., None, :], at.sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def queries(config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> Queries:
    """Rotated queries of the normalised input `h`."""
    q = linear(h, p["q_proj"]).reshape(*h.shape[:-1], config.num_heads, config.head_dim)
    return rotate(rms_norm(q, p["q_norm"], config.rms_norm_eps) if "q_norm" in p else q, at)


def keys_values(config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> tuple[KeyValues, KeyValues]:
    """One row: rotated keys, and values, of the normalised input `h`."""
    heads = (*h.shape[:-1], config.num_kv_heads, config.head_dim)
    k, v = linear(h, p["k_proj"]).reshape(heads), linear(h, p["v_proj"]).reshape(heads)
    return rotate(rms_norm(k, p["k_norm"], config.rms_norm_eps) if "k_norm" in p else k, at), v


def decoder_layer(config: ModelConfig, p: PyTree, x: Hidden, at: Rotary, attend) -> Hidden:
    """One pre-norm layer; `attend(q)` reads whatever row this layer reads."""
    q = queries(config, p, rms_norm(x, p["input_norm"], config.rms_norm_eps), at)
    mixed = attend(q).reshape(*x.shape[:-1], -1)
    return after_attention(x, mixed, p, eps=config.rms_norm_eps)
