"""Rows of latents: what DeepSeek's attention stores of a token, for the keys and values of all heads."""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from swiftkv_jax.config.latent import Latent
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.core.form import PAGED, Form, Paged, Pair, Raw, Stored, filled
from swiftkv_jax.core.layers import LATENT_EPS, Rotary, kernel_of, linear_weights, rms_norm, turned
from swiftkv_jax.core.shapes import Array, Float, KeyValues, Mixed, PyTree, Queries, Weight
from swiftkv_jax.kernels.common.dispatch import device
from swiftkv_jax.kernels.common.pools import Pool
from swiftkv_jax.kernels.paged_attention.api import paged_attention

_MOST_BYTES = 2 << 30  # of expanded keys and values, which only one layer has at a time
_LANES = 128  # of a TPU: XLA copies pools whose rows are no multiple of them at every call
_TILE = 1024  # keys that are expanded together, if any of them is in use


class Latents(Form):
    """A normed latent, and beside it the rotated part of the keys (DeepSeek-V2, arXiv 2405.04434).

    Full sequences expand a latent to the keys and values of every head. Over pages `kv_b_proj` moves to the
    queries and to the weighted sums, so that all heads read the stored row as it is: its key is the whole
    row, its value the latent. Long chunks are expanded too: all pages of the table where XLA reads them
    anyway, the pages in use for the TPU's kernel. Layers that share a row read it by its maker's `kv_b_proj`.
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
        return (Stored(1, _whole_lanes(latent.rank + latent.rotary)),)

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
        return (filled(row, self.arrays(config)[0].width),)

    def reader(self, p: PyTree) -> PyTree:
        return p["kv_b_proj"]

    def keys_values(self, config: ModelConfig, reader: PyTree, made, at: Rotary) -> Pair:
        return _keys_values(latent_of(config), reader, made[0])

    def read(self, config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Mixed:
        latent, (pool,) = latent_of(config), paged.pools
        if _long_chunks(latent, q, paged):
            return _over_expanded(config, reader, q, paged)
        to_keys, to_values = jnp.split(kernel_of(reader, q.dtype), [latent.plain], axis=-1)
        plain, rotary = jnp.split(q, [latent.plain], axis=-1)
        moved = jnp.concatenate([jnp.einsum("bcnh,nrh->bcnr", plain, to_keys), rotary], axis=-1)
        moved = filled(moved, pool.data.shape[-1])
        scale = config.head_dim**-0.5
        mixed = paged_attention(moved, (pool,), *paged.places, value=latent.rank, scale=scale, **paged.how)
        return jnp.einsum("bcnr,nrh->bcnh", mixed, to_values)


def latent_of(config: ModelConfig) -> Latent:
    """The sizes of a model's latent attention."""
    assert config.latent is not None  # see `rows.check`
    return config.latent


def expanded(made: Float[Array, "*batch R"], p: PyTree) -> Float[Array, "*batch N h"]:
    """The keys, without their rotary part, and the values of all heads, from normed latents."""
    return jnp.einsum("...r,nrh->...nh", made, kernel_of(p, made.dtype))


def expanded_widths(latent: Latent) -> tuple[int, int]:
    """The widths of a head's keys and values in the temporary pools of a long chunk."""
    return _whole_lanes(latent.plain + latent.rotary), _whole_lanes(latent.value)


def _keys_values(latent: Latent, reader: PyTree, row: Float[Array, "*batch 1 W"]) -> Pair:
    """The keys and values of all heads, from stored rows [*batch, 1, W]."""
    keys, values = jnp.split(expanded(row[..., 0, : latent.rank], reader), [latent.plain], axis=-1)
    rotary = row[..., latent.rank : latent.rank + latent.rotary]
    rotary = jnp.broadcast_to(rotary, (*keys.shape[:-1], latent.rotary))
    return jnp.concatenate([keys, rotary], axis=-1), values


def _long_chunks(latent: Latent, q: Queries, paged: Paged) -> bool:
    """Whether the sequences have so many queries in the mean that it takes fewer FLOPs to expand their rows
    than to read them as they are, and the keys and values that exist at once fit.

    For a head, a query and key cost 4 FLOPs times the latent's width, or 2 times those of a key and a value,
    and expanding a key 2 times both; the rotary part is left out. The TPU's kernel computes whole rows. It
    must have one sequence: the empty queries of several, which count here, it does not compute.
    """
    sequences, (_, _, page, row) = len(paged.table), paged.pools[0].data.shape
    widths = both = sum(expanded_widths(latent))
    if paged.implementation == "xla_one_turn":
        row, both = latent.rank, latent.plain + latent.value
    elif paged.implementation != "pallas_tpu" or sequences > 1:
        return False
    fits = paged.table.size * page * q.shape[2] * widths * q.dtype.itemsize <= _MOST_BYTES
    return fits and paged.position.size * (2 * row - both) >= row * both * sequences


def _over_expanded(config: ModelConfig, reader: PyTree, q: Queries, paged: Paged) -> Mixed:
    """Attention over expanded keys and values: of the whole table by XLA, of the pages in use by the TPU's
    kernel, which takes two blocks of queries as one. Each block reads all keys, and these are ten times as
    many bytes as latents."""
    latent, names, shape, blocks = latent_of(config), paged.table.reshape(-1), q.shape, len(q)
    if paged.implementation == "xla_one_turn":
        both = _keys_values(latent, reader, _rows(paged, names, q.dtype)[:, :, None])
        keys, values = (Pool(x.reshape(1, *x.shape[:2], -1)) for x in both)
    else:
        keys, values = _in_use(latent, reader, q.dtype, paged)
        q, blocks = filled(q, expanded_widths(latent)[0]), blocks if blocks % 2 else blocks // 2
    table = jnp.arange(len(names), dtype=jnp.int32).reshape(paged.table.shape)
    where = table, paged.sequence[:blocks], paged.position.reshape(blocks, -1)
    options = paged.how | {"row": 0, "scale": config.head_dim**-0.5, "value": latent.value}
    q = q.reshape(blocks, -1, *q.shape[2:])
    return paged_attention(q, (keys, values), *where, **options).reshape(*shape[:3], -1)


def _in_use(latent: Latent, reader: PyTree, dtype, paged: Paged) -> list[Pool]:
    """The keys and values [1, slots, Z, N * width] of one sequence, up to its last query."""
    (names,), (page, width) = paged.table, paged.pools[0].data.shape[2:]
    size = min(len(names), max(1, _TILE // page))
    # A matrix for all heads each, whose products lie as a page does.
    both = _keys_values(latent, reader, jnp.eye(width, dtype=dtype)[:, None])
    both = [filled(x, _whole_lanes(x.shape[-1])).reshape(width, -1) for x in both]

    def tile(i, made):
        at = jnp.minimum(i * size, len(names) - size)

        def put(made):
            rows = _rows(paged, lax.dynamic_slice_in_dim(names, at, size), dtype).reshape(-1, width)
            new = ((rows @ x).reshape(1, size, page, -1) for x in both)
            return [lax.dynamic_update_slice_in_dim(*each, at, 1) for each in zip(made, new, strict=True)]

        return lax.cond(at * page <= paged.position.max(), put, lambda made: made, made)

    made = [lax.empty((1, len(names), page, x.shape[1]), dtype) for x in both]
    return [Pool(x) for x in lax.fori_loop(0, -(-len(names) // size), tile, made)]


def _rows(paged: Paged, names, dtype) -> Array:
    """Whole pages of rows, [pages, Z, W]."""
    (pool,) = paged.pools
    rows = pool.data[paged.row, names].astype(dtype)
    return rows if pool.scale is None else rows * pool.scale[paged.row, names, 0, :, None].astype(dtype)


def _whole_lanes(width: int) -> int:
    """`width`, on TPUs rounded up to whole lanes."""
    return -(-width // _LANES) * _LANES if device()[0] == "tpu" else width
