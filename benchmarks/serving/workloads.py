"""Workloads: fixed lengths, and lengths distributed like ShareGPT's or taken from a ShareGPT file."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.serving.client import Ask
from swiftkv_jax.common.errors import UsageError

LENGTHS = (2000, 8000, 32000, 128000)  # tokens in, of the paper's throughput figures and table A.2
OUTPUTS = 256
RATIOS = (0.0, 0.2, 1.0, 2.0, 10.0, 20.0, 100.0)  # least tokens in per token out, of table A.3
# Mean tokens in and out of ShareGPT as the PagedAttention paper reports them (arXiv 2309.06180, figure 11);
# the spreads of the logarithms are our choice, for long tails on both sides. The real file: `from_file`.
SHAREGPT = {"means": (161.3, 338.0), "spreads": (1.6, 1.1)}
_LEAST = 4  # tokens, in and out: shorter turns are left out, as vLLM's sampler does
_MOST_DRAWS = 5_000_000
Lengths = tuple[int, int]


def scaled(tokens: float, scale: float) -> int:
    return max(1, round(tokens / scale))


def asks(lengths: Sequence[Lengths], vocab: int, seed: int) -> list[Ask]:
    """Random prompts of these lengths; no two begin alike, so that prefix caches do not help."""
    random = np.random.default_rng(seed)
    return [Ask(tuple(random.integers(2, vocab, n).tolist()), outputs) for n, outputs in lengths]


def like_sharegpt(count: int, ratio: float, context: int, seed: int) -> list[Lengths]:
    """`count` pairs of lengths, log-normal in and out, that fit a context and have in >= ratio * out.

    Raises:
      UsageError: such pairs are too rare.
    """
    random = np.random.default_rng(seed)
    spreads = np.asarray(SHAREGPT["spreads"])
    centres = np.log(SHAREGPT["means"]) - spreads**2 / 2  # of a log-normal with these means
    found: list[Lengths] = []
    for _ in range(0, _MOST_DRAWS, 2**17):
        drawn = np.exp(random.normal(centres, spreads, (2**17, 2))).round().astype(int)
        found += map(tuple, drawn[_fits(*drawn.T, ratio, context)].tolist())
        if len(found) >= count:
            return found[:count]
    raise UsageError(
        f"of {_MOST_DRAWS} requests only {len(found)} have {ratio:g} tokens in per token out and fit a "
        f"context of {context}: ask for fewer, leave out this ratio, or raise --scale"
    )


def from_file(path: Path, tokenizer, ratio: float, context: int, seed: int) -> Iterator[Ask]:
    """First questions of a ShareGPT file, as long as its first answers, in random order.

    The file is a list of {"conversations": [{"value": question}, {"value": answer}, ...]}.

    Raises:
      UsageError: the file cannot be read, or is not such a list.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        turns = [[turn["value"] for turn in row["conversations"][:2]] for row in rows]
        pairs = [pair for pair in turns if len(pair) == 2]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--dataset {path} is no ShareGPT file ({reason})") from None
    for i in np.random.default_rng(seed).permutation(len(pairs)):
        question, answer = pairs[i]
        prompt = tokenizer.encode(question)
        lengths = len(prompt), len(tokenizer.encode(answer, add_special_tokens=False))
        if _fits(*lengths, ratio, context):
            yield Ask(tuple(prompt), lengths[1])


def _fits(n, m, ratio: float, context: int):
    """Whether to keep n tokens in and m out; elementwise for arrays."""
    return (n >= _LEAST) & (m >= _LEAST) & (n + m <= context) & (n >= ratio * m)


def default_scale(context: int, longest: int = max(LENGTHS) + OUTPUTS) -> int:
    """The least power of two that brings the longest workload into a context."""
    return 2 ** max(0, math.ceil(math.log2(longest / context)))
