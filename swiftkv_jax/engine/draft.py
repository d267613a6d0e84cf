"""Draft tokens by prompt lookup. Plain Python: no jax, no arrays, no clock."""

from swiftkv_jax.engine.sequence import Sequence

LONGEST, SHORTEST = 4, 2  # tokens at the end that must have occurred before
_WINDOW = 4096  # tokens looked back over


def guess(most: int, sequence: Sequence, room: int) -> list[int]:
    """Return at most `most` draft tokens for a sequence, in a step with `room` for so many.

    There are none where a token changes what the next may be: those rules need one token per step.
    """
    request, room = sequence.request, min(most, room, sequence.request.max_length - sequence.length - 1)
    if room < 1 or request.params.penalised or request.bad_ids or sequence.one_by_one:
        return []
    return lookup(sequence.tokens, room)


def lookup(tokens: list[int], most: int) -> list[int]:
    """Return at most `most` tokens that followed the last earlier occurrence of the last few tokens, or none.

    This is prompt lookup decoding: answers often repeat their prompts. The longest match wins.
    """
    tokens = tokens[-_WINDOW:]
    for length in range(LONGEST, SHORTEST - 1, -1):
        tail = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start] == tail[0] and tokens[start : start + length] == tail:
                return tokens[start + length : start + length + most]
    return []
