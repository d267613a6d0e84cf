"""Documents, and the row formats of published datasets and of users' own files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.text.messages import message

# Role names in ShareGPT's format -> role names in chat templates.
_SPEAKERS = {"human": "user", "gpt": "assistant"} | {x: x for x in ("system", "user", "assistant")}


@dataclass(frozen=True)
class Document:
    """A text, or a chat (then `text` is empty). `id` names it for the held-out rule and in messages; `place`
    is its file and line, where it has one."""

    id: str
    text: str = ""
    messages: tuple[dict, ...] = ()
    place: str = field(default="", compare=False)

    @property
    def content(self) -> str:
        """The content that identifies it: the text, or the messages as JSON."""
        return json.dumps(self.messages, ensure_ascii=False, sort_keys=True) if self.messages else self.text


class BadRow(ValueError):
    """A row that is in none of the known forms; the message says why."""


def _turns(value) -> list:
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise BadRow("the messages of a chat are a list of objects, at least one")
    return value


def _message(turn: dict) -> dict:
    try:
        return message(turn)
    except UsageError as error:
        raise BadRow(str(error)) from None


def _speech(turn: dict) -> dict:
    if turn.get("from") is None and turn.get("role") is not None:
        return _message(turn)
    if turn.get("from") not in _SPEAKERS or not isinstance(turn.get("value"), str):
        raise BadRow(f'a turn needs "from" (one of {", ".join(_SPEAKERS)}) and "value"')
    return {"role": _SPEAKERS[turn["from"]], "content": turn["value"]}


def _messages(name: str) -> Callable[[dict], Document]:
    return lambda row: Document("", messages=tuple(_message(turn) for turn in _turns(row[name])))


def _answered(row: dict) -> Document:
    """A chat whose last answer is a column of its own (AceMath)."""
    turns = [_message(turn) for turn in _turns(row["messages"])]
    if turns[-1]["role"] == "user":
        turns.append({"role": "assistant", "content": _text(row, "answer")})
    return Document("", messages=tuple(turns))


def _alpaca(row: dict) -> Document:
    more = _text(row, "input") if row.get("input") else ""
    asked = _text(row, "instruction") + (f"\n\n{more}" if more else "")
    return _exchange(asked, _text(row, "output"))


def _orca(row: dict) -> Document:
    system = _text(row, "system_prompt") if row.get("system_prompt") else ""
    return _exchange(_text(row, "question"), _text(row, "response"), system)


def _completion(row: dict) -> Document:
    """Both texts, or both lists of messages (TRL)."""
    parts = row["prompt"], row["completion"]
    if all(isinstance(part, list) for part in parts):
        turns = [_message(turn) for part in parts for turn in _turns(part)]
        return Document("", messages=tuple(turns))
    return _exchange(_text(row, "prompt"), _text(row, "completion"))


def _text(row: dict, name: str) -> str:
    if not isinstance(row[name], str):
        raise BadRow(f'"{name}" is {type(row[name]).__name__}, not a text')
    return row[name]


def _exchange(asked: str, answer: str, system: str = "") -> Document:
    turns = (("system", system), ("user", asked), ("assistant", answer))
    return Document("", messages=tuple({"role": r, "content": c} for r, c in turns if c or r != "system"))


# Columns that make a form -> the function that makes a document of them; a row's first match counts.
FORMS: dict[tuple[str, ...], Callable[[dict], Document]] = {
    ("messages", "answer"): _answered,  # AceMath-Instruct-Training-Data
    ("messages",): _messages("messages"),
    ("conversation",): _messages("conversation"),  # lmsys-chat-1m
    ("conversations",): lambda row: Document("", messages=tuple(map(_speech, _turns(row["conversations"])))),
    ("instruction", "output"): _alpaca,
    ("question", "response"): _orca,
    ("prompt", "completion"): _completion,
    ("text",): lambda row: Document("", _text(row, "text")),
    ("question", "answer"): lambda row: _exchange(_text(row, "question"), _text(row, "answer")),  # GSM8K
}
KNOWN = ", ".join(" with ".join(needed) for needed in FORMS)


def form_of(columns: Mapping | Sequence) -> tuple[str, ...] | None:
    """The form that these columns make, or None; null columns of a row do not count."""
    have = [c for c in columns if not isinstance(columns, Mapping) or columns[c] is not None]
    return next((needed for needed in FORMS if set(needed) <= set(have)), None)


def renamed(row: dict, columns: Sequence[str], id_column: str = "id") -> dict:
    """The columns of a row renamed as `columns` ("ours=theirs" each) says, and its id; a row that has none of
    them is returned unchanged."""
    pairs = [part.partition("=")[::2] for part in columns]
    if not any(theirs in row for _, theirs in pairs):
        return row
    taken = {ours: row[theirs] for ours, theirs in pairs if theirs in row}
    return taken if id_column in taken or id_column not in row else taken | {id_column: row[id_column]}


def check_columns(columns: Sequence[str]) -> None:
    """Raises UsageError: one of them does not look like text=body, or names a column that no form has."""
    known = {name for needed in FORMS for name in needed} | {"input", "system_prompt", "id"}
    for part in columns:
        ours, equals, theirs = part.partition("=")
        if not equals or not theirs or ours not in known:
            raise UsageError(f"columns are ours=theirs, ours of {', '.join(sorted(known))}, not {part!r}")


def parse_row(row, id_column: str = "id", columns: Sequence[str] = ()) -> Document:
    """The document of a row in one of `FORMS`, whose columns are first renamed as `columns` says.

    A document without an id of its own is named by the sha256 of its content.

    Raises:
      BadRow: the row has none of these forms, or a value in it is not a text.
    """
    if not isinstance(row, dict):
        raise BadRow(f"a row is an object, not {type(row).__name__}")
    row = renamed(row, columns, id_column) if columns else row
    form = form_of(row)
    if form is None and (nulls := form_of(list(row))) is not None:
        empty = [f'"{name}"' for name in nulls if row[name] is None]
        raise BadRow(f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} null")
    if form is None:
        names = ", ".join(list(map(str, row))[:8])
        shown = f"the columns {names[:80]}" if names else "a row without columns"
        raise BadRow(f'neither "text" nor "messages" nor another known form in {shown}')
    document = FORMS[form](row)
    name = row.get(id_column)
    try:
        digest = sha256(document.content.encode()).hexdigest()
        name = digest if name is None or name == "" else str(name)
        name.encode()
    except UnicodeEncodeError as error:
        raise BadRow("half of a surrogate pair") from error
    return Document(name, document.text, document.messages)
