"""The tasks: where their items come from, what a model is asked, and what its answer scores."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.distill.data import files
from swiftkv_jax.tasks import ifeval, retrieval

# measure -> (points, the most there are); several where an item has several instructions.
Scores = dict[str, tuple[int, int]]
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_WITHOUT = re.compile(r".*#### |,|\$|\.$", re.DOTALL)


class Scored(NamedTuple):
    """A text, and endings of which the model's likeliest one is its answer."""

    context: str
    endings: list[str]


class Task(NamedTuple):
    """One evaluation.

    Attributes:
      asked: an item -> the user's turn, or what is scored.
      scores: (item, answer as text, or the log likelihood of each ending) -> points.
      names: what its file may be called, before the suffix. published: where it is to be had.
      needs: fields of an item. stop: texts that end an answer. takes: whether an item can be scored.
      made: instead of a file, (lengths of prompts, number of items, size of a prompt) -> items.
      tokens: the most of an answer, where that is known.
    """

    asked: Callable[[dict], str | Scored]
    scores: Callable[[dict, Any], Scores]
    names: tuple[str, ...] = ()
    published: str = ""
    needs: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    takes: Callable[[dict], bool] = lambda item: True
    made: Callable[[Sequence[int], int, Callable[[str], int]], list[dict]] | None = None
    tokens: int = sys.maxsize


def items_of(name: str, folder: Path) -> list[dict]:
    """The items of a task, from its file in a folder.

    Raises:
      UsageError: there is no such file, or an item lacks a field.
    """
    task, bad = TASKS[name], []
    lying = {p.name.split(".")[0]: p for p in folder.glob("*") if files.kind_of(p)}
    path = next((lying[stem] for stem in task.names if stem in lying), None)
    if path is None:
        wanted = f"{folder / task.names[0]}.jsonl (or {', '.join(task.names[1:])})"
        raise UsageError(f"{name} needs {wanted}; it is published in {task.published}")
    kind = str(files.kind_of(path))
    if kind in files.TEXT_SUFFIXES:
        lines = "".join(text for _, text in files.texts(path, path.name, bad)).split("\n")
        blocks = zip(*[iter(lines)] * 6, strict=False)
        rows = enumerate(({"ctx": c, "label": label, "endings": e} for c, label, *e in blocks), 1)
    else:
        rows = files.rows(path, kind, bad)
    items = []
    for number, row in rows:
        items.append(item := dict(row) if isinstance(row, Mapping) else {})
        lacks = [field for field in task.needs if item.get(field) is None]
        lacks += ["index of an ending"] * (not str(item.get("label", 0)).isdigit())
        bad += [f"{path}, item {number}: no {', '.join(lacks)}"] if lacks else []
    if bad or not items:
        raise UsageError(f"{name} cannot be read: {'; '.join(bad[:3]) or f'{path} is empty'}")
    return items


def _ifeval(item: dict, answer: str) -> Scores:
    found = {}
    for how, loose in (("strict", False), ("loose", True)):
        right = ifeval.followed(answer, item["instruction_id_list"], item["kwargs"], loose)
        found |= {f"prompt {how}": (int(all(right)), 1), f"instruction {how}": (sum(right), len(right))}
    return found


def number_of(text: str) -> str:
    """The last number in a text, without marks of thousands and of currency; "" without one."""
    numbers = _NUMBER.findall(text)
    return _WITHOUT.sub("", numbers[-1]) if numbers else ""


def _gsm8k(item: dict, answer: str) -> Scores:
    return {"exact match": (int(number_of(answer) == _WITHOUT.sub("", item["answer"])), 1)}


def _plain(text: str) -> str:
    """A text of HellaSwag without the marks of its sources."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _hellaswag(item: dict) -> Scored:
    text = item["ctx"]
    if "activity_label" in item:
        text = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
    return Scored(_plain(text), [_plain(ending) for ending in item["endings"]])


def _likeliest(item: dict, answer: list[float]) -> Scores:
    endings = _hellaswag(item).endings
    by_length = [value / len(ending) for value, ending in zip(answer, endings, strict=True)]
    found = {"acc": answer, "acc_norm": by_length}
    return {
        name: (int(max(range(len(v)), key=v.__getitem__) == int(item["label"])), 1)
        for name, v in found.items()
    }


TASKS = {
    "ifeval": Task(
        lambda item: item["prompt"],
        _ifeval,
        ("ifeval", "ifeval_input_data", "input_data"),
        "github.com/google-research/google-research/tree/master/instruction_following_eval/data",
        ("prompt", "instruction_id_list", "kwargs"),
        takes=lambda item: ifeval.checkable(item["instruction_id_list"], item["kwargs"]),
    ),
    "gsm8k": Task(
        lambda item: f"Q: {item['question']}\nA: Let's think step by step.",
        _gsm8k,
        ("gsm8k_test", "test"),
        "github.com/openai/grade-school-math/tree/master/grade_school_math/data",
        ("question", "answer"),
        stop=("Q:",),
    ),
    "hellaswag": Task(
        _hellaswag,
        _likeliest,
        ("hellaswag_val", "hellaswag_val_full"),
        "github.com/rowanz/hellaswag/tree/master/data",
        ("ctx", "label", "endings"),
    ),
    "retrieval": Task(lambda item: item["prompt"], retrieval.scores, made=retrieval.made, tokens=32),
}
