"""The files of a batch run: prompts read line by line, answers written line by line and resumed.

A line with audio is one request per window of 30 s, whose answers become one line.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from swiftkv_jax.common.errors import UsageError, explained, suggest
from swiftkv_jax.common.folder import read_text
from swiftkv_jax.engine import speech
from swiftkv_jax.engine.request import Request, RequestOutput, SamplingParams

EXAMPLES = (
    "The module provides",
    "This function returns a list of",
    "If the file does not exist, an",
    "Changed in version",
)
DEFAULT_MAX_TOKENS = 128
PROMPTS = ("prompt", "messages", "prompt_token_ids", "audio")
_BESIDE = {"audio": ("language", "task")}  # fields that belong to a kind of prompt
_SHOWN = 20  # broken lines shown in one error


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of input: its position, its id (None without one), its prompt, and the checked work.

    `key` changes when the prompt, its parameters or the model do.
    """

    index: int
    id: str | int | None
    prompt: dict
    work: Request | speech.Dictation
    key: str


def read_lines(source: str | None) -> list[tuple[int, str]]:
    """(line number, line) of the input without its blank lines; lines to be read as JSON are marked.

    `source` is a path (JSON when it ends in .jsonl or .json), "-" for stdin (JSON where a line begins with a
    brace), or None for a few examples.
    """
    if source is None:
        return list(enumerate(EXAMPLES, 1))
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if source == "-" else read_text(source)
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if source.endswith((".jsonl", ".json")):
        return [(number, _Json(line)) for number, line in lines]
    if source == "-":
        return [(n, _Json(line) if line.lstrip().startswith("{") else line.rstrip("\r")) for n, line in lines]
    return [(number, line.rstrip("\r")) for number, line in lines]


class _Json(str):
    """A line to be read as JSON."""


def make_jobs(
    lines: list[tuple[int, str]],
    defaults: SamplingParams,
    seed: int,
    llm,
    skip_bad: bool,
    warn: Callable[[str], None],
    folder: Path = Path(),
) -> list[Job]:
    """Jobs of all good lines, checked by `llm.request`.

    Lines without a seed get consecutive ones from `seed` on, so that a resumed run gives the same answers; a
    line of n completions takes n. Paths in lines are relative to `folder`.
    """
    jobs, problems, ignored = [], {}, set()
    for index, (number, line) in enumerate(lines):
        try:
            job, unknown = _job(index, line, defaults, seed, llm, folder)
        except UsageError as error:
            problems[number] = str(error)
            seed += 1
        else:
            jobs.append(job)
            ignored |= unknown
            seed += job.work.params.n
    if problems and not skip_bad:
        shown = [f"line {number}: {problem}" for number, problem in sorted(problems.items())[:_SHOWN]]
        rest = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        count = f"{len(problems)} bad line{'s' * (len(problems) > 1)}"
        raise UsageError(f"{count} in the input ({'; '.join(shown)}{rest}); fix them, or --skip-bad-lines")
    for number, problem in problems.items():
        warn(f"skipped line {number}: {problem}")
    if ignored:
        warn(f"ignored fields of the input: {', '.join(sorted(ignored))}")
    return jobs


def _job(
    index: int, line: str, defaults: SamplingParams, seed: int, llm, folder: Path
) -> tuple[Job, set[str]]:
    """Return the job of one line, and its unknown fields."""
    row = _parse(line) if isinstance(line, _Json) else {"prompt": line}
    kinds = [name for name in PROMPTS if name in row]
    if len(kinds) != 1:
        raise UsageError(f"it must have exactly one of {', '.join(PROMPTS[:-1])} and {PROMPTS[-1]}")
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), str | int | None):
        raise UsageError(f"id must be a string or an integer, not {row['id']!r}")
    own = (*kinds, *_BESIDE.get(kinds[0], ()))
    known = {*own, "id", *SamplingParams.names()}
    unknown = {name for name in row if name not in known}
    for name in sorted(unknown):
        if guess := suggest(name, SamplingParams.names()):
            raise UsageError(f"unknown field {name!r}{guess}")
    changes = {name: row[name] for name in SamplingParams.names() if name in row}
    params = defaults.updated({"seed": seed % 2**63} | changes)
    prompt = {name: row[name] for name in own if name in row}
    if "audio" in prompt:
        return _sound_job(index, row.get("id"), prompt, params, llm, folder), unknown
    if speech.takes_audio(llm):
        raise UsageError(f'{llm.model.config.family} takes audio: give {{"audio": "FILE.wav"}}')
    key = _key(llm, prompt, params)
    request = llm.request(prompt, params)
    if params.max_tokens is None and "max_tokens" not in row:  # not set: at most the default
        capped = min(DEFAULT_MAX_TOKENS, request.params.max_tokens)
        request = dataclasses.replace(request, params=request.params.updated({"max_tokens": capped}))
    return Job(index, row.get("id"), prompt, request, key), unknown


def _key(llm, *content) -> str:
    content = [dataclasses.asdict(x) if isinstance(x, SamplingParams) else x for x in content]
    return hashlib.sha256(json.dumps([llm.fingerprint, *content], sort_keys=True).encode()).hexdigest()[:16]


def _sound_job(index: int, name, prompt: dict, params: SamplingParams, llm, folder: Path) -> Job:
    path = prompt["audio"]
    if not isinstance(path, str) or "\0" in path:
        raise UsageError(f"audio must be the path of a wav file, not {path!r}")
    for field in _BESIDE["audio"]:
        if not isinstance(prompt.get(field), str | None):
            raise UsageError(f"{field} must be a string, not {prompt[field]!r}")
    if params.n != 1:
        raise UsageError(f"n must be 1 with audio, not {params.n}")
    speech.settings(llm)  # a model without audio is reported before a missing file
    with explained(f"read audio {path}"):
        sound = (folder / os.path.expanduser(path)).read_bytes()
    task = prompt.get("task") or "transcribe"
    dictation = speech.listen(llm, sound, prompt.get("language"), task, params, where=f"audio {path}")
    dictation.requests(llm)  # bad parameters are reported with the line
    key = _key(llm, prompt | {"sha256": hashlib.sha256(sound).hexdigest()}, params)
    return Job(index, name, prompt, dictation, key)


def answered(llm, jobs: list[Job]) -> Iterator[tuple[Job, RequestOutput]]:
    """Yield each job with its answer as it finishes. Languages that are not given are detected first."""
    work: list = [job.work for job in jobs]
    if not speech.takes_audio(llm):
        yield from ((jobs[i], output) for i, output in llm.run(work))
        return
    for i, dictation, windows in speech.run(llm, work):
        yield dataclasses.replace(jobs[i], work=dictation), speech.whole(windows)


def _parse(line: str) -> dict:
    try:
        row = json.loads(line)
        line.encode()
        json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UsageError(f"a JSON object is needed, not {type(row).__name__}")
    return row


def output_row(job: Job, output: RequestOutput) -> dict:
    """The output line of a job: the first completion in the row itself; where n > 1, all in `completions`."""
    metrics = output.metrics
    row = {"index": job.index, "id": job.id, "key": job.key, "prompt": output.prompt}
    if output.prompt is None:
        row |= job.prompt
    if isinstance(job.work, speech.Dictation):
        row |= {"language": job.work.language, "task": job.work.task} | job.work.about
    completions = [_completion_row(completion) for completion in output.outputs]
    row |= completions[0] | {
        "prompt_tokens": len(output.prompt_token_ids),
        "timings": {
            "queue_s": metrics.scheduled_time - metrics.arrival_time,
            "ttft_s": metrics.ttft,
            "tpot_s": metrics.tpot,
            "total_s": metrics.finished_time - metrics.arrival_time,
        },
    }
    return row if len(completions) == 1 else row | {"completions": completions}


def _completion_row(completion) -> dict:
    row = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.finish_reason == "error":  # what there is of a text is not the answer
        row |= {"text": None, "error": completion.error}
    if completion.logprobs is None:
        return row
    logprobs = [{token: vars(entry) for token, entry in entries.items()} for entries in completion.logprobs]
    return row | {"cumulative_logprob": completion.cumulative_logprob, "logprobs": logprobs}


class OutputError(Exception):
    """Answers cannot be written; the message is one line for the user."""


class Output:
    """Answers as JSON lines, each written and flushed as it comes; a file is put in order at the end.

    Attributes:
      left: the jobs that have no line yet. file: the path of the file; None for stdout, a pipe or a device,
        where answers stay in the order in which they came.
    """

    def __init__(self, path: str, resume: bool, jobs: list[Job]):
        """Open for writing; with `resume`, append to what an earlier run left, without an incomplete last
        line."""
        self.left, self.file = jobs, None
        if path == "-":
            self._file = sys.stdout
            return
        with explained(f"write {path}"):
            if Path(path).exists() and not Path(path).is_file():  # a pipe or a device: nothing to resume
                self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
                return
            earlier = Path(path).read_bytes() if Path(path).exists() else b""
            if earlier and not resume:
                raise UsageError(f"{path} is not empty: give --resume to finish it, or another --output")
            whole = earlier[: earlier.rfind(b"\n") + 1]
            finished = _finished(path, whole)
            for job in jobs:
                if finished.get(job.index, job.key) != job.key:
                    other = f"{path} has an answer of another prompt, model or sampling at index {job.index}"
                    raise UsageError(f"{other}: give the first run's input and flags, or another --output")
            self.left = [job for job in jobs if job.index not in finished]
            self._file = open(path, "r+" if earlier else "w", encoding="utf-8")  # noqa: SIM115 (see `close`)
            self._file.truncate(len(whole))
            self._file.seek(0, os.SEEK_END)
            self.file = Path(path).resolve()

    def write(self, row: dict) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def sort(self) -> str:
        """Put the lines of a file in the order of the input, once every job has one; return why not, "" if
        they are. Without room for a second copy, the file stays as it was."""
        if self.file is None:
            return "they are not in a file"
        draft = self.file.with_name(f".{self.file.name}.sorted")
        try:
            lines = self.file.read_bytes().splitlines(keepends=True)
            in_order = sorted(lines, key=lambda line: json.loads(line)["index"])
            if lines != in_order:
                with draft.open("wb") as out:
                    out.writelines(in_order)
                    out.flush()
                    os.fsync(out.fileno())  # a crash of the machine leaves the old file or the new one
                shutil.copymode(self.file, draft)
                os.replace(draft, self.file)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            draft.unlink(missing_ok=True)
        return ""

    def close(self) -> None:
        if self._file is not sys.stdout:
            with contextlib.suppress(OSError):  # of a line that could not be written, which `write` reported
                self._file.close()


def _finished(path: str, content: bytes) -> dict[int, str]:
    """The key of every line, by its index."""
    out = {}
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
            out[row["index"]] = row["key"]
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{path}, line {number}, is no output of this command: give another") from None
    return out
