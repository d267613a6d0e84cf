"""The messages of a chat: one conversion for training data, `LLM.chat`, batches and HTTP, so that a model is
trained on, scored on and served the same text."""

import datetime
import json
import math
import numbers
import re
import uuid
from collections.abc import Callable, Mapping, Sequence

from swiftkv_jax.common.errors import UsageError

MARKER = "swiftkvturn7f3a91c5e"  # placeholder for a turn's content; one word, so that no template alters it
_DEEPEST = 64  # levels of a field's objects and lists
_WRITTEN = (datetime.date, datetime.time, datetime.timedelta, numbers.Number, uuid.UUID)
_NOT_OFFERED = {"image": "images", "audio": "audio parts", "video": "videos", "file": "files"}
_NEEDED = 'a message needs "role" and "content", both texts'
_KNOWS_DEVELOPERS = re.compile(r"""["']developer["']""")


def conversation(messages, where: str) -> list[dict]:
    """Messages as a chat template reads them; those that are converted already stay as they are."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError(f"{where}: messages must be a list of {{role, content}} objects, not empty")
    out = []
    for number, turn in enumerate(messages):
        try:
            out.append(message(turn))
        except UsageError as error:
            raise UsageError(f"{where}: message {number}: {error}") from None
    return out


def message(turn) -> dict:
    """One message: its role and content as texts, its tool calls with arguments as objects, its other fields
    as JSON has them.

    Parts of a content are joined. Beside tool calls the content may be missing. Null fields are left out, and
    a value that JSON cannot say becomes text: a time, or the name of its type.
    """
    if not isinstance(turn, Mapping):
        raise UsageError("a message is an object with role and content")
    rest = {name: value for name, value in turn.items() if name not in ("role", "content", "tool_calls")}
    role, content, calls = turn.get("role"), _joined(turn.get("content")), turn.get("tool_calls") or []
    content = "" if content is None and calls else content
    if not isinstance(role, str) or not role or not isinstance(content, str):
        raise UsageError(_NEEDED)
    if not isinstance(calls, list | tuple):
        raise UsageError("tool_calls must be a list")
    made: dict = {"role": role, "content": content}
    if calls:
        made["tool_calls"] = [_call(call) for call in calls]
    return made | _present(rest)


def _joined(content):
    """The text of a content in parts, [{"type": "text", "text": "..."}, ...]; other contents unchanged."""
    if not isinstance(content, list | tuple) or not content:
        return content
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            other = next((offer for word, offer in _NOT_OFFERED.items() if word in str(kind)), "other parts")
            raise UsageError(f"{_NEEDED}: part {number} of its content is none, and {other} are not offered")
    return "".join(part["text"] for part in content)


def _call(call) -> dict:
    """A tool call, {"function": {"name", "arguments"}} or its function alone."""
    wrapped = isinstance(call, Mapping) and call.get("function") is not None
    function = call["function"] if wrapped else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError('a tool call needs a function with a "name", a text')
    made = _present(function) | {"arguments": _arguments(function.get("arguments"))}
    return {"type": "function", **_present(call), "function": made} if wrapped else made


def _arguments(value):
    """The arguments of a call as an object; a text that is no JSON stays as it is."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str):
        return _plain(value)
    try:
        return _arguments(_plain(json.loads(value)))  # some encode them twice
    except (ValueError, RecursionError):
        return value


def _present(fields: Mapping) -> dict:
    """The fields that are not null, as JSON has them."""
    return {str(name): _plain(value) for name, value in fields.items() if value is not None}


def _plain(value, depth: int = 0):
    if depth > _DEEPEST:
        raise UsageError(f"a field has more than {_DEEPEST} levels")
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    return str(value) if isinstance(value, _WRITTEN) else f"<{type(value).__name__}>"


def with_roles_of(template: str, messages: Sequence[dict]) -> list[dict]:
    """The messages under the roles that a template knows: a developer is the system where it names none."""
    if _KNOWS_DEVELOPERS.search(template):
        return list(messages)
    return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]


def lost(messages: Sequence[dict], text: str, render: Callable[[list[dict]], str]) -> int | None:
    """The number of the first message that says something of which nothing is in `text`, the chat as `render`
    makes it; or None.

    The chat is rendered once more, with a marker in place of each content and of each called function's name.
    Only for a message without a marker there, it is rendered without what that message says.
    """
    speaking = [i for i, turn in enumerate(messages) if turn["content"].strip() or turn.get("tool_calls")]
    try:
        marked = render([_with_marker(turn, i) for i, turn in enumerate(messages)]).lower()
    except UsageError:  # the template checks contents
        marked = ""
    for i in speaking:
        if f"{MARKER}{i}e" not in marked:
            silent = {name: value for name, value in messages[i].items() if name != "tool_calls"}
            try:
                if render([*messages[:i], silent | {"content": ""}, *messages[i + 1 :]]) == text:
                    return i
            except UsageError:  # the template reads it
                continue
    return None


def _with_marker(turn: dict, number: int) -> dict:
    """The message with a marker as its content, if it has one, and as the name of each function it calls."""
    mark = f"{MARKER}{number}e"
    out = turn | ({"content": mark} if turn["content"].strip() else {})
    if calls := turn.get("tool_calls"):
        out["tool_calls"] = [
            each | ({"function": each["function"] | {"name": mark}} if "function" in each else {"name": mark})
            for each in calls
        ]
    return out
