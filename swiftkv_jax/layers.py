"""The parts of a decoder layer, as functions of parameters and arrays."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from swiftkv_jax.config import ModelConfig
from swiftkv_jax.kernels.common.dispatch import device
from swiftkv_jax.pytree import pytree
from swiftkv_jax.rope import RopeConfig
from swiftkv_jax.shapes import Angles, Array, Float, Hidden, Int, KeyValues, PyTree, Queries


def linear(x: Float[Array, "*batch i"], p: PyTree) -> Float[Array, "*batch o"]:
    """x @ kernel (+ bias), in x's dtype: the only function that meets a kernel.

    Master weights in float32 are rounded here, where they are used. An 8-bit kernel has a `scale` for each
    of its columns, a float32 factor of what comes out.
    """
    if "scale" in p:
        y = jnp.matmul(x, p["kernel"].astype(x.dtype), preferred_element_type=jnp.float32)
        y = (y * p["scale"]).astype(x.dtype)
    else:
        y = jnp.matmul(x, p["kernel"].astype(x.dtype))
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def rms_norm(x: Float[Array, "*batch w"], gain: Float[Array, " w"], eps: float) -> Float[Array, "*batch w"]:
    """Root-mean-square norm, computed in float32 and rounded before the gain, as the checkpoints expect."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * gain.astype(x.dtype)


@pytree
class Rotary:
    """cos and sin of each token's rotary angles, [..., head_dim / 2] in float32."""

    cos: Angles
    sin: Angles

    def at(self, index: Int[Array, "*batch"]) -> "Rotary":
        """The angles at some places of a table of angles, or of a flat batch."""
        return Rotary(self.cos[index], self.sin[index])


def inverse_frequencies(config: ModelConfig, length: int | Int[Array, ""]) -> Float[Array, " half"]:
    """Rotary inverse frequencies; `length` (tokens, traced or not) matters to `dynamic` scaling only."""
    rope, dim = config.rope, config.head_dim
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
    angle = positions[..., None].astype(jnp.float32) * inverse_frequencies(config, length)
    factor = config.rope.attention_factor

    def turned() -> tuple[Angles, Angles]:
        return jnp.cos(angle) * factor, jnp.sin(angle) * factor

    def unturned() -> tuple[Angles, Angles]:
        return jnp.full_like(angle, factor), jnp.zeros_like(angle)

    if device()[0] != "cpu":
        return Rotary(*turned())
    # XLA for CPUs would compute each cosine again in every layer; what a condition gives, it keeps.
    return Rotary(*jax.lax.cond(jnp.any(positions != 0), turned, unturned))


def rotate(x: Float[Array, "*batch heads H"], at: Rotary) -> Float[Array, "*batch heads H"]:
    """Rotate the two halves of each head (the published Llama convention), in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = at.cos[..., None, :], at.sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def queries(config: ModelConfig, p: PyTree, h: Hidden, at: Rotary) -> Queries:
    """Rotated queries of the normalised input `h`."""
    q = _by_head(linear(h, p["q_proj"]), config.num_heads)
    return rotate(rms_norm(q, p["q_norm"], config.rms_norm_eps) if "q_norm" in p else q, at)


def project(config: ModelConfig, p: PyTree, h: Hidden) -> KeyValues:
    """Keys or values of the normalised input `h`, cut into kv heads; keys before their norm and rotation."""
    return _by_head(linear(h, p), config.num_kv_heads)


def _by_head(y: Float[Array, "*batch E"], heads: int) -> Float[Array, "*batch K H"]:
    """A product cut into heads.

    Without the barrier XLA for TPUs lays the product out by head, and for that copies its kernel into another
    order at every launch: 42 MB a layer of Llama-3.1-8B, on v5p. On a GPU the barrier would cost a kernel.
    """
    y = jax.lax.optimization_barrier(y) if device()[0] == "tpu" else y
    return y.reshape(*y.shape[:-1], heads, -1)


def finish_keys(config: ModelConfig, p: PyTree, k: KeyValues, at: Rotary) -> KeyValues:
    """Projected keys as queries meet them: normed where the model has `k_norm`, then rotated."""
    return rotate(rms_norm(k, p["k_norm"], config.rms_norm_eps) if "k_norm" in p else k, at)


def gated_mlp(p: PyTree, h: Hidden) -> Hidden:
    """The gated SiLU feed-forward network of the normalised input `h`."""
    return linear(jax.nn.silu(linear(h, p["gate_proj"])) * linear(h, p["up_proj"]), p["down_proj"])


def decoder_layer(
    config: ModelConfig,
    p: PyTree,
    x: Hidden,
    at: Rotary,
    reads: Sequence[Callable[[Queries], Queries]],
    mlp: Callable[[PyTree, Hidden], Hidden] = gated_mlp,
) -> Hidden:
    """One pre-norm layer: its attentions in order, then its MLP.

    reads: for each attention of the layer, what its queries [*batch, N, H] read from the row they read.
    """
    eps = config.rms_norm_eps
    for attention, read in zip(p["attentions"], reads, strict=True):
        mixed = read(queries(config, attention, rms_norm(x, attention["norm"], eps), at))
        x = x + linear(mixed.reshape(*x.shape[:-1], -1), attention["o_proj"])
    return x + mlp(p["mlp"], rms_norm(x, p["mlp"]["norm"], eps))
