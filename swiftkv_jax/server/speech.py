"""Audio in, text out: `/v1/audio/transcriptions` and `/v1/audio/translations`, as OpenAI's client sends them.

Whisper takes 30 s at a time. Audio is cut into such windows, each a request of its own, and their answers are
joined. If no language is given, it is detected in the first window before the others run.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
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
from swiftkv_jax.server.generate import Tally, model_failed
from swiftkv_jax.server.service import Service

MULTIPART = "multipart/form-data"
_MOST_FIELDS = 32


@dataclasses.dataclass(frozen=True)
class SpeechCall:
    """A checked request for the text of an audio file.

    Attributes:
      sound: the file's bytes. task: "transcribe" or "translate". The rest as in `generate.Call`.
    """

    body: schema.SpeechRequest
    sound: bytes
    task: str
    tenant: str
    request_id: str
    client_id: str


async def read_form(request: HttpRequest, kind: type[schema.Body]) -> tuple[schema.Body, bytes]:
    """Return (the checked fields of a form, the bytes of its file).

    Raises:
      ApiError: 403: it comes from another site's page, which a browser lets send forms; 415: it is not a
        form; 400: a field is wrong, or there is not exactly one file.
    """
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
        """Run a call; its reserved capacity is released however it ends.

        Raises:
          ApiError: it was refused, or failed.
        """
        with Tally(call.request_id, call.client_id) as tally:
            heard = await self._ask(call, lambda: self._heard(call), len(call.sound))
            spoken, tally.sound = heard.guess, heard.sound.given
            async with AsyncExitStack() as stack:
                demand = Demand.of(heard.question) if heard.question else Demand()
                demand += sum(map(Demand.of, self._windows(call, heard, heard.guess)), Demand())
                ticket = stack.enter_context(self.service.admit(call.tenant, demand))
                if heard.question is not None:
                    ((tokens, _),) = await self._run(call, [heard.question], ticket, tally)
                    names = {token: code for code, token in speech.asked(self.llm).languages}
                    spoken = next((names[token] for token in tokens if token in names), heard.guess)
                requests = self._windows(call, heard, spoken)
                tally.prompt = sum(len(request.token_ids) for request in requests)
                answers_of = await self._run(call, requests, ticket, tally)
        text = speech.joined(said for _, said in answers_of)
        if call.body.response_format == "text":
            return PlainTextResponse(f"{text}\n")
        usage = {"type": "duration", "seconds": round(heard.sound.duration)}
        return Response(answers.encode({"text": text, "usage": usage}), media_type="application/json")

    async def _ask(self, call: SpeechCall, work, size: int):
        """Return the result of `work`, which runs on the tokenizer's threads: they read audio too, off the
        event loop.

        Raises:
          ApiError: 400 for audio or fields that the model cannot take.
        """
        try:
            return await self.service.consult(call.tenant, size, work)
        except UsageError as error:
            name = next((n for n in ("language", "prompt") if f"{n} " in str(error)[:40]), "file")
            raise ApiError(400, str(error), name) from error

    def _heard(self, call: SpeechCall) -> "_Heard":
        """Convert a call's audio and fields to the model's input."""
        sound = speech.listen(self.llm, call.sound, "file", self.service.settings.max_sequences)
        languages = [code for code, _ in speech.asked(self.llm).languages]
        spoken = call.body.language or speech.asked(self.llm).language
        if spoken is not None:
            spoken = speech.language_code(spoken, languages or ["en"])
        question = speech.language_request(self.llm, sound.windows[0], "file") if spoken is None else None
        before = self._before(call)
        return _Heard(sound, question, spoken or next(iter(languages), None), before)

    def _before(self, call: SpeechCall) -> Sequence[int]:
        """Token ids of the text before the audio, at most as many as the model was trained on."""
        said = (call.body.prompt or "").strip()
        if not said:
            return ()
        if self.llm.tokenizer is None:
            raise UsageError("prompt is text, and this model has no tokenizer")
        most = self.llm.settings.max_model_len // 2 - 1
        return self.llm.tokenizer.encode(f" {said}", add_special_tokens=False)[-most:]

    def _windows(self, call: SpeechCall, heard: "_Heard", spoken: str | None) -> list[Request]:
        """The request of each window, for text in the spoken language."""
        params = speech.GREEDY.updated({"temperature": call.body.temperature or 0.0})
        languages = speech.asked(self.llm).languages
        given = (spoken if languages else None, call.task, params)
        try:
            return [
                speech.window_request(self.llm, frames, *given, () if number else heard.before, "file")
                for number, frames in enumerate(heard.sound.windows)
            ]
        except UsageError as error:
            raise ApiError(400, str(error), "file") from error

    async def _run(
        self, call: SpeechCall, requests: list[Request], ticket, tally: Tally
    ) -> list[tuple[list[int], str]]:
        """(token ids, text) of each request's answer."""
        tokens: list[list[int]] = [[] for _ in requests]
        texts = [""] * len(requests)
        async with self.service.stream(requests, ticket) as stream:
            async for number, delta in stream:
                tokens[number] += delta.token_ids
                texts[number] += delta.text
                tally.completion += len(delta.token_ids)
                tally.reasons.add(delta.finish_reason or "")
                if delta.finish_reason == "error":
                    raise model_failed(call.request_id, delta.error)
        return list(zip(tokens, texts, strict=True))


@dataclasses.dataclass(frozen=True)
class _Heard:
    """A call's audio as the model takes it.

    Attributes:
      question: the request that asks for the language; None where it is known. guess: the language that was
        given, or else the first the model knows. before: token ids of a text.
    """

    sound: speech.Heard
    question: Request | None
    guess: str | None
    before: Sequence[int]
