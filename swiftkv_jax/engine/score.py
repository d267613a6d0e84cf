"""Log probabilities of a prompt's own tokens, by the definition of what is served: every token through every
layer, over rows as the cache stores them."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core import predict
from swiftkv_jax.core.ends import logits
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted, generator
from swiftkv_jax.core.rows import rounded
from swiftkv_jax.core.scan import forward
from swiftkv_jax.core.shapes import Array, Int, PyTree
from swiftkv_jax.core.sharding import under
from swiftkv_jax.engine.request import Logprob
from swiftkv_jax.engine.sampling import logprobs_of
from swiftkv_jax.engine.scheduler import power_of_two
from swiftkv_jax.engine.sequence import NOT_FINITE, Choice, logprobs
from swiftkv_jax.kernels.causal_attention.api import causal_attention

_BLOCK = 64  # positions whose logits exist at a time
SHORTEST, _STEP = 64, 4  # the smallest compiled size, and the ratio of each size to the one before
TOGETHER = 16  # most texts in one row; "cudnn" takes 31 and padding


def prompt_logprobs(
    texts: Sequence[Sequence[int]], top: int, limit: int, tokenizer, read: Callable, together: int = 1
) -> list[list[dict[int, Logprob] | None]]:
    """Return for each text one entry per token: its log probability and rank, then the `top` likeliest; None
    for the first.

    `limit` is the context in tokens; `read(tokens, following, places, segments)` returns what `scores` does.
    The last token is only predicted, so there may be one token more than the context holds. Up to `together`
    short texts are packed into a row.
    """
    if (longest := max(map(len, texts), default=0)) > limit + 1:
        raise UsageError(f"{longest} tokens are too many to score: at most {limit + 1}, the context and 1")
    entries: list[list[dict[int, Logprob] | None]] = [[None] for _ in texts]
    sizes = [len(ids) - 1 for ids in texts]
    for row in _rows(sizes, _size(SHORTEST * _STEP, limit), together):
        ends = list(accumulate((sizes[n] for n in row), initial=0))
        tokens, following, places, segments = np.zeros((4, _size(ends[-1], limit)), np.int32)
        for number, (n, start, end) in enumerate(zip(row, ends[:-1], ends[1:], strict=True), 1):
            tokens[start:end], following[start:end] = texts[n][:-1], texts[n][1:]
            places[start:end], segments[start:end] = np.arange(sizes[n]), number
        packed = (places[None], segments[None]) if len(row) > 1 else (None, None)
        arrays = jax.device_get(read(tokens[None], following, *packed))
        if not np.isfinite(arrays[0][: ends[-1]]).all():
            raise FloatingPointError(NOT_FINITE)
        for n, start, end in zip(row, ends[:-1], ends[1:], strict=True):
            for token, *of_token in zip(texts[n][1:], *(array[start:end] for array in arrays), strict=True):
                value, rank, likeliest, values = (array.tolist() for array in of_token)
                choice = Choice(token, value, rank, tuple(zip(likeliest, values, strict=True)))
                entries[n].append(logprobs(choice, top, tokenizer))
    return entries


def _rows(sizes: Sequence[int], most: int, together: int) -> list[list[int]]:
    """The texts, by their numbers, of each row of at most `most` tokens. A longer text has its own.

    Each text, the longest first, is put into the first row that has room for it.
    """
    rows: list[list[int]] = []
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        free = (row for row in rows if len(row) < together and sizes[n] + sum(sizes[m] for m in row) <= most)
        if (row := next(free, None)) is None:
            rows.append(row := [])
        row.append(n)
    return rows


def _size(tokens: int, limit: int) -> int:
    """Array size for so many tokens in a context of `limit`: one of a few, so that few programs compile."""
    size = SHORTEST
    while size < tokens:
        size *= _STEP
    return min(size, max(SHORTEST, power_of_two(limit)))


def lengths(longest: int, limit: int) -> list[int]:
    """Prompt lengths to score at warm-up, so that no prompt of up to `longest` tokens compiles later, in a
    context of `limit`."""
    sizes = {_size(tokens, limit) for tokens in range(1, longest + 1)}
    return [min(size, longest) for size in sorted(sizes)]


@partial(jax.jit, static_argnames=("model", "limit", "cache_dtype", "attention", "top", "mesh"))
def scores(
    model: Transformer | Predicted,
    limit: int,
    cache_dtype: str,
    attention: str | None,
    top: int,
    params: PyTree,
    tokens: Int[Array, "1 T"],
    following: Int[Array, " T"],
    places: Int[Array, "1 T"] | None = None,
    segments: Int[Array, "1 T"] | None = None,
    mesh: Mesh | None = None,
):
    """For each position, the log probability and rank of `following`, and the `top` likeliest ids and their
    log probabilities.

    `limit` is the context in tokens, which `dynamic` rotary scaling takes its frequencies from. `cache_dtype`
    and `attention` are the `cache_dtype` and `scoring` of `Settings`. Texts that share the row are told apart
    by `places`, their positions, and `segments`. With a `mesh` the results are replicated.
    """
    if places is None:  # padding beyond the context has a position of a token: learned ones may end there
        places = jnp.minimum(jnp.arange(tokens.shape[1]), limit - 1)[None]
    served = {"length": limit, "store": partial(rounded, dtype=cache_dtype)}
    if isinstance(model, Predicted):
        x = predict.forward(model, params, tokens, places, segments, **served)[0]
    else:

        def attend(q, k, v, apart, window, **bias):
            apart = None if segments is None else apart
            return causal_attention(q, k, v, apart, window, implementation=attention, **bias)

        x = under(forward, mesh)(model, params, tokens, places, segments, attention=attend, **served)[0]
    model, params = generator(model, params)

    def block(part):
        x, target = part
        return logprobs_of(logits(model, params, x), target, top)

    cut = (x.reshape(-1, _BLOCK, x.shape[-1]), following.reshape(-1, _BLOCK))
    out = jax.tree.map(lambda y: jax.lax.collapse(y, 0, 2), jax.lax.map(block, cut))
    return out if mesh is None else jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P()))
