"""One completion while it is generated: its tokens, its text, and whether it has ended. No jax, no numpy."""

import bisect
import codecs
import dataclasses
import functools
import itertools

from swiftkv_jax.engine.request import CompletionOutput, Logprob, Request, RequestMetrics

BAD = -2  # in place of a token: the model's logits were not finite
NONE_LEFT = -3  # in place of a token: the request rules out every one
RULED_OUT = "no token is left: allowed_token_ids, bad_words, min_tokens and the like rule out every one"
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
_NO_TOKEN = {BAD: NOT_FINITE, NONE_LEFT: RULED_OUT}
_CONTEXT = 4  # tokens decoded before new ones, at least: as many as a character has bytes
_UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 character to


@dataclasses.dataclass(frozen=True)
class Choice:
    """One sampled token as the device reports it; `top` holds (id, log probability), most likely first;
    `guessed`: it was an accepted draft token, so it came with the token before it; `drafted`: the number of
    tokens that were drafted to follow it."""

    token: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()
    guessed: bool = False
    drafted: int = 0


@dataclasses.dataclass
class SourcePages:
    """Pages of an encoder's output, in order; `filled` once the launch that fills them was sent."""

    pages: list[int]
    filled: bool = False


class Sequence:
    """A request's completion number `child`.

    Attributes:
      number: order of arrival; of two equally urgent sequences of a key the later is preempted first.
      output: tokens generated so far. cached: tokens of prompt + output whose rows are in the cache.
      lane: its slot in the batch, None when it has none. pages: of the cache, in order.
      source: the pages of the encoder's output for its source, which completions of a request share.
      names: of the pages that are full and can be shared. validated: how many of these are verified, because
        a later token was sampled from finite logits.
      charged: tokens charged to its key. prefix_hit: prompt tokens found in the prefix cache.
      invalid: the contents of its pages may be wrong.
      finish_reason: None while it runs, then "stop", "length", "abort" or "error"; `error` says what failed.
      arrival, scheduled, first_token, last_token, finished: times, in seconds.
    """

    def __init__(self, request: Request, child: int, tokenizer, arrival: float, number: int = 0):
        self.request, self.child, self.tokenizer, self.number = request, child, tokenizer, number
        self.output: list[int] = []
        self.cached = 0
        self.lane: int | None = None
        self.pages: list[int] = []
        self.source: SourcePages | None = None
        self.names: list[bytes] = []
        self.validated = self.charged = self.prefix_hit = 0
        self.invalid = False
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.stop_reason: int | str | None = None
        self.arrival, self.scheduled, self.first_token, self.finished = arrival, 0.0, 0.0, 0.0
        self.last_token = 0.0
        self._choices: list[Choice] = []
        self._offsets: list[int] = []  # where their tokens begin in the text
        self._logprob = 0.0  # sum over all choices
        skip = request.params.skip_special_tokens
        detokenizer = functools.partial(Detokenizer, tokenizer, request.token_ids)
        self._words = None if tokenizer is None else detokenizer(skip)
        mixed = skip and request.mixed_stops  # stop strings are searched where special tokens are shown
        self._shown = detokenizer(False) if mixed else self._words
        self._shown_offsets: list[int] = [] if mixed else self._offsets
        self._text_end: int | None = None
        self._stop_ids, self._stops = frozenset(request.stop_ids), tuple(request.params.stop or ())
        kept = request.params.include_stop_str_in_output and not mixed
        self._held_back = 0 if kept else max(map(len, self._stops), default=1) - 1
        self._delivered = (0, 0)  # characters and tokens that `delta` has returned

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.token_ids, *self.output]

    def slice(self, start: int, stop: int) -> list[int]:
        """`tokens[start:stop]`, without joining the rest."""
        prompt = len(self.request.token_ids)
        return [
            *self.request.token_ids[start:stop],
            *self.output[max(0, start - prompt) : max(0, stop - prompt)],
        ]

    @property
    def last(self) -> int:
        return self.output[-1] if self.output else self.request.token_ids[-1]

    @property
    def length(self) -> int:
        return len(self.request.token_ids) + len(self.output)

    @property
    def pending(self) -> int:
        """The number of known tokens that are not cached: many in prefill, one in decoding."""
        return self.length - self.cached

    @property
    def seed(self) -> int:
        assert self.request.params.seed is not None  # see `LLM.make_request`
        return self.request.params.seed + self.child

    def append(self, choice: Choice, now: float) -> None:
        """Append one sampled token, which may end the sequence."""
        if choice.token in _NO_TOKEN:
            return self.end("error", now, _NO_TOKEN[choice.token])
        if not self.output:
            self.first_token = now
        self.last_token = now
        self.output.append(choice.token)
        self._choices.append(choice)
        self._offsets.append(len(self._words.text) if self._words else 0)
        if self._shown is not self._words:
            self._shown_offsets.append(len(self._shown.text) if self._shown else 0)
        self._logprob += choice.logprob
        self._check_end(choice.token)
        if self.finish_reason:
            self.finished = now

    def _check_end(self, token: int) -> None:
        params, texts = self.request.params, dict(self.request.stop_texts)
        may_end, kept = len(self.output) >= params.min_tokens, params.include_stop_str_in_output
        if token in self._stop_ids and may_end:
            self.finish_reason = "stop"
            self.stop_reason = texts.get(token, None if token in self.request.eos_ids else token)
        if self._words and self._shown and (not self.finish_reason or kept):
            seen = len(self._shown.text)
            self._words.push(token)
            if self._shown is not self._words:
                self._shown.push(token)
            stop = find_stop(self._shown.text, self._stops, seen) if may_end else None
            if stop and not self.finish_reason:
                self.finish_reason, self.stop_reason = "stop", stop[1]
                self._text_end = self._place(stop[0])
        if not self.finish_reason and self.length >= self.request.max_length:
            self.finish_reason = "length"
        if self.finish_reason and self._words:
            self._words.finish()
            if kept and isinstance(self.stop_reason, str):
                cut = self._text_end is not None  # a special token may be there
                end = self._words.text[: self._text_end]
                end = end if cut else end.removesuffix(self.stop_reason)
                self._words.text, self._text_end = end + self.stop_reason, None

    def _place(self, index: int) -> int:
        """The place in the text of a place in the text that stop strings are searched in."""
        token = bisect.bisect_right(self._shown_offsets, index) - 1
        ends = [*self._offsets[token + 1 : token + 2], len(self._words.text) if self._words else 0]
        return min(self._offsets[token] + index - self._shown_offsets[token], ends[0])

    def end(self, reason: str, now: float, error: str | None = None) -> None:
        """End it from outside: "abort", or "error" and what failed."""
        if not self.finish_reason:
            self.finish_reason, self.error, self.finished = reason, error, now

    @property
    def decodes(self) -> bool:
        """Whether it decodes: only its last sampled token is not cached yet."""
        return self.pending == 1 and bool(self.output)

    @property
    def one_by_one(self) -> bool:
        """Whether each token may change which tokens are forbidden next; only the host can tell."""
        return self._too_short or any(len(word) > 1 for word in self.request.bad_ids)

    @property
    def _too_short(self) -> bool:
        return bool(self.request.unseen_stops) and len(self.output) < self.request.params.min_tokens

    def forbidden(self) -> list[int]:
        """Ids that are ruled out now: they would complete a bad word, begin the output although they may not,
        or end it too early by a stop id that the device does not check."""
        out = list(self.request.unseen_stops) if self._too_short else []
        out += () if self.output else self.request.first_bad_ids
        for word in self.request.bad_ids:
            before = word[:-1]
            if not before or tuple(self.output[-len(before) :]) == before:
                out.append(word[-1])
        return out

    def delta(self) -> CompletionOutput:
        """What is new since the last call, except text that may be the beginning of a stop string."""
        (characters, tokens), text = self._delivered, self._words.text if self._words else ""
        end = self._text_end if self.finish_reason else max(characters, len(text) - self._held_back)
        self._delivered = (len(text[:end]), len(self.output))
        return self._since(characters, tokens, end)

    def completion(self) -> CompletionOutput:
        """The whole completion, once `finish_reason` is set."""
        return self._since(0, 0, self._text_end)

    def _since(self, characters: int, tokens: int, end: int | None) -> CompletionOutput:
        wanted, new = self.request.params.logprobs, self._choices[tokens:]
        return CompletionOutput(
            index=self.child,
            text=self._words.text[characters:end] if self._words else "",
            token_ids=self.output[tokens:],
            cumulative_logprob=None if wanted is None else self._logprob,
            logprobs=None if wanted is None else [logprobs(choice, wanted, self.tokenizer) for choice in new],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            cached_tokens=self.prefix_hit,
            offsets=None if wanted is None else self._offsets[tokens:],
        )

    @property
    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            arrival_time=self.arrival,
            scheduled_time=self.scheduled,
            first_token_time=self.first_token,
            finished_time=self.finished,
            output_tokens=len(self.output),
        )


def logprobs(choice: Choice, top: int, tokenizer) -> dict[int, Logprob]:
    """The chosen token first, then the `top` likeliest ones."""
    entries = {choice.token: (choice.logprob, choice.rank)}
    for rank, (token, value) in enumerate(choice.top[:top], 1):
        entries.setdefault(token, (value, rank))
    return {
        token: Logprob(logprob=value, rank=rank, decoded_token=word(tokenizer, token))
        for token, (value, rank) in entries.items()
    }


def word(tokenizer, token: int) -> str | None:
    """A token's text within a text: with its leading space. None without a tokenizer."""
    if spell := getattr(tokenizer, "token_bytes", None):
        return spell(token).decode(errors="replace")
    return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def unfinished(tokenizer, tokens: list[int]) -> bool:
    """Whether the last of these tokens, all of which have a text, ends within a character."""
    if (spell := getattr(tokenizer, "token_bytes", None)) is None:
        return tokenizer.decode(tokens, skip_special_tokens=False).endswith(_UNFINISHED)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(map(spell, tokens[-3:])))  # of four bytes at most
    return bool(decoder.getstate()[0])


class Detokenizer:
    """The text of a growing list of tokens: what prompt and output decode to, from the first character that
    the prompt does not complete.

    New tokens are decoded together with 4 to 8 earlier ones, so that joining rules (spaces, byte fallback)
    work. The end of that text is the end of the whole, however far back it begins: a character has at most
    four bytes. So the text grows by what lies behind the part of the end that is known. An incomplete
    character at the end is held back until it is complete, or `finish` is called.

    Attributes:
      text: everything decoded so far.
    """

    def __init__(self, tokenizer, prompt: tuple[int, ...], skip_special_tokens: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._tokenizer, self.text = tokenizer, ""
        visible = itertools.islice(filter(self._visible, reversed(prompt)), _CONTEXT)
        self._ids = list(visible)[::-1]
        self._end = self._decode(self._ids)
        self._known = len(self._end) - self._waiting

    def _visible(self, token: int) -> bool:
        """Whether a token adds to the text, unlike a special one that is left out. Some decoders drop the
        space of a first token."""
        return bool(self._decode([token, token]))

    @property
    def _waiting(self) -> bool:
        """Whether the last character is incomplete."""
        return self._end.endswith(_UNFINISHED) and unfinished(self._tokenizer, self._ids)

    def push(self, token: int) -> None:
        """Add one token, and append to `text` what it completes."""
        end = self._decode([*self._ids, token])
        if end == self._end and not self._visible(token):
            return
        self._ids.append(token)
        self._end = end
        self._grow(len(end) - self._waiting)
        if len(self._ids) > 2 * _CONTEXT:
            del self._ids[:_CONTEXT]
            self._end = self._decode(self._ids)
            self._known += len(self._end) - len(end)

    def finish(self) -> None:
        """Append to `text` the character that stays incomplete."""
        self._grow(len(self._end))

    def _grow(self, known: int) -> None:
        self.text += self._end[self._known : known]
        self._known = max(self._known, known)


def find_stop(text: str, stops: tuple[str, ...], seen: int) -> tuple[int, str] | None:
    """The earliest stop string that ends after the first `seen` characters: (where it begins, which)."""
    matches = []
    for order, stop in enumerate(stops):
        start = text.find(stop, max(0, seen - len(stop) + 1))
        if start >= 0:
            matches.append((start, order, stop))
    return (min(matches)[0], min(matches)[2]) if matches else None
