"""Admission control: the limits of the queue and each key's share, checked before any work is done; and the
order in which the tokenizer serves keys."""

import dataclasses
import math
import sys
import threading
import typing
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from swiftkv_jax.engine.queue import Demand
from swiftkv_jax.engine.settings import Settings
from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.settings import HttpSettings

LONG = 2**15  # bytes: tokenising a longer text would delay short requests too much
_ANSWER = typing.TypeVar("_ANSWER")


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of the engine: what waits, by key; running sequences; pages in use, of how many."""

    waiting: Mapping[str, Demand] = dataclasses.field(default_factory=dict)
    running: int = 0
    pages_used: int = 0
    pages: int = 1
    tokens_per_s: float = 0.0

    @property
    def queued(self) -> Demand:
        return sum(self.waiting.values(), Demand())


class Ticket:
    """A reservation of queue capacity for one call, released when its `with` block ends.

    Attributes:
      demand: an estimate until the texts are tokenised; without sequences the call needs only the tokenizer.
      places: how much of its key's share it takes; a call that needs only the tokenizer takes one.
      waiting: whether its sequences are not yet in the engine's own queue.
    """

    def __init__(self, admission: "Admission", tenant: str, demand: Demand):
        self._admission, self.tenant, self.demand = admission, tenant, demand
        self.places, self.waiting = max(1, demand.sequences), True

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_) -> None:
        self._admission.release(self)


class Admission:
    """Gives out tickets on the event loop's thread; the engine's thread publishes its load.

    Attributes:
      tickets: of the calls that are being answered. load: what the engine published last.
    """

    def __init__(self, engine: Settings, limits: HttpSettings, refused: Callable[[str], None]):
        """`refused` is called with the reason of every temporary refusal."""
        self._limits, self._refused, context = limits, refused, engine.max_model_len
        tokens = limits.max_queued_tokens or max(64 * engine.max_num_batched_tokens, 4 * context)
        output_tokens = limits.max_queued_output_tokens or 64 * context
        self._most = most = Demand(limits.max_queued_requests, tokens, output_tokens)
        # The most that one key may have: sequences that run or wait, and tokens of those that wait. With two
        # or more keys it is half of the total, so that no key alone can keep the others out.
        self._share = Demand(*[sys.maxsize] * 3)
        if len(limits.api_keys) > 1:
            places = (most.sequences + engine.max_num_seqs) // 2
            self._share = Demand(max(1, places), most.tokens // 2, most.output_tokens // 2)
        if limits.max_requests_per_key is not None:
            self._share = dataclasses.replace(self._share, sequences=limits.max_requests_per_key)
        self.load = Load(pages=max(1, engine.num_pages or 1))
        self.tickets: set[Ticket] = set()
        self._per_tenant: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards what both threads write: the load and `Ticket.waiting`

    def publish(self, load: Load, taken: Ticket | None) -> None:
        """Publish the engine's load; `taken` is now counted in the engine's own queue, or has ended."""
        with self._lock:
            self.load = load
            if taken:
                taken.waiting = False

    def admit(self, tenant: str, demand: Demand) -> Ticket:
        """Reserve room for a call's sequences and its estimated prompt and output tokens."""
        self.check(tenant, demand)
        return self._issue(tenant, demand)

    def check(self, tenant: str, demand: Demand) -> None:
        """Check that there is room for `demand`."""
        most, share = self._most, self._share
        fits = min(self._limits.max_sequences, most.sequences, share.sequences)
        if demand.sequences > fits:
            raise ApiError(400, f"n times prompts is {demand.sequences}; at most {fits} may be", "n")
        self._check_key(tenant, demand.sequences)
        with self._lock:
            coming = [ticket for ticket in self.tickets if ticket.waiting]
            load = self.load
        own = [ticket.demand for ticket in coming if ticket.tenant == tenant]
        mine = sum(own, load.waiting.get(tenant, Demand()))
        if why := mine.crowds_out(demand, dataclasses.replace(share, sequences=sys.maxsize)):
            raise self._above_share(f"of this key, {why}")
        if why := sum((ticket.demand for ticket in coming), load.queued).crowds_out(demand, most):
            raise self.refuse("queue", self.full(why))

    def update(self, ticket: Ticket, demand: Demand) -> None:
        """Replace the estimate of an admitted call's tokens; `ticket` keeps its places."""
        ticket.demand = Demand()
        self.check(ticket.tenant, dataclasses.replace(demand, sequences=0))
        ticket.demand = demand

    def admit_reader(self, tenant: str) -> Ticket:
        """Admit a call that needs only the tokenizer; at most `max_sequences` of them are here at a time."""
        self._check_key(tenant, 1)
        readers = sum(not ticket.demand.sequences for ticket in self.tickets)
        if readers >= self._limits.max_sequences:
            raise self.refuse("queue", self.full(f"{readers} texts are waiting"))
        return self._issue(tenant, Demand())

    def release(self, ticket: Ticket) -> None:
        """Release the reservation of a call that has ended."""
        self.tickets.discard(ticket)
        self._per_tenant[ticket.tenant] -= ticket.places
        if not self._per_tenant[ticket.tenant]:
            del self._per_tenant[ticket.tenant]

    def refuse(self, reason: str, error: ApiError) -> ApiError:
        """Count a refusal: "queue", "key", "draining" or "starting"; return `error`."""
        self._refused(reason)
        return error

    def full(self, why: str) -> ApiError:
        """The error of a full queue: retry when the waiting prompts may have been read."""
        rate = self.load.tokens_per_s
        seconds = math.ceil(self.load.queued.tokens / rate) if rate else 1
        status = self._limits.queue_status
        return ApiError(status, f"the server is busy: {why}", retry_after=min(60, max(1, seconds)))

    def _check_key(self, tenant: str, sequences: int) -> None:
        cap = self._share.sequences
        here = self._per_tenant[tenant]
        if here + sequences > cap:
            raise self._above_share(f"this key has {here} requests here already, of the {cap} it may have")

    def _above_share(self, why: str) -> ApiError:
        message = f"{why}; wait for one to end"
        return self.refuse("key", ApiError(self._limits.key_status, message, retry_after=1))

    def _issue(self, tenant: str, demand: Demand) -> Ticket:
        ticket = Ticket(self, tenant, demand)
        self.tickets.add(ticket)
        self._per_tenant[tenant] += ticket.places
        return ticket


class Turns:
    """A thread that serves keys in turn, one piece of work at a time."""

    def __init__(self, name: str):
        self._lines: dict[str, deque[tuple[Future, Callable]]] = {}  # the first key is next
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, name)

    def submit(self, key: str, work: Callable[[], _ANSWER]) -> Future[_ANSWER]:
        """Run `work` for a key. If it is cancelled in time, it never starts."""
        future: Future[_ANSWER] = Future()
        with self._lock:
            self._lines.setdefault(key, deque()).append((future, work))
        self._thread.submit(self._next)
        return future

    def stop(self) -> None:
        """Cancel all work that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for line in self._lines.values():
                for future, _ in line:
                    future.cancel()
            self._lines.clear()

    def _next(self) -> None:
        """Do the next piece of work; this is called once for each piece."""
        with self._lock:
            if not self._lines:  # stopped
                return
            key = next(iter(self._lines))
            line = self._lines.pop(key)
            future, work = line.popleft()
            if line:
                self._lines[key] = line
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)
