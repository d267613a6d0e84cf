"""Attention by others at the sizes of the contest, each in its own layout: what a winner is compared with.

They cannot win: none of them reads the pool.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import paged_attention as triton

from benchmarks.first_light.candidates import Candidate
from benchmarks.first_light.kernels import attention
from benchmarks.first_light.machine import seconds_of
from benchmarks.first_light.shapes import Shape
from benchmarks.first_light.shapes import shape as shape_of
from swiftkv_jax.kernels.paged_attention import jax_nn

PEERS = (("decode", "JAX's Triton kernel"), ("decode", "cuDNN, unpaged"), ("chunk", "cuDNN, unpaged"))
_PAGE = 64
_SPLITS = 16  # shares of a sequence, of the Triton kernel
_CHECKED = 64  # queries of a chunk that are compared

Call = tuple[Callable[[], jax.Array], Callable[[], jax.Array]]  # what is timed, and what it should give


def peer(shape: str, kind: str, name: str) -> Iterator[dict]:
    """For each size: seconds, least bytes and FLOPs, and the distance to plain attention in float32."""
    sizes = shape_of(shape)
    if kind == "decode":
        timed = {f"{count} x {length}": (count, length - 1, 1) for count, length in sizes.decodes}
    else:
        timed = {f"{sizes.chunk} at {cached}": (1, cached, sizes.chunk) for cached, _ in sizes.contexts}
    for said, (count, cached, new) in timed.items():
        case = attention(sizes, Candidate(kind, "", _PAGE), [(cached, new)] * count)
        call, exact = (_triton if "Triton" in name else _unpaged)(sizes, count, cached, new)
        want = np.asarray(exact(), np.float32)
        got = np.asarray(call()[0][: len(want)], np.float32)
        off = float(np.abs(got - want).max() / np.abs(want).max())
        yield {said: {"seconds": seconds_of(call), "bytes": case.bytes, "flops": case.flops, "off": off}}


def _random(sizes: Shape, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = (jax.random.key(i, impl="rbg") for i in range(len(shapes)))
    made = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return [made(key, shape, sizes.computed) for key, shape in zip(keys, shapes, strict=True)]


def _triton(sizes: Shape, count: int, cached: int, new: int) -> Call:
    config, pages = sizes.config, -(-(cached + new) // _PAGE)
    pool = config.num_kv_heads, count * pages, _PAGE, config.head_dim
    q, k, v = _random(sizes, (count, config.num_heads, config.head_dim), pool, pool)
    table = jax.random.permutation(jax.random.key(3), count * pages).reshape(count, pages)
    lengths = jnp.full(count, cached + new, jnp.int32)
    run = functools.partial(
        triton.paged_attention,
        k_splits=min(_SPLITS, pages),
        interpret=jax.default_backend() == "cpu",
    )

    def exact() -> jax.Array:
        own = (x[:, table[0]].reshape(config.num_kv_heads, -1, config.head_dim) for x in (k, v))
        own = [jnp.swapaxes(x, 0, 1)[: cached + new] for x in own]
        return _plain(q[:1], *own, cached)[0]

    scaled = (q * config.head_dim**-0.5).astype(q.dtype)
    return lambda: run(scaled, k, v, table, lengths), exact


def _unpaged(sizes: Shape, count: int, cached: int, new: int) -> Call:
    """As `jax_nn` does, but nothing is gathered: a chunk with itself and with what is before it, merged; a
    decoded token with all keys."""
    config, scale, decoded = sizes.config, sizes.config.head_dim**-0.5, new == 1
    parts = [cached + new] if decoded else [n for n in (cached, new) if n]
    shapes = [(count, n, config.num_kv_heads, config.head_dim) for n in parts for _ in range(2)]
    q, *arrays = _random(sizes, (count, new, config.num_heads, config.head_dim), *shapes)
    attend = jax_nn.by_xla if jax.default_backend() == "cpu" else jax_nn.by_cudnn

    @jax.jit
    def run(q, *arrays):
        def over(k, v, causal: bool):
            queries, keys = (jnp.full(count, x.shape[1], jnp.int32) for x in (q, k))
            return attend(q, k, v, queries, keys, scale, causal)

        last = over(*arrays[-2:], not decoded)
        if len(arrays) == 2:
            return last[0]
        return jax_nn.merge(last, over(*arrays[:2], False), jnp.ones(count, bool)).astype(q.dtype)

    def exact() -> jax.Array:
        keys, values = (jnp.concatenate([x[0] for x in arrays[i::2]]) for i in range(2))
        return _plain(q[0], keys, values, cached)

    return lambda: run(q, *arrays), exact


def _plain(q, k, v, cached: int) -> jax.Array:
    """Attention in float32 of queries [T, N, H] at positions from `cached` on, of the first few only."""
    q = q[:_CHECKED]
    q, k, v = (x.astype(jnp.float32) for x in (q, k[: cached + len(q)], v[: cached + len(q)]))
    seen = jnp.arange(len(k)) <= cached + jnp.arange(len(q))[:, None]
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=seen[None, None])[0]
