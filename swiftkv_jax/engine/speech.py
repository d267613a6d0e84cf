"""A Whisper, asked: sound as requests, a request for each window of 30 s, and their answers as one text.

    for frames in listen(llm, sound):                          # a path, wav bytes, or (samples, rate)
        request = window_request(llm, frames, "en", "transcribe", params)
        ...                                                    # run by the engine, as any other
    text = joined(texts)

Where no language is given, `language_request` asks for it and `language_of` reads the answer.
"""

import dataclasses
import functools
import operator
import typing
from collections.abc import Iterable, Sequence

import numpy as np

from swiftkv_jax import audio
from swiftkv_jax.audio import AudioSettings
from swiftkv_jax.checkpoint.generation import Speech
from swiftkv_jax.engine.given import decoder_start
from swiftkv_jax.engine.request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from swiftkv_jax.errors import UsageError, suggest
from swiftkv_jax.shapes import Float

if typing.TYPE_CHECKING:
    from swiftkv_jax.engine.llm import LLM

TASKS = ("transcribe", "translate")
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
Frames = Float[np.ndarray, "frames mels"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcription:
    """What was said in some sound.

    Attributes:
      text: of all windows. language: its code, None where the model knows one only. duration: seconds.
      windows: the answer to each window's request.
    """

    text: str
    language: str | None
    duration: float
    windows: list[RequestOutput]


def hears(llm: "LLM") -> bool:
    """Whether the model takes sound."""
    within = llm.model.config.encoder
    return within is not None and bool(within.mels)


def settings(llm: "LLM") -> AudioSettings:
    """How sound becomes the frames that the model was trained on.

    Raises:
      UsageError: the model hears nothing, or its files disagree.
    """
    within = llm.model.config.encoder
    if within is None or not within.mels:
        raise UsageError(f"{llm.model.config.family} reads text, not sound: give generate a prompt")
    frames, plain = 2 * within.max_position_embeddings, AudioSettings()
    source = llm.model.config.source
    if source is not None:
        found = audio.read_settings(source, within.mels)
    else:
        found = dataclasses.replace(plain, mels=within.mels, seconds=max(1, frames * plain.hop // plain.rate))
    if (found.frames, found.mels) != (frames, within.mels):
        raise UsageError(
            f"the model takes {frames} frames of {within.mels} numbers, and its preprocessor_config.json "
            f"makes {found.frames} of {found.mels}"
        )
    return found


def listen(llm: "LLM", sound, where: str = "audio") -> tuple[list[Frames], float]:
    """(the frames of each window of some sound, its length in seconds).

    Raises:
      UsageError: as `audio.load`, or the model hears nothing.
    """
    how = settings(llm)
    samples = audio.load(sound, how.rate, where)
    return [audio.features(window, how) for window in audio.windows(samples, how)], len(samples) / how.rate


def asked(llm: "LLM") -> Speech:
    """The token ids by which the model is asked."""
    return llm.generation.speech or Speech()


def language_code(said: str, languages: Iterable[str], where: str = "language") -> str:
    """The code of a language given by its code or its English name.

    Raises:
      UsageError: the model does not know it.
    """
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    known, low = list(languages), str(said).lower().strip("<|>")
    code = low if low in known else TO_LANGUAGE_CODE.get(low, low)
    if code not in known:
        raise UsageError(
            f"{where} {said!r} is unknown; this model knows {', '.join(known)}{suggest(low, known)}"
        )
    return code


def prompt_tokens(
    llm: "LLM",
    language: str | None,
    task: str = "transcribe",
    previous: Sequence[int] = (),
    where: str = "audio",
) -> list[int]:
    """What the decoder reads before it writes: text that came before, language, task, no timestamps.

    Raises:
      UsageError: an unknown language or task.
    """
    speech = asked(llm)
    languages, tasks = dict(speech.languages), dict(speech.tasks)
    if task not in TASKS:
        raise UsageError(f"{where}: task must be one of {', '.join(TASKS)}, not {task!r}")
    opened = [speech.previous, *previous] if previous and speech.previous is not None else []
    out = [*opened, decoder_start(llm)]
    if languages:
        if language is None:
            raise UsageError(f"{where}: the language must be given, or asked for by language_request")
        out.append(languages[language_code(language, languages, f"{where}: language")])
    elif language is not None and language_code(language, ["en"], f"{where}: language") != "en":
        raise UsageError(f"{where}: this model knows English only")
    if tasks:
        out.append(tasks[task])
    elif task != "transcribe":
        raise UsageError(f"{where}: this model cannot {task}: it knows one language")
    return out if speech.no_timestamps is None else [*out, speech.no_timestamps]


def window_request(
    llm: "LLM",
    frames: Frames,
    language: str | None,
    task: str = "transcribe",
    params: SamplingParams | None = None,
    previous: Sequence[int] = (),
    where: str = "audio",
    salt: str = "",
) -> Request:
    """The request of one window's text.

    Raises:
      UsageError: an unknown language or task, or no room in the context.
    """
    speech = asked(llm)
    prompt = prompt_tokens(llm, language, task, previous, where)
    ruled_out = {
        "bad_ids": tuple((token,) for token in speech.suppressed),
        "first_bad_ids": tuple(
            token for token in speech.first_suppressed if token < llm.model.config.vocab_size
        ),
    }
    return llm.settled(None, prompt, params or GREEDY, where, salt, **_heard(frames), **ruled_out)


def language_request(llm: "LLM", frames: Frames, where: str = "audio") -> Request | None:
    """The request whose one token is the language of a window; None where the model knows one only."""
    languages = [token for _, token in asked(llm).languages]
    if not languages:
        return None
    params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=languages, ignore_eos=True)
    return llm.settled(None, [decoder_start(llm)], params, where, **_heard(frames))


def language_of(llm: "LLM", output: RequestOutput) -> str | None:
    """The language that the answer to a `language_request` names; None: it failed."""
    names = {token: code for code, token in asked(llm).languages}
    return next((names.get(token) for token in output.outputs[0].token_ids), None)


def _heard(frames: Frames) -> dict[str, typing.Any]:
    return {"source": frames, "source_length": len(frames) // 2}


def joined(texts: Iterable[str]) -> str:
    """The texts of neighbouring windows as one."""
    return " ".join(text.strip() for text in texts if text.strip())


def whole(windows: Sequence[RequestOutput]) -> RequestOutput:
    """The answers to the windows of one sound as one answer, which ended as the worst of them did."""
    said, times = [window.outputs[0] for window in windows], [window.metrics for window in windows]
    worst = max(said, key=lambda one: _WORSE.index(one.finish_reason))
    begun = [m.first_token_time for m in times if m.output_tokens]
    output = CompletionOutput(
        index=0,
        text=joined(one.text for one in said),
        token_ids=[token for one in said for token in one.token_ids],
        cumulative_logprob=_sum(one.cumulative_logprob for one in said),
        logprobs=_sum(one.logprobs for one in said),
        finish_reason=worst.finish_reason,
        stop_reason=worst.stop_reason,
        error=worst.error,
    )
    metrics = RequestMetrics(
        arrival_time=min(m.arrival_time for m in times),
        scheduled_time=min(m.scheduled_time for m in times),
        first_token_time=min(begun, default=0.0),
        finished_time=max(m.finished_time for m in times),
        output_tokens=sum(m.output_tokens for m in times),
    )
    return RequestOutput(
        request_id=windows[0].request_id,
        prompt=None,
        prompt_token_ids=[token for window in windows for token in window.prompt_token_ids],
        outputs=[output],
        metrics=metrics,
    )


_WORSE = (None, "stop", "length", "abort", "error")  # ends of an answer, the best first


def _sum(parts: Iterable):
    """Numbers added, or lists one after the other; None where any is None."""
    known = list(parts)
    return None if any(part is None for part in known) else functools.reduce(operator.add, known)


def transcribe(
    llm: "LLM", sounds: list, language: str | None, task: str, params: SamplingParams | None
) -> list[Transcription]:
    """As `LLM.transcribe`, of several sounds at once."""
    if not sounds:
        raise UsageError("audio is empty: give at least one sound")
    names = [f"audio[{i}]" if len(sounds) > 1 else "audio" for i in range(len(sounds))]
    heard = [listen(llm, sound, name) for sound, name in zip(sounds, names, strict=True)]
    spoken = [language] * len(sounds)
    if language is None and asked(llm).languages:
        prompt_tokens(llm, asked(llm).languages[0][0], task)  # what is wrong is told before anything runs
        requests = [
            language_request(llm, frames[0], name) for (frames, _), name in zip(heard, names, strict=True)
        ]
        answers = dict(llm.run([request for request in requests if request is not None]))
        spoken = [language_of(llm, answers[i]) or asked(llm).languages[0][0] for i in range(len(sounds))]
    elif language is not None:
        known = [code for code, _ in asked(llm).languages] or ["en"]
        spoken = [language_code(language, known)] * len(sounds)
    requests = [
        window_request(llm, window, code, task, params, where=name)
        for (frames, _), code, name in zip(heard, spoken, names, strict=True)
        for window in frames
    ]
    answers, out, at = dict(llm.run(requests)), [], 0
    for (frames, seconds), code in zip(heard, spoken, strict=True):
        windows = [answers[i] for i in range(at, at + len(frames))]
        text = joined(window.outputs[0].text for window in windows)
        out.append(Transcription(text=text, language=code, duration=seconds, windows=windows))
        at += len(frames)
    return out
