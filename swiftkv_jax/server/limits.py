"""The first layer of the server: size, time and key of a request are checked before any route sees it."""

import asyncio
import hmac
import logging
import random
import traceback
from collections.abc import Callable, Mapping
from hashlib import sha256

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_jax.server import page
from swiftkv_jax.server.errors import ApiError, clip
from swiftkv_jax.server.settings import HttpSettings

log = logging.getLogger("swiftkv_jax.http")
# The only paths that need no key: those of probes, and the page's files, which hold nothing about the models
# or their users.
OPEN = ("/health", "/ready", *page.FILES)
METRICS = "/metrics"
AUDIO = "/v1/audio/"  # routes whose bodies hold audio
TENANT = "swiftkv.tenant"  # in an ASGI scope: the digest of the caller's key, "" where none is asked for
REQUEST_ID = "swiftkv.request_id"
_CLOSING = (401, 403, 408, 413, 431, 500)  # a body may be left unread, so the connection ends with the answer
_PASSING = (KeyboardInterrupt, SystemExit, GeneratorExit)


class Keys:
    """The API keys and the metrics key. All digests are compared, in constant time."""

    def __init__(self, keys: tuple[str, ...], metrics_key: str | None):
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._metrics = None if metrics_key is None else sha256(metrics_key.encode()).digest()

    def tenant(self, authorization: bytes) -> str | None:
        """The digest of the bearer's key; "" when no key is asked for; None when it is wrong."""
        if not self._digests:
            return ""
        digest = _bearer(authorization)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest.hex() if any(matches) else None

    def check_metrics(self, authorization: bytes) -> None:
        """Check access to the metrics. They cover all requests, so that one of several API keys does not open
        them.
        """
        if self._metrics is not None and hmac.compare_digest(_bearer(authorization), self._metrics):
            return
        if self.tenant(authorization) is None:
            raise _no_such_key()
        if self._metrics is not None or len(self._digests) > 1:
            raise ApiError(403, "/metrics takes only the key in --metrics-key-file")


def _bearer(authorization: bytes) -> bytes:
    """The digest of KEY in `Bearer KEY`; with another scheme that of an empty key, which nobody can hold."""
    scheme, _, key = authorization.partition(b" ")
    return sha256(key.strip() if scheme.lower() == b"bearer" else b"").digest()


def _no_such_key() -> ApiError:
    return ApiError(401, "no such API key; send the header Authorization: Bearer KEY")


class Limits:
    """ASGI middleware: limits, key, request id. No exception passes it.

    Whatever a route raises is answered here, in the one format of errors.
    """

    def __init__(self, app, settings: HttpSettings, draining: Callable[[], bool]):
        """`draining`: whether connections should close after their answer."""
        self.app, self.settings, self.draining = app, settings, draining
        self.keys = Keys(settings.api_keys, settings.metrics_key)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        answer = _Answer(send, f"{random.getrandbits(128):032x}", self.draining)
        scope[REQUEST_ID] = answer.request_id
        scope["app"] = self  # makes a router raise errors that it would otherwise answer in its own format
        try:
            most = self._check(scope)
            body = _Body(receive, self.settings, most)
            await self.app(scope, body.receive, answer.send)
        except ApiError as error:
            await answer.error(error)
        except HTTPException as error:
            messages = {404: "no such route", 405: f"this route does not take {clip(scope['method'], 16)}"}
            known = ApiError(error.status_code, messages.get(error.status_code, "bad request"))
            await answer.error(known, error.headers or {})
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the server no longer waits for running requests
            if not answer.started:
                await answer.error(ApiError(503, "the server has stopped", retry_after=5))
            raise
        except _PASSING:
            raise
        except BaseException:  # a panic of a library in Rust is not an Exception
            log.error("request %s failed\n%s", answer.request_id, traceback.format_exc())
            await answer.error(ApiError(500, f"internal error; request id {answer.request_id}"))

    def _check(self, scope) -> int:
        """Check the headers' size, then the key, then the announced length; return the most bytes that the
        body may have.
        """
        limits, headers = self.settings, scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.max_headers or size > limits.max_header_bytes:
            most = f"{limits.max_headers} headers or {limits.max_header_bytes} bytes of them"
            raise ApiError(431, f"more than {most}")
        fields = dict(headers)
        authorization = fields.get(b"authorization", b"")
        if scope["path"] == METRICS:
            self.keys.check_metrics(authorization)
        else:
            tenant = self.keys.tenant(authorization)
            if tenant is None and scope["path"] not in OPEN:
                raise _no_such_key()
            scope[TENANT] = tenant or ""
        length = fields.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18:
            raise ApiError(400, "content-length is not a number")
        sound = scope["path"].startswith(AUDIO)
        most = limits.max_audio_bytes if sound else limits.max_body_bytes
        if int(length) > most:
            raise too_large(most)
        return most


def too_large(most: int) -> ApiError:
    """The error of a body that is too large: 413."""
    return ApiError(413, f"the body is larger than {most} bytes; send less")


class _Body:
    """`receive` that counts bytes, chunks and seconds until the body is whole."""

    def __init__(self, receive, limits: HttpSettings, most: int):
        self._receive, self._limits, self._most = receive, limits, most
        self._bytes = self._chunks = 0
        self._deadline: float | None = None
        self._whole = False

    async def receive(self):
        if self._whole:
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._deadline = self._deadline or now + self._limits.body_timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            seconds = self._limits.body_timeout_s
            raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._chunks += 1
            self._whole = not message.get("more_body", False)
            if self._bytes > self._most:
                raise too_large(self._most)
            if self._chunks > self._limits.max_body_chunks:
                raise ApiError(413, f"the body arrived in more than {self._limits.max_body_chunks} pieces")
        return message


class _Answer:
    """`send` that adds the request id, and can still report an error while nothing has been sent."""

    def __init__(self, send, request_id: str, draining: Callable[[], bool]):
        self._send, self.request_id, self._draining = send, request_id, draining
        self.started = self._whole = False

    async def send(self, message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if self._draining() or message["status"] in _CLOSING:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)
        await self._send(message)

    async def error(self, error: ApiError, more: Mapping[str, str] | None = None) -> None:
        """Send an error. If an answer is already under way, break off the connection instead, as a signal."""
        if self._whole:
            return
        if self.started:
            raise ConnectionAbortedError("the answer could not be completed") from error
        body = error.body()
        fields = error.headers() | dict(more or {})
        headers = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
