"""The engine on its own thread, and the bridge between it and an event loop.

Requests go in through an inbox. What is new of each completion comes back to the request's own queue on the
loop. The loop never waits for the engine, and the engine never waits for the loop.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import math
import queue
import threading
import time
import traceback
import typing
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.processes import PeerLost
from swiftkv_jax.engine import score
from swiftkv_jax.engine.engine import Engine, Group
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.queue import Demand
from swiftkv_jax.engine.request import Logprob, Request
from swiftkv_jax.server.admission import LONG, Admission, Load, Ticket, Turns
from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.metrics import Metrics
from swiftkv_jax.server.settings import HttpSettings
from swiftkv_jax.server.streams import Delta, Stream, ends, news

log = logging.getLogger("swiftkv_jax.http")
_IDLE_S = 0.2  # how long an idle engine thread sleeps between heartbeats
RESTARTS, _WITHIN_S = 5, 60.0  # after more restarts than this in so many seconds the engine is given up
_ANSWER = typing.TypeVar("_ANSWER")
_ACCEPTED = "accepted"


class Service:
    """Owns the engine's thread. All methods but those marked are for the event loop's thread.

    Attributes:
      llm: its engine belongs to this service alone. draining: new requests are refused.
      admission: the limits on what may wait.
    """

    def __init__(self, llm: LLM, settings: HttpSettings, metrics: Metrics):
        self.llm, self.settings, self.metrics = llm, settings, metrics
        self.draining = False
        self.admission = Admission(llm.settings, settings, metrics.refused)
        self._compiled = (0, 0)  # programs in use, of how many
        self._scored = self._scorings = 0  # programs of scores, likewise; the first by the scorer's thread
        self._ready = self._stopping = self._dead = False
        self.reason_of_death = "the engine has stopped; see the log"  # reported when it is dead
        self._beat = time.monotonic()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # by request id; the engine's thread only
        self._restarts: list[float] = []
        # Tokenizers of short texts, and of long ones: a text as large as a body takes a second.
        self._short, self._long, self._scorer = map(Turns, ("encode-short", "encode-long", "score"))
        self._warmed: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the threads; running requests are dropped."""
        self._stopping = True
        self._calls.put(lambda: None)
        if self._warmed is not None:
            self._warmed.cancel_warm_up()
        for turns in (self._short, self._long, self._scorer):
            turns.stop()
        if self._thread.is_alive():
            self._thread.join(5.0)

    @property
    def healthy(self) -> bool:
        """Whether the engine has responded lately."""
        return not self._dead and not self._silent(self.settings.heartbeat_s)

    @property
    def dead(self) -> bool:
        """Whether the engine was given up, or has been silent for too long: only a new process helps."""
        return self._dead or self._silent(self.settings.give_up_s)

    def _silent(self, seconds: float) -> bool:
        """Whether the engine has not responded for so long, or, where it may compile, for much longer."""
        compiled = self._ready and self.settings.warm_up
        limit = seconds if compiled else self.settings.warm_up_heartbeat_s
        return time.monotonic() - self._beat > limit

    @property
    def progress(self) -> tuple[int, int]:
        """(programs compiled by the warm-up, programs in all); it continues while the first requests are
        served."""
        return self._compiled[0] + self._scored, self._compiled[1] + self._scorings

    @property
    def ready(self) -> bool:
        return self._ready and self.healthy and not self.draining

    def admit(self, tenant: str, demand: Demand) -> Ticket:
        """`Admission.admit`, while the server is open."""
        self._check_open()
        return self.admission.admit(tenant, demand)

    def check(self, tenant: str, demand: Demand) -> None:
        """`Admission.check`, while the server is open."""
        self._check_open()
        self.admission.check(tenant, demand)

    def _check_open(self) -> None:
        self._check_not_draining()
        if not self._ready or not self.healthy:
            error = ApiError(503, "the server is not ready", retry_after=5)
            raise self.admission.refuse("starting", error)

    async def consult(self, tenant: str, size: int, work: Callable[[], _ANSWER]) -> _ANSWER:
        """`encode`, for a call that needs only the tokenizer."""
        self._check_not_draining()
        with self.admission.admit_reader(tenant):
            return await self.encode(tenant, size, work)

    def _check_not_draining(self) -> None:
        if self.draining:
            raise self._closing()

    def _late(self) -> ApiError:
        why = f"no slot became free within {self.settings.queue_timeout_s:g} seconds"
        return self.admission.refuse("queue", self.admission.full(why))

    def _closing(self) -> ApiError:
        error = ApiError(503, "the server is shutting down", retry_after=5)
        return self.admission.refuse("draining", error)

    async def encode(self, tenant: str, size: int, work: Callable[[], _ANSWER]) -> _ANSWER:
        """Run `work`, which uses the tokenizer on `size` bytes of text, when it is this key's turn."""
        turns = self._long if size > LONG else self._short
        return await asyncio.wrap_future(turns.submit(tenant, work))

    async def score(self, tenant: str, ids: tuple[int, ...], top: int) -> list[dict[int, Logprob] | None]:
        """`LLM.score`, one at a time, when it is this key's turn."""
        work = partial(self.llm.score, ids, top)
        try:
            return await asyncio.wrap_future(self._scorer.submit(tenant, work))
        except FloatingPointError:
            self._calls.put(self._count_failed)
            raise

    def stream(self, requests: list[Request], ticket: Ticket) -> Stream:
        """Run these requests; each gets an id of the server's own, whatever the caller's id is."""
        named = [dataclasses.replace(r, request_id=uuid.uuid4().hex, key=ticket.tenant) for r in requests]
        return Stream(self, named, ticket)

    def enter(self, stream: Stream) -> None:
        self._calls.put(partial(self._add, stream))

    def leave(self, stream: Stream) -> None:
        self._calls.put(partial(self._abort, stream))

    async def drain(self) -> None:
        """Refuse new requests, end those that have not begun, and give running ones `shutdown_s` seconds.

        A request that is cut off then gets a 503 or, if its answer is under way, an error in the stream.
        """
        self.draining = True
        self._calls.put(lambda: self._cut_off(self._unbegun(), self._closing))
        await self._emptied(self.settings.shutdown_s)
        self._calls.put(lambda: self._cut_off({*self._streams.values()}, self._closing))
        await self._emptied(5.0)

    async def _emptied(self, seconds: float) -> None:
        """Wait until every call is answered, or for `seconds`."""
        deadline = time.monotonic() + seconds
        while self.admission.tickets and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _run(self) -> None:
        """The main function of the engine's thread; the methods below it run there."""
        try:
            if self.settings.warm_up:
                self._warm_up()
                _freeze_gc()
            self._ready = True
            while not self._stopping:
                self._iterate()
        except Exception as error:
            if self._stopping:
                return
            if isinstance(error, PeerLost):
                self.reason_of_death = f"the engine has stopped: {error}"
            else:
                log.critical("the engine has stopped: \n%s", traceback.format_exc())
            self._dead = True
            for stream in set(self._streams.values()):
                for request in stream.requests:
                    self._tell(stream.loop, [(stream, ends(stream, request))])
            self._streams.clear()
        while not self._stopping:  # the engine is gone, but callers still wait for an answer
            try:
                self._calls.get()()
            except Exception:
                log.error("cleaning up after the engine failed\n%s", traceback.format_exc())

    def _warm_up(self) -> None:
        """Compile until any request can run; the other programs are compiled while the first requests run."""
        engine = self._warmed = self.llm.engine
        limit = self.llm.settings.max_model_len
        longest = min(self.settings.max_scored_tokens, limit)
        lengths = score.lengths(longest, limit) if self.llm.scorable else []
        self._scorings = len(lengths)

        def say(done: int, total: int) -> None:
            self._beat, self._compiled = time.monotonic(), (done, total)

        if self.llm.role.several:  # all processes compile everything, and then go on together
            engine.warm_up(say)
        else:
            engine.begin_warm_up(say)
        for length in lengths:
            self._scorer.submit("", partial(self._compile_scoring, length))

    def _compile_scoring(self, length: int) -> None:
        try:
            with contextlib.suppress(FloatingPointError):  # scores that are NaN are compiled too
                self.llm.score([0] * length)
        except Exception:  # of a request: the requests that need it get it too
            log.error("prompts of %d tokens cannot be scored\n%s", length, traceback.format_exc())
        finally:
            self._scored += 1

    def _count_failed(self) -> None:
        self.llm.engine.stats.failed_requests += 1

    def _iterate(self) -> None:
        self._beat = time.monotonic()
        engine, before = self.llm.engine, self.llm.engine.restarts
        try:
            self._take_calls(0.0 if engine.busy else _IDLE_S)
            if engine.warming is not None:
                engine.take_compiled()
                self._compiled = engine.warming or (self._compiled[1], self._compiled[1])
                if engine.warming is None:
                    _freeze_gc()
            if engine.busy:
                self._post(engine.step())
                self._cut_off(self._unbegun(time.perf_counter() - self.settings.queue_timeout_s), self._late)
        except PeerLost:
            raise
        except Exception as error:
            if self._stopping:
                return
            self._count_restart(traceback.format_exc(), error)
            engine.restart(error)
        else:
            if engine.restarts > before:  # it restarted by itself: the device failed
                self._count_restart("the device failed", RuntimeError("the device fails repeatedly"))
        self._measure()

    def _take_calls(self, seconds: float) -> None:
        """Run what the event loop asks for; wait up to `seconds` for the first of it."""
        try:
            call = self._calls.get(timeout=seconds)
            while True:
                call()
                call = self._calls.get_nowait()
        except queue.Empty:
            return

    def _unbegun(self, arrived_before: float = math.inf) -> Collection[Stream]:
        """The streams of which no completion has had a lane yet."""
        waiting = [sequence for sequence in self.llm.engine.scheduler.waiting if not sequence.scheduled]
        counts = Counter(s.request.request_id for s in waiting if s.arrival < arrived_before)
        streams = Counter[Stream]()
        for request_id, count in counts.items():
            if request_id in self._streams:
                streams[self._streams[request_id]] += count
        return [stream for stream, count in streams.items() if count == stream.sequences]

    def _cut_off(self, streams: Collection[Stream], why: Callable[[], ApiError]) -> None:
        for stream in streams:
            self._abort(stream)
            self._tell(stream.loop, [(stream, why())])

    def _count_restart(self, what: str, error: Exception) -> None:
        """Count a failure outside of single requests: running requests fail, waiting ones continue.

        If it happens too often within a minute, `error` is raised.
        """
        log.error("the engine failed and restarts\n%s", what)
        now = time.monotonic()
        self._restarts = [moment for moment in self._restarts if now - moment < _WITHIN_S] + [now]
        if len(self._restarts) > RESTARTS:
            raise error

    def _add(self, stream: Stream) -> None:
        answer: str | ApiError = _ACCEPTED
        try:
            if self._dead:
                raise RuntimeError("the engine has stopped")
            self._check_not_draining()
            self.llm.engine.add(*stream.requests)
            self._streams |= dict.fromkeys(stream.numbers, stream)
        except ApiError as error:
            answer = error
        except UsageError as error:
            answer = ApiError(400, str(error), "prompt", "context_length_exceeded")
        except Exception:
            log.error("a request was not admitted\n%s", traceback.format_exc())
            answer = ApiError(500, "the engine could not take this request")
        self._tell(stream.loop, [(stream, answer)])
        self._measure(stream.ticket)

    def _abort(self, stream: Stream) -> None:
        for request_id in stream.numbers:
            self._forget(request_id)
        self._measure(stream.ticket)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._dead:
            self.llm.engine.abort(request_id)

    def _post(self, groups: list[Group]) -> None:
        posts: list[tuple[Stream, list[Delta]]] = []
        for group in groups:
            key = group.request.request_id
            stream = self._streams.get(key)
            if stream is not None:
                try:
                    posts.append((stream, news(stream, group)))
                except Exception:
                    log.error("an answer could not be delivered\n%s", traceback.format_exc())
                    self._forget(key)
                    posts.append((stream, ends(stream, group.request)))
            if group.finished:
                self._streams.pop(key, None)
                self.metrics.finished(group)
        if posts:
            self._tell(posts[0][0].loop, posts)

    def _tell(self, loop: asyncio.AbstractEventLoop, posts) -> None:
        def post():
            for stream, item in posts:
                if item:
                    stream.inbox.put_nowait(item)

        if not loop.is_closed():
            loop.call_soon_threadsafe(post)

    def _measure(self, taken: Ticket | None = None) -> None:
        """Publish the engine's load; `taken` is now counted in the engine's own queue, or has ended."""
        engine = self.llm.engine
        scheduler, stats = engine.scheduler, engine.stats
        load = Load(
            waiting=dict(scheduler.waiting.demands),
            running=len(scheduler.running),
            pages_used=scheduler.pages.used,
            pages=scheduler.pages.total,
            tokens_per_s=stats.prompt_tokens / stats.prompt_seconds if stats.prompt_seconds else 0.0,
        )
        self.admission.publish(load, taken)
        self.metrics.stepped(engine, load)


def _freeze_gc() -> None:
    """Exempt the objects alive now from garbage collection: a scan of half a million objects stops every
    thread."""
    gc.collect()
    gc.freeze()
