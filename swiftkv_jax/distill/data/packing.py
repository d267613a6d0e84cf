"""Packing: whole samples side by side in rows of equal length, each in a segment of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from swiftkv_jax.core.pytree import pytree

Ints = Int[Any, "B T"]


@pytree
class Batch:
    """Rows of packed samples; numpy arrays as they come from the loader, jax arrays in a step.

    Attributes:
      tokens: int32. targets: int32, the next token of the same segment; 0 where there is none.
      positions: int32, from 0 in each segment. segments: int32, 1, 2, ... in each row; 0 is padding.
      mask: float32, 1 where the prediction of targets[t], made at t, counts.
    """

    tokens: Ints
    targets: Ints
    positions: Ints
    segments: Ints
    mask: Float[Any, "B T"]


@dataclass(frozen=True)
class Sample:
    """A document as tokens, or a piece of one. `learn[i]`: whether predicting tokens[i] counts; `bos`: what
    every piece begins with, or None."""

    id: str
    tokens: np.ndarray
    learn: np.ndarray
    bos: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def added(self, start: int) -> int:
        """The number of tokens that a piece from `start` has in front: 1 where that is a BOS."""
        return int(start > 0 and self.bos is not None)

    def cut(self, start: int, size: int) -> "Sample":
        """A piece of `size` tokens: a BOS where one is added, and the tokens from `start` on. What follows
        an added BOS in the middle of a text is not to be learnt."""
        end = start + size - self.added(start)
        tokens, learn = self.tokens[start:end], self.learn[start:end]
        if start and self.bos is not None:
            tokens, learn = np.insert(tokens, 0, self.bos), np.insert(learn, 0, False)
            learn[1:2] = False
        return Sample(self.id, tokens, learn)


@dataclass(frozen=True)
class Place:
    """How far a stream of samples has been packed: `offset` tokens into sample number `cursor`."""

    cursor: int = 0
    offset: int = 0


def fill_row(
    sample_at: Callable[[int], Sample | None],
    place: Place,
    seq_len: int,
    *,
    pack: bool,
    cut_anywhere: bool,
    longest: int | None = None,
) -> tuple[list[Sample], Place]:
    """The pieces of the next row, and the place where it ends. Next-fit: what does not fit opens the next
    row.

    Args:
      sample_at: sample number i of the stream; None past its end. Empty samples are passed over.
      pack: several samples per row, or one.
      longest: tokens of a piece of this row, at most; None for `seq_len`. A longer sample is cut there.
      cut_anywhere: also cut a sample longer than `longest` wherever the row ends.
    """
    longest = seq_len if longest is None else longest
    pieces, space, cursor, offset = [], seq_len, place.cursor, place.offset
    while space and (sample := sample_at(cursor)) is not None:
        added = sample.added(offset)
        size = min(added + len(sample) - offset, longest)
        if cut_anywhere and len(sample) > longest:
            size = min(size, space)
        if size > space:
            break
        if size:
            pieces.append(sample.cut(offset, size))
            space -= size
        offset += size - added
        if offset >= len(sample):
            cursor, offset = cursor + 1, 0
        if pieces and not pack:
            break
    return pieces, Place(cursor, offset)


def assemble(rows: Sequence[Sequence[Sample]], fused: Sequence[bool], seq_len: int) -> Batch:
    """Rows of pieces as arrays [rows, seq_len].

    A fused row is one segment with consecutive positions (the reference's long-context augmentation). Even
    there, the first token of a piece is never a target: nothing before it predicts it.
    """
    shape = (len(rows), seq_len)
    tokens, positions, segments = (np.zeros(shape, np.int32) for _ in range(3))
    learn = np.zeros(shape, bool)
    for r, pieces in enumerate(rows):
        start = 0
        for number, piece in enumerate(pieces, 1):
            end = start + len(piece)
            tokens[r, start:end] = piece.tokens
            learn[r, start + 1 : end] = piece.learn[1:]
            positions[r, start:end] = np.arange(start, end) if fused[r] else np.arange(end - start)
            segments[r, start:end] = 1 if fused[r] else number
            start = end
    inside = np.zeros(shape, bool)
    inside[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    targets = np.where(inside, np.roll(tokens, -1, axis=1), 0)
    mask = (inside & np.roll(learn, -1, axis=1)).astype(np.float32)
    return Batch(tokens=tokens, targets=targets, positions=positions, segments=segments, mask=mask)
