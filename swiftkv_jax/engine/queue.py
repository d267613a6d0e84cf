"""The waiting queue: priorities first, then keys (tenants) in turn. Plain Python: no jax, no clock."""

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from swiftkv_jax.engine.request import Request
from swiftkv_jax.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Demand:
    """The load of some sequences: their number, known tokens, and tokens that they may still generate."""

    sequences: int = 0
    tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> "Demand":
        """The demand of all completions of a request whose `max_tokens` is set."""
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
        for field, waiting_for in _DEMANDED.items():
            waiting, bound = getattr(self, field), getattr(most, field)
            if waiting + getattr(coming, field) > bound and (self.sequences or field == "sequences"):
                return f"{waiting} {waiting_for}; at most {bound} may"
        return ""


_DEMANDED = {
    "sequences": "requests are waiting",
    "tokens": "tokens are waiting",
    "output_tokens": "tokens are asked for by those that wait",
}


class Queue:
    """Waiting sequences. The most urgent priority comes first; within it a key that runs nothing, then the
    key that was served least, then the order of arrival.

    Attributes:
      demands: the demand of each key that has anything waiting. served: tokens read and generated for each
        key.
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
        return sum(self.demands.values(), Demand())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for line in self._lines.values() for sequence in line)

    def push(self, sequence: Sequence, front: bool = False) -> None:
        line = (sequence.request.priority, key := sequence.request.key)
        if line not in self._lines:  # a returning key starts level with the key served last
            self._lines[line], self.served[key] = deque(), max(self.served[key], self._clock)
        (self._lines[line].appendleft if front else self._lines[line].append)(sequence)
        self._count(sequence, asked(sequence))

    def head(self, lanes: Mapping[str, int]) -> Sequence | None:
        """Return the next sequence, or None; `lanes` is the number of lanes that each key has."""

        def urgency(line: tuple[int, str]) -> tuple[int, bool, int, int]:
            priority, key = line
            return priority, bool(lanes.get(key)), self.served[key], self._lines[line][0].number

        return self._lines[min(self._lines, key=urgency)][0] if self._lines else None

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a lane."""
        self._clock = max(self._clock, self.served[sequence.request.key])
        self.remove(sequence)

    def charge(self, sequence: Sequence) -> None:
        """Charge its key for the tokens computed since the last call; no debt arises while no other key
        waits."""
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
    """The current demand of one sequence."""
    return Demand(1, sequence.length, sequence.request.max_length - sequence.length)
