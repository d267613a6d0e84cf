"""The host's arrays of a launch, padded to sizes that programs are compiled for."""

from typing import Any

import numpy as np

from swiftkv_jax.core.cache import Cache, Sources
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.shapes import Int
from swiftkv_jax.engine.loop import Inputs, Lanes, Survivors
from swiftkv_jax.engine.sampling import Mode
from swiftkv_jax.engine.scheduler import Work, power_of_two
from swiftkv_jax.engine.sequence import Sequence

_LEAST_SOURCE = 32  # positions: below these a source costs about the same whatever its length


class Arrays:
    """Packs what sequences run into arrays of `count` rows; these sequences have the first rows.

    Attributes:
      slots: pages of a row. source_sizes: positions of an encoder's launch, ascending, none without an
        encoder; an audio window always has all positions.
    """

    def __init__(self, model: Transformer, cache: Cache, drafts: int):
        """A sequence has at most `drafts` draft tokens in a step."""
        self._drafts, self._capacity = drafts, cache.capacity
        self.slots = -(-cache.capacity // cache.page)
        self.source_sizes: list[int] = []
        if model.config.encoder is not None and cache.cross is not None:
            self._mels, most = model.config.encoder.mels, cache.cross.capacity
            self._source_slots = -(-most // cache.cross.page)
            sizes = {min(most, max(_LEAST_SOURCE, power_of_two(n))) for n in range(1, most + 1)}
            self.source_sizes = [most] if self._mels else sorted(sizes)

    def table(self, rows: list[Sequence], count: int) -> Int[np.ndarray, "Q slots"]:
        """The pages of each row."""
        table = np.zeros((count, self.slots), np.int32)
        for row, sequence in enumerate(rows):
            table[row, : len(sequence.pages)] = sequence.pages
        return table

    def flat(self, parts: list[tuple[int, list[int]]], count: int, size: int) -> tuple[Any, Any, Any]:
        """(tokens, positions, query starts) of a launch of `size` tokens; `parts`: a row's first position and
        its tokens."""
        tokens, positions = np.zeros((2, size), np.int32)
        starts = np.zeros(count + 1, np.int32)
        start = 0
        for row, (first, some) in enumerate(parts):
            stop = start + len(some)
            tokens[start:stop], positions[start:stop] = some, range(first, first + len(some))
            start = starts[row + 1] = stop
        starts[len(parts) + 1 :] = start
        return tokens, positions, starts

    def inputs(self, work: list[Work], size: int, count: int) -> tuple[Inputs, list[range]]:
        """(a step of `size` tokens, where the survivors of each piece of `work` are)."""
        parts = []
        for item in work:  # what is read ahead of the model is left out
            stop = item.sequence.cached + item.count
            first = stop - item.count + item.ahead
            parts.append((first, [*item.sequence.slice(first, stop), *item.draft]))
        tokens, positions, starts = self.flat(parts, count, size)
        survivors = np.full(count * (1 + self._drafts), size, np.int32)
        places: list[range] = []
        done = 0
        for row, item in enumerate(work):
            wanted = 1 + len(item.draft) if item.completes else 0
            survivors[done : done + wanted] = range(starts[row + 1] - wanted, starts[row + 1])
            places.append(range(done, done + wanted))
            done += wanted
        rows = [item.sequence for item in work]
        table, sources = self.table(rows, count), self.sources(rows, count)
        return Inputs(tokens, positions, starts, survivors, table, sources), places

    def survivors(self, rows: list[Sequence], places: list[range], count: int, mode: Mode) -> Survivors:
        """The sequences of a step's survivors."""
        owner, lengths = np.zeros((2, count * (1 + self._drafts)), np.int32)
        for row, (sequence, some) in enumerate(zip(rows, places, strict=True)):
            owner[some.start : some.stop] = row
            # Known tokens, then draft tokens.
            lengths[some.start : some.stop] = range(sequence.length, sequence.length + len(some))
        prompts = np.zeros(count, np.int32)
        prompts[: len(rows)] = [len(s.request.token_ids) for s in rows]
        return Survivors(owner, lengths, prompts, self._history(rows, count, mode))

    def lanes(self, rows: list[Sequence], count: int, mode: Mode) -> Lanes:
        """The state of each row of a decode loop."""
        token, position, produced = np.zeros((3, count), np.int32)
        for row, s in enumerate(rows):
            token[row], position[row], produced[row] = s.last, s.length - 1, len(s.output)
        alive = np.arange(count) < len(rows)
        return Lanes(token, position, produced, alive, self._history(rows, count, mode))

    def _history(self, rows: list[Sequence], count: int, mode: Mode) -> Int[np.ndarray, "Q S"]:
        history = np.zeros((count, self._capacity if mode.penalised else 0), np.int32)
        for row, s in enumerate(rows if mode.penalised else []):
            history[row, : s.length] = s.tokens
        return history

    def source(self, source: Any, length: int, size: int, pages: list[int]) -> tuple[np.ndarray, Sources]:
        """(one source of `length` positions in an array of `size`, the pages of its rows)."""
        shape, dtype = ((1, 2 * size, self._mels), np.float32) if self._mels else ((1, size), np.int32)
        padded = np.zeros(shape, dtype)
        padded[0, : len(source)] = source
        table = np.zeros((1, self._source_slots), np.int32)
        table[0, : len(pages)] = pages
        return padded, Sources(table, np.array([length], np.int32))

    def sources(self, rows: list[Sequence], count: int) -> Sources | None:
        """The sources that rows read; None without an encoder."""
        if not self.source_sizes:
            return None
        table, lengths = np.zeros((count, self._source_slots), np.int32), np.zeros(count, np.int32)
        for row, sequence in enumerate(rows):
            if sequence.source is not None:
                table[row, : len(sequence.source.pages)] = sequence.source.pages
                lengths[row] = sequence.request.source_length
        return Sources(table, lengths)
