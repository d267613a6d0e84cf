"""Losses between two streams of hidden states, in chunks of tokens so that [B, T, V] never exists whole."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from swiftkv_jax.core import sharding
from swiftkv_jax.core.shapes import Array, Float, Int, PyTree

Head = Callable[[Float[Array, "B c D"]], Float[Array, "B c V"]]


def chunk_length(batch: int, length: int, vocab: int, mib: float) -> int:
    """Positions per chunk so that [batch, chunk, vocab] float32 logits stay within `mib` MiB; at least 1."""
    return max(1, min(length, int(mib * 2**20 / (4 * vocab * max(1, batch)))))


def over_chunks(per_chunk, chunk: int, *arrays: Array):
    """Run `per_chunk` over time chunks of [B, T, ...] arrays; it returns (a tree to sum, a tree to keep).

    Returns the sums, and the kept values, joined to [B, T, ...] again. The last chunk is padded with zeros,
    which a mask among the arrays must make harmless. Each chunk's logits are recomputed in the backward pass
    instead of being kept. If T is sharded over the mesh, a chunk has `chunk` positions of each shard.
    """
    parts = sharding.pieces("T", arrays[0].shape[1])
    each = arrays[0].shape[1] // parts
    chunk = min(chunk, each)
    count = -(-each // chunk)

    def cut(x):
        x = x.reshape(x.shape[0], parts, each, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, count * chunk - each)) + ((0, 0),) * (x.ndim - 3))
        x = jnp.moveaxis(x.reshape(*x.shape[:2], count, chunk, *x.shape[3:]), 2, 0)
        return x.reshape(*x.shape[:2], parts * chunk, *x.shape[4:])

    def body(total, parts):
        sums, kept = per_chunk(*parts)
        return jax.tree.map(jnp.add, total, sums), kept

    def join(x):
        x = jnp.moveaxis(x.reshape(*x.shape[:2], parts, chunk, *x.shape[3:]), 0, 2)
        x = x.reshape(*x.shape[:2], count * chunk, *x.shape[4:])[:, :, :each]
        return x.reshape(x.shape[0], parts * each, *x.shape[3:])

    chunks = tuple(cut(x) for x in arrays)
    shapes = jax.eval_shape(per_chunk, *(jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for p in chunks))[0]
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, kept = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), zero, chunks)
    return sums, jax.tree.map(join, kept)


def kl_sum(student: Head, teacher: Head, s, t, mask, temperature: float, chunk: int) -> Float[Array, ""]:
    """Sum over unmasked tokens of KL(teacher || student) at `temperature`, times temperature^2, in float32.

    `s` and `t` are the normalised hidden states [B, T, D] that the heads turn into logits. The gradient with
    respect to `s` is computed in the same pass, so no logits are computed twice; nothing else gets a
    gradient.
    """

    def per_chunk(s, t, mask):
        got, pull = jax.vjp(lambda s: student(s) / temperature, s)
        value, slope = _kl_and_slope(got, teacher(t) / temperature, mask)
        return value, pull(slope)[0]

    total, slope = over_chunks(per_chunk, chunk, *jax.lax.stop_gradient((s, t, mask)))
    return _with_slope(total, slope, s) * temperature**2


def head_kl_sum(
    student, kernels: PyTree, teacher: Head, x, t, mask, temperature: float, chunk: int
) -> Float[Array, ""]:
    """As `kl_sum`, of the logits `student(kernels, x)`; the gradient is with respect to `kernels` alone."""
    fixed = jax.lax.stop_gradient(kernels)

    def per_chunk(x, t, mask):
        got, pull = jax.vjp(lambda kernels: student(kernels, x) / temperature, fixed)
        value, slope = _kl_and_slope(got, teacher(t) / temperature, mask)
        return (value, pull(slope)[0]), ()

    (total, slope), _ = over_chunks(per_chunk, chunk, *jax.lax.stop_gradient((x, t, mask)))
    return _with_slope(total, slope, kernels) * temperature**2


def _kl_and_slope(got, want, mask) -> tuple[Float[Array, ""], Float[Array, "B c V"]]:
    """Masked sum of KL(want || got) of logits, and its gradient with respect to `got`."""
    got, want = jax.nn.log_softmax(got), jax.nn.log_softmax(want)
    value = jnp.sum(jnp.sum(jnp.exp(want) * (want - got), axis=-1) * mask)
    return value, (jnp.exp(got) - jnp.exp(want)) * mask[..., None]


def _with_slope(total: Float[Array, ""], slope: PyTree, point: PyTree) -> Float[Array, ""]:
    """`total`, whose gradient with respect to `point` is `slope`."""
    total, slope = jax.lax.stop_gradient((total, slope))
    each = jax.tree.map(lambda g, a: jnp.sum(g * a.astype(jnp.float32)), slope, point)
    moved = sum(jax.tree.leaves(each), jnp.zeros(()))
    return total + moved - jax.lax.stop_gradient(moved)


def cross_entropy_sums(head: Head, h, targets, mask, chunk: int, z: bool = False) -> list[Array]:
    """Sums over unmasked tokens, in float32: of the cross-entropy of `targets`, and with `z` of the square of
    the logits' log-sum-exp, for z-loss (PaLM, section 5)."""

    def per_chunk(h, targets, mask):
        logits = head(h)
        sums = [cross_entropy(logits, targets)] + ([jax.nn.logsumexp(logits, axis=-1) ** 2] if z else [])
        return [jnp.sum(each * mask) for each in sums], ()

    return over_chunks(per_chunk, chunk, h, targets, mask)[0]


def cross_entropy(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Per-token cross-entropy in nats."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def hidden_sum(
    s: Float[Array, "B T D"], t: Float[Array, "B T D"], real: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Sum over real tokens of the mean squared difference of two streams, in float32."""
    gap = s.astype(jnp.float32) - jax.lax.stop_gradient(t).astype(jnp.float32)
    return jnp.sum(jnp.mean(gap * gap, axis=-1) * real)
