"""Chats that a model writes itself, as training data for its own distillation.

The source `self://prompts.jsonl` stands for the model's answers to the prompts in that file. They are sampled
by the engine once, and kept in the cache of `datasets` under the model, the prompts and the sampling.
`self://prompts.jsonl?max_tokens=512&temperature=1` overrides defaults of `Sampling`. `self://?prompts=2000`
stands for answers to prompts that the model writes too.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import jax

from swiftkv_jax.checkpoint.adapter import fingerprint, local_folder
from swiftkv_jax.cli.answering import LANES, answered
from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError, explained
from swiftkv_jax.common.folder import model_name
from swiftkv_jax.common.progress import Doing, show, working
from swiftkv_jax.config.model import ModelConfig
from swiftkv_jax.distill.answers import asked_of
from swiftkv_jax.distill.config import Experiment
from swiftkv_jax.distill.data import files
from swiftkv_jax.distill.data.forms import BadRow, parse_row
from swiftkv_jax.distill.data.sources import SELF, kept_at
from swiftkv_jax.distill.fields import override
from swiftkv_jax.engine.llm import LLM
from swiftkv_jax.engine.request import SamplingParams
from swiftkv_jax.text.tokenizer import Tokenizer, load_tokenizer

Chat = list[dict]
_VERSION = 1  # of the cached files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(checks.Checked):
    """How answers are chosen, as `SamplingParams` has it. Answer i samples with seed + i.

    `prompts`: so many turns of a user are sampled first, at temperature 1, where the chat template begins one
    (Magpie, arXiv 2406.08464).
    """

    prompts: checks.Natural = 0
    max_tokens: checks.Count = 256
    temperature: checks.Amount = 0.8
    top_p: Annotated[float, partial(checks.above, least=0, most=1)] = 0.95
    seed: checks.Natural = 0


_TURNS = Sampling(max_tokens=192, temperature=1.0, top_p=0.98)  # of a user


def with_chats(experiment: Experiment) -> Experiment:
    """The experiment with files of chats in place of `self://` sources; missing files are written."""
    parts = {
        name: dataclasses.replace(data, sources=sources_with_chats(data.sources, experiment.model))
        for name in ("data", "evaluation")
        if (data := getattr(experiment, name)) is not None
    }
    return dataclasses.replace(experiment, **parts)


def sources_with_chats(sources: Sequence[str], model: str) -> tuple[str, ...]:
    """The sources with files of the model's chats in place of those that begin with `self://`."""
    return tuple(str(chats_of(model, source)) if source.startswith(SELF) else source for source in sources)


def chats_of(model: str, source: str) -> Path:
    """The file of chats that a `self://` source stands for; it is written if it is missing."""
    if not model:
        raise UsageError(f"{source} needs a model to answer its prompts: give model")
    name, _, query = source.removeprefix(SELF).partition("?")
    sampling = sampling_of(query, source)
    if bool(name) == bool(sampling.prompts):
        raise UsageError(f"{source}: give a file of prompts or ask for some, as in {SELF}?prompts=2000")
    folder = local_folder(model)
    tokenizer = load_tokenizer(folder)
    if tokenizer.template is None:
        raise UsageError(f"{source}: the model in {folder} has no chat template to answer by")
    if sampling.prompts:
        how = dataclasses.replace(_TURNS, seed=sampling.seed)
        turns = _kept(model, tokenizer, [[]] * sampling.prompts, how)
        chats = [json.loads(line)["messages"] for line in turns.read_text(encoding="utf-8").splitlines()]
        prompts = [chat for chat in chats if chat[0]["content"].strip()]
    else:
        prompts = prompts_of(name)
    return _kept(model, tokenizer, prompts, sampling)


def _kept(model: str, tokenizer: Tokenizer, prompts: Sequence[Chat], sampling: Sampling) -> Path:
    """The file of the model's answers to the prompts; it is written if it is missing."""
    folder, how = local_folder(model), dataclasses.asdict(sampling)
    del how["prompts"]
    key = [_VERSION, fingerprint(folder), tokenizer.fingerprint, prompts, how]
    path = kept_at(f"self-{sha256(json.dumps(key).encode()).hexdigest()[:32]}.jsonl")
    if path.exists():
        show(f"{len(prompts):,} chats that {model} wrote before, in {path}")
        return path
    if jax.process_count() > 1:
        raise UsageError(f"{path} is not written yet: write it with one process (--no-distributed)")
    began = time.monotonic()
    tokens, seconds = write_chats(str(folder), prompts, path, sampling), time.monotonic() - began
    show(f"{model} wrote {len(prompts):,} chats, {tokens:,} tokens, in {seconds:.0f} s: {path}")
    return path


def user_turn(tokenizer: Tokenizer) -> tuple[list[int], str]:
    """(The ids before a chat's first turn of a user, the text that closes it)."""
    one, other = (tokenizer.encode_chat([{"role": "user", "content": text}], False) for text in "ab")
    alike = [a == b for a, b in zip(one, other, strict=True)]
    end = len(alike) - alike[::-1].index(False)
    close = tokenizer.decode(one[end:], skip_special_tokens=False)
    return one[: alike.index(False)], close.strip() or close


def sampling_of(query: str, source: str) -> Sampling:
    """The sampling options after the question mark of a source."""
    try:
        return override(Sampling(), query.split("&") if query else [])
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def prompts_of(source: str, texts: bool = False) -> list:
    """The prompts of a file, a pattern or a folder: rows with a text `prompt`, or chats without their last
    answer; with `texts` also rows with a text, as strings."""
    bad, prompts = [], []
    for path, _ in files.files_of(source):
        kind = files.kind_of(path)
        if kind not in files.ROW_SUFFIXES:
            raise UsageError(f"prompts are rows of {', '.join(files.ROW_SUFFIXES)}; {path} has none")
        for place, row in files.rows(path, kind, bad):
            try:
                if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row["prompt"]:
                    prompts.append([{"role": "user", "content": row["prompt"]}])
                    continue
                document = parse_row(row)
                if texts and document.text:
                    prompts.append(document.text)
                    continue
                if not (chat := asked_of(document.messages)):
                    raise BadRow('neither "prompt" nor a turn of the user')
                prompts.append(chat)
            except BadRow as error:
                files.note(bad, path, place, error)
    if bad:
        raise UsageError(f"broken prompts: {'; '.join(bad[:10])}")
    if not prompts:
        raise UsageError(f"{source} holds no prompts")
    return prompts


def write_chats(model: str, prompts: Sequence[Chat], path: Path, sampling: Sampling = Sampling()) -> int:
    """Write the model's answers to `path`, a conversation a line, in the order of the prompts; return the
    number of their tokens. The answer to a chat without turns is a user's first.

    Each answer is saved beside `path` as soon as it is finished, so that a stopped run can continue.
    """
    draft = path.with_name(f"{path.name}.part")
    with explained(f"write to {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        answers: dict[int, tuple[str, int]] = {}  # of each prompt: text, tokens
        for line in draft.read_text(encoding="utf-8").splitlines() if draft.exists() else []:
            with contextlib.suppress(ValueError):  # the last line of a stopped run may be incomplete
                number, text, tokens = json.loads(line)
                answers[number] = text, tokens
        left = [number for number in range(len(prompts)) if number not in answers]
        with (
            working(show, f"{model_name(model)} answers {len(left):,} prompts") as doing,
            draft.open("a", encoding="utf-8") as file,
        ):
            for number, answer in _answers(model, prompts, left, sampling, doing):
                answers[number] = answer
                file.write(json.dumps([number, *answer]) + "\n")
                file.flush()
        rows = []
        for number, prompt in enumerate(prompts):
            turn = {"role": "assistant" if prompt else "user", "content": answers[number][0]}
            rows.append({"messages": [*prompt, turn]})
        whole = path.with_name(f"{path.name}.whole")  # until it is there, the draft alone has the answers
        with whole.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(whole, path)
        draft.unlink()
    return sum(tokens for _, tokens in answers.values())


def _answers(model: str, prompts: Sequence[Chat], left: Sequence[int], sampling: Sampling, doing: Doing):
    """(number, (text, tokens)) of the answers to the prompts numbered `left`, as they are finished."""
    if not left:
        return
    folder = local_folder(model)
    tokenizer, context = load_tokenizer(folder), ModelConfig.from_hf(folder).max_position_embeddings
    start, close = ([], "") if all(prompts) else user_turn(tokenizer)
    texts = {n: tokenizer.encode_chat(prompts[n], True) if prompts[n] else start for n in left}
    most = min(context, max(map(len, texts.values())) + sampling.max_tokens)
    llm = LLM(model, max_model_len=most, max_num_seqs=min(LANES, len(left)), dtype="auto")
    asked = {}
    for number, ids in texts.items():
        room = max(1, min(sampling.max_tokens, most - len(ids)))  # without any `llm.request` raises
        temperature, top_p, seed = sampling.temperature, sampling.top_p, sampling.seed + number
        stop = (close,) if close and not prompts[number] else ()
        params = SamplingParams(max_tokens=room, temperature=temperature, top_p=top_p, seed=seed, stop=stop)
        asked[number] = {"prompt_token_ids": ids}, params
    for number, answer in answered(llm, asked, doing):
        yield number, (answer.text, len(answer.token_ids))
