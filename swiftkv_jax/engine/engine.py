"""Continuous batching: plan, run, record; requests join and leave while the batch keeps running."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
from jax.sharding import Mesh

from swiftkv_jax.common.errors import UsageError, first_line
from swiftkv_jax.common.processes import PeerLost
from swiftkv_jax.core.model import Transformer
from swiftkv_jax.core.predict import Predicted
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.engine import draft
from swiftkv_jax.engine.followers import Single
from swiftkv_jax.engine.pages import Pages
from swiftkv_jax.engine.request import Request, RequestOutput
from swiftkv_jax.engine.runner import DecodeLaunch, Runner, StepLaunch, new_cache
from swiftkv_jax.engine.scheduler import Scheduler
from swiftkv_jax.engine.sequence import BAD, RULED_OUT, Choice, Sequence
from swiftkv_jax.engine.settings import Settings
from swiftkv_jax.engine.warm import WarmUp


@dataclasses.dataclass
class Stats:
    """Counters of an engine. Seconds are wall time and include the compilation of new shapes.

    Attributes:
      prompt_seconds: of steps that read prompts. decode_seconds: of all others.
      prompt_survivors: prompt tokens that ran every layer: the last of each prompt, or its tail.
      auxiliary_tokens: prompt tokens that an auxiliary model read.
      source_tokens: positions of sources that an encoder computed. source_bytes_per_token: of one of them in
        their pool.
      decoded_steps: tokens that a row may have decoded in decode launches. decode_host_seconds: time of their
        steps that was not spent waiting for the device.
    """

    prompt_tokens: int = 0
    prompt_survivors: int = 0
    auxiliary_tokens: int = 0
    output_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
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
    source_tokens: int = 0
    source_bytes_per_token: int = 0

    def as_dict(self) -> dict[str, int | float]:
        """All fields, total seconds, and tokens per second: of prompts in their steps, of output in all."""
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
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=list(self.request.token_ids),
            outputs=[sequence.completion() for sequence in self.sequences],
            metrics=self.sequences[0].metrics,
        )


class Engine:
    """Runs requests, as many at once as there are lanes and pages; call `step` while it is `busy`.

    Each step is one launch. While any running sequence has a prompt to read, it takes tokens up to a budget,
    decoded ones first. Otherwise all sequences decode several tokens per launch, and the next launch is sent
    before the last one is read. With batch invariance, launches that read prompts and launches that decode
    alternate.

    An error inside one request ends that request alone.

    Attributes:
      groups: requests whose end has not been reported yet, by id.
      restarts: number of restarts since it was made.
      probe: called with a point ("admit", "schedule", "run", "sample", "detokenise") and a request id each
        time a request passes it; what it raises is that request's failure.
    """

    def __init__(
        self,
        model: Transformer | Predicted,
        params: PyTree,
        mesh: Mesh | None,
        tokenizer,
        settings: Settings,
        role: Single | None = None,
    ):
        """`settings` have `num_pages`, see `resolve`; `params` are folded if the settings name a fused
        fill. `role`: the role among the processes whose devices hold the model."""
        self.settings, self.tokenizer = settings, tokenizer
        self.runner = Runner(model, params, mesh, settings, new_cache, role)
        self._start()
        self.count_anew()
        self.probe: Callable[[str, str], None] = lambda point, request_id: None
        self.groups: dict[str, Group] = {}
        self._count = 0
        self._ready = False
        self._warming: WarmUp | None = None
        self._ending = False
        self.restarts = 0
        self._flight: DecodeLaunch | None = None
        self._changed: dict[str, Group] = {}
        self._waited = 0.0
        self._reads = False  # whether the last launch was a step

    def count_anew(self) -> None:
        pools, cross = self.runner.pools, self.runner.cache.cross
        self.stats = Stats(
            source_bytes_per_token=0 if cross is None else cross.bytes_per_token,
            cache_bytes=sum(pool.nbytes for pool in pools),
            cache_bytes_per_token=sum(pool.bytes_per_token for pool in pools),
        )

    def _start(self) -> None:
        s, cross = self.settings, self.runner.cache.cross
        self.scheduler = Scheduler(
            Pages(self.runner.cache.pages),
            s.page_size,
            s.max_num_seqs,
            s.max_num_batched_tokens,
            s.prefix_caching and cross is None,  # with an encoder, rows also depend on the source
            None if cross is None else Pages(cross.pages),
            s.batch_invariant,
        )

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or self._flight is not None or bool(self._changed)

    def warm_up(self, say: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compile every program that any request may need; return how many. Afterwards nothing compiles."""
        self._ready = True
        return self.runner.warm_up(say=say)

    def begin_warm_up(self, say: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Run `warm_up` on other threads; return when the first few programs, which suffice for any request,
        are in use. `warming` reports the progress, and `take_compiled` advances it."""
        self._ready = True
        self._warming = self.runner.begin_warm_up()
        if self._ending:
            self._warming.stop()
        say(0, self._warming.total)
        while not self._warming.usable:
            self._warming.take()
            say(len(self._warming.ready), self._warming.total)

    @property
    def warming(self) -> tuple[int, int] | None:
        """(programs in use, programs in all); None once all are in use."""
        return self._warming and (len(self._warming.ready), self._warming.total)

    def take_compiled(self) -> None:
        """Put programs into use that were compiled meanwhile."""
        if self._warming is None or self._flight is not None:
            return
        if self._warming.waits:
            self._warming.take()
        if self._warming.done:
            self.runner.end_warm_up()
            self._warming = None

    def cancel_warm_up(self) -> None:
        """Cancel compilations that have not begun, before a shutdown. Any thread may call it."""
        self._ending = True
        if (warming := self._warming) is not None:
            warming.stop()

    def add(self, *requests: Request) -> None:
        """Queue requests, all or none; each `request_id` must be new."""
        page, pages = self.settings.page_size, self.scheduler.pages.total
        for request in requests:
            if (need := -(-request.max_length // page)) > pages:
                size = f"{request.max_length} tokens of prompt and completion need {need} pages of {page}"
                raise UsageError(f"{size}; the cache has {pages}: raise num_pages, or lower max_tokens")
            if request.request_id in self.groups:
                raise UsageError(f"request_id {request.request_id!r} is in use")
        groups = []
        for request in requests:
            self.probe("admit", request.request_id)
            groups.append(Group(request, self.tokenizer, time.perf_counter(), self._count))
            self._count += request.params.n
        for group in groups:
            self.groups[group.request.request_id] = group
            for sequence in group.sequences:
                self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request, whatever it is doing; its pages are free at once. Unknown ids are ignored."""
        group = self.groups.get(request_id)
        for sequence in group.sequences if group else []:
            if not sequence.finish_reason:
                sequence.end("abort", time.perf_counter())
                self._leave(sequence)

    def step(self) -> list[Group]:
        """Run one launch; return the requests that it changed."""
        began, self._waited = time.perf_counter(), 0.0
        prompts, decoded = self.stats.prompt_tokens, self.stats.decoded_steps
        self._advance()
        seconds = time.perf_counter() - began
        self.stats.steps += 1
        if self.stats.prompt_tokens > prompts:
            self.stats.prompt_seconds += seconds
        else:
            self.stats.decode_seconds += seconds
        if self.stats.decoded_steps > decoded:
            self.stats.decode_host_seconds += seconds - self._waited
        for name in ("preemptions", "prefix_queries", "prefix_hits"):
            setattr(self.stats, name, getattr(self.stats, name) + getattr(self.scheduler, name))
            setattr(self.scheduler, name, 0)
        changed, self._changed = list(self._changed.values()), {}
        for group in changed:
            if group.finished:
                self.groups.pop(group.request.request_id, None)
        return changed

    def _advance(self) -> None:
        launch, runner = self._flight, self.runner
        if not self._ready:
            runner.fewest_rows = runner.rows(len(self.scheduler.running)) if self.scheduler.running else 1
        try:
            if launch is not None:
                self._flight = self._follow(launch)
                self.stats.decoded_steps += launch.steps
                return self._read(launch)
            for sequence in self.scheduler.admit():
                sequence.scheduled = time.perf_counter()
                with self._contained(sequence):
                    self.probe("schedule", sequence.request.request_id)
                    runner.seats.take(sequence)
                    if sequence.source is not None and not sequence.source.filled:  # by a sibling
                        runner.encode(sequence)
                        self.stats.source_tokens += sequence.request.source_length
            self._reads = self._is_step_next()
            if self._reads:
                self._run()
            else:
                self._decode()
        except jax.errors.JaxRuntimeError as error:  # the device failed, not a request
            if runner.role.several:
                raise PeerLost(f"a launch of several processes failed: {first_line(error, 200)}") from error
            self.restart(error)

    def _is_step_next(self) -> bool:
        """Whether the next launch is a step. With batch invariance, steps and decode launches alternate."""
        reading = self.scheduler.reading
        if self.settings.batch_invariant:
            return reading and not (self._reads and self.scheduler.decoding)
        one_by_one = any(sequence.one_by_one for sequence in self.scheduler.running.values())
        return reading or bool(self.settings.lookups) or one_by_one

    def _run(self) -> None:
        guess = partial(draft.guess, self.settings.lookups) if self.settings.lookups else None
        work, size = self.scheduler.plan(guess)
        for item in work:
            with self._contained(item.sequence):
                self.probe("run", item.sequence.request.request_id)
        work = [item for item in work if item.sequence.lane is not None]
        if not work:
            return
        launch = self.runner.run(work, size)
        for item in work:
            if item.sequence.pending > 1 or not item.sequence.output:
                self.stats.prompt_tokens += item.count
                if self.runner.auxiliary is not None:
                    self.stats.auxiliary_tokens += item.ahead
                by_plan = self.runner.tail and self.runner.auxiliary is None
                self.stats.prompt_survivors += item.count - item.ahead if by_plan else item.completes
            self.scheduler.cached(item.sequence, item.count)
        if launch is not None and any(launch.places):
            self._read(launch)

    def _decode(self) -> None:
        steps = self.runner.steps
        for sequence in self.scheduler.decoding:
            if sequence.lane is not None:
                self.scheduler.grow(sequence, min(sequence.length + steps - 1, sequence.request.max_length))
        for sequence in self.scheduler.decoding:
            with self._contained(sequence):
                self.probe("run", sequence.request.request_id)
        if rows := self.scheduler.decoding:
            self._flight = self.runner.decode(rows)

    def _follow(self, launch: DecodeLaunch) -> DecodeLaunch | None:
        """Send the next launch without waiting for `launch`, if its result cannot change what runs next."""
        rows, steps, scheduler = launch.rows, launch.steps, self.scheduler
        same = [s for s in rows if not s.finish_reason] == rows and len(scheduler.running) == len(rows)
        same = same and not any(s.one_by_one for s in rows)
        compiled = self._warming is not None and self._warming.waits
        if (
            compiled
            or not same
            or len(scheduler.waiting)
            or all(s.length + steps >= s.request.max_length for s in rows)
        ):
            return None
        for sequence in rows:
            tokens = min(sequence.length + 2 * steps - 1, sequence.request.max_length)
            if not scheduler.grow(sequence, tokens, preempt=False):
                return None
        return self.runner.follow(launch)

    def _read(self, launch: StepLaunch | DecodeLaunch) -> None:
        began = time.perf_counter()
        rows = launch.read()
        now = time.perf_counter()
        self._waited += now - began
        for sequence, choices in zip(launch.rows, rows, strict=True):
            if choices and not sequence.finish_reason:
                with self._contained(sequence):
                    self.probe("sample", sequence.request.request_id)
                    self._append(sequence, choices, now)
                if sequence.finish_reason and sequence.lane is not None:
                    self._leave(sequence)
                self._touch(sequence)

    def _append(self, sequence: Sequence, choices: list[Choice], now: float) -> None:
        self.probe("detokenise", sequence.request.request_id)
        for choice in choices:
            self.stats.drafted_tokens += choice.drafted
            self.stats.accepted_tokens += choice.guessed
            self.scheduler.cached(sequence, sequence.pending)  # it was sampled after all known tokens
            sequence.append(choice, now)
            if choice.token != BAD:
                self.scheduler.mark_finite(sequence)
            self.stats.output_tokens += 1
            if sequence.finish_reason:  # what follows a stop string, which only the host sees, is dropped
                break

    @contextlib.contextmanager
    def _contained(self, sequence: Sequence) -> Iterator[None]:
        """A context in which an exception ends this sequence, and nothing else."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except Exception as error:
            sequence.end("error", time.perf_counter(), f"{type(error).__name__}: {error}")
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Remove a finished sequence. Pages written by a failed one, or by other completions of its request,
        are zeroed and never shared.
        """
        if sequence.finish_reason == "error" and sequence.error != RULED_OUT:
            self.stats.failed_requests += 1
            group = self.groups.get(sequence.request.request_id)
            for sibling in group.sequences if group else [sequence]:
                sibling.invalid = True
        if sequence.invalid:
            self.runner.clear(*self.scheduler.invalidate(sequence))
        self.scheduler.remove(sequence)
        self._touch(sequence)

    def _touch(self, sequence: Sequence) -> None:
        key = sequence.request.request_id
        if key in self.groups:
            self._changed[key] = self.groups[key]

    def restart(self, error: Exception) -> None:
        """Restart after the device or the engine failed: running requests fail, waiting ones run on a new
        cache."""
        self._flight = None
        self.restarts += 1
        waiting = list(self.scheduler.waiting)
        what = "device" if isinstance(error, jax.errors.JaxRuntimeError) else "engine"
        for sequence in self.scheduler.in_order():
            sequence.end("error", time.perf_counter(), f"the {what} failed: {first_line(error, 200)}")
            self.stats.failed_requests += 1
            self._touch(sequence)
        self.runner.restart()
        self._start()
        for sequence in waiting:
            self.scheduler.add(sequence)
