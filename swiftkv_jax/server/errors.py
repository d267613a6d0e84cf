"""The format of every error, and the type and code of each status."""

import dataclasses
import json

MAX_MESSAGE = 500  # characters
MAX_ECHO = 100  # characters of a caller's own text in a message

_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    413: ("invalid_request_error", "body_too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "too_many_requests"),
    431: ("invalid_request_error", "headers_too_large"),
    499: ("client_closed_request", "client_closed_request"),
    500: ("server_error", "internal_error"),
    503: ("service_unavailable_error", "server_is_overloaded"),
    529: ("service_unavailable_error", "server_is_overloaded"),
}
_RETRIED = (408, 429, 503, 529)


@dataclasses.dataclass
class ApiError(Exception):
    """An error that is returned to the client. `param` names the field at fault; `retry_after` is in whole
    seconds.

    `retry`: whether the same request may succeed later; None: by the status.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    retry: bool | None = None

    def __post_init__(self):
        super().__init__(self.message)

    def body(self) -> bytes:
        """The error object, at most 1 KiB of UTF-8 where at most `MAX_ECHO` characters are a caller's."""
        kind, code = _KINDS.get(self.status, ("invalid_request_error", "invalid_value"))
        fields = {
            "message": clip(self.message, MAX_MESSAGE),
            "type": kind,
            "param": None if self.param is None else clip(self.param, MAX_ECHO),
            "code": self.code or code,
        }
        return json.dumps({"error": fields}, ensure_ascii=False).encode()

    def headers(self) -> dict[str, str]:
        """Headers that tell a client whether and when to retry."""
        again = self.status in _RETRIED if self.retry is None else self.retry
        out = {"content-type": "application/json", "x-should-retry": str(again).lower()}
        if self.retry_after is not None:
            out["retry-after"] = str(self.retry_after)
        return out


def clip(text: str, most: int) -> str:
    """`text` on one line of printable characters, cut to `most` of them."""
    line = "".join(c if c.isprintable() else " " for c in text[: most + 1])
    return line if len(line) <= most else line[: most - 3] + "..."
