"""Which tokens run next. Plain Python: no jax, no arrays, no clock."""

import dataclasses
from collections import deque

from swiftkv_jax.engine.sequence import Sequence

_SMALLEST = 32  # tokens: below this a launch costs the same whatever its size


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def launch_size(pending: int, budget: int) -> int:
    """Array size of the next prompt launch, a power of two (or `budget`), so that few are ever compiled.

    Padding of more than a quarter is not taken: 1100 tokens run as 1024 and then 76.
    """
    up = max(_SMALLEST, power_of_two(pending))
    size = up if up <= 4 * _SMALLEST or 4 * pending >= 3 * up else up // 2
    return min(size, budget)


@dataclasses.dataclass(frozen=True)
class Work:
    """The next `count` tokens of one sequence's prompt."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be sampled after this."""
        return self.count == self.sequence.pending


class Scheduler:
    """Sequences wait, take a lane, read their prompt in chunks, decode, and give the lane back."""

    def __init__(self, lanes: int, budget: int):
        self.budget = budget
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._free = list(range(lanes))[::-1]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give free lanes to those that waited longest; the sequences that got one."""
        admitted = []
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.lane = self._free.pop()
            self.running[sequence.lane] = sequence
            admitted.append(sequence)
        return admitted

    def plan(self) -> tuple[list[Work], int]:
        """Prompt chunks in lane order, and the array size to run them in; no work means decode."""
        reading = [s for _, s in sorted(self.running.items()) if s.pending > 1 or not s.output]
        if not reading:
            return [], 0
        size = launch_size(sum(s.pending for s in reading), self.budget)
        work, left = [], size
        for sequence in reading:
            count = min(sequence.pending, left)
            if count:
                work.append(Work(sequence, count))
            left -= count
        return work, size

    def release(self, sequence: Sequence) -> None:
        """Take a finished sequence's lane back."""
        assert sequence.lane is not None  # only what runs is released
        del self.running[sequence.lane]
        self._free.append(sequence.lane)
        self._free.sort(reverse=True)
        sequence.lane = None
