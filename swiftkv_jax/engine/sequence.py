"""One completion in the making: its tokens, its text, and whether it has ended. No jax, no numpy."""

import dataclasses
import typing

from swiftkv_jax.engine.request import CompletionOutput, Logprob, Request, RequestMetrics
from swiftkv_jax.engine.text import Detokenizer, find_stop


@dataclasses.dataclass(frozen=True)
class Choice:
    """One sampled token as the device reports it; `top` holds (id, log probability), likeliest first."""

    token: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


class Sequence:
    """A request's completion number `child`.

    Attributes:
      output: tokens generated so far. cached: tokens of prompt + output whose rows are in the cache.
      lane: its place in the batch, None when it has none.
      finish_reason: None while it runs, then "stop" or "length".
      arrival, scheduled, first_token, finished: moments, in seconds.
    """

    def __init__(self, request: Request, child: int, tokenizer, arrival: float):
        self.request, self.child, self.tokenizer = request, child, tokenizer
        self.output: list[int] = []
        self.cached = 0
        self.lane: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.arrival, self.scheduled, self.first_token, self.finished = arrival, 0.0, 0.0, 0.0
        self._choices: list[Choice] = []
        skip = request.params.skip_special_tokens
        self._words = None if tokenizer is None else Detokenizer(tokenizer, request.token_ids, skip)
        self._text_end: int | None = None
        self._stop_ids = frozenset(request.stop_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.token_ids, *self.output]

    @property
    def length(self) -> int:
        return len(self.request.token_ids) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens known but not cached. Reading a prompt: many. Decoding: one. There is no other state."""
        return self.length - self.cached

    @property
    def seed(self) -> int:
        assert self.request.params.seed is not None  # settled in every Request
        return self.request.params.seed + self.child

    def append(self, choice: Choice, now: float) -> None:
        """Take one sampled token; it may end the sequence."""
        if not self.output:
            self.first_token = now
        self.output.append(choice.token)
        self._choices.append(choice)
        self._check_end(choice.token)
        if self.finish_reason:
            self.finished = now

    def _check_end(self, token: int) -> None:
        params = self.request.params
        may_end = len(self.output) >= params.min_tokens
        if token in self._stop_ids and may_end:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.request.eos_ids else token
        if self._words and (not self.finish_reason or params.include_stop_str_in_output):
            seen = len(self._words.text)
            self._words.push(token)
            stops = typing.cast(tuple[str, ...], params.stop)  # SamplingParams makes it one
            stop = find_stop(self._words.text, stops, seen) if may_end else None
            if stop and not self.finish_reason:
                self.finish_reason, self.stop_reason = "stop", stop[1]
                self._text_end = stop[0] + (len(stop[1]) if params.include_stop_str_in_output else 0)
        if not self.finish_reason and self.length >= self.request.max_length:
            self.finish_reason = "length"

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.arrival,
            scheduled_time=self.scheduled,
            first_token_time=self.first_token,
            finished_time=self.finished,
            output_tokens=len(self.output),
        )

    def completion(self) -> CompletionOutput:
        """What the user gets, once `finish_reason` is set."""
        wanted = self.request.params.logprobs
        assert self.finish_reason is not None  # the engine asks only then
        return CompletionOutput(
            index=self.child,
            text=self._words.text[: self._text_end] if self._words else "",
            token_ids=list(self.output),
            cumulative_logprob=None if wanted is None else sum(choice.logprob for choice in self._choices),
            logprobs=None if wanted is None else [self._logprobs(choice, wanted) for choice in self._choices],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _word(self, token: int) -> str | None:
        return self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer else None

    def _logprobs(self, choice: Choice, wanted: int) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest ones."""
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(choice.top[:wanted], 1)}
        entries = {choice.token: (choice.logprob, choice.rank)}
        entries |= {token: entry for token, entry in ranked.items() if token != choice.token}
        return {
            token: Logprob(logprob=value, rank=rank, decoded_token=self._word(token))
            for token, (value, rank) in entries.items()
        }
