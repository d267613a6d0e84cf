"""Tokens to text as they come: no half characters, and stop strings found across token boundaries."""

_CONTEXT = 6  # prompt tokens decoded before the output: some tokenizers drop a leading space otherwise
_UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 character to
_LONGEST_CHARACTER = 4  # bytes of UTF-8: more unfinished tokens than that are invalid, not incomplete


class Detokenizer:
    """The text of a growing list of tokens.

    Tokens are decoded behind a few already written, and only their difference is added, so that joining
    rules (spaces, byte fallback) work; text ending in an incomplete character waits for its rest.

    Attributes:
      text: everything decoded so far.
    """

    def __init__(self, tokenizer, prompt: tuple[int, ...], skip_special_tokens: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._written = 0, len(self._ids)
        self.text = ""

    def push(self, token: int) -> None:
        """Add one token, and to `text` whatever it completes."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._written])
        after = self._decode(self._ids[self._start :])
        waiting = len(self._ids) - self._written
        if after.endswith(_UNFINISHED) and waiting < _LONGEST_CHARACTER:
            return
        self.text += after[len(before) :]
        self._start, self._written = self._written, len(self._ids)


def find_stop(text: str, stops: tuple[str, ...], seen: int) -> tuple[int, str] | None:
    """The earliest stop string that ends after the first `seen` characters: (where it begins, which)."""
    found = []
    for order, stop in enumerate(stops):
        at = text.find(stop, max(0, seen - len(stop) + 1))
        if at >= 0:
            found.append((at, order, stop))
    return (min(found)[0], min(found)[2]) if found else None
