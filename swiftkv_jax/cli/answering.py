"""Many answers of the engine: to prompts as they finish, and of a student beside its teacher."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax

from swiftkv_jax.checkpoint.generation import read_generation_config
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.common.progress import Doing, Say, show, working
from swiftkv_jax.core.layers import is_linear
from swiftkv_jax.core.shapes import PyTree
from swiftkv_jax.distill.answers import Answers, StudentAndTeacher
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import CompletionOutput, SamplingParams
from swiftkv_jax.engine.validate import mesh_of

Number = TypeVar("Number")
LANES = 64  # prompts that are answered at a time


def answered(
    llm: LLM, asked: Mapping[Number, tuple[dict, SamplingParams]], doing: Doing
) -> Iterator[tuple[Number, CompletionOutput]]:
    """(number, answer) of prompts by any number, in any form that `LLM.request` takes, as they are finished.

    Raises:
      UsageError: a prompt is invalid, or the model fails on it.
    """
    numbers = list(asked)
    requests = [llm.request(*pair, f"prompt {number}") for number, pair in asked.items()]
    most = sum(request.params.max_tokens or 0 for request in requests)  # tokens, unless answers end before
    for done, (index, output) in enumerate(llm.run(requests), 1):
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            raise UsageError(f"prompt {numbers[index]}: {answer.error}")
        most -= (requests[index].params.max_tokens or 0) - len(answer.token_ids)
        rate = llm.stats["output_tokens_per_s"]
        doing.place = far(done, len(numbers), rate, (most - llm.stats["output_tokens"]) / rate)
        yield numbers[index], answer


def far(done: int, of: int, rate: float, left: float) -> str:
    """How far work is: for `Doing.place`. `rate` in tokens per second; `left`: seconds."""
    return f"{done:,} of {of:,}, {rate:,.0f} tokens/s, about {left:.0f} s left, "


def beside(
    student: Callable[[], LLM],
    teacher: Callable[[], LLM],
    prompts: Sequence[list[int]],
    tokens: int,
    say: Say = show,
) -> tuple[Answers, Answers]:
    """(The teacher's, the student's) greedy answers to prompts as ids, of at most `tokens` tokens.

    The student is freed before the teacher is made.
    """
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0)
    requests = {number: ({"prompt_token_ids": ids}, greedy) for number, ids in enumerate(prompts)}

    def answers(llm: LLM, who: str) -> list[CompletionOutput]:
        with working(say, f"the {who} answers {len(prompts):,} prompts") as doing:
            outputs = dict(answered(llm, requests, doing))
        return [outputs[number] for number in requests]

    its = answers(student(), "student")
    llm = teacher()
    both = answers(llm, "teacher"), its
    with working(say, "the teacher reads both") as doing:
        pairs = [
            (([*ids, *output.token_ids], len(ids)), output)
            for outputs in both
            for ids, output in zip(prompts, outputs, strict=True)
        ]
        rows = [
            (list(o.token_ids), o.text, -likelihoods(llm, [read])[0] / len(o.token_ids))
            for read, o in doing.counted(pairs)
        ]
    theirs, own = rows[: len(prompts)], rows[len(prompts) :]
    return Answers(*map(list, zip(*theirs, strict=True))), Answers(*map(list, zip(*own, strict=True)))


def likelihoods(llm: LLM, texts: Sequence[tuple[Sequence[int], int]]) -> list[float]:
    """Of each text, as ids and how many of them are given: the log likelihood, in nats, of the rest."""
    read = zip(texts, llm.score_each([ids for ids, _ in texts]), strict=True)
    return [
        sum(entry[token].logprob for token, entry in zip(ids[given:], scored[given:], strict=True) if entry)
        for (ids, given), scored in read
    ]


def in_dtype(params: PyTree, dtype: str) -> PyTree:
    """The same parameters in `dtype`, but for projections in 8 bits, which stay so."""

    def one(part: PyTree) -> PyTree:
        eight_bit = is_linear(part) and "scale" in part
        return part if eight_bit else jax.tree.map(lambda leaf: leaf.astype(dtype), part)

    return jax.tree.map(one, params, is_leaf=is_linear)


def ask(
    models: StudentAndTeacher, prompts: Sequence[list[int]], tokens: int, say: Say = show
) -> tuple[Answers, Answers]:
    """A `distill.answers.Ask`: the engine runs on a student's weights, on the devices where they are."""
    sizes = {"max_model_len": max(map(len, prompts)) + tokens, "max_num_seqs": min(LANES, len(prompts))}
    parts = {"mesh": mesh_of(models.params), "tokenizer": models.tokenizer}
    student, dtype = models.student, models.student.dtype
    generation = read_generation_config(models.teacher)
    own = in_dtype(models.params, dtype)  # trained weights are float32
    return beside(
        lambda: LLM.from_model(student, own, generation=generation, **sizes, **parts),
        lambda: LLM(models.teacher, dtype=dtype, **sizes, **parts),
        prompts,
        tokens,
        say,
    )
