"""Plan, run, record: requests come and go while the batch keeps running."""

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from swiftkv_jax.cache import LARGEST, Cache
from swiftkv_jax.engine import draft
from swiftkv_jax.engine.pages import Pages
from swiftkv_jax.engine.request import Request, RequestOutput
from swiftkv_jax.engine.runner import Launch, Runner, new_cache
from swiftkv_jax.engine.scheduler import Scheduler
from swiftkv_jax.engine.sequence import Choice, Sequence
from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION
from swiftkv_jax.model import Transformer
from swiftkv_jax.shapes import PyTree

CACHE_DTYPES = ("float32", "bfloat16", "float16", *LARGEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs. None of it but `cache_dtype` changes a request's tokens.

    Attributes:
      max_model_len: most tokens of prompt and completion together.
      max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of one step.
      steps_per_launch: tokens a sequence decodes before the host looks at stop strings and new requests.
      page_size: tokens of a page; prompts share whole pages.
      num_pages: of the cache. None: enough for `max_num_seqs` full contexts, or what `memory_fraction` of
        the device's memory leaves beside the weights, if that is less.
      cache_dtype: "auto" (the model's), or a float type, or "float8_e4m3fn" or "int8", which round.
      prefix_caching: keep full pages, for prompts that begin the same way.
      attention: how pages are read: an implementation of kernels/paged_attention, by name; None: the
        platform's choice ("xla" where the model lies on several devices).
      drafts: tokens guessed by prompt lookup and checked in one step; 0: none.
      max_queued_requests, max_queued_tokens: above these a request is refused; None: no bound.
    """

    max_model_len: int
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    steps_per_launch: int = 8
    page_size: int = 64
    num_pages: int | None = None
    memory_fraction: float = 0.9
    cache_dtype: str = "auto"
    prefix_caching: bool = True
    attention: str | None = None
    drafts: int = 0
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_model_len // self.page_size)


class Overloaded(RuntimeError):
    """The queue is full: come back later."""


@dataclasses.dataclass
class Stats:
    """What an engine did. Seconds are wall time; compilation of new shapes is in them.

    Attributes:
      prompt_seconds: of steps that read prompts, decode_seconds: of all others.
      host_seconds: of both, what was not spent waiting for the device. decoded_steps: tokens a row may have
        decoded in decode launches, whose host time is `decode_host_seconds`.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    decode_host_seconds: float = 0.0
    steps: int = 0
    decoded_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    failed_requests: int = 0
    cache_bytes: int = 0
    cache_bytes_per_token: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """All fields, seconds in all, and tokens per second: of prompts while read, of output in all."""
        seconds = self.prompt_seconds + self.decode_seconds
        return dataclasses.asdict(self) | {
            "seconds": seconds,
            "prompt_tokens_per_s": self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0,
            "output_tokens_per_s": self.output_tokens / seconds if seconds else 0.0,
        }


class Group:
    """A request in the engine and its completions."""

    def __init__(self, request: Request, tokenizer, arrival: float, number: int):
        self.request = request
        self.sequences = [
            Sequence(request, child, tokenizer, arrival, number + child) for child in range(request.params.n)
        ]

    @property
    def finished(self) -> bool:
        return all(s.finish_reason for s in self.sequences)

    def output(self) -> RequestOutput:
        """What the user gets in the end."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.token_ids),
            outputs=[sequence.completion() for sequence in self.sequences],
            metrics=self.sequences[0].metrics,
        )


class Engine:
    """Runs requests, as many at once as there are lanes and pages; `step` is called until nothing is `busy`.

    Each step is one launch. While any running sequence has a prompt to read, it takes up to a budget of
    tokens, decoded ones first. Otherwise all sequences decode several tokens a launch, and the next launch
    is sent before the last one is read.

    Whatever goes wrong inside for one request ends that request alone.

    Attributes:
      probe: called with a point ("admit", "schedule", "run", "sample", "detokenise") and a request id each
        time a request passes it; what it raises is that request's failure.
    """

    def __init__(
        self,
        model: Transformer,
        params: PyTree,
        mesh: Mesh | None,
        tokenizer,
        settings: Settings,
    ):
        """`settings` with `num_pages` settled, see `settle`."""
        self.settings, self.tokenizer, self.model = settings, tokenizer, model
        self._new_cache = partial(new_cache, model, params, mesh, partial(empty_pool, model, settings))
        cache = self._new_cache()
        budget, steps = settings.max_num_batched_tokens, settings.steps_per_launch
        lanes, drafts = settings.max_num_seqs, settings.drafts
        self.runner = Runner(model, params, mesh, cache, lanes, budget, steps, drafts)
        self._start()
        self.stats = Stats(cache_bytes=cache.nbytes, cache_bytes_per_token=cache.bytes_per_token)
        self.probe: Callable[[str, str], None] = lambda point, request_id: None
        self._groups: dict[str, Group] = {}
        self._count = 0
        self._ready = False
        self._flight: Launch | None = None
        self._changed: dict[str, Group] = {}
        self._waited = 0.0

    def _start(self) -> None:
        s = self.settings
        pages = Pages(self.runner.cache.k.shape[1])
        self.scheduler = Scheduler(
            pages, s.page_size, s.max_num_seqs, s.max_num_batched_tokens, s.prefix_caching
        )

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or self._flight is not None or bool(self._changed)

    def warm_up(self, say: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compile every program that any request may need; how many. Afterwards nothing compiles."""
        self._ready = True
        return self.runner.warm_up(say)

    def add(self, request: Request) -> None:
        """Queue a request; its `request_id` must be new.

        Raises:
          UsageError: it could never run. Overloaded: too much is waiting.
        """
        s, waiting = self.settings, self.scheduler.waiting
        need = -(-request.max_length // s.page_size)
        if need > self.scheduler.pages.total:
            raise UsageError(
                f"{request.max_length} tokens of prompt and completion need {need} pages of {s.page_size}; "
                f"the cache has {self.scheduler.pages.total}: raise num_pages, or lower max_tokens"
            )
        if request.request_id in self._groups:
            raise UsageError(f"request_id {request.request_id!r} is in use")
        requests, tokens = len(waiting) + request.params.n, waiting.tokens + len(request.token_ids)
        if s.max_queued_requests is not None and requests > s.max_queued_requests:
            raise Overloaded(f"{len(waiting)} requests are waiting; at most {s.max_queued_requests} may")
        if s.max_queued_tokens is not None and tokens > s.max_queued_tokens:
            raise Overloaded(f"{waiting.tokens} tokens are waiting; at most {s.max_queued_tokens} may")
        self.probe("admit", request.request_id)
        group = Group(request, self.tokenizer, time.perf_counter(), self._count)
        self._count += request.params.n
        self._groups[request.request_id] = group
        for sequence in group.sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request, whatever it is doing; its pages are free at once. Unknown ids are ignored."""
        group = self._groups.get(request_id)
        for sequence in group.sequences if group else []:
            if not sequence.finish_reason:
                sequence.end("abort", time.perf_counter())
                self._leave(sequence)

    def step(self) -> list[Group]:
        """One launch; the requests that it changed."""
        began, self._waited = time.perf_counter(), 0.0
        prompts, decoded = self.stats.prompt_tokens, self.stats.decoded_steps
        self._advance()
        seconds = time.perf_counter() - began
        self.stats.steps += 1
        self.stats.host_seconds += seconds - self._waited
        if self.stats.prompt_tokens > prompts:
            self.stats.prompt_seconds += seconds
        else:
            self.stats.decode_seconds += seconds
        if self.stats.decoded_steps > decoded:
            self.stats.decode_host_seconds += seconds - self._waited
        scheduler = self.scheduler
        self.stats.preemptions = scheduler.preemptions
        self.stats.prefix_queries, self.stats.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits
        changed, self._changed = list(self._changed.values()), {}
        for group in changed:
            if group.finished:
                self._groups.pop(group.request.request_id, None)
        return changed

    def _advance(self) -> None:
        launch, runner = self._flight, self.runner
        if not self._ready:
            runner.fewest_rows = runner.rows(len(self.scheduler.running)) if self.scheduler.running else 1
        try:
            if launch is not None:
                self._flight = self._follow(launch)
                return self._read(launch)
            for sequence in self.scheduler.admit():
                sequence.scheduled = time.perf_counter()
                self._guarded(sequence, "schedule", self.runner.seat, sequence)
            if self.scheduler.reading or self.settings.drafts or self._one_by_one():
                self._run()
            else:
                self._decode()
        except jax.errors.JaxRuntimeError as error:  # the device failed, not a request
            self.restart(error)

    def _run(self) -> None:
        work, size = self.scheduler.plan(self._draft if self.settings.drafts else None)
        for item in work:
            self._guarded(item.sequence, "run")
        work = [item for item in work if item.sequence.lane is not None]
        if not work:
            return
        launch = self.runner.run(work, size)
        for item in work:
            if item.sequence.pending > 1 or not item.sequence.output:
                self.stats.prompt_tokens += item.count
            self.stats.drafted_tokens += len(item.draft)
            self.scheduler.cached(item.sequence, item.count)
        if any(launch.places):
            self._read(launch)

    def _decode(self) -> None:
        steps = self.settings.steps_per_launch
        for sequence in self.scheduler.in_order():
            if sequence.lane is not None:
                self.scheduler.grow(sequence, min(sequence.length + steps - 1, sequence.request.max_length))
        for sequence in self.scheduler.in_order():
            self._guarded(sequence, "run")
        rows = self.scheduler.in_order()
        if rows:
            self._flight = self.runner.decode(rows, steps)

    def _follow(self, launch: Launch) -> Launch | None:
        """The launch after `launch`, when nothing that the host does not know yet could change it."""
        rows, steps, scheduler = launch.rows, launch.steps, self.scheduler
        same = [s for s in rows if not s.finish_reason] == rows and len(scheduler.running) == len(rows)
        if not same or len(scheduler.waiting) or all(s.length + steps >= s.request.max_length for s in rows):
            return None
        for sequence in rows:
            tokens = min(sequence.length + 2 * steps - 1, sequence.request.max_length)
            if not scheduler.grow(sequence, tokens, preempt=False):
                return None
        return self.runner.follow(launch)

    def _read(self, launch: Launch) -> None:
        began = time.perf_counter()
        rows = launch.read()
        now = time.perf_counter()
        self._waited += now - began
        self.stats.decoded_steps += launch.steps
        drafts = [item.draft for item in launch.work] or [None] * len(rows)
        for sequence, choices, guess in zip(launch.rows, rows, drafts, strict=True):
            if choices and not sequence.finish_reason:
                self._guarded(sequence, "sample", self._append, sequence, choices, guess, now)
                if sequence.finish_reason and sequence.lane is not None:
                    self._leave(sequence)
                self._touch(sequence)

    def _append(self, sequence: Sequence, choices: list[Choice], guess: tuple | None, now: float) -> None:
        """Tokens of a decode loop, all; or of a step: one, and one more for each guess that proved right."""
        self.probe("detokenise", sequence.request.request_id)
        for i, choice in enumerate(choices):
            if guess is None:
                self.scheduler.cached(sequence, 1)
            elif i:
                if choices[i - 1].token != guess[i - 1]:
                    break
                self.stats.accepted_tokens += 1
                self.scheduler.cached(sequence, 1)
            sequence.append(choice, now)
            self.stats.output_tokens += 1
            if sequence.finish_reason:  # what lies behind a stop string that only the host can see is dropped
                break

    def _draft(self, sequence: Sequence, most: int) -> list[int]:
        room = min(most, self.settings.drafts, sequence.request.max_length - sequence.length - 1)
        if room < 1 or sequence.request.params.penalised or sequence.request.bad_ids:
            return []
        return draft.lookup(sequence.tokens, room)

    def _one_by_one(self) -> bool:
        """Whether the host must look at every token: a bad word of several tokens may be under way."""
        return any(len(word) > 1 for s in self.scheduler.running.values() for word in s.request.bad_ids)

    def _guarded(self, sequence: Sequence, point: str, action: Callable = lambda: None, *args) -> None:
        """Whatever is raised here ends this sequence, and nothing else."""
        try:
            self.probe(point, sequence.request.request_id)
            action(*args)
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            sequence.end("error", time.perf_counter(), f"{type(error).__name__}: {error}")
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take an ended sequence out; what a failed one left in the cache is wiped and never found."""
        if sequence.finish_reason == "error":
            self.stats.failed_requests += 1
            self.runner.clear(self.scheduler.spoil(sequence))
        self.scheduler.remove(sequence)
        self._touch(sequence)

    def _touch(self, sequence: Sequence) -> None:
        key = sequence.request.request_id
        if key in self._groups:
            self._changed[key] = self._groups[key]

    def restart(self, error: Exception) -> None:
        """The device or the engine failed: what ran has failed, what waits will run on a new cache."""
        self._flight = None
        waiting = list(self.scheduler.waiting)
        for sequence in self.scheduler.in_order():
            sequence.end(
                "error", time.perf_counter(), f"the device failed: {str(error).splitlines()[0][:200]}"
            )
            self._touch(sequence)
        self.runner.cache = self._new_cache()
        self._start()
        for sequence in waiting:
            self.scheduler.add(sequence)


def empty_pool(model: Transformer, settings: Settings) -> Cache:
    """The engine's pool of `settings.num_pages` pages and the scratch page; its own table is empty."""
    assert settings.num_pages is not None  # see `settle`
    dtype = model.dtype if settings.cache_dtype == "auto" else settings.cache_dtype
    table, pages = jnp.zeros((1, 1), jnp.int32), settings.num_pages + 1
    page, dtype = settings.page_size, jnp.dtype(dtype)
    cache = Cache.create(model.config, model.plan, table, pages, page, dtype, settings.max_model_len)
    return dataclasses.replace(cache, implementation=settings.attention)


def settle(settings: Settings, model: Transformer, devices: list) -> Settings:
    """`settings` with `num_pages` a number, for a model on these devices.

    Raises:
      UsageError: an unknown `cache_dtype` or `attention`, or pages for less than one sequence.
    """
    known = ("auto", *CACHE_DTYPES)
    if settings.cache_dtype not in known:
        near = suggest(settings.cache_dtype, known)
        raise UsageError(f"cache_dtype must be one of {', '.join(known)}, not {settings.cache_dtype!r}{near}")
    if settings.attention not in (None, *PAGED_ATTENTION):
        near = suggest(settings.attention, PAGED_ATTENTION)
        raise UsageError(
            f"attention must be one of {', '.join(PAGED_ATTENTION)}, not {settings.attention!r}{near}"
        )
    if settings.attention is None and len(devices) > 1:  # kernels are not cut up by the compiler
        settings = dataclasses.replace(settings, attention="xla")
    least, pages = settings.pages_per_sequence, settings.num_pages
    if pages is None:
        one = jax.eval_shape(partial(empty_pool, model, dataclasses.replace(settings, num_pages=0)))
        room = int(_free_bytes(devices[0], settings.memory_fraction) / one.nbytes) - 1
        pages = min(settings.max_num_seqs * least, room)
    if pages < least:
        raise UsageError(
            f"{pages} pages of {settings.page_size} tokens cannot hold one sequence of max_model_len "
            f"{settings.max_model_len}: {least} are needed; raise num_pages or memory_fraction, or lower "
            "max_model_len"
        )
    return dataclasses.replace(settings, num_pages=pages)


def _free_bytes(device, fraction: float) -> float:
    """What `fraction` of a device's memory leaves beside what is in use; on a CPU, half of what is free."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return fraction * stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return fraction / 2 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
