"""Who may come in: the bounds on what waits, and each key's share, checked before any work is done."""

import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable

from swiftkv_jax.engine.http.errors import ApiError
from swiftkv_jax.engine.http.settings import HttpSettings
from swiftkv_jax.engine.settings import Settings


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine holds: sequences and their known tokens; pages in use of all."""

    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    pages_used: int = 0
    pages: int = 1
    tokens_per_s: float = 0.0


class Ticket:
    """The right to have `sequences` sequences in the server; given back when its `with` block ends.

    Attributes:
      waiting: whether the engine has not yet taken them over into its own queue.
    """

    def __init__(self, admission: "Admission", tenant: str, sequences: int, tokens: int):
        self._admission, self.tenant = admission, tenant
        self.sequences, self.tokens, self.waiting = sequences, tokens, True

    def __enter__(self) -> "Ticket":
        return self

    def __exit__(self, *_) -> None:
        self._admission.release(self)


class Admission:
    """Gives out tickets on the event loop's thread; the engine's thread publishes its load."""

    def __init__(self, engine: Settings, limits: HttpSettings, refused: Callable[[str], None]):
        """`refused` is told the reason of every refusal that the same call later may not meet."""
        self._engine, self._limits, self._refused = engine, limits, refused
        self._load = Load(pages=max(1, engine.num_pages or 1))
        self._tickets: set[Ticket] = set()
        self._per_tenant: Counter[str] = Counter()
        self._lock = threading.Lock()  # of what both threads write: the load and `Ticket.waiting`

    @property
    def tickets(self) -> int:
        """Calls that are being answered."""
        return len(self._tickets)

    def publish(self, load: Load, taken: Ticket | None) -> None:
        """The engine's load; `taken` is from now on counted there, or gone."""
        with self._lock:
            self._load = load
            if taken:
                taken.waiting = False

    def admit(self, tenant: str, sequences: int, tokens: int) -> Ticket:
        """Room for a call's sequences, with about `tokens` tokens to read.

        Raises:
          ApiError: 503 when full; 429 above the key's share; 400 if it can never fit.
        """
        limits, engine = self._limits, self._engine
        most = engine.max_queued_requests
        if sequences > min(limits.max_sequences, most or limits.max_sequences):
            raise ApiError(400, f"n times prompts is {sequences}; at most {limits.max_sequences}", "n")
        self._check_key(tenant)
        with self._lock:
            coming = [ticket for ticket in self._tickets if ticket.waiting]
            waiting = self._load.waiting + sum(ticket.sequences for ticket in coming)
            known = self._load.waiting_tokens + sum(ticket.tokens for ticket in coming)
        if most is not None and waiting + sequences > most:
            raise self.refuse("queue", self.full(f"{waiting} requests are waiting"))
        if engine.max_queued_tokens is not None and waiting and known + tokens > engine.max_queued_tokens:
            raise self.refuse("queue", self.full(f"{known} tokens are waiting"))
        return self._issue(tenant, sequences, tokens)

    def admit_reader(self, tenant: str) -> Ticket:
        """Room for a call that wants only the tokenizer; `max_sequences` of them may be here at a time.

        Raises:
          ApiError: 503 when full; 429 above the key's share.
        """
        self._check_key(tenant)
        readers = sum(not ticket.sequences for ticket in self._tickets)
        if readers >= self._limits.max_sequences:
            raise self.refuse("queue", self.full(f"{readers} texts are waiting"))
        return self._issue(tenant, 0, 0)

    def release(self, ticket: Ticket) -> None:
        """The call has ended."""
        self._tickets.discard(ticket)
        self._per_tenant[ticket.tenant] -= 1
        if not self._per_tenant[ticket.tenant]:
            del self._per_tenant[ticket.tenant]

    def refuse(self, reason: str, error: ApiError) -> ApiError:
        """Count a refusal: "queue", "key", "draining" or "starting"; `error` again."""
        self._refused(reason)
        return error

    def full(self, why: str) -> ApiError:
        """503, to come back when what waits may have been read."""
        rate = self._load.tokens_per_s
        seconds = math.ceil(self._load.waiting_tokens / rate) if rate else 1
        return ApiError(503, f"the server is busy: {why}", retry_after=min(60, max(1, seconds)))

    def _check_key(self, tenant: str) -> None:
        cap = self._limits.max_requests_per_key
        if cap is not None and self._per_tenant[tenant] >= cap:
            message = f"this key has {cap} requests here already; wait for one to end"
            raise self.refuse("key", ApiError(429, message, retry_after=1))

    def _issue(self, tenant: str, sequences: int, tokens: int) -> Ticket:
        ticket = Ticket(self, tenant, sequences, tokens)
        self._tickets.add(ticket)
        self._per_tenant[tenant] += 1
        return ticket
