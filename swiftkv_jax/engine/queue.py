"""What waits, and in which order: priorities first, then keys in turn. Plain Python: no jax, no clock."""

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from swiftkv_jax.engine.request import Request
from swiftkv_jax.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Demand:
    """What some sequences ask for: how many they are, tokens known, and tokens that they may yet generate."""

    sequences: int = 0
    tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> "Demand":
        """Of all completions of a request; its `max_tokens` is settled."""
        n = request.params.n
        return cls(n, n * len(request.token_ids), n * (request.max_length - len(request.token_ids)))

    def __add__(self, other: "Demand") -> "Demand":
        sequences, tokens = self.sequences + other.sequences, self.tokens + other.tokens
        return Demand(sequences, tokens, self.output_tokens + other.output_tokens)

    def __neg__(self) -> "Demand":
        return Demand(-self.sequences, -self.tokens, -self.output_tokens)

    def crowds_out(self, coming: "Demand", most: "Demand") -> str:
        """Which limit of `most` would be exceeded if `coming` joined what is waiting; "" for none.

        An empty queue accepts any number of tokens: a request that is too large now would always be.
        """
        for field, what in _DEMANDED.items():
            waiting, bound = getattr(self, field), getattr(most, field)
            if waiting + getattr(coming, field) > bound and (self.sequences or field == "sequences"):
                return f"{waiting} {what}; at most {bound} may"
        return ""


_DEMANDED = {
    "sequences": "requests are waiting",
    "tokens": "tokens are waiting",
    "output_tokens": "tokens are asked for by those that wait",
}


class Queue:
    """Who waits: the most urgent priority first; within it a key that runs nothing; then the key that was
    served least; then by arrival.

    Attributes:
      demands: of each key that has anything waiting. served: tokens read and generated for each key.
    """

    def __init__(self):
        self._lines: dict[tuple[int, str], deque[Sequence]] = {}
        self._clock = 0
        self.served: Counter[str] = Counter()
        self.demands: dict[str, Demand] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @property
    def demand(self) -> Demand:
        """Of all that wait."""
        return sum(self.demands.values(), Demand())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line)

    def push(self, sequence: Sequence, front: bool = False) -> None:
        line = (sequence.request.priority, key := sequence.request.key)
        if line not in self._lines:  # a key that comes back starts level with whoever was served last
            self._lines[line], self.served[key] = deque(), max(self.served[key], self._clock)
        (self._lines[line].appendleft if front else self._lines[line].append)(sequence)
        self._count(sequence, asked(sequence))

    def head(self, lanes: Mapping[str, int]) -> Sequence | None:
        """Who is next, where keys have so many `lanes`."""

        def turn(line: tuple[int, str]) -> tuple[int, bool, int, int]:
            priority, key = line
            return priority, bool(lanes.get(key)), self.served[key], self._lines[line][0].number

        return self._lines[min(self._lines, key=turn)][0] if self._lines else None

    def take(self, sequence: Sequence) -> None:
        """Take one out, for it gets a lane."""
        self._clock = max(self._clock, self.served[sequence.request.key])
        self.remove(sequence)

    def charge(self, sequence: Sequence) -> None:
        """Count what was computed of it since the last time; while no other key waits that is no debt."""
        key, before = sequence.request.key, sequence.charged
        sequence.charged = max(before, sequence.cached)
        self.served[key] += sequence.charged - before
        if all(other == key for _, other in self._lines):
            self._clock = max(self._clock, self.served[key])

    def remove(self, sequence: Sequence) -> None:
        line = (sequence.request.priority, sequence.request.key)
        self._lines[line].remove(sequence)
        self._count(sequence, -asked(sequence))
        if not self._lines[line]:
            del self._lines[line]

    def _count(self, sequence: Sequence, more: Demand) -> None:
        key = sequence.request.key
        self.demands[key] = self.demands.get(key, Demand()) + more
        if not self.demands[key].sequences:
            del self.demands[key]


def asked(sequence: Sequence) -> Demand:
    """What one sequence asks for now."""
    return Demand(1, sequence.length, sequence.request.max_length - sequence.length)
