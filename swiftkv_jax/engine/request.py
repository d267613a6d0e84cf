"""Requests to the engine and its answers, under vLLM's names. Plain Python: no jax, no numpy."""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated

from swiftkv_jax.common.checks import Checked, Count, Flag, above, integer, number
from swiftkv_jax.common.errors import UsageError, suggest
from swiftkv_jax.text.messages import conversation

MAX_LOGPROBS = 20
MOST_STOPS = 8  # stop ids of one request that a launch checks; room for more would need another program
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it would overflow
MIN_TEMPERATURE = 1e-2  # what a positive temperature is raised to, as vLLM does
MIN_TOP_P = 1e-9  # the same for top_p: it keeps only the likeliest token, where 0 in float32 would keep none

_INT32 = 2**31 - 1


def _strings(name: str, value) -> tuple[str, ...]:
    value = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f"{name} must be a string or a list of strings, none of them empty, not {value!r}")
    return tuple(value)


def _bias(value) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs in order; JSON's ids are strings."""
    value = {} if value is None else dict(value) if isinstance(value, tuple) else value
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, not {value!r}")
    out = {}
    for token, bias in value.items():
        token = int(token) if isinstance(token, str) and token.isdecimal() else token
        integer("logit_bias: a token id", token, 0, _INT32)
        out[token] = number(f"logit_bias of token {token}", bias, -100, 100)
    return tuple(sorted(out.items()))


def _ids(name: str, value) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{name} must be a list of token ids, not {value!r}")
    return tuple(integer(name, item, 0, _INT32) for item in value)


@typing.no_type_check  # user input: its own checks below name the field
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked):
    """Sampling parameters of one request; names and defaults are vLLM's.

    Attributes:
      n: completions of the same prompt; completion i samples with seed + i.
      max_tokens: most tokens to generate; None: until the context is full.
      min_tokens: least number of tokens before an end-of-sequence token, stop id or stop string may end the
        output.
      temperature: logits are divided by it; 0 is greedy.
      top_p: keep the most likely tokens up to this total probability; 1 keeps all.
      top_k: keep this many most likely tokens; 0 (or -1) keeps all.
      min_p: keep tokens at least this likely, relative to the most likely one; 0 keeps all.
      repetition_penalty: penalty on tokens of the prompt and the output; 1: none.
      presence_penalty: penalty on tokens that the output already has; 0: none.
      frequency_penalty: penalty for each occurrence of a token in the output; 0: none.
      seed: seed of this request; None (or -1): the next of a counter that starts at `LLM(seed=...)`.
      stop: strings that end the text, special tokens among them; they are cut off unless
        `include_stop_str_in_output`.
      stop_token_ids: ids that end the output, in addition to the model's end-of-sequence ids.
      ignore_eos: continue after an end-of-sequence token.
      bad_words: texts that may not be generated; a word also counts with a space before it.
      logit_bias: token id -> number in [-100, 100] to add to its logit.
      allowed_token_ids: the only ids that may be generated; None: all.
      include_stop_str_in_output: keep the stop string that ended the text.
      logprobs: None, or how many of the most likely tokens to report at each position (at most 20), by the
        model's own distribution: before penalties, temperature and filters.
      prompt_logprobs: the same for the prompt, by a separate pass through all layers.
      skip_special_tokens: leave special tokens out of the text.
    """

    n: Count = 1
    max_tokens: Annotated[int | None, partial(integer, least=1, most=_INT32)] = 16
    min_tokens: Annotated[int, partial(integer, least=0, most=_INT32)] = 0
    temperature: Annotated[float, partial(number, least=0, most=2)] = 1.0
    top_p: Annotated[float, partial(above, least=0, most=1)] = 1.0
    top_k: Annotated[int, partial(integer, least=-1, most=_INT32)] = 0
    min_p: Annotated[float, partial(number, least=0, most=1)] = 0.0
    repetition_penalty: Annotated[float, partial(above, least=0)] = 1.0
    presence_penalty: Annotated[float, partial(number, least=-2, most=2)] = 0.0
    frequency_penalty: Annotated[float, partial(number, least=-2, most=2)] = 0.0
    seed: Annotated[int | None, partial(integer, least=-(2**63), most=2**63 - 1)] = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Annotated[Sequence[int] | None, _ids] = ()
    ignore_eos: Flag = False
    bad_words: Sequence[str] | None = ()
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Annotated[Sequence[int] | None, _ids] = None
    include_stop_str_in_output: Flag = False
    logprobs: Annotated[int | None, partial(integer, least=0, most=MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, partial(integer, least=0, most=MAX_LOGPROBS)] = None
    skip_special_tokens: Flag = True

    def __post_init__(self):
        super().__post_init__()
        self._set("top_k", max(0, self.top_k))
        self._set("seed", None if self.seed == -1 else self.seed)
        if self.temperature < GREEDY_BELOW:
            self._set("temperature", 0.0)
        elif self.temperature < MIN_TEMPERATURE:
            self._set("temperature", MIN_TEMPERATURE)
        self._set("top_p", max(self.top_p, MIN_TOP_P))
        self._set("stop", _strings("stop", self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("stop_token_ids", self.stop_token_ids or ())
        self._set("logit_bias", _bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}")
        if self.allowed_token_ids == ():
            raise UsageError("allowed_token_ids is empty: no token could be generated; give None for all")

    def _set(self, name: str, value):
        object.__setattr__(self, name, value)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    def updated(self, changes: Mapping) -> "SamplingParams":
        """These with some fields changed.

        Raises:
          UsageError: a field is unknown or its value is out of range.
        """
        for name in changes:
            if name not in self.names():
                raise UsageError(f"unknown sampling field {name!r}{suggest(name, self.names())}")
        return dataclasses.replace(self, **changes)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on earlier tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def biased(self) -> bool:
        """Whether some tokens are favoured, or ruled out, by their ids."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A checked request: the engine takes it as it is.

    Attributes:
      prompt: its text, None when it came as ids. token_ids: the prompt, never empty.
      params: with `max_tokens` and `seed` set. eos_ids: the model's end-of-sequence ids, empty under
        `ignore_eos`. stop_texts: (id, text) of the stop strings that are special tokens.
      mixed_stops: whether a stop string holds special tokens and other text.
      bad_ids: the tokens of each bad word. priority: lower goes first. key: the tenant; keys take turns.
      root: the start of its chain of page names (pages.py).
      ahead: number of leading prompt tokens that are read ahead of the model (`predict.fill`); None: none.
      source: the encoder's input, which is read before the prompt: token ids, or audio frames. source_length:
        the encoder's positions for it; 0 without an encoder.
      first_bad_ids: tokens that the completion may not begin with.
    """

    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    stop_texts: tuple[tuple[int, str], ...] = ()
    mixed_stops: bool = False
    bad_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    key: str = ""
    root: bytes = b""
    request_id: str = ""
    ahead: int | None = None
    source: typing.Any = dataclasses.field(default=None, compare=False, repr=False)
    source_length: int = 0
    first_bad_ids: tuple[int, ...] = ()

    @property
    def shareable(self) -> int:
        """The number of leading tokens whose rows depend on tokens alone, so that other prompts can share
        their pages: all, or those that an auxiliary model reads."""
        return self.max_length if self.ahead is None else self.ahead

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends it, the model's own first."""
        texts = (token for token, _ in self.stop_texts)
        return tuple(dict.fromkeys((*self.eos_ids, *(self.params.stop_token_ids or ()), *texts)))

    @property
    def unseen_stops(self) -> tuple[int, ...]:
        """The stop ids that only the host checks, not the device."""
        return self.stop_ids[MOST_STOPS:]

    @property
    def biased(self) -> bool:
        """Whether some tokens are favoured, or ruled out, by their ids."""
        listed = self.bad_ids or self.first_bad_ids
        return self.params.biased or bool(listed) or bool(self.params.min_tokens and self.unseen_stops)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and completion together."""
        assert self.params.max_tokens is not None  # see above
        return len(self.token_ids) + self.params.max_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's natural-log probability; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion, or, while it streams, what is new of it.

    Attributes:
      finish_reason: "stop", "length", "abort" or "error"; None while it runs.
      stop_reason: the stop string or id that ended it, None for the model's own end.
      error: what failed, when `finish_reason` is "error". cached_tokens: of the prompt, found in the cache.
      offsets: where each token begins in the whole text; None unless log probabilities were asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    offsets: list[int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Timestamps of one request, in seconds of one monotonic clock.

    A decode launch yields several tokens at once, so `finished_time` is when the host saw the last one.
    """

    arrival_time: float
    scheduled_time: float
    first_token_time: float
    finished_time: float
    output_tokens: int

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token, time in the queue included; None when none came."""
        return self.first_token_time - self.arrival_time if self.output_tokens else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; 0 when there is only one, None when there is none."""
        seconds = self.finished_time - self.first_token_time
        return seconds / max(1, self.output_tokens - 1) if self.output_tokens else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request: its prompt and `n` completions. `metrics` are the first completion's.

    `prompt_logprobs`: None unless asked for; then one entry a prompt token, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


# ---- the forms in which prompts may come ----------------------------------------------------------------


@typing.no_type_check  # user input: checked here, by name
def encode(tokenizer, prompt, where: str) -> tuple[str | None, list]:
    """Return (text, token ids) of a prompt in any form; error messages begin with `where`. Ids are not
    checked."""
    special = not isinstance(prompt, Mapping) or prompt.get("add_special_tokens", True)
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt]
        if len(known) != 1:
            raise UsageError(f"{where} must hold one of prompt, prompt_token_ids and messages")
        value = prompt[known[0]]
        if known[0] == "messages":
            opened = prompt.get("add_generation_prompt", True)
            return None, _need(tokenizer, where).encode_chat(conversation(value, where), opened)
        if isinstance(value, str) != (known[0] == "prompt"):
            raise UsageError(f"{where}: {known[0]} has the wrong type, {type(value).__name__}")
        prompt = value
    if isinstance(prompt, str):
        return prompt, _need(tokenizer, where).encode(prompt, special) if prompt else []
    if isinstance(prompt, list | tuple):
        return None, list(prompt)
    raise UsageError(f"{where} must be a string or a list of token ids, not {type(prompt).__name__}")


def bad_word_ids(tokenizer, words: Iterable[str], where: str) -> list[tuple[int, ...]]:
    """Each word's tokens, at the beginning of a text and after a space; no duplicates, no empty lists."""
    ids_of_words = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids_of_words[tuple(_need(tokenizer, where).encode(text, add_special_tokens=False))] = None
    return [ids for ids in ids_of_words if ids]


def special_texts(tokenizer) -> Mapping[str, int]:
    """The ids of a tokenizer's control tokens by their texts, if it knows them."""
    return getattr(tokenizer, "special_texts", {})


def special_stops(tokenizer, stops: Iterable[str], vocab: int) -> dict:
    """The fields of `Request` about stop strings that are special tokens, or hold some."""
    known = special_texts(tokenizer)
    return {
        "stop_texts": tuple((known[s], s) for s in stops if s in known and known[s] < vocab),
        "mixed_stops": any(text in s for s in stops if s not in known for text in known),
    }


def is_one(prompts) -> bool:
    """Whether this is a single prompt: a string, a dict, or a list of numbers."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], int)


def _need(tokenizer, where: str):
    if tokenizer is None:
        raise UsageError(f"{where} is text, and the model has no tokenizer.json: give token ids")
    return tokenizer
