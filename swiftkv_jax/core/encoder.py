"""An encoder: the decoder's loop over full sequences, with bidirectional attention.

    encoded = encode(model, params, source, lengths)    # tokens [B, S]; for Whisper frames [B, F, mels]
    logits = model.apply({"params": params}, tokens, encoded)

Serving writes its output into the cache once for each request (`fill`), as the plan's cross rows.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.config.plan import ENCODER
from swiftkv_jax.core import weights
from swiftkv_jax.core.cache import Cache, Encoded, Sources, make_batch
from swiftkv_jax.core.layers import norm, relative_bias, rotary, see_all
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.rows import FORMS
from swiftkv_jax.core.scan import through
from swiftkv_jax.core.shapes import Array, Float, Int, PyTree

Source = Int[Array, "B S"] | Float[Array, "B F mels"]


def encode(
    model: Transformer, params: PyTree, source: Source, lengths: Int[Array, " B"] | None = None
) -> Encoded:
    """Run the encoder on a batch of sources.

    source: token ids, or audio frames, two of which make one position. lengths: the number of real positions
    of each source, all by default; the others are padding.
    """
    config = model.config.encoder
    if config is None:
        raise UsageError(f"{model.config.family} has no encoder")
    encoder, own = Transformer(config, config.plan(), model.dtype), params["encoder"]
    x = _convolved(encoder, own, source) if config.mels else params["embed"][source].astype(encoder.dtype)
    count, length = x.shape[:2]
    if config.learned_positions:
        if length > config.max_position_embeddings:
            raise UsageError(
                f"{length} positions of a source, and {config.family} has embeddings for "
                f"{config.max_position_embeddings}: cut it into windows"
            )
        x = x + own["positions"][:length].astype(x.dtype)
    lengths = jnp.full(count, length, jnp.int32) if lengths is None else jnp.asarray(lengths)
    bias = None
    if config.relative_buckets:
        bias = relative_bias(config, own["relative"], np.arange(1 - length, length))

    def attention(q, k, v, segments, window):
        return see_all(q, k, v, lengths, bias)

    positions = jnp.broadcast_to(jnp.arange(length), (count, length))
    at = rotary(config, positions, length)
    run = partial(through, encoder, own, x, at, jnp.ones_like(positions), attention=attention)
    return Encoded(norm(config, own, run().x), lengths)


def _convolved(
    encoder: Transformer, params: PyTree, frames: Float[Array, "B F mels"]
) -> Float[Array, "B S D"]:
    """Hidden states of audio frames: two convolutions of width three, the second with stride two."""
    x = frames.astype(encoder.dtype)
    for name, stride in (("conv1", 1), ("conv2", 2)):
        sizes = {"window_strides": (stride,), "padding": [(1, 1)], "dimension_numbers": ("NWC", "OIW", "NWC")}
        y = jax.lax.conv_general_dilated(x, params[name].astype(x.dtype), **sizes)
        x = jax.nn.gelu(y + params[f"{name}_bias"].astype(x.dtype), approximate=False)
    return x


def fill(model: Transformer, params: PyTree, source: Source, cache: Cache, sources: Sources) -> Cache:
    """Write the rows of a batch of sources into the pages that `sources` names: once for each request, before
    its first token."""
    x = encode(model, params, source, sources.lengths).x
    count, length = x.shape[:2]
    position = jnp.tile(jnp.arange(length), count)
    sequence = jnp.repeat(jnp.arange(count), length)
    batch = make_batch(None, position, length)
    valid = position < jnp.asarray(sources.lengths)[sequence]
    batch = dataclasses.replace(batch, sequence=sequence, valid=valid)
    pool = cache.reading(sources).cross
    assert pool is not None
    flat, plan = x.reshape(count * length, -1), model.plan
    for form in plan.forms_of(ENCODER):
        due = [i for i in sorted(set(plan.cross)) if plan.rows[i].form == form]
        at = pool.angles.at(jnp.zeros_like(position))
        made = [FORMS[form].make(model.config, weights.row(params, i), flat, at) for i in due]
        pool = pool.write(due, made, batch)
    return dataclasses.replace(cache, cross=pool)
