"""The forms in which prompts may come, read as token ids."""

import typing
from collections.abc import Iterable, Mapping

from swiftkv_jax.errors import UsageError


@typing.no_type_check  # user input: checked here, by name
def encode(tokenizer, prompt, where: str) -> tuple[str | None, list]:
    """(text, token ids) of any form of prompt; `where` opens every error message. Ids are not checked.

    Raises:
      UsageError: it has none of the forms, or is text and there is no tokenizer.
    """
    special = not isinstance(prompt, Mapping) or prompt.get("add_special_tokens", True)
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt]
        if len(known) != 1:
            raise UsageError(f"{where} must hold one of prompt, prompt_token_ids and messages")
        value = prompt[known[0]]
        if known[0] == "messages":
            opened = prompt.get("add_generation_prompt", True)
            return None, _need(tokenizer, where).encode_chat(_conversation(value, where), opened)
        if isinstance(value, str) != (known[0] == "prompt"):
            raise UsageError(f"{where}: {known[0]} has the wrong type, {type(value).__name__}")
        prompt = value
    if isinstance(prompt, str):
        return prompt, _need(tokenizer, where).encode(prompt, special) if prompt else []
    if isinstance(prompt, list | tuple):
        return None, list(prompt)
    raise UsageError(f"{where} must be a string or a list of token ids, not {type(prompt).__name__}")


def spelt(tokenizer, words: Iterable[str], where: str) -> list[tuple[int, ...]]:
    """Each word's tokens, at the beginning of a text and behind a space; none twice, none empty.

    Raises:
      UsageError: there is no tokenizer.
    """
    found = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            found[tuple(_need(tokenizer, where).encode(text, add_special_tokens=False))] = None
    return [ids for ids in found if ids]


def is_one(prompts) -> bool:
    """Whether this is a single prompt: a string, a dict, or a list of numbers."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], int)


def one_each(params, count: int) -> list:
    """Sampling parameters for each of `count` prompts, of one for all or a list.

    Raises:
      UsageError: the list has another length.
    """
    if not isinstance(params, list | tuple):
        return [params] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling_params for {count} prompts; give one for all, or one each")
    return list(params)


def _conversation(messages, where: str) -> list[dict]:
    good = isinstance(messages, list) and bool(messages)
    if not good or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise UsageError(f"{where}: messages must be a list of {{role, content}} objects, not empty")
    return [dict(message) for message in messages]


def _need(tokenizer, where: str):
    if tokenizer is None:
        raise UsageError(
            f"{where} is text, but the model has no tokenizer: give token ids, or put tokenizer.json in "
            "its folder"
        )
    return tokenizer
