"""`swiftkv eval STUDENT --against TEACHER`: the answers of a student beside its teacher's, without labels.

Likelihoods say little of answers: a student follows its own tokens, which its teacher would not have written.
Both answer the same prompts greedily.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.cli.teacher_chats import Chat, prompts_of
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

EQUAL = (16, 64, 256)  # tokens from the beginning
BEGINNING = 64  # tokens of a document that are its prompt
GRAM = 4
SHOWN = 2  # pairs
LANES = 64


class Answers(NamedTuple):
    """One model's answers to all prompts: token ids, texts, and the teacher's nats per token of each."""

    ids: list[list[int]]
    texts: list[str]
    nats: list[float]


class Pair(NamedTuple):
    """A figure of both models, means over the answers, and the mean of the paired differences (student less
    teacher) with its standard error."""

    teacher: float
    student: float
    difference: float
    error: float

    @classmethod
    def of(cls, teacher: Sequence[float], student: Sequence[float]) -> "Pair":
        """Of one number for each answer."""
        apart = np.subtract(student, teacher)
        return cls(float(np.mean(teacher)), float(np.mean(student)), *mean(apart))


def mean(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """(mean, its standard error; infinite for one value)."""
    x = np.asarray(values, float)
    return float(x.mean()), float(x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else float("inf")


def repeated(ids: Sequence[int]) -> float:
    """The share of an answer's 4-grams that occurred in it before; 0 if it is shorter."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compared(teacher: Answers, student: Answers) -> tuple[dict[int, tuple[float, float]], dict[str, Pair]]:
    """(tokens -> share of answers that begin with the same so many tokens, or are the same where shorter, and
    its standard error; figure -> both models')."""
    both = list(zip(teacher.ids, student.ids, strict=True))
    equal = {n: mean([float(a[:n] == b[:n]) for a, b in both]) for n in EQUAL}
    figures = {
        "teacher's nats per token": Pair.of(teacher.nats, student.nats),
        "repeated 4-grams": Pair.of(*([repeated(a) for a in x.ids] for x in (teacher, student))),
        "tokens": Pair.of(*([float(len(a)) for a in x.ids] for x in (teacher, student))),
    }
    return equal, figures


def ids_of(tokenizer: Tokenizer, prompt: Chat | str) -> list[int]:
    """A chat by its template, without one a single turn's text; or a document's beginning."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)[:BEGINNING]
    if tokenizer.template is None and len(prompt) == 1:
        return tokenizer.encode(prompt[0]["content"])
    return tokenizer.encode_chat(prompt, True)


def answers_of(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], list[str]]:
    """(ids, texts) of the greedy answers, at most `tokens` tokens each."""
    params, done = SamplingParams(max_tokens=tokens, temperature=0.0), {}
    requests = [
        llm.request({"prompt_token_ids": ids}, params, f"prompt {i}") for i, ids in enumerate(prompts)
    ]
    with working(show, f"{len(prompts):,} answers") as doing:
        for number, output in llm.run(requests):
            done[number] = output.outputs[0]
            if done[number].finish_reason == "error":
                raise UsageError(f"prompt {number}: {done[number].error}")
            doing.place = f"{len(done):,} done, "
    outputs = [done[number] for number in range(len(prompts))]
    return [list(output.token_ids) for output in outputs], [output.text for output in outputs]


def nats_of(llm: LLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The model's mean negative log likelihood of the answer's tokens."""
    known = llm.score([*prompt, *answer])[len(prompt) :]
    return -float(np.mean([found[i].logprob for found, i in zip(known, answer, strict=True) if found]))


def parser() -> Parser:
    """All flags of the command."""
    p = Parser(
        description="Answer prompts greedily with a student and with its teacher: how many answers begin "
        "alike, how likely the teacher finds the student's, how often both repeat themselves.",
        epilog="example: %(prog)s runs/mine/export --against HuggingFaceTB/SmolLM2-135M-Instruct "
        "--prompts chats.jsonl",
    )
    p.flag("STUDENT", "a folder or a hub id")
    p.flag("--against TEACHER", "the model that the student was made of", required=True)
    rows = "rows with a prompt, with chats whose last answer is left out, or with texts, whose first "
    p.flag("--prompts FILE", f"{rows}{BEGINNING} tokens are the prompt", required=True)
    p.flag("--count N", "prompts used, from the first (default: %(default)s)", type=int, default=100)
    p.flag("--tokens N", "most tokens of an answer (default: %(default)s)", type=int, default=256)
    p.flag("--cache-dtype D", "of the student's cache (default: %(default)s)", default="auto")
    p.flag("--out FILE", "write every pair of answers there, one JSON object a line", type=Path)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 130 for Ctrl-C."""
    return exit_code(lambda: _run(parser().parse_args(argv)), failures=(OSError,))


def _run(args: argparse.Namespace) -> None:
    integer("--count", args.count, 1)
    integer("--tokens", args.tokens, 1)
    prompts = prompts_of(args.prompts, texts=True)[: args.count]
    folders = [local_folder(model) for model in (args.student, args.against)]
    tokenizers = list(map(load_tokenizer, folders))
    read = [[ids_of(tokenizer, prompt) for prompt in prompts] for tokenizer in tokenizers]
    for number, (mine, theirs) in enumerate(zip(*read, strict=True)):
        if mine != theirs:
            raise UsageError(
                f"{args.student} and {args.against} read prompt {number} as other tokens: answers can be "
                "compared if tokenizer and chat template are the same"
            )
    longest = max(map(len, read[0])) + args.tokens
    context = min(ModelConfig.from_hf(folder).longest_context for folder in folders)
    if longest > context:
        raise UsageError(
            f"--tokens {args.tokens}: with the longest prompt {longest}, over the context {context}"
        )
    sizes = {"max_model_len": longest, "max_num_seqs": min(LANES, len(prompts)), "dtype": "auto"}
    student = answers_of(LLM(args.student, **sizes, cache_dtype=args.cache_dtype), read[0], args.tokens)
    llm = LLM(args.against, **sizes)
    teacher = answers_of(llm, read[0], args.tokens)
    with working(show, "the teacher reads both"):
        both = [
            Answers(ids, texts, [nats_of(llm, *pair) for pair in zip(read[0], ids, strict=True)])
            for ids, texts in (teacher, student)
        ]
    equal, figures = compared(*both)
    show(report(equal, figures, len(prompts)))
    pairs = [
        {"prompt": llm.tokenizer.decode(ids), "teacher": own, "student": its}
        for ids, own, its in zip(read[0], both[0].texts, both[1].texts, strict=True)
    ]
    apart = (pair for pair in pairs if pair["teacher"] != pair["student"])
    for pair in itertools.islice(apart, SHOWN):
        show("".join(f"\n{name}: {text.strip()}" for name, text in pair.items()))
    if args.out:
        with explained(f"write to {args.out}"):
            args.out.write_text("".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs))


def report(equal: dict[int, tuple[float, float]], figures: dict[str, Pair], count: int) -> str:
    """The lines that are printed."""
    alike = ", ".join(f"{n} tokens {share:.3f} ± {error:.3f}" for n, (share, error) in equal.items())
    lines = [f"{count} prompts, greedy; share of answers with equal beginnings: {alike}"]
    lines.append(f"{'':28}{'teacher':>10}{'student':>10}   difference")
    for name, x in figures.items():
        apart = f"{x.difference:+.3f} ± {x.error:.3f}"
        lines.append(f"{name:28}{x.teacher:>10.3f}{x.student:>10.3f}   {apart}")
    return "\n".join(lines)
