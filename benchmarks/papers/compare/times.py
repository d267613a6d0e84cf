"""Time to the first token of a batch of prompts on a dense cache, by `loop.step` and `predict.fill`."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import interleaved, ratio
from swiftkv_jax.core.cache import Cache, make_batch
from swiftkv_jax.core.ends import embed, logits
from swiftkv_jax.core.loop import run, step
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Caches, Predicted, cached, fill, generator, split_layers
from swiftkv_jax.core.shapes import Array, Int, PyTree

SHORT = (64, 59)  # the KV prediction paper's prompts, and tokens of each, as in TriviaQA (section 6.3)
MANY = 8  # prompts of the curve over lengths (figure 5b)
LENGTHS = (64, 128, 256, 512)
Model = Transformer | Predicted


@partial(jax.jit, static_argnames=("model", "whole"), donate_argnames="cache")
def first_tokens(
    model: Model, params: PyTree, tokens: Int[Array, "B T"], cache: Cache | Caches, whole: bool = False
) -> tuple[Int[Array, " B"], Cache | Caches]:
    """The greedy first token after each prompt, and the cache; `params` cut at every layer.

    whole: every layer runs for every token, as other systems do.
    """
    prompts, length = tokens.shape

    def flat(first: int, last: int):
        count = last - first
        positions = jnp.tile(jnp.arange(first, last), prompts)
        return tokens[:, first:last].ravel(), positions, count * jnp.arange(prompts + 1)

    base, theirs = generator(model, params)
    if isinstance(model, Predicted) and isinstance(cache, Caches):
        ahead = max(0, length - model.prediction.tail)
        caches = fill(model, params, *flat(0, ahead), cache)
        given, at, starts = flat(ahead, length)
        out, own = step(base, theirs, given, at, starts, starts[1:] - 1, caches.base)
        return jnp.argmax(out, -1), Caches(own, caches.auxiliary)
    cache = cache.base if isinstance(cache, Caches) else cache
    given, at, starts = flat(0, length)
    if not whole:
        out, cache = step(base, theirs, given, at, starts, starts[1:] - 1, cache)
        return jnp.argmax(out, -1), cache
    x = embed(base, theirs, given, at)
    x, cache, *_ = run(base, theirs, x, cache.angles.at(at), make_batch(starts, at), cache)
    return jnp.argmax(logits(base, theirs, x[starts[1:] - 1]), -1), cache


def empty(model: Model, params: PyTree, prompts: int, capacity: int) -> Cache | Caches:
    """An empty cache for `prompts` prompts of `capacity` tokens, on the devices of `params`."""

    def one(part: Transformer) -> Cache:
        cache = Cache.dense(part.config, part.plan, prompts, capacity, jnp.dtype(part.dtype))
        return jax.device_put(cache, jax.tree.leaves(params)[0].sharding)  # else it compiles twice

    pools = [one(part) for part in cached(model)]
    return Caches(*pools) if len(pools) > 1 else pools[0]


def reader(model: Model, params: PyTree, prompts: int, length: int, whole: bool = False) -> Callable:
    """A call that reads random prompts and waits for their first tokens."""
    vocab = generator(model, params)[0].config.vocab_size
    tokens = jnp.asarray(np.random.default_rng(length).integers(2, vocab, (prompts, length)), jnp.int32)
    params, held = split_layers(model, params), [empty(model, params, prompts, length)]

    def read() -> None:
        first, held[0] = first_tokens(model, params, tokens, held[0], whole=whole)
        first.block_until_ready()

    return read


def over_full_depth(
    full: tuple[Transformer, PyTree], one: tuple[Model, PyTree], prompts: int, length: int, rounds: int
) -> float:
    """Time to the first token of `one` over that of `full` at full depth: the median of paired ratios."""
    reads = {"full": reader(*full, prompts, length, whole=True), "one": reader(*one, prompts, length)}
    return ratio(interleaved(reads, rounds), "one", "full")


def by_length(
    full: tuple[Transformer, PyTree], others: Mapping[str, tuple[Model, PyTree]], rounds: int
) -> dict[str, dict[int, float]]:
    """Median seconds of batches of MANY prompts: name -> length -> seconds; `full` as "full depth"."""
    out: dict[str, dict[int, float]] = {"full depth": {}} | {name: {} for name in others}
    most = full[0].config.longest_context
    for length in (n for n in LENGTHS if n <= most):
        reads = {name: reader(*one, MANY, length) for name, one in others.items()}
        reads |= {"full depth": reader(*full, MANY, length, whole=True)}
        for name, seconds in interleaved(reads, rounds).items():
            out[name][length] = statistics.median(seconds)
    return out
