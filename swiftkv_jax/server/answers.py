"""The JSON of answers: completions, chats and their chunks."""

import dataclasses
import json
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence

from swiftkv_jax.engine.request import CompletionOutput, Logprob

_NO_CHARACTER = "\ufffd"  # what a tokenizer decodes part of a character to
_LOWEST = -9999.0  # JSON has no minus infinity
Entries = Sequence[Mapping[int, Logprob] | None]


def encode(value: typing.Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def joined(envelope: Mapping[str, typing.Any], choices: Iterable[dict]) -> bytes:
    """Encode an answer, its choices one by one: no other Python thread runs while JSON is written."""
    around = encode({name: value for name, value in envelope.items() if name != "choices"})
    return around[:-1] + b',"choices":[' + b",".join(map(encode, choices)) + b"]}"


def event(value: typing.Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(prompt: int, completion: int, cached: int) -> dict[str, typing.Any]:
    """Numbers of prompt tokens, of generated tokens, and of prompt tokens found in the prefix cache."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The common part of both routes' answers. `id`, `created` and `model` open every chunk of one answer.

    `top`: number of likeliest tokens that a chat shows at each position. `spell`: returns the bytes of a
    token, which may be part of a character; None if they are not known.
    """

    id: str
    model: str
    fingerprint: str
    spell: Callable[[int], bytes] | None = None
    top: int = 0
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    whole: typing.ClassVar[str]
    part: typing.ClassVar[str]

    def bytes_of(self, token: int, item: Logprob) -> bytes:
        text = item.decoded_token or ""
        return self.spell(token) if self.spell and _NO_CHARACTER in text else text.encode()

    def around(self, index: int, output: CompletionOutput, content: dict, logprobs: dict | None) -> dict:
        """A choice with this content."""
        ends = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return {"index": index} | content | {"logprobs": logprobs} | ends

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

    def choice(self, index: int, output: CompletionOutput, first: bool) -> dict:
        """The choice of a chunk, or of a whole answer, which is one chunk."""
        entries = output.logprobs
        logprobs = None if entries is None else self._logprobs(entries, output.offsets)
        return self.around(index, output, {"text": output.text}, logprobs)

    final = choice

    def _logprobs(self, entries: Entries, offsets: Sequence[int] | None) -> dict:
        tokens, values, tops = [], [], []
        for entry in entries:
            token, chosen = next(iter((entry or {}).items()), (0, None))
            raw = self.bytes_of(token, chosen) if chosen else b""
            tokens.append(_written(raw))
            values.append(None if chosen is None or chosen.rank == 0 else _finite(chosen.logprob))
            tops.append(None if chosen is None or chosen.rank == 0 else self._top(entry or {}))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """Text to log probability. Of tokens with the same text, the later are named by their ids."""
        out: dict[str, float] = {}
        for token, item in entry.items():
            text = _written(self.bytes_of(token, item))
            out[f"token_id:{token}" if text in out else text] = _finite(item.logprob)
        return out


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    whole, part = "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: CompletionOutput, first: bool) -> dict:
        """The choice of a chunk; the role comes with the first token, not before it."""
        role = {"role": "assistant"} if first else {}
        return self._message(index, output, "delta", role | {"content": output.text})

    def final(self, index: int, output: CompletionOutput, first: bool) -> dict:
        """The choice of a whole answer."""
        return self._message(index, output, "message", {"role": "assistant", "content": output.text})

    def _message(self, index: int, output: CompletionOutput, name: str, message: dict) -> dict:
        entries = output.logprobs
        logprobs = None if entries is None else {"content": [self._entry(entry) for entry in entries]}
        return self.around(index, output, {name: message}, logprobs)

    def _entry(self, entry: Mapping[int, Logprob]) -> dict:
        first = next(iter(entry))
        ranked = sorted(entry, key=lambda token: entry[token].rank)
        likeliest = [self._token(token, entry[token]) for token in ranked if entry[token].rank <= self.top]
        return self._token(first, entry[first]) | {"top_logprobs": likeliest}

    def _token(self, token: int, item: Logprob) -> dict:
        raw = list(self.bytes_of(token, item))
        return {"token": item.decoded_token or "", "logprob": _finite(item.logprob), "bytes": raw}


def _finite(value: float) -> float:
    return max(value, _LOWEST)


def _written(raw: bytes) -> str:
    """A token as text; part of a character as in OpenAI's completions, such as `bytes:\\xf0\\x9f`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
