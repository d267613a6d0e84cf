"""The web page at `/`: the files of static/, sent with headers that allow nothing else to be loaded."""

import importlib.resources

from starlette.requests import Request
from starlette.responses import Response

from swiftkv_jax.server.openapi import Operation

_SCRIPTS = ("page", "api", "words", "plot")
FILES = {  # route: (file, media type)
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
# Own files and own routes only. As trusted types are required and none is allowed, a browser that supports
# them refuses every way of turning text into markup or code.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def operations() -> list[Operation]:
    """A route for each file."""
    folder = importlib.resources.files("swiftkv_jax.server") / "static"

    def operation(path: str, content: bytes, kind: str) -> Operation:
        async def answer(_: Request) -> Response:
            """A file of the web page."""
            return Response(content, headers=_HEADERS, media_type=kind)

        return Operation(path, answer, media=(kind.partition(";")[0],))

    return [operation(path, (folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()]
