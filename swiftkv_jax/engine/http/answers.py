"""The shapes of answers: what a completion, a chat and their chunks look like."""

import dataclasses
import json
import time
import typing
from collections.abc import Iterable, Mapping, Sequence

from swiftkv_jax.engine.request import CompletionOutput, Logprob

_LOWEST = -9999.0  # JSON has no minus infinity
Entries = Sequence[Mapping[int, Logprob] | None]


def encode(value: typing.Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def joined(envelope: Mapping[str, typing.Any], choices: Iterable[dict]) -> bytes:
    """An answer, its choices written one by one: while JSON is written, no other thread of Python runs."""
    around = encode({name: value for name, value in envelope.items() if name != "choices"})
    return around[:-1] + b',"choices":[' + b",".join(map(encode, choices)) + b"]}"


def event(value: typing.Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Tokens read and written."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What both routes share. `id`, `created` and `model` open every chunk of one answer.

    `top`: how many of the likeliest tokens a chat shows at each place.
    """

    id: str
    model: str
    fingerprint: str
    top: int = 0
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    whole: typing.ClassVar[str]
    part: typing.ClassVar[str]

    def envelope(self, kind: str, choices: list[dict]) -> dict:
        """An answer around its choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class CompletionShape(Shape):
    """`/v1/completions`."""

    whole = part = "text_completion"

    def choice(self, index: int, output: CompletionOutput, first: bool, offset: int) -> dict:
        """A chunk's choice; the whole's is one with everything in it. `offset`: characters before it."""
        return {
            "index": index,
            "text": output.text,
            "logprobs": None if output.logprobs is None else self._logprobs(output.logprobs, offset),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    final = choice

    def _logprobs(self, entries: Entries, offset: int) -> dict:
        tokens, values, tops, offsets = [], [], [], []
        for entry in entries:
            chosen = next(iter((entry or {}).values()), None)
            text = chosen.decoded_token or "" if chosen else ""
            tokens.append(text)
            values.append(None if chosen is None or chosen.rank == 0 else _finite(chosen.logprob))
            tops.append(None if chosen is None or chosen.rank == 0 else _top(entry or {}))
            offsets.append(offset)
            offset += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    whole, part = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: CompletionOutput, first: bool, offset: int) -> dict:
        """A chunk's choice; the role comes with the first token, not before it."""
        role = {"role": "assistant"} if first else {}
        return self._around(index, output, "delta", role | {"content": output.text})

    def final(self, index: int, output: CompletionOutput, first: bool, offset: int) -> dict:
        """The whole's choice."""
        return self._around(index, output, "message", {"role": "assistant", "content": output.text})

    def _around(self, index: int, output: CompletionOutput, name: str, message: dict) -> dict:
        found = output.logprobs
        entries = None if found is None else [_chat_entry(entry, self.top) for entry in found]
        return {
            "index": index,
            name: message,
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }


def _finite(value: float) -> float:
    return max(value, _LOWEST)


def _top(entry: Mapping[int, Logprob]) -> dict[str, float]:
    """Text to log probability. Tokens of equal text share one place, and the likelier one has it."""
    out: dict[str, float] = {}
    for item in entry.values():
        text = item.decoded_token or ""
        out[text] = max(out.get(text, _LOWEST), _finite(item.logprob))
    return out


def _chat_entry(entry: Mapping[int, Logprob], top: int) -> dict:
    items = list(entry.values())
    ranked = sorted(items, key=lambda item: item.rank)
    likeliest = [_chat_token(item) for item in ranked if item.rank <= top]
    return _chat_token(items[0]) | {"top_logprobs": likeliest}


def _chat_token(item: Logprob) -> dict:
    text = item.decoded_token or ""
    return {"token": text, "logprob": _finite(item.logprob), "bytes": list(text.encode())}
