"""`/openapi.json`: every route and what it takes, made from the routes and the models of their bodies."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Collection

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from swiftkv_jax.server.errors import MAX_MESSAGE

JSON = "application/json"
EVENTS = "text/event-stream"
_KEY = "key"
_ABOUT = (
    "OpenAI's completions, chats and transcriptions, and what lm-eval's and vLLM's clients ask for beside "
    "them. Fields not listed are ignored, but for a few that ask for what is not offered; null, where it is "
    "allowed, takes the default."
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "maxLength": MAX_MESSAGE},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": "string"},
            },
        }
    },
}
_FAILED = {
    "description": "refused or failed; `message` gives the reason",
    "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One route. `body`: the model of its body, which makes it a POST; None for a GET. `media`: the media
    types of its answers. `reads`: the media type of the body."""

    path: str
    handler: Callable[[Request], Awaitable[Response]]
    body: type[BaseModel] | None = None
    media: tuple[str, ...] = (JSON,)
    reads: str = JSON

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


def describe(operations: Collection[Operation], keyed: bool, unguarded: Collection[str]) -> dict:
    """The description of a server; `keyed`: it asks for a key everywhere but on the `unguarded` paths."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    where = "#/components/schemas/{model}"
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=where)
    paths: dict[str, dict] = {}
    for operation in operations:
        path = re.sub(r":\w+}", "}", operation.path)
        done = {"description": "done", "content": {media: {} for media in operation.media}}
        known: dict[str, typing.Any] = {
            "summary": (inspect.getdoc(operation.handler) or "").splitlines()[0],
            "responses": {"200": done, "default": _FAILED},
        }
        if names := re.findall(r"{(\w+)}", path):
            text = {"type": "string"}
            known["parameters"] = [{"name": n, "in": "path", "required": True, "schema": text} for n in names]
        if operation.body is not None:
            reference = {"$ref": where.format(model=operation.body.__name__)}
            known["requestBody"] = {"required": True, "content": {operation.reads: {"schema": reference}}}
        if keyed and operation.path in unguarded:
            known["security"] = []
        paths.setdefault(path, {})[operation.method.lower()] = known
    out: dict[str, typing.Any] = {
        "openapi": "3.1.0",
        "info": {"title": "swiftkv-jax", "version": "1", "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": schemas["$defs"] | {"Error": _ERROR}},
    }
    if keyed:
        out["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
        out["security"] = [{_KEY: []}]
    return out
