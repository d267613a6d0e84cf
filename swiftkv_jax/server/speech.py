"""Audio in, text out: `/v1/audio/transcriptions` and `/v1/audio/translations`, as OpenAI's client sends them.

Whisper takes 30 s at a time. Audio is cut into such windows, each a request of its own, and their answers are
joined. If no language is given, it is detected in the first window before the others run.
"""

import dataclasses
from urllib.parse import urlsplit

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine import speech
from swiftkv_jax.engine.queue import Demand
from swiftkv_jax.engine.request import Request
from swiftkv_jax.server import answers, schema
from swiftkv_jax.server.errors import ApiError
from swiftkv_jax.server.generate import Caller, RequestLog, model_failed
from swiftkv_jax.server.service import Service

MULTIPART = "multipart/form-data"
_MOST_FIELDS = 32


@dataclasses.dataclass(frozen=True)
class SpeechCall:
    """A checked request for the text of an audio file.

    Attributes:
      sound: the file's bytes. task: "transcribe" or "translate".
    """

    body: schema.SpeechRequest
    sound: bytes
    task: str
    caller: Caller


async def read_form(request: HttpRequest, kind: type[schema.Body]) -> tuple[schema.Body, bytes]:
    """Return (the checked fields of a form, the bytes of its file)."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, "a page of another site may not send audio")
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != MULTIPART:
        raise ApiError(415, f"the body must be a form: send it as {MULTIPART}")
    try:
        async with request.form(max_files=2, max_fields=_MOST_FIELDS) as form:
            files = [value for name, value in form.multi_items() if name == "file"]
            if len(files) != 1 or not isinstance(files[0], UploadFile):
                raise ApiError(400, "file: the form must have one file of this name", "file")
            fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            return schema.parse_form(kind, fields), await files[0].read()
    except HTTPException as error:  # which Starlette makes of its MultiPartException
        if error.status_code != 400:
            raise
        raise ApiError(400, f"the form cannot be read ({error.detail})") from None


class Listener:
    """Answers calls with audio with one service."""

    def __init__(self, service: Service):
        self.service, self.llm = service, service.llm

    async def respond(self, call: SpeechCall) -> Response:
        """Run a call; its reserved capacity is released however it ends."""
        with RequestLog(call.caller) as record:
            dictation, requests = await self._prepared(call)
            record.sound = {name: dictation.about[name] for name in ("rate", "channels")}
            questions = [] if dictation.question is None else [dictation.question]
            demand = sum(map(Demand.of, [*requests, *questions]), Demand())
            with self.service.admit(call.caller.tenant, demand) as ticket:
                if questions:
                    ((tokens, _),) = await self._run(call, questions, ticket, record)
                    requests = dictation.answered(self.llm, tokens).requests(self.llm)
                record.prompt = sum(len(request.token_ids) for request in requests)
                windows = await self._run(call, requests, ticket, record)
        text = speech.joined(text for _, text in windows)
        if call.body.response_format == "text":
            return PlainTextResponse(f"{text}\n")
        usage = {"type": "duration", "seconds": round(dictation.about["duration"])}
        return Response(answers.encode({"text": text, "usage": usage}), media_type="application/json")

    async def _prepared(self, call: SpeechCall) -> tuple[speech.Dictation, list[Request]]:
        """(the audio as the model takes it, the requests of its windows). The tokenizer's threads read audio
        too, off the event loop.
        """

        def work():
            params = speech.GREEDY.updated({"temperature": call.body.temperature or 0.0})
            text, previous = (call.body.prompt or "").strip(), ()
            if text and self.llm.tokenizer is None:
                raise UsageError("prompt is text, and this model has no tokenizer")
            if text:  # before the audio: at most as many tokens as the model was trained on
                tokens = self.llm.tokenizer.encode(f" {text}", add_special_tokens=False)
                previous = tokens[1 - self.llm.settings.max_model_len // 2 :]
            options = call.body.language, call.task, params, previous, "file"
            most = self.service.settings.max_sequences
            dictation = speech.listen(self.llm, call.sound, *options, most)
            return dictation, dictation.requests(self.llm)

        try:
            return await self.service.consult(call.caller.tenant, len(call.sound), work)
        except UsageError as error:
            name = next((n for n in ("language", "prompt") if f"{n} " in str(error)[:40]), "file")
            raise ApiError(400, str(error), name) from error

    async def _run(
        self, call: SpeechCall, requests: list[Request], ticket, record: RequestLog
    ) -> list[tuple[list[int], str]]:
        """(token ids, text) of each request's answer."""
        tokens: list[list[int]] = [[] for _ in requests]
        texts = [""] * len(requests)
        async with self.service.stream(requests, ticket) as stream:
            async for number, delta in stream:
                tokens[number] += delta.token_ids
                texts[number] += delta.text
                record.completion += len(delta.token_ids)
                record.reasons.add(delta.finish_reason or "")
                if delta.finish_reason == "error":
                    raise model_failed(call.caller.request_id, delta.error)
        return list(zip(tokens, texts, strict=True))
