"""The engine on a thread of its own, and what joins it to an event loop.

Requests go in through an inbox; what is new of each completion comes back to the request's own queue on the
loop. The loop never waits for the engine, and the engine never waits for the loop.
"""

import asyncio
import dataclasses
import logging
import math
import queue
import threading
import time
import traceback
import typing
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from swiftkv_jax.engine.engine import Engine, Group, Overloaded
from swiftkv_jax.engine.http.errors import ApiError
from swiftkv_jax.engine.http.settings import HttpSettings
from swiftkv_jax.engine.http.streams import Delta, Stream, Ticket, ends, news
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import Logprob, Request
from swiftkv_jax.engine.scheduler import power_of_two
from swiftkv_jax.errors import UsageError

log = logging.getLogger("swiftkv_jax.http")
_IDLE_S = 0.2  # how long an idle engine thread sleeps between heartbeats
_RESTARTS, _WITHIN_S = 5, 60.0  # more restarts than this in so long, and the engine is given up
_ANSWER = typing.TypeVar("_ANSWER")
_ACCEPTED = "accepted"
_SHORTEST_SCORE = 64  # tokens: the smallest program of `LLM.score`


@dataclasses.dataclass(frozen=True)
class Load:
    """What the engine holds: sequences and their known tokens; pages in use of all."""

    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    pages_used: int = 0
    pages: int = 1
    tokens_per_s: float = 0.0


class Observer:
    """Told what happens, on the engine's thread. The metrics are one."""

    def stepped(self, engine: Engine, load: Load) -> None:
        """After every launch."""

    def finished(self, group: Group) -> None:
        """A request ended, in whatever way."""

    def refused(self, reason: str) -> None:
        """A request was not taken: "queue", "key", "draining" or "starting"."""


class Service:
    """Owns the engine's thread. All methods but those marked are for the event loop's thread.

    Attributes:
      llm: its engine belongs to this service alone. draining: nothing new is taken.
    """

    def __init__(self, llm: LLM, settings: HttpSettings, observer: Observer):
        self.llm, self.settings, self.observer = llm, settings, observer
        self.draining = False
        self.load = Load(pages=max(1, llm.settings.num_pages or 1))
        self.progress = (0, 0)  # programs compiled while warming up, of how many
        self._ready = self._stopping = self._dead = False
        self._beat = time.monotonic()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # by request id; the engine's thread only
        self._restarts: list[float] = []
        self._tickets: set[Ticket] = set()
        self._per_tenant: Counter[str] = Counter()
        self._lock = threading.Lock()  # of what both threads write: `load` and `Ticket.waiting`
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._scorer = ThreadPoolExecutor(1, "score")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; what still runs is dropped."""
        self._stopping = True
        self._calls.put(lambda: None)
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._scorer.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def healthy(self) -> bool:
        """Whether the engine has been heard of lately."""
        limit = self.settings.heartbeat_s if self._ready else self.settings.warm_up_heartbeat_s
        return not self._dead and time.monotonic() - self._beat <= limit

    @property
    def dead(self) -> bool:
        """Whether the engine was given up: only a new process helps."""
        return self._dead

    @property
    def ready(self) -> bool:
        return self._ready and self.healthy and not self.draining

    @property
    def tickets(self) -> int:
        """Calls that are being answered."""
        return len(self._tickets)

    def admit(self, tenant: str, sequences: int, tokens: int) -> Ticket:
        """Room for a call's sequences, with about `tokens` tokens to read; refused before any work is done.

        Raises:
          ApiError: 503 while starting, draining or full; 429 above the key's share; 400 if it can never fit.
        """
        limits, engine = self.settings, self.llm.settings
        if self.draining:
            raise self._refuse("draining", ApiError(503, "the server is shutting down", retry_after=5))
        if not self._ready or not self.healthy:
            raise self._refuse("starting", ApiError(503, "the server is not ready", retry_after=5))
        most, cap = engine.max_queued_requests, limits.max_requests_per_key
        if sequences > min(limits.max_sequences, most or limits.max_sequences):
            raise ApiError(400, f"n times prompts is {sequences}; at most {limits.max_sequences}", "n")
        if cap is not None and self._per_tenant[tenant] >= cap:
            message = f"this key has {cap} requests here already; wait for one to end"
            raise self._refuse("key", ApiError(429, message, retry_after=1))
        with self._lock:
            coming = [ticket for ticket in self._tickets if ticket.waiting]
            waiting = self.load.waiting + sum(ticket.sequences for ticket in coming)
            known = self.load.waiting_tokens + sum(ticket.tokens for ticket in coming)
        if most is not None and waiting + sequences > most:
            raise self._refuse("queue", self._full(f"{waiting} requests are waiting"))
        if engine.max_queued_tokens is not None and waiting and known + tokens > engine.max_queued_tokens:
            raise self._refuse("queue", self._full(f"{known} tokens are waiting"))
        ticket = Ticket(self, tenant, sequences, tokens)
        self._tickets.add(ticket)
        self._per_tenant[tenant] += 1
        return ticket

    def release(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self._per_tenant[ticket.tenant] -= 1
        if not self._per_tenant[ticket.tenant]:
            del self._per_tenant[ticket.tenant]

    def _refuse(self, reason: str, error: ApiError) -> ApiError:
        self.observer.refused(reason)
        return error

    def _full(self, why: str) -> ApiError:
        rate = self.load.tokens_per_s
        seconds = math.ceil(self.load.waiting_tokens / rate) if rate else 1
        return ApiError(503, f"the server is busy: {why}", retry_after=min(60, max(1, seconds)))

    async def encode(self, work: Callable[[], _ANSWER]) -> _ANSWER:
        """Run `work` on the one thread that uses the tokenizer and numbers requests."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    async def score(self, ids: tuple[int, ...], top: int) -> list[dict[int, Logprob] | None]:
        """`LLM.score`, one at a time."""
        work = partial(self.llm.score, ids, top)
        return await asyncio.get_running_loop().run_in_executor(self._scorer, work)

    def stream(self, requests: list[Request], ticket: Ticket) -> Stream:
        """Run these; every one gets an id of ours, whatever the caller calls it."""
        named = [dataclasses.replace(r, request_id=uuid.uuid4().hex, key=ticket.tenant) for r in requests]
        return Stream(self, named, ticket)

    def enter(self, stream: Stream) -> None:
        self._calls.put(partial(self._add, stream))

    def leave(self, stream: Stream) -> None:
        self._calls.put(partial(self._abort, stream))

    async def drain(self) -> None:
        """Take nothing new; give what runs `shutdown_s`, then end it with `finish_reason` "abort"."""
        self.draining = True
        for seconds in (self.settings.shutdown_s, 5.0):
            deadline = time.monotonic() + seconds
            while self._tickets and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            self._calls.put(self._abort_all)

    def _run(self) -> None:
        """The engine's thread, from here on down."""
        try:
            if self.settings.warm_up:
                self._warm_up()
            self._ready = True
            while not self._stopping:
                self._turn()
        except Exception:
            log.critical("the engine has stopped\n%s", traceback.format_exc())
            self._dead = True
            self._fail_all()
        while not self._stopping:  # the engine is gone, but callers still wait for an answer
            self._calls.get()()

    def _warm_up(self) -> None:
        longest = min(self.settings.max_scored_tokens, self.llm.settings.max_model_len)
        sizes = [_SHORTEST_SCORE]
        while sizes[-1] < power_of_two(longest):
            sizes.append(2 * sizes[-1])

        def say(done: int, total: int) -> None:
            self._beat = time.monotonic()
            self.progress = (done, total + len(sizes))

        done = self.llm.engine.warm_up(say)
        for number, size in enumerate(sizes):
            say(done + number, done)
            self.llm.score([0] * min(size, longest))
        say(done + len(sizes), done)

    def _turn(self) -> None:
        self._beat = time.monotonic()
        engine = self.llm.engine
        try:
            call = self._calls.get(timeout=0 if engine.busy else _IDLE_S)
            while True:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            pass
        if engine.busy:
            try:
                self._post(engine.step())
            except Exception as error:
                self._recover(error)
            self._refuse_late()
        self._measure()

    def _refuse_late(self) -> None:
        """Who has waited for too long, with nothing begun, is told to come back."""
        latest = time.perf_counter() - self.settings.queue_timeout_s
        waiting = [sequence for sequence in self.llm.engine.scheduler.waiting if not sequence.scheduled]
        late = Counter(s.request.request_id for s in waiting if s.arrival < latest)
        streams = Counter[Stream]()
        for request_id, count in late.items():
            if request_id in self._streams:
                streams[self._streams[request_id]] += count
        for stream, count in streams.items():
            if count == stream.sequences:
                self._abort(stream)
                self.observer.refused("queue")
                seconds = f"{self.settings.queue_timeout_s:g}"
                self._tell(stream.loop, [(stream, self._full(f"no place came free in {seconds} seconds"))])

    def _recover(self, error: Exception) -> None:
        """Something outside every request's own boundary failed: what ran fails, what waits goes on."""
        log.error("the engine failed and starts anew\n%s", traceback.format_exc())
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < _WITHIN_S] + [now]
        if len(self._restarts) > _RESTARTS:
            raise error
        self.llm.engine.restart(error)

    def _add(self, stream: Stream) -> None:
        engine, added = self.llm.engine, []
        answer: str | ApiError = _ACCEPTED
        try:
            if self._dead:
                raise RuntimeError("the engine has stopped")
            for request in stream.requests:
                engine.add(request)
                added.append(request)
                self._streams[request.request_id] = stream
        except Overloaded as error:
            self.observer.refused("queue")
            answer = self._full(str(error))
        except UsageError as error:
            answer = ApiError(400, str(error), "prompt", "context_length_exceeded")
        except Exception:
            log.error("a request was not admitted\n%s", traceback.format_exc())
            answer = ApiError(500, "the engine could not take this request")
        if answer is not _ACCEPTED:
            for request in added:
                self._forget(request.request_id)
        self._measure(stream.ticket)
        self._tell(stream.loop, [(stream, answer)])

    def _abort(self, stream: Stream) -> None:
        for request_id in stream.numbers:
            self._forget(request_id)
        self._measure(stream.ticket)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._dead:
            self.llm.engine.abort(request_id)

    def _abort_all(self) -> None:
        for request_id in list(self._streams):
            self.llm.engine.abort(request_id)

    def _fail_all(self) -> None:
        """The engine is gone: every stream ends with an error."""
        posts = []
        for stream in set(self._streams.values()):
            posts += [(stream, ends(stream, request)) for request in stream.requests]
        self._streams.clear()
        for stream, deltas in posts:
            self._tell(stream.loop, [(stream, deltas)])

    def _post(self, groups: list[Group]) -> None:
        posts: list[tuple[Stream, list[Delta]]] = []
        for group in groups:
            key = group.request.request_id
            stream = self._streams.get(key)
            if stream is not None:
                posts.append((stream, self._told(stream, group)))
            if group.finished:
                self._streams.pop(key, None)
                self.observer.finished(group)
        if posts:
            self._tell(posts[0][0].loop, posts)

    def _told(self, stream: Stream, group: Group) -> list[Delta]:
        """What is new of a group; when even that cannot be said, its end."""
        try:
            return news(stream, group)
        except Exception:
            log.error("an answer could not be told\n%s", traceback.format_exc())
            key = group.request.request_id
            self._forget(key)
            return ends(stream, group.request)

    def _tell(self, loop: asyncio.AbstractEventLoop, posts) -> None:
        def post():
            for stream, item in posts:
                if item:
                    stream.post(item)

        if not loop.is_closed():
            loop.call_soon_threadsafe(post)

    def _measure(self, taken: Ticket | None = None) -> None:
        """Publish the engine's load; `taken` is from now on counted there, or gone."""
        engine = self.llm.engine
        scheduler, stats = engine.scheduler, engine.stats
        load = Load(
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            running=len(scheduler.running),
            pages_used=scheduler.pages.total - scheduler.pages.available,
            pages=scheduler.pages.total,
            tokens_per_s=stats.prompt_tokens / stats.prompt_seconds if stats.prompt_seconds else 0.0,
        )
        with self._lock:
            self.load = load
            if taken:
                taken.waiting = False
        self.observer.stepped(engine, load)
