"""What was sent to the device and not yet read: a step of any tokens, or a loop that decodes several."""

import dataclasses

import jax
import numpy as np

from swiftkv_jax.engine.sampling import NO_ID, Mode, Sampled
from swiftkv_jax.engine.scheduler import Work
from swiftkv_jax.engine.sequence import Choice, Sequence


@dataclasses.dataclass(frozen=True)
class StepLaunch:
    """A step that was sent to the device and not yet read.

    Attributes:
      work: what it runs. places: of each item's survivors. sampled: [M] after each; None without any.
    """

    work: list[Work]
    places: list[range]
    sampled: Sampled | None

    @property
    def rows(self) -> list[Sequence]:
        return [item.sequence for item in self.work]

    def read(self) -> list[list[Choice]]:
        """Wait for it; each row's tokens: none where its prompt goes on, else one, and one more for each
        guess that proved right."""
        sampled = jax.device_get(self.sampled)
        return [self._standing(sampled, *each) for each in zip(self.work, self.places, strict=True)]

    def _standing(self, sampled: Sampled, item: Work, places: range) -> list[Choice]:
        out: list[Choice] = []
        for i, at in enumerate(places):
            if i and out[-1].token != item.draft[i - 1]:
                break
            out.append(_choice(sampled, (at,), guessed=i > 0, drafted=0 if i else len(item.draft)))
        return out


@dataclasses.dataclass(frozen=True)
class DecodeLaunch:
    """A decode loop that was sent to the device and not yet read; another can be sent behind it.

    Attributes:
      rows: the sequences, row by row. sampled: [steps, Q], `each` of them a turn.
      mode: what they were sampled by.
    """

    rows: list[Sequence]
    sampled: Sampled
    mode: Mode
    steps: int
    each: int

    def read(self) -> list[list[Choice]]:
        """Wait for it; each row's tokens in order."""
        sampled = jax.device_get(self.sampled)
        return [self._given(sampled, row, sequence) for row, sequence in enumerate(self.rows)]

    def _given(self, sampled: Sampled, row: int, sequence: Sequence) -> list[Choice]:
        """The first token of a turn opens it; as many are guessed to follow as the sequence has room for."""
        room = sequence.request.max_length - sequence.length - 1
        out = []
        for known, i in enumerate(np.flatnonzero(sampled.token[:, row] != NO_ID).tolist()):
            guessed = i % self.each > 0
            drafted = 0 if guessed else min(self.each - 1, room - known)
            out.append(_choice(sampled, (i, row), guessed, drafted))
        return out


def _choice(sampled: Sampled, at: tuple[int, ...], guessed: bool, drafted: int) -> Choice:
    """The device's arrays at one place as plain numbers."""
    token, logprob, rank = (array[at].item() for array in (sampled.token, sampled.logprob, sampled.rank))
    top = zip(sampled.top_ids[at].tolist(), sampled.top_logprobs[at].tolist(), strict=True)
    return Choice(token, logprob, rank, tuple(top), guessed, drafted)
