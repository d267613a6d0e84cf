"""Retrieval by generation: one line of a long prompt has the answer. Prompts are made, not read from files.

As in RULER (arXiv 2404.06654) and "Lost in the Middle" (arXiv 2307.03172), with words and numbers drawn anew
for each item: among sentences about other things ("needle"), or among lines of the same form ("key-value").
"""

import bisect
import random
from collections.abc import Callable, Sequence

from swiftkv_jax.common.errors import UsageError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the line, as a share of the text
KINDS = ("needle", "key-value")
_ADJECTIVES = "amber bold calm dusty early faint gentle hidden icy loud narrow old pale quiet red".split()
_NOUNS = "anchor barn cloud door engine farmer garden hill island kettle lamp mill pond river wall".split()
_VERBS = "admires avoids covers crosses follows guards holds keeps leaves misses paints sees".split()
_WHEN = "at dawn,by the road,in spring,near the coast,on Sundays,after rain,before noon".split(",")
_KEYS = [f"{adjective} {noun} {n}" for adjective in _ADJECTIVES for noun in _NOUNS for n in range(10, 100)]


def made(lengths: Sequence[int], items: int, size: Callable[[str], int]) -> list[dict]:
    """So many items, the same at each call: {"prompt", "kind", "length", "depth", "code"}. They take lengths
    in turn, then kinds, then depths.

    Args:
      lengths: most tokens of each prompt, which is filled up to a line. size: of a prompt, with what else
        must fit, in tokens.

    Raises:
      UsageError: no line fits in a length.
    """
    per_round = len(lengths) * len(KINDS)
    return [
        _item(
            random.Random(number),
            lengths[number % len(lengths)],
            KINDS[number // len(lengths) % len(KINDS)],
            DEPTHS[number // per_round % len(DEPTHS)],
            size,
        )
        for number in range(items)
    ]


def _item(rng: random.Random, length: int, kind: str, depth: float, size: Callable[[str], int]) -> dict:
    key, *others = rng.sample(_KEYS, min(2 + max(0, length) // 4, len(_KEYS)))  # a line has over four tokens
    code = str(rng.randrange(10_000, 100_000))
    if kind == "needle":
        words = (_ADJECTIVES, _NOUNS, _VERBS, _NOUNS, _WHEN)
        lines = ["The {} {} {} the {} {}.".format(*map(rng.choice, words)) for _ in others]
    else:
        lines = [f"The code of {other} is {rng.randrange(10_000, 100_000)}." for other in others]

    def prompt(count: int) -> str:
        place = round(depth * count)
        text = [*lines[:place], f"The code of {key} is {code}.", *lines[place:count]]
        return "\n".join([*text, "", f"What is the code of {key}? Answer with the code alone."])

    fitting = bisect.bisect_right(range(len(lines) + 1), length, key=lambda count: size(prompt(count))) - 1
    if fitting < 1:
        raise UsageError(f"--lengths: {length} tokens are too few for a question: {size(prompt(1))} are not")
    return {"prompt": prompt(fitting), "kind": kind, "length": length, "depth": depth, "code": code}


def scores(item: dict, answer: str) -> dict[str, tuple[int, int]]:
    """Whether the code is in the answer."""
    return {f"{item['kind']}, {item['length']} tokens": (int(item["code"] in answer), 1)}
