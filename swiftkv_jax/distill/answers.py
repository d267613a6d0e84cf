"""A student's answers beside its teacher's, without labels.

Likelihoods say little of answers: a student follows its own tokens, which its teacher would not have written.
Both answer the same prompts greedily, by an engine that is handed in.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from swiftkv_jax.common.errors import UsageError, first_line
from swiftkv_jax.common.progress import Say
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.distill.data.loader import DataConfig
from swiftkv_jax.distill.data.samples import Samples
from swiftkv_jax.distill.start import Student
from swiftkv_jax.text.tokenizer import Tokenizer

EQUAL = (16, 64, 256)  # tokens from the beginning
Numbers = Sequence[float] | np.ndarray
BEGINNING = 64  # tokens of a document that are its prompt
TOKENS = 64  # most of an answer to a held-out prompt
GRAM = 4
SHOWN = 2  # pairs


class Answers(NamedTuple):
    """One model's answers to all prompts: token ids, texts, and the teacher's nats per token of each."""

    ids: list[list[int]]
    texts: list[str]
    nats: list[float]


class StudentAndTeacher(NamedTuple):
    """A student in memory, and the folder of the teacher that it was made of."""

    student: Student
    params: PyTree
    teacher: Path
    tokenizer: Tokenizer


# (models, prompts as ids, most tokens of an answer) -> (the teacher's answers, the student's)
Ask = Callable[[StudentAndTeacher, Sequence[list[int]], int], tuple[Answers, Answers]]


class Pair(NamedTuple):
    """A figure of both models, means over the answers, and the mean of the paired differences (student less
    teacher) with its standard error."""

    teacher: float
    student: float
    difference: float
    error: float

    @classmethod
    def of(cls, teacher: Numbers, student: Numbers, weights: Numbers | None = None) -> "Pair":
        """Of one number for each answer, see `mean`."""
        apart = mean(np.subtract(student, teacher), weights)
        return cls(mean(teacher, weights)[0], mean(student, weights)[0], *apart)


class Compared(NamedTuple):
    """The answers of both models, compared.

    Attributes:
      equal: tokens -> share of answers that begin with the same so many tokens, or are the same where
        shorter, and its standard error. figures: name -> both models'.
      pairs: prompt and answers as texts, {"prompt", "teacher", "student"} each.
    """

    equal: dict[int, tuple[float, float]]
    figures: dict[str, Pair]
    pairs: list[dict[str, str]]

    def report(self, pairs: bool = False) -> str:
        """The lines that are printed, with a few pairs of different answers if asked."""
        alike = ", ".join(f"{n} tokens {share:.3f} ± {error:.3f}" for n, (share, error) in self.equal.items())
        lines = [f"{len(self.pairs)} prompts, greedy; share of answers with equal beginnings: {alike}"]
        lines.append(f"{'':28}{'teacher':>10}{'student':>10}   difference")
        for name, x in self.figures.items():
            apart = f"{x.difference:+.3f} ± {x.error:.3f}"
            lines.append(f"{name:28}{x.teacher:>10.3f}{x.student:>10.3f}   {apart}")
        different = (pair for pair in self.pairs if pair["teacher"] != pair["student"])
        for pair in itertools.islice(different, SHOWN * pairs):
            lines += ["", *(f"{name}: {text.strip()}" for name, text in pair.items())]
        return "\n".join(lines)

    def page(self, pairs: bool = False) -> list[str]:
        """`report` as a section of a Markdown page."""
        lines = (f"    {line}".rstrip() for line in self.report(pairs).splitlines())
        return ["## Answers to held-out prompts, beside the teacher's", "", *lines]

    def as_json(self) -> str:
        """All of it, figures by name."""
        figures = {name: pair._asdict() for name, pair in self.figures.items()}
        return json.dumps({"equal": self.equal, "figures": figures, "pairs": self.pairs}, indent=2)


def mean(values: Numbers, weights: Numbers | None = None) -> tuple[float, float]:
    """(Sum of values over sum of weights, its standard error over the values; infinite for one value).

    Args:
      weights: how much each value is the sum of; None: of one thing each.
    """
    x, w = np.asarray(values, float), np.ones(len(values)) if weights is None else np.asarray(weights, float)
    share, count = float(x.sum() / w.sum()), len(x)
    spread = np.square(x - share * w).sum() * count / (count - 1) if count > 1 else math.inf
    return share, float(math.sqrt(spread) / w.sum())


def repeated(ids: Sequence[int]) -> float:
    """The share of an answer's 4-grams that occurred in it before; 0 if it is shorter."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compared(teacher: Answers, student: Answers, prompts: Sequence[str], tokens: int) -> Compared:
    """Both models' answers to the same prompts, of at most `tokens` tokens."""
    both = list(zip(teacher.ids, student.ids, strict=True))
    lengths = sorted({min(n, tokens) for n in EQUAL})
    texts = zip(prompts, teacher.texts, student.texts, strict=True)
    return Compared(
        {n: mean([float(a[:n] == b[:n]) for a, b in both]) for n in lengths},
        {
            "teacher's nats per token": Pair.of(teacher.nats, student.nats),
            "repeated 4-grams": Pair.of(*([repeated(a) for a in x.ids] for x in (teacher, student))),
            "tokens": Pair.of(*([float(len(a)) for a in x.ids] for x in (teacher, student))),
        },
        [{"prompt": prompt, "teacher": own, "student": its} for prompt, own, its in texts],
    )


def ids_of(tokenizer: Tokenizer, prompt: Sequence[dict] | str) -> list[int]:
    """A chat by its template, without one a single turn's text; or a document's beginning."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)[:BEGINNING]
    if tokenizer.template is None and len(prompt) == 1:
        return tokenizer.encode(prompt[0]["content"])
    return tokenizer.encode_chat(prompt, True)


def asked_of(messages: Sequence[dict]) -> list[dict]:
    """A chat up to the last turn of the user; empty without one."""
    ends = [number for number, turn in enumerate(messages, 1) if turn["role"] == "user"]
    return list(messages[: ends[-1]]) if ends else []


def held_out(data: DataConfig, tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """At most `count` prompts from all over the documents of `data`, with room for `tokens` more in a row."""
    samples, prompts = Samples(data, tokenizer), []
    for index in samples.indices[:: max(1, len(samples) // count)]:
        document = samples.documents[int(index)]
        prompt = asked_of(document.messages) or document.text
        if document.messages and data.chats == "plain":
            prompt = "\n\n".join(turn["content"] for turn in document.messages)
        with contextlib.suppress(UsageError):  # the template refuses the chat; evaluation has said so
            ids = ids_of(tokenizer, prompt)
            ids = ids[: data.seq_len - tokens] if isinstance(prompt, str) else ids
            if 0 < len(ids) <= data.seq_len - tokens and len(prompts) < count:
                prompts.append(ids)
    return prompts


def to_held_out(
    ask: Ask, models: StudentAndTeacher, data: DataConfig, count: int, say: Say
) -> Compared | None:
    """Both models' answers to at most `count` prompts of `data`, reported; None without any, or where the
    engine fails.

    Args:
      data: held-out documents; prompt and answer together are no longer than its rows.
    """
    tokenizer = models.tokenizer
    tokens = min(TOKENS, data.seq_len // 2)
    prompts = held_out(data, tokenizer, count, tokens) if count else []
    try:
        if not prompts:
            return None
        if jax.process_count() > 1:
            raise UsageError("there are several processes")
        both = ask(models, prompts, tokens)
    except (UsageError, jax.errors.JaxRuntimeError) as error:  # too little memory beside a run, say
        say(f"no answers, as {first_line(error)}: swiftkv eval STUDENT --against TEACHER compares them later")
        return None
    result = compared(*both, [tokenizer.decode(ids) for ids in prompts], tokens)
    say(result.report())
    return result
