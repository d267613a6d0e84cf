"""Rows of latents: what DeepSeek's attention stores of a token, for the keys and values of all heads."""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp

from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.form import PAGED, Form, Paged, Pair, Raw, Stored
from swiftkv_jax.core.layers import LATENT_EPS, Rotary, kernel_of, linear_weights, rms_norm, turned
from swiftkv_jax.core.shapes import Array, Float, KeyValues, Mixed, PyTree, Queries, Weight
from swiftkv_jax.kernels.common.dispatch import device
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.paged_attention.api import paged_attention

_MOST_BYTES = 2 << 30  # of expanded keys and values, which only one layer has at a time
_LANES = 128  # of a TPU: XLA copies pools whose rows are no multiple of them at every call


class Latents(Form):
    """A normed latent, and beside it the rotated part of the keys (DeepSeek-V2, arXiv 2405.04434).

    Full sequences expand a latent to the keys and values of every head. Over pages `kv_b_proj` moves to the
    queries and to the weighted sums, so that all heads read the stored row as it is: its key is the whole
    row, its value the latent. Long chunks are expanded too, if their attention reads all pages of the table
    anyway. Layers that share a row read it by its maker's `kv_b_proj`.
    """

    operation: ClassVar[str] = PAGED
    projections: ClassVar[tuple[str, ...]] = ("kv_a_proj",)
    apart: ClassVar[bool] = True
    names: ClassVar[Mapping[str, str]] = {
        "q_a_norm": "q_a_layernorm",
        "kv_a_proj": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
    }

    def arrays(self, config: ModelConfig) -> tuple[Stored, ...]:
        latent = latent_of(config)
        width, lanes = latent.rank + latent.rotary, _LANES if device()[0] == "tpu" else 1
        return (Stored(1, -(-width // lanes) * lanes),)

    def weights(self, config: ModelConfig) -> PyTree:
        latent = latent_of(config)
        inside, made = ("D", config.hidden_size), (".", latent.rank + latent.rotary)
        by_head = (config.num_heads, latent.rank, latent.plain + latent.value)
        return {
            "kv_a_proj": linear_weights(inside, made, config.qkv_bias, 0.02),
            "kv_a_norm": Weight((latent.rank,), ".", fill=1.0),
            "kv_b_proj": {"kernel": Weight(by_head, "N D .", std=latent.rank**-0.5)},
        }

    def finish(self, config: ModelConfig, p: PyTree, raw: Raw, at: Rotary) -> tuple[KeyValues, ...]:
        latent = latent_of(config)
        made, rotary = jnp.split(raw[0][..., None, :], [latent.rank], axis=-1)
        made = rms_norm(made, p["kv_a_norm"], LATENT_EPS)
        row = jnp.concatenate([made, turned(rotary, at)], axis=-1)
        return (_widened(row, self.arrays(config)[0].width),)

    def reader(self, p: PyTree) -> PyTree:
        return p["kv_b_proj"]

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        return _keys_values(latent_of(config), reader, made[0])

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Mixed:
        latent, (pool,) = latent_of(config), paged.pools
        if paged.implementation == "xla_one_turn" and _long_chunks(latent, q, paged):
            return _over_expanded(config, reader, q, paged)
        to_keys, to_values = jnp.split(kernel_of(reader, q.dtype), [latent.plain], axis=-1)
        plain, rotary = jnp.split(q, [latent.plain], axis=-1)
        moved = jnp.concatenate([jnp.einsum("bcnh,nrh->bcnr", plain, to_keys), rotary], axis=-1)
        moved = _widened(moved, pool.data.shape[-1])
        scale = config.head_dim**-0.5
        mixed = paged_attention(moved, (pool,), *paged.places, value=latent.rank, scale=scale, **paged.how)
        return jnp.einsum("bcnr,nrh->bcnh", mixed, to_values)

    def convert(self, config: ModelConfig, plain: PyTree, solved, names) -> PyTree:
        return plain


def latent_of(config: ModelConfig) -> Latent:
    """The sizes of a model's latent attention."""
    assert config.latent is not None  # see `rows.check`
    return config.latent


def expanded(made: Float[Array, "*batch R"], p: PyTree) -> Float[Array, "*batch N h"]:
    """The keys, without their rotary part, and the values of all heads, from normed latents."""
    return jnp.einsum("...r,nrh->...nh", made, kernel_of(p, made.dtype))


def _keys_values(latent: Latent, reader: PyTree, row: Float[Array, "*batch 1 W"]) -> Pair:
    """The keys and values of all heads, from stored rows [*batch, 1, W]."""
    keys, values = jnp.split(expanded(row[..., 0, : latent.rank], reader), [latent.plain], axis=-1)
    rotary = row[..., latent.rank : latent.rank + latent.rotary]
    rotary = jnp.broadcast_to(rotary, (*keys.shape[:-1], latent.rotary))
    return jnp.concatenate([keys, rotary], axis=-1), values


def _long_chunks(latent: Latent, q: Queries, paged: Paged) -> bool:
    """Whether the sequences have so many queries in the mean, and the keys and values of all of them, which
    exist at once, fit."""
    sequences, (heads, width) = len(paged.table), q.shape[2:]
    keys = paged.table.size * paged.pools[0].data.shape[2]
    held = keys * heads * (width + latent.value) * q.dtype.itemsize
    return held <= _MOST_BYTES and paged.position.size >= latent.worth_expanding * sequences


def _over_expanded(config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Mixed:
    """Attention over the keys and values of all pages of the table, expanded."""
    (pool,), names = paged.pools, paged.table.reshape(-1)
    rows = pool.data[paged.row, names].astype(q.dtype)  # [Q * slots, Z, W]
    if pool.scale is not None:
        rows = rows * pool.scale[paged.row, names, 0, :, None].astype(q.dtype)
    made = _keys_values(latent_of(config), reader, rows[:, :, None])
    keys, values = (Pool(x.reshape(1, *x.shape[:2], -1), None) for x in made)
    table = jnp.arange(len(names), dtype=jnp.int32).reshape(paged.table.shape)
    options = paged.how | {"row": 0, "scale": config.head_dim**-0.5}
    return paged_attention(q, (keys, values), table, *paged.places[1:], **options)


def _widened(x: Float[Array, "*batch w"], width: int) -> Float[Array, "*batch W"]:
    """`x` with zeros up to `width`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
