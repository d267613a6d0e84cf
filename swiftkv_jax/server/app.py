"""The routes."""

import asyncio
import contextlib
import json
import time
import typing
from collections import Counter
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.server import generate, openapi, page, schema, speech
from swiftkv_jax.server.answers import encode
from swiftkv_jax.server.errors import ApiError, clip
from swiftkv_jax.server.limits import AUDIO, METRICS, OPEN, REQUEST_ID, TENANT, Limits, log
from swiftkv_jax.server.metrics import render
from swiftkv_jax.server.openapi import EVENTS, JSON, Operation
from swiftkv_jax.server.served import Model, Models
from swiftkv_jax.server.settings import HttpSettings
from swiftkv_jax.server.streams import until_disconnect

_REFUSALS_S = 1.0


class Api:
    """The ASGI application and its models. The engines' threads live as long as the lifespan.

    Attributes:
      models: all. llm, service, metrics: those of the first, which answers if a request names no model.
      operations: all routes.
    """

    def __init__(self, llm: LLM, settings: HttpSettings, others: Mapping[str, LLM] | None = None):
        """`settings.model_name` is `llm`'s name; `others` are served beside it under theirs."""
        self.settings = settings
        self.models = Models({settings.model_name: llm} | dict(others or {}), settings)
        self.llm, self.service = llm, self.models.first.service
        self.metrics = self.models.first.metrics
        self._created = int(time.time())
        self.operations = self._all_operations()
        routes = [Route(o.path, o.handler, methods=[o.method]) for o in self.operations]
        router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)
        self.asgi = Limits(router, settings, lambda: self.models.draining)
        self._refusals: Counter[int] = Counter()

    def _all_operations(self) -> list[Operation]:
        answers = (JSON, EVENTS)
        sound = (schema.SpeechRequest, (JSON, "text/plain"), speech.MULTIPART)
        return [
            Operation("/v1/completions", self.completions, schema.CompletionRequest, answers),
            Operation("/v1/chat/completions", self.chat, schema.ChatRequest, answers),
            Operation(f"{AUDIO}transcriptions", self.transcribe, *sound),
            Operation(f"{AUDIO}translations", self.translate, *sound),
            Operation("/v1/models", self.list_models),
            Operation("/v1/models/{name:path}", self.model),
            Operation("/tokenize", self.tokenize, schema.TokenizeRequest),
            Operation("/detokenize", self.detokenize, schema.DetokenizeRequest),
            Operation("/tokenizer_info", self.tokenizer_info),
            Operation("/openapi.json", self.describe),
            Operation("/health", self.health),
            Operation("/ready", self.ready),
            Operation(METRICS, self.show_metrics, media=("text/plain",)),
            *page.operations(),
        ]

    @contextlib.asynccontextmanager
    async def _lifespan(self, _):
        self.models.start()
        try:
            yield
        finally:
            self.models.stop()

    async def completions(self, request: Request) -> Response:
        """OpenAI's legacy completions: texts or token ids in, text out."""
        self._refuse_early(request)
        body, model = await self._read(request, schema.CompletionRequest)
        call = generate.completion_call(body, _caller(request), model, self.settings.max_prompts)
        return await until_disconnect(request.receive, generate.Generator(model.service).respond(call))

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions, by the model's own template."""
        self._refuse_early(request)
        body, model = await self._read(request, schema.ChatRequest)
        call = generate.chat_call(body, _caller(request), model)
        return await until_disconnect(request.receive, generate.Generator(model.service).respond(call))

    async def transcribe(self, request: Request) -> Response:
        """OpenAI's transcriptions: a wav file in, its text out."""
        return await self._listen(request, "transcribe")

    async def translate(self, request: Request) -> Response:
        """OpenAI's translations: a wav file in, its text in English out."""
        return await self._listen(request, "translate")

    async def _listen(self, request: Request, task: str) -> Response:
        self._refuse_early(request)
        body, sound = await speech.read_form(request, schema.SpeechRequest)
        model = self._model(body.model)
        call = speech.SpeechCall(body, sound, task, _caller(request))
        return await until_disconnect(request.receive, speech.Listener(model.service).respond(call))

    def _refuse_early(self, request: Request) -> None:
        """Refuse a request before its body is read, if no model would take even the smallest request. The
        number of such refusals is logged by status, at most once a second."""

        def tell() -> None:
            log.info(json.dumps({"refused": dict(sorted(self._refusals.items()))}))
            self._refusals.clear()

        try:
            self.models.check(request.scope[TENANT])
        except ApiError as error:
            if not self._refusals:
                asyncio.get_running_loop().call_later(_REFUSALS_S, tell)
            self._refusals[error.status] += 1
            raise

    async def list_models(self, _: Request) -> Response:
        """The models, and the sampling defaults in force."""
        cards = [model.card(self._created) for model in self.models.by_name.values()]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One model's card."""
        return JSONResponse(self._model(request.path_params["name"]).card(self._created))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        body, model = await self._read(request, schema.TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        size = generate.size({"messages": body.messages} if body.prompt is None else body.prompt)

        def work() -> dict:
            if body.prompt is not None:
                ids = _tokenizer(model.llm).encode(body.prompt, add_special_tokens=body.add_special_tokens)
            else:
                generate.refuse_control_tokens(model.llm, body.messages or [])
                ids = _tokenizer(model.llm).encode_chat(body.messages, body.add_generation_prompt)
            return {"tokens": ids, "count": len(ids), "max_model_len": model.llm.settings.max_model_len}

        return await self._consult(request, model, size, work)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body, model = await self._read(request, schema.DetokenizeRequest)
        size = generate.size(body.tokens)

        def work() -> dict:
            vocab = model.llm.model.config.vocab_size
            bad = next((i for i, token in enumerate(body.tokens) if token >= vocab), None)
            if bad is not None:
                raise ApiError(400, f"tokens.{bad}: is outside the vocabulary [0, {vocab})", "tokens")
            return {"prompt": _tokenizer(model.llm).decode(body.tokens, skip_special_tokens=False)}

        return await self._consult(request, model, size, work)

    async def _consult(self, request: Request, model: Model, size: int, work: Callable[[], dict]) -> Response:
        """Return the result of `work` as JSON; both are made on the tokenizer's threads."""
        made = model.service.consult(request.scope[TENANT], size, lambda: encode(work()))
        try:
            return Response(await until_disconnect(request.receive, made), media_type=JSON)
        except UsageError as error:
            raise ApiError(400, generate.without_place(model.llm, error)) from error

    async def tokenizer_info(self, _: Request) -> Response:
        """The tokenizer's special tokens; the chat template only if the server is set to show it."""
        known = _tokenizer(self.llm)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        info: dict[str, typing.Any] = {name: getattr(known, "named", {}).get(name) for name in names}
        info["tokenizer_class"] = type(known).__name__
        info["model_max_length"] = self.llm.settings.max_model_len
        if self.settings.show_template:
            info["chat_template"] = getattr(known, "chat_template", None)
        return Response(encode(info), media_type=JSON)

    async def describe(self, _: Request) -> Response:
        """This description: OpenAPI 3.1."""
        return JSONResponse(openapi.describe(self.operations, bool(self.settings.api_keys), OPEN))

    async def health(self, _: Request) -> Response:
        """Whether the engine responds."""
        if self.models.healthy:
            return JSONResponse({"status": "ok"})
        raise ApiError(503, "the engine does not answer", code="unhealthy", retry_after=10)

    async def ready(self, _: Request) -> Response:
        """Whether new requests are accepted, and whether all programs are compiled that make them run
        fastest."""
        if self.models.ready:
            return JSONResponse({"status": "ready", "warm": self.models.warm})
        state = f"warming up: {self.models.how_far}"
        if self.models.draining or not self.models.healthy:
            state = "draining" if self.models.draining else "the engine does not answer"
        raise ApiError(503, f"not ready ({state})", code="not_ready", retry_after=5)

    async def show_metrics(self, _: Request) -> Response:
        """Prometheus' text format."""
        text = render(model.metrics for model in self.models.by_name.values())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _read(self, request: Request, kind: type[schema.Body]) -> tuple[schema.Body, Model]:
        """The body, checked, and the model it names."""
        media = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if media != JSON:
            raise ApiError(415, f"the body must be JSON: send the header Content-Type: {JSON}")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "compressed bodies are not read")
        raw = await request.body()
        large = len(raw) > 2**16
        body = await asyncio.to_thread(schema.parse, kind, raw) if large else schema.parse(kind, raw)
        if unknown := schema.unknown_fields(body):
            log.info("request %s: fields ignored: %s", request.scope[REQUEST_ID], unknown)
        return body, self._model(getattr(body, "model", None))

    def _model(self, name: str | None) -> Model:
        if name is None:
            return self.models.first
        if name not in self.models.by_name:
            served = " and ".join(map(repr, self.models.by_name))
            message = f"no model {clip(name, 60)!r} here; this server has {served}"
            raise ApiError(404, message, "model", "model_not_found")
        return self.models.by_name[name]


def _caller(request: Request) -> generate.Caller:
    client_id = clip(request.headers.get("x-request-id", ""), 64)
    return generate.Caller(request.scope[TENANT], request.scope[REQUEST_ID], client_id)


def _tokenizer(llm: LLM):
    if llm.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; send token ids", "prompt")
    return llm.tokenizer
