"""The routes."""

import asyncio
import contextlib
import time
import typing

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swiftkv_jax.engine.http import generate, schema
from swiftkv_jax.engine.http.answers import encode
from swiftkv_jax.engine.http.asgi import until_disconnect
from swiftkv_jax.engine.http.errors import ApiError, clip
from swiftkv_jax.engine.http.limits import REQUEST_ID, TENANT, Limits, log
from swiftkv_jax.engine.http.metrics import Metrics
from swiftkv_jax.engine.http.service import Service
from swiftkv_jax.engine.http.settings import HttpSettings
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.errors import UsageError

_JSON = "application/json"


class Api:
    """The ASGI application, its engine and its metrics. The engine's thread lives as long as the lifespan."""

    def __init__(self, llm: LLM, settings: HttpSettings):
        self.llm, self.settings = llm, settings
        self.metrics = Metrics(llm, settings)
        self.service = Service(llm, settings, self.metrics)
        self.generator = generate.Generator(self.service)
        self._created = int(time.time())
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.show_metrics, methods=["GET"]),
        ]
        handlers: dict[typing.Any, typing.Any] = {ApiError: _api_error, HTTPException: _http_error}
        handlers |= {ClientDisconnect: _client_left, Exception: _bug}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        app.router.redirect_slashes = False
        self.asgi = Limits(app, settings, lambda: self.service.draining)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _):
        self.service.start()
        try:
            yield
        finally:
            self.service.stop()

    async def completions(self, request: Request) -> Response:
        """OpenAI's legacy completions: texts or token ids in, text out."""
        body = await self._read(request, schema.CompletionRequest)
        call = generate.completion_call(body, self._common(request), self.settings.max_prompts)
        return await until_disconnect(request.receive, self.generator.respond(call))

    async def chat(self, request: Request) -> Response:
        """OpenAI's chat completions, by the model's own template."""
        body = await self._read(request, schema.ChatRequest)
        call = generate.chat_call(body, self._common(request))
        return await until_disconnect(request.receive, self.generator.respond(call))

    async def models(self, _: Request) -> Response:
        """The one model, and the sampling defaults in force."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """One model's card."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        body = await self._read(request, schema.TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        ids = await self.service.encode(lambda: self._tokens(body))
        limit = self.llm.settings.max_model_len
        return Response(encode({"tokens": ids, "count": len(ids), "max_model_len": limit}), media_type=_JSON)

    def _tokens(self, body: schema.TokenizeRequest) -> list[int]:
        try:
            if body.prompt is not None:
                return list(self._tokenizer().encode(body.prompt, add_special_tokens=body.add_special_tokens))
            messages = [message.as_dict() for message in body.messages or ()]
            generate.refuse_control_tokens(self.llm, messages)
            return list(self._tokenizer().encode_chat(messages, body.add_generation_prompt))
        except UsageError as error:
            name = str(getattr(self.llm.tokenizer, "name", "") or "the model")
            raise ApiError(400, str(error).replace(name, "the model"), "messages") from error

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._read(request, schema.DetokenizeRequest)
        vocab = self.llm.model.config.vocab_size
        bad = next((i for i, token in enumerate(body.tokens) if token >= vocab), None)
        if bad is not None:
            raise ApiError(400, f"tokens.{bad}: is outside the vocabulary [0, {vocab})", "tokens")
        tokenizer = self._tokenizer()
        text = await self.service.encode(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return Response(encode({"prompt": text}), media_type=_JSON)

    async def tokenizer_info(self, _: Request) -> Response:
        """The strings that begin and end texts; the chat template only where that was asked for."""
        known = getattr(self._tokenizer(), "hf", None)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        info: dict[str, typing.Any] = {name: getattr(known, name, None) for name in names}
        info["tokenizer_class"] = type(known or self.llm.tokenizer).__name__
        info["model_max_length"] = self.llm.settings.max_model_len
        if self.settings.show_template:
            info["chat_template"] = getattr(known, "chat_template", None)
        return Response(encode(info), media_type=_JSON)

    async def health(self, _: Request) -> Response:
        """Whether the engine still moves."""
        if self.service.healthy:
            return JSONResponse({"status": "ok"})
        raise ApiError(503, "the engine does not answer", code="unhealthy", retry_after=10)

    async def ready(self, _: Request) -> Response:
        """Whether new requests are taken."""
        if self.service.ready:
            return JSONResponse({"status": "ready"})
        done, total = self.service.progress
        state = "draining" if self.service.draining else f"warming up: {done} of {total} programs"
        raise ApiError(503, f"not ready ({state})", code="not_ready", retry_after=5)

    async def show_metrics(self, _: Request) -> Response:
        """Prometheus' text format."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _read(self, request: Request, model: type[schema.Body]) -> schema.Body:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != _JSON:
            raise ApiError(415, f"the body must be JSON: send the header Content-Type: {_JSON}")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "compressed bodies are not read")
        raw = await request.body()
        body = (
            await asyncio.to_thread(schema.parse, model, raw)
            if len(raw) > 2**16
            else schema.parse(model, raw)
        )
        if unknown := schema.unknown_fields(body):
            log.info("request %s: fields ignored: %s", request.scope[REQUEST_ID], unknown)
        self._check_model(getattr(body, "model", None))
        return body

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            served = self.settings.model_name
            message = f"no model {clip(name, 60)!r} here; this server has {served!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _common(self, request: Request) -> dict:
        """What a call needs beside its body."""
        scope = request.scope
        client_id = clip(request.headers.get("x-request-id", ""), 64)
        return {
            "call": {"tenant": scope[TENANT], "request_id": scope[REQUEST_ID], "client_id": client_id},
            "shape": {"model": self.settings.model_name, "fingerprint": self.llm.fingerprint},
        }

    def _card(self) -> dict:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {
            "id": self.settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "swiftkv-jax",
            "max_model_len": self.llm.settings.max_model_len,
            "sampling_defaults": {name: getattr(self.llm.defaults, name) for name in names},
        }

    def _tokenizer(self):
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; send token ids", "prompt")
        return self.llm.tokenizer


async def _api_error(_: Request, error: ApiError) -> Response:
    return Response(error.body(), status_code=error.status, headers=error.headers())


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: no such route, or a method it does not take."""
    said = {404: "no such route", 405: f"this route does not take {clip(request.method, 16)}"}
    known = ApiError(error.status_code, said.get(error.status_code, "bad request"))
    answer = await _api_error(request, known)
    answer.headers.update(error.headers or {})
    return answer


async def _client_left(request: Request, _: ClientDisconnect) -> Response:
    return await _api_error(request, ApiError(499, "the client left"))


async def _bug(request: Request, _: Exception) -> Response:
    """Told without details; the traceback goes to the log."""
    return await _api_error(request, ApiError(500, f"internal error; request id {request.scope[REQUEST_ID]}"))
