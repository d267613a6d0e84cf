"""From a checked body to an answer: `/v1/completions` and `/v1/chat/completions`."""

import asyncio
import dataclasses
import json
import logging
import re
import time
import typing
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from starlette.responses import Response

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.queue import Demand
from swiftkv_jax.engine.request import CompletionOutput, Logprob, Request, SamplingParams, special_texts
from swiftkv_jax.engine.sequence import RULED_OUT, Detokenizer, unfinished, word
from swiftkv_jax.server import answers, schema
from swiftkv_jax.server.errors import MAX_ECHO, ApiError, clip
from swiftkv_jax.server.served import Model
from swiftkv_jax.server.service import Service
from swiftkv_jax.server.streams import Delta, EventStream, Stream

log = logging.getLogger("swiftkv_jax.http")
_BYTES_PER_TOKEN = 4  # of text, for an estimate before it is tokenised
MOST_ENTRIES = 2**20  # log probabilities of prompts in one answer: 100 MB of JSON
_MOST_BYTES_PER_TOKEN = 16  # a text longer than this times the context is refused unread
_PLAIN = {*SamplingParams.names()} & {*schema.Sampling.model_fields} - {"max_tokens"}  # taken as they are
_NAMED = re.compile(r"^(?:prompt|messages)(?: \d+)?: (\w+): |^(\w+)")


class Caller(typing.NamedTuple):
    """The sender of a request: the tenant, whose cached prefixes it shares; our id of the request; the
    client's own, for the log only."""

    tenant: str
    request_id: str
    client_id: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request for completions.

    Attributes:
      prompts: as `LLM.request` takes them. where: their name in errors.
      max_tokens: None generates `unsaid` tokens, or fewer if the context leaves no more; 0 only scores.
      unsaid: None fills the context. logprobs: how many of the likeliest tokens; None: none.
      echo: the prompt comes first.
    """

    body: schema.Sampling
    shape: answers.CompletionShape | answers.ChatShape
    prompts: list
    where: str
    max_tokens: int | None
    logprobs: int | None
    echo: bool
    unsaid: int | None
    caller: Caller

    @property
    def n(self) -> int:
        return self.body.n or 1

    @property
    def counts_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.include_usage)


def completion_call(body: schema.CompletionRequest, caller: Caller, model: Model, most_prompts: int) -> Call:
    """Check the body of a completion. Raises ApiError: 400."""
    _check_stream(body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 generates nothing; with echo it scores the prompt", "max_tokens")
    kind = {"add_special_tokens": body.add_special_tokens}
    prompts = schema.prompts(body.prompt, most_prompts)
    prompts = [{"prompt": each} | kind if isinstance(each, str) else each for each in prompts]
    shape = _shape(answers.CompletionShape, "cmpl", caller, model)
    echo = bool(body.echo)
    return Call(body, shape, prompts, "prompt", body.max_tokens, body.logprobs, echo, 16, caller)


def chat_call(body: schema.ChatRequest, caller: Caller, model: Model) -> Call:
    """Check the body of a chat. Raises ApiError: 400."""
    _check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens: must be at least 1", "max_tokens")
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens or body.max_tokens
    shape = _shape(answers.ChatShape, "chatcmpl", caller, model, top=wanted or 0)
    chat = {"messages": body.messages, "add_generation_prompt": body.add_generation_prompt}
    return Call(body, shape, [chat], "messages", limit, wanted, False, None, caller)


def _check_stream(body: schema.Sampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: needs stream to be true", "stream_options")


def _shape(kind, prefix: str, caller: Caller, model: Model, **fields):
    spell = getattr(model.llm.tokenizer, "token_bytes", None)
    fields |= {"id": f"{prefix}-{caller.request_id}", "fingerprint": model.fingerprint, "spell": spell}
    return kind(model=model.name, **fields)


class Generator:
    """Answers calls with one service."""

    def __init__(self, service: Service):
        self.service, self.llm = service, service.llm

    async def respond(self, call: Call) -> Response:
        """Run a call; its reserved capacity is released however it ends."""
        limits, context = self.service.settings, self.llm.settings.max_model_len
        if call.n > limits.max_n:
            raise ApiError(400, f"n: must be at most {limits.max_n}", "n")
        if max(map(size, call.prompts)) > _MOST_BYTES_PER_TOKEN * context:
            message = f"{call.where}: too long for a context of {context} tokens"
            raise ApiError(400, message, call.where, "context_length_exceeded")
        async with AsyncExitStack() as stack:
            record = stack.enter_context(RequestLog(call.caller))
            guess = _demand(call, context)
            ticket = stack.enter_context(self.service.admit(call.caller.tenant, guess))
            total = sum(map(size, call.prompts))
            requests = await self.service.encode(
                call.caller.tenant, total, lambda: make_requests(self.llm, call)
            )
            self.service.admission.update(ticket, sum(map(Demand.of, requests), Demand()))
            record.prompt = sum(len(request.token_ids) for request in requests)
            openings = await self._openings(call, requests)
            stream = None
            if call.max_tokens != 0:
                stream = await stack.enter_async_context(self.service.stream(requests, ticket))
            deltas = self._deltas(call, openings, stream, record)
            if call.body.stream:
                deltas = await _begun(deltas)
                return EventStream(_events(call, deltas, record), stack.pop_all())
            return await _whole(call, deltas, record)
        raise AssertionError("unreachable: nothing above swallows an exception")

    async def _openings(self, call: Call, requests: list[Request]) -> list[CompletionOutput]:
        """What `echo` puts first: the prompts and, with `logprobs`, their tokens' log probabilities."""
        if not call.echo:
            return []
        if call.logprobs is not None:
            most, sizes = self.service.settings.max_scored_tokens, [len(r.token_ids) for r in requests]
            if max(sizes) > most:
                message = f"echo: prompts of more than {most} tokens are not scored; this has {max(sizes)}"
                raise ApiError(400, message, "echo", "context_length_exceeded")
            entries = call.n * sum(sizes) * (1 + call.logprobs)
            if entries > MOST_ENTRIES:
                message = f"echo: {entries} log probabilities are too many for one answer: send fewer prompts"
                raise ApiError(400, message, "echo")
        return [await self._opening(call, request) for request in requests]

    async def _opening(self, call: Call, request: Request) -> CompletionOutput:
        ids, entries, offsets = request.token_ids, None, None
        if call.logprobs is not None:
            if not self.llm.scorable:
                raise ApiError(400, "echo: this model cannot score prompts: leave out logprobs", "echo")
            try:
                scored = await self.service.score(call.caller.tenant, ids, call.logprobs)
            except FloatingPointError as error:
                raise model_failed(call.caller.request_id, str(error)) from None
            first = {ids[0]: Logprob(logprob=0.0, rank=0, decoded_token=word(self.llm.tokenizer, ids[0]))}
            entries = [first, *(entry or {} for entry in scored[1:])]
        text = request.prompt
        if text is None:
            text = await self.service.encode(call.caller.tenant, size(ids), lambda: _text(self.llm, ids))
            if call.max_tokens != 0 and text.endswith("\ufffd") and unfinished(self.llm.tokenizer, list(ids)):
                text = text[:-1]  # of a character that the output completes
        if entries is not None:
            offsets = await self.service.encode(
                call.caller.tenant, size(ids), lambda: _offsets(self.llm, ids, text)
            )
        return CompletionOutput(
            index=0,
            text=text,
            logprobs=entries,
            finish_reason="length" if call.max_tokens == 0 else None,  # None is not 0
            offsets=offsets,
        )

    async def _deltas(
        self, call: Call, openings: list[CompletionOutput], stream: Stream | None, record: "RequestLog"
    ) -> AsyncGenerator[Delta, None]:
        for number, opening in enumerate(openings):
            for child in range(call.n):
                yield number, dataclasses.replace(opening, index=child)
        if stream is None:
            return
        async for number, delta in stream:
            record.completion += len(delta.token_ids)
            record.reasons.add(delta.finish_reason or "")
            record.cached += delta.cached_tokens if delta.finish_reason and not delta.index else 0
            if delta.error == RULED_OUT:
                raise ApiError(400, RULED_OUT, "allowed_token_ids")
            if delta.finish_reason == "error":
                raise model_failed(call.caller.request_id, delta.error)
            if openings and delta.offsets:
                before = len(openings[number].text)
                delta = dataclasses.replace(delta, offsets=[before + offset for offset in delta.offsets])
            yield number, delta


def model_failed(request_id: str, why: str | None) -> ApiError:
    """The error for the client; `why` goes to the log."""
    log.error("request %s failed: %s", request_id, why)
    return ApiError(500, f"the model failed on this request ({request_id})", retry=True)


@dataclasses.dataclass
class RequestLog:
    """The content of a request's one log line; `sound`: the rate and channels of a transcription's audio as
    given."""

    caller: Caller
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasons: set[str] = dataclasses.field(default_factory=set)
    sound: dict[str, int] = dataclasses.field(default_factory=dict)
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def usage(self) -> dict[str, typing.Any]:
        return answers.usage(self.prompt, self.completion, self.cached)

    def __enter__(self) -> "RequestLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _) -> None:
        """Log it as JSON, so that nothing a client sent can look like a log line of its own. A cancelled call
        means that the client disconnected (499)."""
        status = 200 if error is None else 499 if isinstance(error, asyncio.CancelledError) else 500
        record = {
            "status": error.status if isinstance(error, ApiError) else status,
            "request": self.caller.request_id,
            "client": self.caller.client_id,
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "finished": sorted(self.reasons - {""}),
            "seconds": round(time.monotonic() - self.began, 4),
        }
        log.info(json.dumps(record | ({"sound": self.sound} if self.sound else {})))


def make_requests(llm: LLM, call: Call) -> list[Request]:
    """Tokenise the prompts and make the requests; runs on a tokenizer thread."""
    fields = {name: getattr(call.body, name) for name in _PLAIN}
    changes = {name: value for name, value in fields.items() if value is not None}
    changes |= {"max_tokens": 1 if call.max_tokens == 0 else call.max_tokens, "logprobs": call.logprobs}
    try:
        params, requests = llm.defaults.updated(changes), []
        for number, prompt in enumerate(call.prompts):
            where = call.where if len(call.prompts) == 1 else f"{call.where} {number}"
            if call.where == "messages":
                refuse_control_tokens(llm, prompt["messages"])
            request = llm.request(prompt, params, where, f"{call.caller.tenant}:{call.body.cache_salt or ''}")
            if call.max_tokens is None and call.unsaid is not None:
                most = min(call.unsaid, request.max_length - len(request.token_ids))
                request = dataclasses.replace(request, params=request.params.updated({"max_tokens": most}))
            requests.append(dataclasses.replace(request, priority=call.body.priority or 0))
        return requests
    except UsageError as error:
        message = without_place(llm, error)
        match = _NAMED.match(message)
        named = (match[1] or match[2]) if match else ""
        param = named if named in type(call.body).model_fields else call.where
        long = "a context of" in message or "the context of" in message
        raise ApiError(400, message, param, "context_length_exceeded" if long else None) from error


def refuse_control_tokens(llm: LLM, messages: list[dict[str, typing.Any]]) -> None:
    """Refuse messages with the text of a control token, which could end their own turn."""
    for number, message in enumerate(messages):
        for name, value in message.items():
            text = name + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            token = next((t for t in special_texts(llm.tokenizer) if t in text), None)
            if token is not None:
                where = f"messages.{number}.{clip(name, 40)}"
                raise ApiError(400, f"{where}: holds the control token {clip(token, 40)}", where)


def without_place(llm: LLM, error: UsageError) -> str:
    """The error's message without the tokenizer's folder. A template may repeat a message, and is cut
    short."""
    folder, message, cause = getattr(llm.tokenizer, "name", None), str(error), str(error.__cause__ or "")
    message = message.replace(f"of {folder}", "of the model") if folder else message
    return message.replace(cause, clip(cause, MAX_ECHO)) if cause else message


async def _begun(deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
    """The same deltas, once the first has arrived: until then a failure can still set the status."""
    first = await anext(deltas, None)

    async def again() -> AsyncGenerator[Delta, None]:
        async with aclosing(deltas):
            if first is not None:
                yield first
            async for delta in deltas:
                yield delta

    return again()


async def _whole(call: Call, deltas: AsyncGenerator[Delta, None], record: RequestLog) -> Response:
    parts: dict[int, list[CompletionOutput]] = {}
    async for number, delta in deltas:
        parts.setdefault(number * call.n + delta.index, []).append(delta)

    def written() -> bytes:
        choices = (call.shape.final(index, _joined(parts[index]), True) for index in sorted(parts))
        body = call.shape.envelope(call.shape.whole, [])
        return answers.joined(body | {"usage": record.usage}, choices)

    # With log probabilities it is up to a hundred times the text.
    content = written() if call.logprobs is None else await asyncio.to_thread(written)
    return Response(content, media_type="application/json")


def _joined(parts: list[CompletionOutput]) -> CompletionOutput:
    logprobs: typing.Any = [entry for part in parts for entry in part.logprobs or ()]
    asked = parts[-1].logprobs is not None
    return dataclasses.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        logprobs=logprobs if asked else None,
        offsets=[offset for part in parts for offset in part.offsets or ()] if asked else None,
    )


async def _events(
    call: Call, deltas: AsyncGenerator[Delta, None], record: RequestLog
) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()  # choices
    uncounted = {"usage": None} if call.counts_usage else {}
    try:
        async with aclosing(deltas):
            async for number, delta in deltas:
                index = number * call.n + delta.index
                choice = call.shape.choice(index, delta, index not in begun)
                begun.add(index)
                yield answers.event(call.shape.envelope(call.shape.part, [choice]) | uncounted)
    except ApiError as error:  # the status is sent already
        yield b"data: " + error.body() + b"\n\n"
    else:
        if call.counts_usage:
            last = call.shape.envelope(call.shape.part, [])
            yield answers.event(last | {"usage": record.usage})
    yield answers.DONE


def _demand(call: Call, context: int) -> Demand:
    """The estimated demand of a call, before its texts are tokenised."""
    tokens = [size(prompt) // _BYTES_PER_TOKEN + 1 for prompt in call.prompts]
    rooms = [max(0, context - count) for count in tokens]
    most = call.unsaid if call.max_tokens is None else call.max_tokens
    output = sum(room if most is None else min(most, room) for room in rooms)
    return Demand(call.n * len(tokens), call.n * sum(tokens), call.n * output)


def size(prompt) -> int:
    """The bytes of a text or of a chat's texts; for token ids, an estimate of their text's."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    if isinstance(prompt, dict):
        if "prompt" in prompt:
            return len(prompt["prompt"].encode())
        messages = prompt["messages"]
        rest = [{n: v for n, v in m.items() if n not in ("role", "content")} for m in messages]
        texts = [json.dumps(fields, ensure_ascii=False) for fields in rest if fields]
        return sum(len(text.encode()) for text in [*texts, *(m["content"] for m in messages)])
    return _BYTES_PER_TOKEN * len(prompt)


def _text(llm: LLM, ids: Sequence[int]) -> str:
    return llm.tokenizer.decode(list(ids), skip_special_tokens=False) if llm.tokenizer else ""


def _offsets(llm: LLM, ids: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its `text`, which need not show the BOS in front of it."""
    if llm.tokenizer is None:
        return [0] * len(ids)
    hidden = ids[0] == llm.tokenizer.bos_id and not text.startswith(_text(llm, ids[:1]))  # the BOS
    words, out = Detokenizer(llm.tokenizer, (), False), [0] * hidden
    for token in ids[hidden:]:
        out.append(len(words.text))
        words.push(token)
    return out
