"""IFEval (arXiv 2311.07911): whether an answer follows instructions that a program can check.

The rules are those of google-research/instruction_following_eval; sentences, words in capitals and languages
are told by rules of our own (words.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swiftkv_jax.tasks.words import KNOWN, capitals, language, sentences

_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_FENCE = re.compile(r"^```(?:json|Json|JSON)?|```$")


def _bounded(count: int, relation: str, bound: int) -> bool:
    """Whether a count is "less than" a bound, or "at least" it."""
    return count < bound if relation == "less than" else count >= bound


def _count(pattern: str, text: str, flags: int = re.IGNORECASE) -> int:
    return len(re.findall(pattern, text, flags))


def _between(text: str, separator: str) -> list[str]:
    """The parts between separators, of which the first and the last may be empty; none if another one is."""
    parts = [part.strip() for part in re.split(separator, text)]
    return list(filter(None, parts)) if all(parts[1:-1]) else []


def _highlights(text: str) -> int:
    single = [part.strip("*") for part in re.findall(r"\*[^\n*]*\*", text)]
    return sum(bool(part.strip()) for part in single + re.findall(r"\*\*([^\n*]*)\*\*", text))


def _is_json(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()).strip())
    except ValueError:
        return False
    return True


def _begins(text: str, paragraphs: int, number: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n")]
    count = len(list(filter(None, parts)))
    if count != paragraphs or number > count or not parts[number - 1]:
        return False
    word = parts[number - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _has_postscript(text: str, marker: str) -> bool:
    return _count(_POSTSCRIPTS.get(marker, marker), text) > 0


def _is(text: str, code: str) -> bool:
    return language(text) in (None, code)


# From an answer and what the data gives by name.
CHECKERS: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "keywords:existence": lambda t, k: all(_count(word, t) for word in k["keywords"]),
    "keywords:frequency": lambda t, k: _bounded(_count(k["keyword"], t), k["relation"], k["frequency"]),
    "keywords:forbidden_words": lambda t, k: not any(_count(rf"\b{w}\b", t) for w in k["forbidden_words"]),
    "keywords:letter_frequency": lambda t, k: _bounded(
        t.lower().count(k["letter"].lower()), k["let_relation"], k["let_frequency"]
    ),
    "language:response_language": lambda t, k: _is(t, k["language"]),
    "length_constraints:number_sentences": lambda t, k: _bounded(
        sentences(t), k["relation"], k["num_sentences"]
    ),
    "length_constraints:number_paragraphs": lambda t, k: (
        len(_between(t, r"\s?\*\*\*\s?")) == k["num_paragraphs"]
    ),
    "length_constraints:number_words": lambda t, k: _bounded(
        _count(r"\w+", t), k["relation"], k["num_words"]
    ),
    "length_constraints:nth_paragraph_first_word": lambda t, k: _begins(
        t, k["num_paragraphs"], k["nth_paragraph"], k["first_word"]
    ),
    "detectable_content:number_placeholders": lambda t, k: _count(r"\[.*?\]", t) >= k["num_placeholders"],
    "detectable_content:postscript": lambda t, k: _has_postscript(t, k["postscript_marker"].strip()),
    "detectable_format:number_bullet_lists": lambda t, k: (
        _count(r"^\s*\*[^*].*$", t, re.M) + _count(r"^\s*-.*$", t, re.M) == k["num_bullets"]
    ),
    "detectable_format:constrained_response": lambda t, k: any(choice in t for choice in _CHOICES),
    "detectable_format:number_highlighted_sections": lambda t, k: _highlights(t) >= k["num_highlights"],
    "detectable_format:multiple_sections": lambda t, k: (
        _count(rf"{k['section_spliter']}\s?\d+", t, 0) >= k["num_sections"]
    ),
    "detectable_format:json_format": lambda t, k: _is_json(t),
    "detectable_format:title": lambda t, k: any(s.strip("<>").strip() for s in re.findall(r"<<[^\n]+>>", t)),
    "combination:two_responses": lambda t, k: len(set(parts := _between(t, r"\*{6}"))) == len(parts) == 2,
    "combination:repeat_prompt": lambda t, k: (
        t.strip().lower().startswith(k["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda t, k: (
        t.strip().strip('"').lower().endswith(k["end_phrase"].strip().lower())
    ),
    "startend:quotation": lambda t, k: re.fullmatch(r'\s*".*"\s*', t, re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda t, k: _bounded(
        capitals(t), k["capital_relation"], k["capital_frequency"]
    ),
    "change_case:english_capital": lambda t, k: t.isupper() and _is(t, "en"),
    "change_case:english_lowercase": lambda t, k: t.islower() and _is(t, "en"),
    "punctuation:no_comma": lambda t, k: "," not in t,
}


def checkable(instructions: Sequence[str], kwargs: Sequence[dict]) -> bool:
    """Whether there is a checker for each instruction, and it knows the language that is asked for."""
    languages = {given["language"] for given in kwargs if given.get("language")}
    return CHECKERS.keys() >= set(instructions) and languages <= KNOWN


def followed(
    text: str, instructions: Sequence[str], kwargs: Sequence[dict], loose: bool = False
) -> list[bool]:
    """Whether an answer follows each instruction; an empty one follows none.

    Args:
      kwargs: what each checker takes, by name.
      loose: any of eight forms of the answer may follow: without the first line, the last or both, each also
        without asterisks.
    """
    forms = [text]
    if loose:
        lines = text.split("\n")
        forms += ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
        forms += [form.replace("*", "") for form in forms]
    pairs = zip(instructions, kwargs, strict=True)
    return [any(form.strip() and CHECKERS[name](form, given) for form in forms) for name, given in pairs]
