"""Which tokens run next. Plain Python: no jax, no arrays, no clock.

A sequence has known tokens and cached tokens; there is no prompt phase and no decode phase. A step takes
tokens up to a budget: one from each sequence that decodes, then prompts in chunks.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from swiftkv_jax.engine.pages import Pages, extend
from swiftkv_jax.engine.queue import Queue
from swiftkv_jax.engine.request import Request
from swiftkv_jax.engine.sequence import Sequence, SourcePages

# Array sizes of small launches, in tokens. They take an accelerator about the same time, but not a CPU. Small
# launches are common: the tokens after a shared prefix, and the end of a prompt whose other tokens an
# auxiliary model read.
_SMALL = (1, 8, 32, 128)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def launch_size(pending: int, budget: int) -> int:
    """Array size of a launch that could take `pending` tokens: a power of two (or `budget`), so that few
    sizes compile.

    Padding of more than a quarter is avoided: 1100 tokens run as 1024 and then 76.
    """
    up = _padded(pending)
    size = up if up <= _SMALL[-1] or 4 * pending >= 3 * up else up // 2
    return min(size, budget)


def _padded(tokens: int) -> int:
    return next((size for size in _SMALL if tokens <= size), power_of_two(tokens))


def array_size(tokens: int, size: int) -> int:
    """Array size of a launch of `tokens` tokens of a step, whose array size is `size` by `launch_size`."""
    return min(size, _padded(tokens))


@dataclasses.dataclass(frozen=True)
class Work:
    """The next `count` known tokens of one sequence, and the `draft` tokens to verify after them."""

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()

    @property
    def completes(self) -> bool:
        """Whether the sequence's next token can be sampled after this."""
        return self.count == self.sequence.pending

    @property
    def ahead(self) -> int:
        """The number of leading tokens that are read ahead of the model, which reads the others."""
        return min(self.count, max(0, (self.sequence.request.ahead or 0) - self.sequence.cached))


class Scheduler:
    """Sequences wait, take a lane and pages, run, and give both back.

    Pages for all known tokens of a sequence are allocated when it is admitted; decoding allocates more as it
    goes. When no page is left, a sequence is preempted: it releases its pages and later recomputes its
    tokens. The victim is among the least urgent sequences, among these of the key with the most lanes, among
    these the latest. A waiting key without a lane gets one in the same way. Full pages are named as soon as
    they are computed, so that other prompts can share them.

    With batch invariance, a step always has the size of the whole budget and reads prompts only, only the
    pages of prompts are shared, and a sequence is admitted with all pages that it may ever need. No sequence
    is preempted, because decoded tokens would be recomputed in a step, with other rounding.
    """

    def __init__(
        self,
        pages: Pages,
        page: int,
        lanes: int,
        budget: int,
        share_prefixes: bool = True,
        sources: Pages | None = None,
        invariant: bool = False,
    ):
        """`page` is in tokens; at most `lanes` sequences run at once, and `budget` tokens in one step.
        `sources`: the pages for encoder outputs, enough for the longest source in every lane. `invariant`: as
        `Settings.batch_invariant`."""
        self.sources, self.invariant = sources, invariant
        self.pages, self.page, self.budget, self.share_prefixes = pages, page, budget, share_prefixes
        self.waiting = Queue()
        self.running: dict[int, Sequence] = {}
        self.preemptions = self.prefix_queries = self.prefix_hits = 0  # the latter two in tokens
        self._free = list(range(lanes))[::-1]

    @property
    def busy(self) -> bool:
        return bool(len(self.waiting) or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, running or waiting; its lane and pages are free at once."""
        if sequence.lane is not None:
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def in_order(self) -> list[Sequence]:
        """The running sequences, the most urgent first; equally urgent ones in order of arrival."""
        return sorted(self.running.values(), key=lambda each: (each.request.priority, each.number))

    @property
    def reading(self) -> bool:
        """Whether any running sequence has more to read than its last sampled token."""
        return any(not s.decodes for s in self.running.values())

    @property
    def decoding(self) -> list[Sequence]:
        """The running sequences that decode, in order."""
        return [sequence for sequence in self.in_order() if sequence.decodes]

    def admit(self) -> list[Sequence]:
        """Give lanes and pages to the next sequences, while there are any; return the admitted ones."""
        admitted = []
        while (sequence := self.waiting.head(lanes := self._lanes())) and self._can_start(sequence):
            if self._free and self._take_pages(sequence):
                self.waiting.take(sequence)
                sequence.lane = self._free.pop()
                self.running[sequence.lane] = sequence
                admitted.append(sequence)
            elif lanes[sequence.request.key] or not self._make_room(sequence.request.priority, lanes):
                break
        return admitted

    def _lanes(self) -> Counter[str]:
        """The number of lanes of each key."""
        return Counter(sequence.request.key for sequence in self.running.values())

    def _make_room(self, priority: int, lanes: Mapping[str, int]) -> bool:
        """Preempt a sequence of a key with several lanes, for a key without one; return whether it did.

        A more urgent sequence is never preempted.
        """
        if self.invariant:
            return False
        several = [s for s in self.running.values() if lanes[s.request.key] > 1]
        several = [s for s in several if s.request.priority >= priority]
        if several:
            self._preempt(self._victim(several, lanes))
        return bool(several)

    def _victim(self, running: Iterable[Sequence], lanes: Mapping[str, int]) -> Sequence:
        """The least urgent sequence; of these, one of the key with the most lanes; of these, the latest."""
        return max(running, key=lambda s: (s.request.priority, lanes[s.request.key], s.number))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.waiting.push(sequence, front=True)
        self.preemptions += 1

    def plan(self, draft=None) -> tuple[list[Work], int]:
        """Plan one step: (work in order of service, array size). Sequences may be preempted for it.

        `draft(sequence, most)` returns draft tokens for a sequence that decodes; each takes budget.
        """
        work: list[Work] = []
        left = self.budget
        for sequence in [] if self.invariant else self.decoding:
            if sequence.lane is not None and left and self.grow(sequence, sequence.length):
                guess = tuple(draft(sequence, left - 1)) if draft else ()
                if guess and not self.grow(sequence, sequence.length + len(guess), preempt=False):
                    guess = ()
                work.append(Work(sequence, 1, guess))
                left -= 1 + len(guess)
        work = [item for item in work if item.sequence.lane is not None]
        reading = [s for s in self.in_order() if not s.decodes]
        reading.sort(key=lambda s: (s.request.priority, self.waiting.served[s.request.key], s.number))
        used = self.budget - left
        # All decode tokens fit, and prompts advance by at least one token.
        size = launch_size(used + sum(s.pending for s in reading), self.budget)
        least = min(self.budget, _padded(used + bool(reading)))
        size = self.budget if self.invariant else max(size, least)
        left = size - used
        for sequence in reading:
            count = min(sequence.pending, left)
            if count < sequence.pending:  # up to the end of a page, if that is not where it begins
                stop = (sequence.cached + count) // self.page * self.page
                count = stop - sequence.cached if stop > sequence.cached else count
            if count > 0:
                work.append(Work(sequence, count))
                left -= count
        return work, size

    def grow(self, sequence: Sequence, tokens: int, preempt: bool = True) -> bool:
        """Allocate pages for `tokens` tokens of a running sequence; return whether it has them. The sequence
        may itself be preempted."""
        need = -(-tokens // self.page) - len(sequence.pages)
        while need > 0:
            got = self.pages.allocate(need, sequence.request.key)
            if got is not None:
                sequence.pages += got
                break
            if not preempt:
                return False
            self._preempt(victim := self._victim(self.running.values(), self._lanes()))
            if victim is sequence:
                return False
        return True

    def cached(self, sequence: Sequence, count: int) -> None:
        """Record `count` more cached tokens of a sequence, and name the pages that are full now."""
        sequence.cached += count
        self.waiting.charge(sequence)
        if not self.share_prefixes:
            return
        tokens = None
        shareable = min(sequence.cached, self._shareable(sequence.request))
        while (len(sequence.names) + 1) * self.page <= shareable:
            tokens = sequence.tokens if tokens is None else tokens
            count = len(sequence.names)
            part = tuple(tokens[count * self.page : (count + 1) * self.page])
            name = extend(sequence.names[-1] if count else sequence.request.root, part)
            self.pages.name(sequence.pages[count], name, part)
            sequence.names.append(name)

    def _shareable(self, request: Request) -> int:
        """The number of leading tokens of a request whose rows would be the same in any other request."""
        return min(request.shareable, len(request.token_ids)) if self.invariant else request.shareable

    def mark_finite(self, sequence: Sequence) -> None:
        """Mark a sequence's pages as verified: a token was sampled from finite logits after them."""
        known, sequence.validated = sequence.validated, len(sequence.names)
        self.pages.validate(sequence.pages[known : sequence.validated])

    def invalidate(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Make sure that a sequence's pages are never found again; return those that only it uses, and the
        pages of its source that no other sequence reads.

        Sequences that share one of them are marked as invalid too: they may end before their own logits show
        the fault.
        """
        for page in sequence.pages:
            self.pages.forget(page)
        for other in self.running.values():
            other.invalid |= not set(other.pages).isdisjoint(sequence.pages)
        alone = [page for page in sequence.pages if self.pages.references[page] == 1]
        if self.sources is None or sequence.source is None:
            return alone, []
        return alone, [page for page in sequence.source.pages if self.sources.references[page] == 1]

    def _can_start(self, sequence: Sequence) -> bool:
        """False while a sibling still reads their prompt, whose pages it can then share."""
        siblings = (other for other in self.running.values() if other.request is sequence.request)
        return not self.share_prefixes or all(other.output for other in siblings)

    def _take_pages(self, sequence: Sequence) -> bool:
        if self.running and self.pages.available <= len(self.running):
            return False  # at once: a long prompt would be hashed at every step, and needs a page of its own
        tokens = sequence.tokens
        shared, names = self._find(sequence, tokens)
        for page in shared:
            self.pages.share(page)
        most = sequence.request.max_length if self.invariant else len(tokens)
        need = -(-most // self.page) - len(shared)
        spare = self.pages.available - need >= len(self.running)  # room for those that decode
        fresh = self.pages.allocate(need, sequence.request.key) if spare or not self.running else None
        if fresh is None:  # then no cached page was evicted
            self.pages.release(shared)
            return False
        sequence.pages, sequence.names = shared + fresh, names
        self._take_source(sequence)
        sequence.cached = len(shared) * self.page
        sequence.charged = max(sequence.charged, sequence.cached)  # prefix hits are not charged
        if not sequence.output:
            self.prefix_queries += len(tokens)
            self.prefix_hits += sequence.cached
            sequence.prefix_hit = sequence.cached
        return True

    def _take_source(self, sequence: Sequence) -> None:
        """Allocate pages for its source, or share those of a running sibling."""
        request = sequence.request
        if self.sources is None or not request.source_length:
            return
        sibling = next((other for other in self.running.values() if other.request is request), None)
        if sibling is not None and sibling.source is not None:
            sequence.source = sibling.source
            for page in sequence.source.pages:
                self.sources.share(page)
            return
        pages = self.sources.allocate(-(-request.source_length // self.page), request.key)
        if pages is None:
            raise RuntimeError("there are fewer pages of sources than the lanes need")
        sequence.source = SourcePages(pages)

    def _find(self, sequence: Sequence, tokens: list[int]) -> tuple[list[int], list[bytes]]:
        """Named pages that begin with `tokens`, and their names; at least one token is left to run."""
        pages: list[int] = []
        names: list[bytes] = []
        if not self.share_prefixes:
            return pages, names
        name, most = sequence.request.root, min(len(tokens) - 1, self._shareable(sequence.request))
        for start in range(0, most // self.page * self.page, self.page):
            part = tuple(tokens[start : start + self.page])
            name = extend(name, part)
            page = self.pages.find(name, part)
            if page is None:
                break
            pages.append(page)
            names.append(name)
        return pages, names

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.lane is not None
        del self.running[sequence.lane]
        self._free.append(sequence.lane)
        self._free.sort(reverse=True)
        self.pages.release(sequence.pages)
        if self.sources is not None and sequence.source is not None:
            self.sources.release(sequence.source.pages)
        sequence.lane, sequence.pages, sequence.names, sequence.source = None, [], [], None
        sequence.cached = sequence.validated = 0
