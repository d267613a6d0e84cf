"""Guesses at the tokens to come. Plain Python: no jax, no arrays, no clock."""

LONGEST, SHORTEST = 4, 2  # tokens at the end that must have occurred before
_WINDOW = 4096  # tokens looked back over


def lookup(tokens: list[int], most: int) -> list[int]:
    """What followed the last earlier occurrence of the last few tokens: at most `most` tokens, or none.

    Prompt lookup decoding: answers often repeat their prompts. The longest match counts.
    """
    tokens = tokens[-_WINDOW:]
    for length in range(LONGEST, SHORTEST - 1, -1):
        tail = tokens[-length:]
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at] == tail[0] and tokens[at : at + length] == tail:
                return tokens[at + length : at + length + most]
    return []
