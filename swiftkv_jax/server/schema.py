"""Request bodies. They are read from raw bytes, strictly: no coercion, no NaN, nothing unbounded."""

import typing
from collections.abc import Callable
from typing import Annotated

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.engine.request import MAX_LOGPROBS
from swiftkv_jax.server.errors import MAX_ECHO, ApiError, clip
from swiftkv_jax.text.messages import message

_TEXT = 2**21  # characters: the body's own limit
_ID = Field(ge=0, le=2**31 - 1)
Id = Annotated[int, _ID]
# Lists stop at their first bad item: an error for each of a million would cost seconds and gigabytes.
Ids = Annotated[list[Id], Field(max_length=2**20, fail_fast=True)]
Text = Annotated[str, Field(max_length=_TEXT)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]

_REFUSED = frozenset(  # unless their value asks for nothing
    (
        "add_special_tokens audio best_of chat_template chat_template_kwargs continue_final_message "
        "documents echo function_call functions guided_choice guided_grammar guided_json guided_regex "
        "include_reasoning kv_transfer_params length_penalty logits_processors lora lora_request "
        "max_completion_tokens mm_processor_kwargs modalities prompt_embeds prompt_logprobs reasoning_effort "
        "response_format return_token_ids return_tokens_as_token_ids spaces_between_special_tokens "
        "stop_regex structural_tag structured_outputs suffix thinking_token_budget tool_choice tools "
        "truncate_prompt_tokens use_beam_search web_search_options "
        # Of forms.
        "chunking_strategy include[] known_speaker_names[] stream timestamp_granularities[]"
    ).split()
)
_DEFAULT = {  # values that ask for nothing too
    "best_of": 1,
    "include_reasoning": True,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
}
_NOTHING: tuple = (None, False, "", "none", "auto", [], {}, {"type": "text"}, ["text"])


def _few(value: typing.Any) -> typing.Any:
    """Limit a map's size before its items are checked: maps, unlike lists, are checked whole before they are
    counted."""
    if isinstance(value, dict) and len(value) > _MOST_BIASES:
        raise PydanticCustomError("too_long", "Map should have at most {most} items", {"most": _MOST_BIASES})
    return value


_MOST_BIASES = 1024
_Bias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MOST_BIASES),
    BeforeValidator(_few),
]


def _one_or_several(value: typing.Any, check: Callable[[typing.Any], typing.Any]) -> typing.Any:
    """Report the bounds, where a union would report the error of its first member."""
    try:
        return check(value)
    except pydantic.ValidationError:
        said = "must be a text of 1 to 1024 characters, or a list of at most 32 of them"
        raise PydanticCustomError("stop", said) from None


_Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=32, fail_fast=True)], WrapValidator(_one_or_several)
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """`include_usage`: a last chunk that counts tokens."""

    include_usage: bool | None = None


class Sampling(_Body):
    """The fields that completions and chats share. None takes the model's default, then the API's."""

    model: Annotated[str, Field(max_length=512)] | None = None
    n: Count | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stops | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64, fail_fast=True)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=32, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[list[Id], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    logit_bias: _Bias | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")] | None = None
    priority: Annotated[int, Field(ge=0, le=100)] | None = None


_Texts = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]
_Tokens = Annotated[Ids, Field(min_length=1)]
_Lists = Annotated[list[_Tokens], Field(min_length=1, fail_fast=True)]
_STRICT = ConfigDict(strict=True)
_PROMPTS: dict[type, pydantic.TypeAdapter] = {
    str: pydantic.TypeAdapter(_Texts, config=_STRICT),
    list: pydantic.TypeAdapter(_Lists, config=_STRICT),
}
_PROMPT = pydantic.TypeAdapter(Annotated[Text, Field(min_length=1)] | _Texts | _Tokens | _Lists)


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Annotated[typing.Any, WithJsonSchema(_PROMPT.json_schema())]  # checked by `prompts`
    echo: bool | None = None
    add_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


def _message(value: dict[str, typing.Any]) -> dict[str, typing.Any]:
    try:
        return message(value)
    except UsageError as error:
        raise PydanticCustomError("message", "{said}", {"said": str(error)}) from None


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "arguments": {}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": {"type": "object", "properties": {"function": _FUNCTION}}},
    },
    "description": "one turn of a chat; its content may be missing only beside tool calls",
}
_Message = Annotated[dict[str, typing.Any], AfterValidator(_message), WithJsonSchema(_MESSAGE)]
Messages = Annotated[list[_Message], Field(min_length=1, max_length=1024, fail_fast=True)]


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Messages
    add_generation_prompt: bool = True
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(_Body):
    """POST /tokenize: either a prompt or messages."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Ids


_FILE = {"type": "string", "format": "binary", "description": "a wav file"}
_NOTHING_OF_FORMS = ("", "false", "auto", "null")


class SpeechRequest(_Body):
    """The form of POST /v1/audio/transcriptions and /v1/audio/translations; its file is read apart."""

    model_config = ConfigDict(strict=False)  # a form's values are texts

    file: Annotated[typing.Any, WithJsonSchema(_FILE)] = None
    model: Annotated[str, Field(max_length=512)] | None = None
    language: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    prompt: Annotated[str, Field(max_length=2**14)] | None = None
    response_format: typing.Literal["json", "text"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None


Body = typing.TypeVar("Body", bound=_Body)


def parse(model: type[Body], raw: bytes) -> Body:
    try:
        body = model.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise _bad(error) from None
    for name, value in (body.model_extra or {}).items():
        if name in _REFUSED and _asks(name, value):
            raise _not_offered(name)
    return body


def parse_form(model: type[Body], fields: dict[str, str]) -> Body:
    for name, value in fields.items():
        if name in _REFUSED - model.model_fields.keys() and value.lower() not in _NOTHING_OF_FORMS:
            raise _not_offered(name)
    try:
        return model.model_validate({name: value for name, value in fields.items() if name != "file"})
    except pydantic.ValidationError as error:
        raise _bad(error) from None


def _not_offered(name: str) -> ApiError:
    message = f"{name} is not offered; /openapi.json lists the fields"
    return ApiError(400, message, name, "unsupported_parameter")


def _asks(name: str, value: typing.Any) -> bool:
    """Whether a value asks for anything; 0 is a number, not the False that equals it."""
    if name in _DEFAULT and value is not None:
        return value != _DEFAULT[name]
    return not any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING)


def unknown_fields(body: BaseModel) -> list[str]:
    """Unknown names that were sent, cut short for a log."""
    return [clip(name, 40) for name in list(body.model_extra or {})[:8] if name not in _REFUSED]


def prompts(value: typing.Any, most: int) -> list[str | list[int]]:
    """The prompts of a completion request: each a text or a list of token ids."""
    single = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    value = [value] if single else value
    if not isinstance(value, list) or not value:
        raise ApiError(400, "prompt must be a text, a list of texts, token ids, or a list of those", "prompt")
    if len(value) > most:
        raise ApiError(400, f"prompt holds {len(value)} prompts; at most {most} may come at once", "prompt")
    adapter = _PROMPTS[str if isinstance(value[0], str) else list]
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise _bad(error, "prompt") from None


def _bad(error: pydantic.ValidationError, *where: str) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not valid JSON ({clip(first['msg'], MAX_ECHO)})", None, "invalid_json"
        )
    # A union reports one place for each of its members: their names are not fields.
    parts = [str(part) for part in (*where, *first["loc"])]
    place = parts[:1] + [part for part in parts[1:] if not part.startswith(_UNION_TAGS)]
    param = clip(".".join(place), MAX_ECHO) or None
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", param)


_UNION_TAGS = ("constrained-", "list[", "str", "function-")
