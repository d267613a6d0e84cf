"""`swiftkv eval MODEL --tasks ifeval,gsm8k,hellaswag --files DIR`: public evaluations from local files, or
`--tasks retrieval` without any, of a model or of a student beside its teacher, on the same items."""

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from swiftkv_jax.checkpoint.hf import local_folder
from swiftkv_jax.cli.answering import LANES, answered, far, likelihoods
from swiftkv_jax.cli.answers import check_alike, fitting
from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import Parser, UsageError, exit_code, explained, suggest
from swiftkv_jax.common.folder import model_name
from swiftkv_jax.common.progress import show, working
from swiftkv_jax.distill.answers import Pair, ids_of, mean
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.engine.score import TOGETHER
from swiftkv_jax.tasks.items import TASKS, items_of
from swiftkv_jax.tasks.retrieval import DEPTHS, KINDS
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

Place = tuple[str, int]  # task, and number of an item
Reading = list[tuple[list[int], int]]  # texts as ids, each with the number of ids that are given
ROUND = len(DEPTHS) * len(KINDS)  # of retrieval: each kind at each depth once


def parser() -> Parser:
    """All flags of the command."""
    p = Parser(
        description="Measure a model on public evaluations, from local files: IFEval and GSM8K by what it "
        "answers greedily, HellaSwag by likelihoods; and on finding one line in long prompts that are made "
        "(retrieval). With --against both models take the same items.",
        epilog="example: %(prog)s runs/mine/export --against HuggingFaceTB/SmolLM2-135M-Instruct "
        "--tasks ifeval,hellaswag --files data",
    )
    p.flag("MODEL", "a folder or a hub id")
    p.flag("--tasks T,T,...", f"of {', '.join(TASKS)}", required=True)
    p.flag("--files DIR", "the folder with the tasks' files (docs/evaluation.md)", type=Path)
    lengths = "most tokens of retrieval's prompts, each with its answer (default: %(default)s)"
    p.flag("--lengths N,N,...", lengths, default="2048")
    p.flag("--against TEACHER", "the model that MODEL was made of")
    about = f"items of each task, from the first (default: all; of retrieval {ROUND} for each length)"
    p.flag("--count N", about, type=int)
    p.flag("--tokens N", "most tokens of an answer (default: %(default)s)", type=int, default=512)
    p.flag("--cache-dtype D", "of MODEL's cache (default: %(default)s)", default="auto")
    p.flag("--out FILE", "write every answer there, one JSON object a line; a stopped run goes on", type=Path)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run; exit code 0, 2 for bad usage, 130 for Ctrl-C."""
    return exit_code(lambda: _run(parser().parse_args(argv)), failures=(OSError,))


def _run(args: argparse.Namespace) -> None:
    integer("--tokens", args.tokens, 1)
    if args.count is not None:
        integer("--count", args.count, 1)
    models = [args.model, *([args.against] if args.against else [])]
    folders = list(map(local_folder, models))
    tokenizers = list(map(load_tokenizer, folders))
    items = _items(args, tokenizers[0])
    read = [{place: reading(known, place[0], item) for place, item in items.items()} for known in tokenizers]
    check_alike(models, [list(each.values()) for each in read])
    texts = [(*text, _most(place[0], args.tokens)) for place, each in read[0].items() for text in each]
    longest = max(len(ids) + tokens * (len(ids) == given) for ids, given, tokens in texts)
    context, lanes = fitting(folders, longest, args.tokens), min(LANES, len(items))
    keys: list[dict[Place, str]] = []
    with contextlib.ExitStack() as stack:
        with explained(f"write to {args.out}"):
            file = stack.enter_context(open(args.out or os.devnull, "a+", encoding="utf-8"))
        known = _written(file)
        for model, dtype in zip(models, (args.cache_dtype, "auto"), strict=False):
            settings = {"model": model, "cache_dtype": dtype, "tokens": args.tokens}
            rows = {place: settings | _named(place, item) for place, item in items.items()}
            keys.append({place: json.dumps(row) for place, row in rows.items()})
            left = {place: read[0][place] for place, key in keys[-1].items() if key not in known}
            sizes: dict[str, Any] = {"max_num_seqs": lanes, "cache_dtype": dtype}
            llm = LLM(model, max_model_len=context, **sizes) if left else None
            for place, answer in _answers(llm, model, left, args.tokens) if llm else ():
                known[keys[-1][place]] = answer
                row = rows[place] | {"answer": answer, "scores": TASKS[place[0]].scores(items[place], answer)}
                file.write(json.dumps(row) + "\n")
                file.flush()
            llm = None  # freed before the next
    for name in dict.fromkeys(name for name, _ in items):
        places = [place for place in items if place[0] == name]
        scores = [[TASKS[name].scores(items[p], known[each[p]]) for p in places] for each in keys]
        show(report(name, models, scores))


def _items(args: argparse.Namespace, tokenizer: Tokenizer) -> dict[Place, dict]:
    """The items of all tasks that are asked for.

    Raises:
      UsageError: a task is unknown, its file is missing or wrong, or no item is left.
    """
    items: dict[Place, dict] = {}
    try:
        lengths = list(map(int, args.lengths.split(",")))
    except ValueError:
        raise UsageError(f"--lengths takes numbers as 2048,4096, not {args.lengths!r}") from None
    for name in dict.fromkeys(args.tasks.split(",")):
        if name not in TASKS:
            raise UsageError(f"--tasks: no task {name!r}{suggest(name, TASKS)}; there are {', '.join(TASKS)}")
        if make := TASKS[name].made:
            count = args.count or ROUND * len(lengths)
            answer = _most(name, args.tokens)
            of_task = list(enumerate(make(lengths, count, partial(_size_with_answer, tokenizer, answer))))
        elif args.files is None:
            raise UsageError(f"--tasks {name}: give the folder of its file by --files")
        else:
            of_task = list(enumerate(items_of(name, args.files)))[: args.count]
        taken = {(name, number): item for number, item in of_task if TASKS[name].takes(item)}
        if len(taken) < len(of_task):
            show(f"{name}: {len(of_task) - len(taken)} items are left out: no checker for their instructions")
        items |= taken
    if not items:
        raise UsageError(f"--tasks {args.tasks}: no item is left")
    return items


def _most(name: str, tokens: int) -> int:
    """The most tokens of an answer to a task."""
    return min(tokens, TASKS[name].tokens)


def _asked(tokenizer: Tokenizer, text: str) -> list[int]:
    """A user's turn as ids."""
    return ids_of(tokenizer, [{"role": "user", "content": text}])


def _size_with_answer(tokenizer: Tokenizer, answer: int, text: str) -> int:
    return len(_asked(tokenizer, text)) + answer


def reading(tokenizer: Tokenizer, name: str, item: dict) -> Reading:
    """What a model reads of an item: a prompt; or context and ending, for each ending."""
    asked = TASKS[name].asked(item)
    if isinstance(asked, str):
        ids = _asked(tokenizer, asked)
        return [(ids, len(ids))]
    context = len(tokenizer.encode(asked.context.rstrip()))
    return [(tokenizer.encode(f"{asked.context} {ending}"), context) for ending in asked.endings]


def _answers(llm: LLM, model: str, left: Mapping[Place, Reading], tokens: int) -> Iterator[tuple[Place, Any]]:
    """(Place, answer) of the items that are left, task by task, as they are finished."""
    for name, group in itertools.groupby(left, key=lambda place: place[0]):
        places = list(group)
        with working(show, f"{name}: {len(places):,} items by {model_name(model)}") as doing:
            if all(len(ids) == given for place in places for ids, given in left[place]):
                most, stop = _most(name, tokens), list(TASKS[name].stop)
                params = SamplingParams(max_tokens=most, temperature=0.0, stop=stop)
                asked = {place: ({"prompt_token_ids": left[place][0][0]}, params) for place in places}
                yield from ((place, output.text) for place, output in answered(llm, asked, doing))
                continue
            began, read = time.monotonic(), 0
            for done in range(0, len(places), TOGETHER):
                some = places[done : done + TOGETHER]
                texts = [text for place in some for text in left[place]]
                values = iter(likelihoods(llm, texts))
                yield from ((place, list(itertools.islice(values, len(left[place])))) for place in some)
                done += len(some)
                read += sum(len(ids) for ids, _ in texts)
                seconds = time.monotonic() - began
                left_s = seconds / done * (len(places) - done)
                doing.place = far(done, len(places), read / seconds, left_s)


def _named(place: Place, item: dict) -> dict:
    """What tells an item from others in a file of answers."""
    asked = TASKS[place[0]].asked(item)
    return {"task": place[0], "item": place[1], "prompt": asked if isinstance(asked, str) else asked.context}


def _written(file: IO[str]) -> dict[str, Any]:
    """The answers in a file of an earlier run, each by the rest of its row."""
    file.seek(0)
    text, known = file.read(), {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the last line of a stopped run may be incomplete
            row = json.loads(line)
            answer = row.pop("answer")
            del row["scores"]
            known[json.dumps(row)] = answer
    file.write("\n" * (text[-1:] not in ("", "\n")))
    return known


def report(name: str, models: Sequence[str], scores: Sequence[Sequence[dict]]) -> str:
    """The lines of a task: each measure of each model with its standard error, and the paired difference.

    Args:
      scores: of each model, those of each item.
    """
    titles = [model_name(model)[-24:] for model in models]
    lines = [f"{name}, {len(scores[0]):,} items".ljust(26) + "".join(f"{title:>26}" for title in titles)]
    lines[0] += "   difference" * (len(models) > 1)
    for measure in dict.fromkeys(measure for each in scores[0] for measure in each):
        points = np.array([[each[measure] for each in row if measure in each] for row in scores], float)
        most = points[0, :, 1]
        cells = [f"{share:.3f} ± {error:.3f}" for share, error in (mean(x, most) for x in points[:, :, 0])]
        line = f"  {measure:24}" + "".join(f"{cell:>26}" for cell in cells)
        if len(models) > 1:
            pair = Pair.of(points[1, :, 0], points[0, :, 0], most)
            line += f"   {pair.difference:+.3f} ± {pair.error:.3f}"
        lines.append(line)
    return "\n".join(lines)
